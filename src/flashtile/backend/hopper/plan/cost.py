"""What the backend's passes do, in units of measured rates (`gpu.cost`)."""

from ....call.call import Needs
from ....call.device import Device
from ....call.problem import FEW_ROWS, Problem
from ....call.window import UNLIMITED
from ...gpu import waves
from ...gpu.cost import Cost, Counts, add_work, memory, missed, of_group, rows_bytes, shared, shown
from ...gpu.waves import Work, busiest, divided_end
from ..backward_config import DkdvConfig, DqConfig, FusedBackwardConfig, SplitBackwardConfig
from ..tile_config import MMA_M, Float32Forward, ForwardConfig, LatentForward, TangentsConfig
from .listed import expects_lists

OneKernel = (
    ForwardConfig | Float32Forward | LatentForward | DqConfig | TangentsConfig | FusedBackwardConfig | DkdvConfig
)
IDLE = 0.5  # part of a step, besides the share of warpgroups that have rows


def forward(
    problem: Problem, device: Device, config: ForwardConfig | Float32Forward | LatentForward, splits: int = 1
) -> Cost:
    """Of a forward pass, whose keys so many programs share."""
    if config.kind == "latent":
        return latent(problem, device, config, splits)
    p, (batch, rows, keys) = problem, problem.counts
    heads, group = batch * p.num_heads_q, p.num_heads_q // p.num_heads_kv
    head = waves.row_tiles(p.window, rows, keys, config.block_m, config.block_n)
    counts = Counts(launch_hopper=1)
    if config.kind == "float32":
        counts["launch split"] = 1
        work = busiest(head, heads, device.cores, at_once=config.heads_at_once * group)
        add(counts, "float32 forward", config, work, p)
        return Cost(counts, memory(4 * rows_bytes(p), p), "warpgroups")
    if splits > 1:
        head = shared(head, splits)
        counts["merge"] += 1
        counts["merge byte"] += splits * heads * rows * p.head_dim_v * 8
    elif expects_lists(p):
        head = shown(head, p)
    work = busiest(head, heads, device.cores, config.programs_per_core, config.heads_at_once * group)
    if config.last_splits > 1:
        work, left = divided_end(head, heads, device.cores, config.last_splits)
        counts["merge"] += 1
        counts["merge last"] += 1
        counts["merge byte"] += config.last_splits * left * config.block_m * p.head_dim_v * 8
    if config.skips_steps and splits == 1:
        rest = rows - (head.count - 1) * config.block_m
        active = -(-rest // MMA_M) / config.num_warpgroups
        work = work._replace(steps=work.steps * (1 - IDLE * (1 - active) / head.count))
    add(counts, "eight_bit" if config.kind == "eight_bit" else "forward", config, work, p)
    key_bytes = (p.head_dim + p.head_dim_v) * p.dtype.itemsize
    again = head.total.steps * heads * config.block_n * key_bytes * missed(config.heads_at_once * keys * key_bytes)
    of_key, of_value = (row_requests(d * p.dtype.itemsize) for d in (p.head_dim, p.head_dim_v))
    requests = work.tiles * config.block_m * of_key + work.steps * config.block_n * (of_key + of_value)
    limits = {**memory(rows_bytes(p) + again, p), "hopper request": requests}
    hidden = config.programs_per_core == 1 and rows > FEW_ROWS
    return Cost(counts, limits, "warpgroups" if hidden else "programs")


def latent(problem: Problem, device: Device, config: LatentForward, splits: int) -> Cost:
    """Of latent rows, where all heads and queries of a sequence are rows of the same tiles."""
    p, (batch, rows, keys) = problem, problem.counts
    head = waves.row_tiles(UNLIMITED, rows * p.num_heads_q, keys, config.block_m, config.block_n)
    counts = Counts(launch_latent=1)
    if splits > 1:
        head = shared(head, splits)
        counts["merge latent"] += 1
        counts["merge latent row"] += batch * p.num_heads_q * rows
    work = busiest(head, batch, device.cores)
    kind = "" if p.eight_bit is None else {"int8": " int8", "packed": " packed"}.get(p.eight_bit.format, " bytes")
    add(counts, f"latent{kind}", config, work, p)
    requests = work.steps * config.block_n * row_requests(p.head_dim * (1 if kind else p.dtype.itemsize))
    return Cost(counts, {**memory(rows_bytes(p), p), "hopper request": requests}, "few rows")


def tangents(problem: Problem, device: Device, forward: Cost, config: TangentsConfig, moves: Needs) -> Cost:
    """Of forward mode, after the work of the forward kernel. The rates of the other kernel are for all five products;
    a tensor that stands still has none.
    """
    p, (batch, rows, keys) = problem, problem.counts
    group, part = p.num_heads_q // p.num_heads_kv, (1 + moves.q + moves.k + moves.changes_scores + moves.v) / 5
    head = waves.row_tiles(p.window, rows, keys, config.block_m, config.block_n)
    work = busiest(head, batch * p.num_heads_q, device.cores, at_once=config.heads_at_once * group)
    second, counts = Counts(), Counts(launch=1)
    add(second, "tangents", config, work, p)
    for part in (forward.counts, {name: n * part for name, n in second.items()}):
        for name, n in part.items():
            counts[name] += n
    counts["sum byte"] += 8 * batch * p.num_heads_q * rows * p.head_dim_v  # `out` in float32, there and back
    more = memory(2 * rows_bytes(p), p)
    return Cost(counts, {name: n + more.get(name, 0) for name, n in forward.limits.items()}, "warpgroups")


def row_requests(size: int) -> float:
    """Requests of TMA for a row of `size` bytes, where heads or rows lie side by side: more if some begin in the middle
    of a sector of 32 bytes, and if they begin in the middle of a line of 128 bytes.
    """
    if size % 32:
        return 2.2 * (size // 128) + 3.3
    return 1.25 * -(-size // 128) if size % 128 else 0.5 * size / 128


def add(counts: Counts, kernel: str, config: OneKernel, work: Work, problem: Problem) -> None:
    """Add the work of a kernel's busiest core."""
    add_work(counts, f"hopper {kernel}", f"hopper {kernel} {name_of(config)}", work, config, problem)


def name_of(config: OneKernel) -> str:
    """The name of a kernel's rates: widths, tile and variant."""
    width, narrower = config.head_dim.width, getattr(config, "head_dim_v", config.head_dim).width
    widths = f"{width}" if narrower == width else f"{width}/{narrower}"
    variants = {"late_dq": " late", "in_order": " in order", "dout_in_registers": " registers"}
    variants["keys_in_registers"] = " registers"
    words = "".join(word for name, word in variants.items() if getattr(config, name, False))
    return f"{widths} {config.block_m}x{config.block_n}{words}"


def backward(problem: Problem, device: Device, config: FusedBackwardConfig | SplitBackwardConfig) -> Cost:
    """Of a backward pass for q, k and v."""
    return split(problem, device, config) if config.kind == "split" else fused(problem, device, config)


def fused(problem: Problem, device: Device, config: FusedBackwardConfig) -> Cost:
    p, (batch, rows, keys) = problem, problem.counts
    group = p.num_heads_q // p.num_heads_kv // config.head_splits
    head = waves.key_tiles(p.window, rows, keys, config.block_m, config.block_n)
    one_tile = head.count == 1 and head.sample[0].steps * config.block_m >= rows
    width = batch * config.head_dim.width
    row_numbers, key_numbers = width * p.num_heads_q * rows, width * p.num_heads_kv * keys
    counts = Counts(launch_backward=1, sum_byte=4 * row_numbers)
    if not one_tile:
        counts["launch"] += 1
        counts["sum byte"] += (10 if config.late_dq else 6) * row_numbers * config.dq_parts
    head = shared(of_group(shown(head, p) if expects_lists(p) else head, group), config.row_splits)
    if config.splits > 1 or config.row_chunks > 1:
        counts["launch sums"] += 1
        of_parts = 4 * config.splits + 10 if config.adds_dkdv else 8 * config.splits + 2
        counts["sum byte"] += 2 * key_numbers * of_parts
    counts["launch"] += config.row_chunks - 1
    heads = batch * p.num_heads_kv * config.head_splits
    work = busiest(head, heads, device.cores, at_once=config.heads_at_once)
    at_once = min(config.heads_at_once, heads, device.cores) * group * rows * config.bytes_per_row
    again = head.total.steps * heads * config.block_m * config.bytes_per_row * missed(at_once)
    if config.last_splits > 1:
        work, left = divided_end(head, heads, device.cores, config.last_splits)
        counts["launch last"] += 1
        counts["sum byte"] += left * config.block_n * config.head_dim.width * 2 * 20
    rest = keys - (head.count - 1) * config.block_n
    if rest <= MMA_M and config.row_splits == 1:  # one of two warpgroups has keys
        work = work._replace(steps=work.steps * (1 - IDLE / 2 / head.count))
    add(counts, "backward", config, work, p)
    requests = work.steps * config.block_m * 2 * row_requests(p.head_dim * p.dtype.itemsize)
    return Cost(counts, {**memory(3 * rows_bytes(p) + again, p), "hopper request": requests}, "gradients")


def split(problem: Problem, device: Device, config: SplitBackwardConfig) -> Cost:
    p, (batch, rows, keys) = problem, problem.counts
    dq, dkdv = config.dq, config.dkdv
    group = p.num_heads_q // p.num_heads_kv
    counts = Counts(launch_backward=1, launch=1)
    counts["sum byte"] += 2 * batch * p.num_heads_q * rows * p.head_dim_v * p.dtype.itemsize
    kind = "float32 " if p.dtype.itemsize == 4 else ""
    if kind:
        counts["launch split"] += 1
    head = waves.row_tiles(p.window, rows, keys, dq.block_m, dq.block_n)
    work = busiest(head, batch * p.num_heads_q, device.cores, at_once=dq.heads_at_once * group)
    add(counts, f"{kind}dq", dq, work, p)
    heads = batch * p.num_heads_kv * dkdv.head_splits
    for x in (dkdv, *((config.dv,) if config.dv else ())):
        head = of_group(waves.key_tiles(p.window, rows, keys, x.block_m, x.block_n), group // dkdv.head_splits)
        name = "dkdv" if x.result == "both" else x.result
        add(counts, kind + name, x, busiest(head, heads, device.cores, at_once=x.heads_at_once), p)
    counts["launch"] += config.dv is not None
    if dkdv.head_splits > 1:
        counts["launch sums"] += 1
        counts["sum byte"] += batch * p.num_heads_kv * keys * (p.head_dim + p.head_dim_v) * (8 * dkdv.head_splits + 2)
    return Cost(counts, memory(3 * rows_bytes(p), p), "gradients")
