"""What the backend's passes do, in units of measured rates (`gpu.cost`)."""

import torch

from ....call.call import Needs
from ....call.device import Device
from ....call.problem import FEW_ROWS, Problem, power_of_two
from ...gpu import waves
from ...gpu.block_lists import LEAST_PAIRS
from ...gpu.chips import memory_of
from ...gpu.cost import Cost, Counts, add_work, memory, of_group, rows_bytes, shared, shown
from ...gpu.waves import Head, Tile, busiest
from ..constants import MOST_MMA, TRANSPOSED_ROWS, wide_forward_bytes
from ..tile_config import BlockedSecond, FusedConfig, KernelConfig, TileConfig
from . import tables

REGISTERS = 2**16  # registers of a core
MERGED_AT_ONCE, MERGE_REGISTERS = 16, 64  # splits that `kernels.combine` loads together, and their numbers
OWN_REGISTERS, MOST_REGISTERS = 40, 255  # registers of a thread, for addresses and the like, and in all
STATISTICS = 8  # 16-bit words of each row
MMA_HEADS = 16  # heads whose tiles take turns in kernels of `kernels.mma`; of others, one head's come after another's
PARTS = 6  # products of bfloat16 numbers for one of float32


def padded(width: int) -> int:
    """The features that a kernel computes: one or two powers of two (`arguments.head_dim`)."""
    first = max(16, 1 << (width.bit_length() - 1))
    rest = 0 if width <= first else max(16, power_of_two(width - first))
    return first + rest


def programs_of_core(problem: Problem, device: Device, tile: KernelConfig, kernel: str = "forward") -> int:
    """The programs that a core runs at once: as many as its shared memory and its registers hold."""
    p, pairs = problem, tile.block_m * tile.block_n
    width, width_v = padded(p.head_dim), padded(p.head_dim_v)
    held = {  # numbers of a program
        "forward": pairs + tile.block_m * width_v,
        "tangents": 2 * pairs + 2 * tile.block_m * width_v,
        "dkdv": 2 * pairs + tile.block_n * (width + width_v),
        "dq": 2 * pairs + tile.block_m * width,
    }.get(kernel, 2 * pairs + tile.block_m * width + tile.block_n * (width + width_v))
    threads = 32 * tile.num_warps
    registers = min(MOST_REGISTERS, OWN_REGISTERS + 1.5 * held / threads)
    shared = shared_bytes(p, tile, kernel) + 1024
    return max(1, min(memory_of(device) * 1024 // shared, int(REGISTERS / (threads * registers))))


def loads_once(problem: Problem, tile: KernelConfig) -> bool:
    """Whether values are a chunk of the keys' rows, or all of them (`launch.arguments.is_latent`)."""
    p, whole = problem, padded(problem.head_dim)
    first = whole if power_of_two(whole) == whole else power_of_two(whole) // 2
    return p.latent and p.eight_bit is None and p.head_dim_v in (first, p.head_dim) and tile.block_m > TRANSPOSED_ROWS


def shared_bytes(problem: Problem, tile: KernelConfig, kernel: str) -> int:
    """Shared memory of a program: about what Triton takes, and what a kernel of `kernels.mma` allocates."""
    p = problem
    if kernel == "tangents" and not tile.mma:
        loaded = 2 * max(tile.num_stages - 1, 1) * tile.block_n * (p.head_dim + p.head_dim_v)
        return (loaded + 2 * tile.block_m * (p.head_dim + tile.block_n)) * p.dtype.itemsize
    if kernel == "second rows":
        return (3 * tile.block_m + 4 * tile.num_stages * tile.block_n) * p.head_dim * p.dtype.itemsize
    if kernel == "second keys":
        return (4 * tile.block_n + 3 * tile.num_stages * tile.block_m) * p.head_dim * p.dtype.itemsize
    if not tile.mma:
        loaded = max(tile.num_stages - 1, 1) * tile.block_n * (p.head_dim + p.head_dim_v * (not loads_once(p, tile)))
        loaded *= p.dtype.itemsize if p.eight_bit is None else 1
        return loaded + tile.block_m * (p.head_dim + tile.block_n) * p.dtype.itemsize
    width, width_v = (max(16, power_of_two(n)) for n in (p.head_dim, p.head_dim_v))
    if kernel == "tangents":  # warps that divide columns share probabilities
        pairs = tile.block_m * tile.block_n if 16 * tile.num_warps > tile.block_m else 0
        return 4 * (tile.block_m * width + tile.block_n * (width + width_v) + pairs)
    if kernel == "forward" and max(width, width_v) > MOST_MMA:
        return wide_forward_bytes(p.head_dim, tile.block_m, tile.block_n, tile.num_stages)
    if kernel == "forward":
        return 2 * (tile.block_m * width + tile.num_stages * tile.block_n * (width + width_v))
    rows = tile.num_stages * tile.block_m * (width + width_v + STATISTICS)
    return 2 * (tile.block_n * (width + width_v) + rows + 2 * tile.block_m * tile.block_n)


def least_exact_bytes(problem: Problem) -> int:
    """Shared memory of the smallest tile of float32 gradients: NVIDIA's exact products take all four operands from
    there, and two tiles of pairs.
    """
    side = tables.SINGLE[-1].dkdv.block_m
    return 4 * 2 * side * (padded(problem.head_dim) + padded(problem.head_dim_v) + side)


def fits(problem: Problem, device: Device, tile: KernelConfig, kernel: str, more: int = 0) -> bool:
    """Whether a chip has the shared memory of a program, and so many bytes more."""
    return shared_bytes(problem, tile, kernel) + more <= memory_of(device) * 1024


def name_of(kernel: str, problem: Problem, tile: KernelConfig) -> str:
    """The name of a kernel's rates: widths, tile, warps, stages and precision."""
    width, width_v = padded(problem.head_dim), padded(problem.head_dim_v)
    widths = f"{width}" if width == width_v else f"{width}/{width_v}"
    kernel += " mma" * tile.mma
    precision = f" {tile.precision}" if problem.dtype.itemsize == 4 else ""
    return f"triton {kernel}{precision} {widths} {tile.block_m}x{tile.block_n}x{tile.num_warps}x{tile.num_stages}"


def add(
    counts: Counts, kernel: str, problem: Problem, device: Device, tile: KernelConfig, head: Head, heads: float
) -> None:
    """Add the work of a kernel's busiest core."""
    programs = programs_of_core(problem, device, tile, kernel)
    work = busiest(head, heads, device.cores, programs, MMA_HEADS if tile.mma else 1)
    add_work(counts, f"triton {kernel}{' mma' * tile.mma}", name_of(kernel, problem, tile), work, tile, problem)


def forward(problem: Problem, device: Device, config: TileConfig, splits: int = 1) -> Cost:
    if config.products is not None:
        return products(problem, 2, 12, 12)
    p, (batch, rows, keys), tile = problem, problem.counts, config.forward
    pack = config.pack_gqa
    heads = batch * p.num_heads_q / pack
    counts = Counts(launch_triton=1)
    if pack > 1 or rows <= tile.block_m:
        head = waves.row_tiles(p.window, rows, keys, max(rows, 1), tile.block_n)
        head = Head(max(1, -(-rows * pack // tile.block_m)), head.sample)
    else:
        head = listed(waves.row_tiles(p.window, rows, keys, tile.block_m, tile.block_n), p)
    if splits > 1:
        add_merge(counts, splits, batch * p.num_heads_q * rows * p.head_dim_v, rounds_of_merge(p, tile, pack, splits))
    add(counts, "forward", p, device, tile, shared(head, splits), heads)
    return Cost(counts, memory(rows_bytes(p), p), "few rows" if tile.block_m <= FEW_ROWS else "programs")


def add_merge(counts: Counts, splits: int, numbers: float, rounds: int) -> None:
    """Add the work of merging so many float32 numbers of each split, written and read, in rounds of rows."""
    counts["merge triton"] += 1
    counts["merge triton split"] += splits
    if splits <= MERGED_AT_ONCE:
        counts["merge triton round"] += rounds
    else:
        counts["merge triton part round"] += rounds * splits / MERGED_AT_ONCE
    counts["merge triton byte"] += splits * numbers * 8


def rounds_of_merge(problem: Problem, tile: KernelConfig, pack: int, splits: int) -> int:
    """How often the last program of a tile loads rows of the splits (`kernels.combine`)."""
    numbers = max(4, MERGE_REGISTERS // power_of_two(min(splits, MERGED_AT_ONCE)))
    at_once = max(1, 32 * tile.num_warps * numbers // power_of_two(problem.head_dim_v))
    return -(-min(problem.counts[1] * pack, tile.block_m) // min(tile.block_m, at_once))


def tangents(problem: Problem, device: Device, config: TileConfig, moves: Needs, splits: int = 1) -> Cost:
    """Of forward mode. Its rates are for all six products; a tensor that stands still has none."""
    p, (batch, rows, keys), tile = problem, problem.counts, config.tangents
    assert tile is not None
    head = listed(waves.row_tiles(p.window, rows, keys, tile.block_m, tile.block_n), p)
    part = (2 + moves.q + moves.k + moves.changes_scores + moves.v) / 6
    counts = Counts()
    add(counts, "tangents", p, device, tile, shared(head, splits), batch * p.num_heads_q)
    counts = counts.times(part)
    counts["launch triton"] += 1
    if splits > 1:
        numbers = 2 * batch * p.num_heads_q * rows * p.head_dim_v
        add_merge(counts, splits, numbers, rounds_of_merge(p, tile, 1, splits))
    return Cost(counts, memory(3 * part * rows_bytes(p), p))


def second(problem: Problem, device: Device, config: TileConfig, moves: Needs, splits: int = 1) -> Cost:
    """The work of forward with tangents, by the products of all three kernels: derived, not measured."""
    if isinstance(config.second, BlockedSecond):
        return blocked_second(problem, device, config)
    cost = tangents(problem, device, config, moves, splits)
    times = 21 / 6  # products of all kernels, beside those of forward with tangents
    return Cost(cost.counts.times(times), {name: times * n for name, n in cost.limits.items()})


BLOCKED_SIDE = 128  # rows and keys whose pairs are all computed
BLOCKED_PRODUCTS, WEIGHT_BYTES = 12, 17  # products of all kernels; bytes of a pair's weights, for each byte of a number


def blocked_second(problem: Problem, device: Device, config: TileConfig) -> Cost:
    """Forward, and the products of visible pairs and their weights at the rates of PyTorch's: derived, not measured."""
    p, (batch, rows, keys) = problem, problem.counts
    head = waves.row_tiles(p.window, rows, keys, BLOCKED_SIDE, BLOCKED_SIDE)
    pairs = batch * p.num_heads_q * head.total.steps * BLOCKED_SIDE**2
    cost = forward(problem, device, config)
    cost.counts["products operation"] += pairs * BLOCKED_PRODUCTS * (p.head_dim + p.head_dim_v)
    cost.counts["products byte"] += pairs * WEIGHT_BYTES * p.dtype.itemsize
    return cost


def listed(head: Head, problem: Problem) -> Head:
    """The tiles of a pass; of what a mask function shows, where kernels visit lists of blocks."""
    batch, rows, keys = problem.counts
    pairs = batch * problem.num_heads_q * rows * keys
    return shown(head, problem) if problem.layout == "dense" and pairs >= LEAST_PAIRS else head


def backward(problem: Problem, device: Device, config: TileConfig) -> Cost:
    p, (batch, rows, keys) = problem, problem.counts
    if config.products_backward is not None:
        return products(problem, 5, 26, 20)
    if config.fused is not None:
        return fused(problem, device, config.fused)
    counts = Counts(**{"launch_triton_backward" if config.one_loop is None else "launch_one_loop": 1})
    counts["sum byte"] += 2 * batch * p.num_heads_q * rows * p.head_dim_v * p.dtype.itemsize
    if config.dkdv.precision == "bf16x6":
        counts["launch triton split"] += 1
    group = p.num_heads_q // max(p.num_heads_kv, 1)
    if (loop := config.one_loop) is not None:
        counts["sum byte"] += 3 * batch * p.num_heads_q * rows * padded(p.head_dim) * 4  # zeros, and sums of dq
        head = listed(waves.key_tiles(p.window, rows, keys, loop.block_m, loop.block_n), p)
        add(counts, "one loop", p, device, loop, of_group(head, group), batch * p.num_heads_kv)
        return Cost(counts, memory(3 * rows_bytes(p), p))
    head = listed(waves.key_tiles(p.window, rows, keys, config.dkdv.block_m, config.dkdv.block_n), p)
    add(counts, "dkdv", p, device, config.dkdv, of_group(head, group), batch * p.num_heads_kv)
    head = listed(waves.row_tiles(p.window, rows, keys, config.dq.block_m, config.dq.block_n), p)
    add(counts, "dq", p, device, config.dq, head, batch * p.num_heads_q)
    return Cost(counts, memory(3 * rows_bytes(p), p))


def fused(problem: Problem, device: Device, config: FusedConfig) -> Cost:
    p, (batch, rows, keys), tile = problem, problem.counts, config.tile
    counts = Counts(launch_triton=1)
    steps = {None: 1, "keys": -(-keys // tile.block_n), "rows": -(-rows // tile.block_m)}[config.walk]
    head = shared(Head(1, (Tile(steps, 0),)), config.splits)
    if config.splits > 1:
        counts["merge triton"] += 1
        summed = rows if config.walk == "keys" else 2 * keys
        counts["merge triton byte"] += config.splits * batch * p.num_heads_q * summed * p.head_dim * 8
    add(counts, f"fused {config.walk or 'whole'}", p, device, tile, head, batch * p.num_heads_q)
    return Cost(counts, memory(2 * rows_bytes(p), p))


def products(problem: Problem, count: int, score_bytes: int, row_bytes: int) -> Cost:
    """Of a pass whose products PyTorch computes, so many for each score: scores go to the kernels between them and
    back, and rows are put in order.
    """
    from ..score_blocks import blocks_of, new_sizes  # not needed otherwise

    p, parts, (batch, rows, keys) = problem, problem.dtype is torch.float32, problem.counts
    sizes = new_sizes(batch, (p.num_heads_q, p.num_heads_kv), (rows, keys), p.window, parts=parts)
    blocks = blocks_of(sizes)
    scores = sum(x.num_heads * x.num_rows * x.num_keys for x in blocks)
    counts = Counts(products_block=len(blocks) * count)
    counts["products operation"] = scores * count * (p.head_dim + p.head_dim_v) * (PARTS if parts else 1)
    numbers = sizes.heads * sizes.rows * max(p.head_dim, p.head_dim_v)
    counts["products byte"] = scores * score_bytes + numbers * row_bytes * (2 if parts else 1)
    return Cost(counts, {})
