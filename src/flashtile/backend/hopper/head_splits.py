"""Numbers of programs that share the query heads of a block of keys, whose tiles a diagonal or a window makes unequal.

A plan chooses them where sums have an order, as the accumulators of dq depend on them, and for the kernel of dk and dv
alone. Where sums have no order, a call chooses by its lengths, which a plan knows only roughly.
"""

from functools import cache

from ...call.call import Call
from ...call.device import Device
from ...call.problem import Problem
from .key_queue import L2_BYTES, KeyQueue, steps_of_blocks
from .split_times import cdiv, divisors, key_tiles
from .tables import keys_per_row
from .tile_config import DkdvConfig, FusedBackwardConfig

UNEVEN = 0.9  # time of the longest tile of keys, in units of all tiles spread over all cores, from which it is split
NEARLY_EVEN = 1.1  # the same, with which splits of heads alone will do
SPLIT_LAUNCHES, SPLIT_BYTES = 4.0, 6e6  # blocks of rows that take as long as the launches, and bytes of dk and dv
SLACK = 1.02  # times the least time, for which fewer programs share a group
CROWDED = 1.1  # times the time, where rows of a window take more than half of the L2 cache


def of_plan(problem: Problem, device: Device, config: FusedBackwardConfig) -> int:
    """The number of a plan, for sums in order: each program has rows of dq of its own, to which it adds in order."""
    if problem.layout != "dense" or problem.window.unlimited or not config.in_order:
        return 1
    if uneven_heads(problem, device, config):
        return 1  # rows may be split instead
    group = problem.num_heads_q // problem.num_heads_kv
    return next((n for n in divisors(group) if not uneven(problem, device, config, n, UNEVEN)), group)


def of_call(call: Call, config: FusedBackwardConfig, cores: int) -> int:
    """The number of a call: that of its plan, or where sums have no order and rows are not split, as few as leave room
    in the L2 cache for the rows of all heads in flight, and more where that shortens the queue by more than their dk
    and dv in fp32 take.
    """
    unequal = call.layout == "dense" and not call.settings.window.unlimited
    if config.in_order or config.row_splits > 1 or not unequal:
        return config.head_splits
    q, k = call.tensors.q, call.tensors.k
    (batch, num_heads, seqlen_q, _), (_, num_heads_k, seqlen_k, _) = q.shape, k.shape
    group = num_heads // num_heads_k
    steps = steps_of_blocks(call.settings, seqlen_q, seqlen_k, config.block_m, config.block_n)
    # fp32 zeros, sums and results
    bytes_split = batch * num_heads_k * seqlen_k * config.head_dim.width * 20
    windowed = call.settings.window.left is not None

    @cache
    def time(parts: int) -> float:
        cost = SPLIT_LAUNCHES + bytes_split / SPLIT_BYTES if parts > 1 else 0.0
        crowded = windowed and queue(parts).bytes_in_flight > L2_BYTES // 2
        return queue(parts).least_time() * (CROWDED if crowded else 1.0) + cost

    def queue(parts: int) -> KeyQueue:
        heads, tiles = batch * num_heads_k * parts, batch * num_heads_k * parts * len(steps)
        rows = group // parts * seqlen_q
        visited = tuple(group // parts * n for n in steps)
        return KeyQueue(heads, visited, min(cores, tiles), rows * config.bytes_per_row, parts)

    choices = divisors(group)
    fitting = [n for n in choices if queue(n).bytes_in_flight <= L2_BYTES] or choices[-1:]
    return next(n for n in fitting if time(n) <= SLACK * min(map(time, fitting)))


def of_dkdv(problem: Problem, device: Device, config: DkdvConfig) -> int:
    """The number for the kernel of dk and dv alone, also where full tiles do not fill the device evenly."""
    group = problem.num_heads_q // problem.num_heads_kv
    if problem.layout != "dense" or group == 1:
        return 1
    choices = divisors(group)
    if not problem.window.unlimited:
        return next((n for n in choices if not uneven(problem, device, config, n, NEARLY_EVEN)), group)
    tiles = key_tiles(problem, config)
    return min(choices, key=lambda n: tiles.time(n, device.cores))


def uneven_heads(problem: Problem, device: Device, config: FusedBackwardConfig) -> bool:
    """Whether tiles of single query heads are uneven, too."""
    return uneven(problem, device, config, problem.num_heads_q // problem.num_heads_kv, NEARLY_EVEN)


def uneven(
    problem: Problem, device: Device, config: FusedBackwardConfig | DkdvConfig, head_splits: int, limit: float
) -> bool:
    """Whether the longest tile of a diagonal or window takes longer than `limit` times all of them on all cores."""
    m_blocks = cdiv(problem.seqlen_q, config.block_m)
    longest = min(m_blocks, cdiv(rows_per_key(problem) * 2, config.block_m))
    mean = rows_per_key(problem) / config.block_m
    return longest * device.cores > key_tiles(problem, config).count * head_splits * mean * limit


def rows_per_key(problem: Problem) -> int:
    """Approximate number of rows that see a key."""
    return max(1, problem.seqlen_q * keys_per_row(problem) // max(problem.seqlen_k, 1))
