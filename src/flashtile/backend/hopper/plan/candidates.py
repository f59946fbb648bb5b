"""The ways to run a pass of a problem: kernels of its width that hold its features, with all splits and orders."""

from collections.abc import Iterator
from dataclasses import replace
from math import gcd
from typing import Any

import torch

from ....call.call import NO_FEATURES
from ....call.device import Device
from ....call.eight_bit import QUERIES
from ....call.problem import Problem
from ....call.window import UNLIMITED, Window
from ....expression import Formula
from ....expression.scaling import is_head_factor
from ...gpu.archive import compiler_version
from ...gpu.waves import splits_that_fill
from ..backward_config import DkdvConfig, FusedBackwardConfig, SplitBackwardConfig
from ..tile_config import Float32Forward, ForwardConfig, LatentForward, TangentsConfig
from .listed import expects_lists, is_padded
from .tables import EIGHT_BIT, FLOAT32, FORWARD, FUSED_BACKWARD, LATENT, LATENT_BYTES, SPLIT_BACKWARD, TANGENTS
from .widths import ONE_BOX, SHARED_COLUMNS, eight_bit_width, is_latent, widths

NEWEST_3WG = (3, 7)  # version of Triton; with later ones, three warpgroups spill at 80 and 96 features
NEWEST_LATE_DQ = (3, 6)  # version of Triton; with 3.9, adding dq late spills 192 bytes at 128 features, not 72
SPLITS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
LATENT_SPLITS = (*SPLITS, 48, 64, 96, 128)
MAX_CHUNK_ROWS = 2**16  # rows of a launch, whose programs stay close enough to share the L2 cache
MAX_DQ_PARTS = 16  # accumulators of dq
L2_BYTES = (16 * 2**20, 40 * 2**20)  # that heads which take turns may take of the L2 cache
DQ_LENGTH = 256  # rows and keys from which warpgroups add dq to zeros


def forward(problem: Problem, device: Device) -> Iterator[tuple[ForwardConfig | Float32Forward | LatentForward, int]]:
    """Configurations, and numbers of programs that share the keys of a tile."""
    if is_latent(problem):
        yield from latent(problem, device)
        return
    width = widths(problem) or (0, 0)  # `support` declines what tables do not have
    if problem.dtype is torch.float32:
        config = FLOAT32[width[0]].forward
        yield from ((replace(config, heads_at_once=heads), 1) for heads in forward_orders(problem))
        return
    if problem.dtype is QUERIES:
        of_bytes = EIGHT_BIT[eight_bit_width(problem) or 0]
        if problem.features.bias is not None:  # in registers beside scores: a thread would spill 700 to 1900 bytes
            two = {"num_warpgroups": 2, "consumer_registers": 216}
            of_bytes = replace(of_bytes, **two) if of_bytes.num_warpgroups > 2 else replace(of_bytes, block_n=64)
        configs: tuple[ForwardConfig, ...] = (of_bytes,)
    else:
        warpgroups, configs = warpgroups_with_room(problem, device, width), FORWARD[width]
        if problem.batch_invariant:  # blocks of one size: neither the rows of a tile nor its turn change a bit
            configs = tuple(x for x in configs if x.block_n == configs[0].block_n)
        configs = tuple(x for x in configs if x.num_warpgroups in warpgroups)
    for config in configs:
        for heads in forward_orders(problem):
            yield from divided(replace(with_pages(config, problem), heads_at_once=heads), problem, device)


def latent(problem: Problem, device: Device) -> Iterator[tuple[LatentForward, int]]:
    """The kernel of latent rows, with all splits of a few tiles."""
    assert problem.pages is not None  # `support` declines others
    batch, rows, keys = problem.counts
    config, eight_bit = LATENT, problem.eight_bit
    if eight_bit is not None:
        of_bytes = next((x for x in LATENT_BYTES if rows * problem.num_heads_q <= x.block_m), LATENT_BYTES[-1])
        packed = eight_bit.format == "packed"
        config = replace(of_bytes, packed=packed, in_turn=packed or of_bytes.in_turn)
    config = replace(config, page_size=problem.pages.size if problem.pages.several else None)
    yield config, 1
    tiles = batch * -(-rows * problem.num_heads_q // config.block_m)
    if tiles < device.cores:
        for n in splits_that_fill(LATENT_SPLITS, tiles, device.cores, -(-keys // config.block_n)):
            yield config, n


def divided(config: ForwardConfig, problem: Problem, device: Device) -> Iterator[tuple[ForwardConfig, int]]:
    """The configuration with its splits of keys: of all tiles where few, of those after whole waves, or none."""
    yield config, 1
    batch, rows, keys = problem.counts
    packed = problem.layout == "varlen" or problem.packed  # whose keys no launch splits
    if packed or problem.batch_invariant or (config.kind == "eight_bit" and is_masked(problem)):
        return
    heads = batch * problem.num_heads_q
    blocks = -(-rows // config.block_m)
    tiles, slots = blocks * heads, device.cores * config.programs_per_core
    if tiles < slots:
        for n in splits_that_fill(SPLITS, tiles, slots, -(-keys // config.block_n)):
            yield config, n
    left = tiles % device.cores
    if is_divisible(problem) and config.programs_per_core == 1 and tiles > device.cores and 0 < left <= blocks:
        splits = min(device.cores // left, -(-keys // config.block_n), SPLITS[-1])
        if splits > 1:
            yield replace(config, last_splits=splits), 1


def is_divisible(problem: Problem) -> bool:
    """Whether a head's rows may be a call of their own, and the last tiles belong to the last head."""
    p = problem
    alike = p.dtype is not QUERIES and p.num_heads_q == p.num_heads_kv
    return p.layout == "dense" and p.window.unlimited and is_plain(p) and alike


def forward_orders(problem: Problem) -> list[int]:
    """Numbers of key heads whose tiles take turns, as many as share the L2 cache. Only tiles that see different keys
    have an order.
    """
    if problem.layout != "dense" or (problem.window.unlimited and not expects_lists(problem)):
        return [1]
    batch, _, keys = problem.counts
    heads = batch * problem.num_heads_kv
    bytes_per_head = max(1, keys * (problem.head_dim + problem.head_dim_v) * problem.dtype.itemsize)
    return sorted({equal_groups(heads, max(1, size // bytes_per_head)) for size in L2_BYTES})


def equal_groups(heads: int, most: int) -> int:
    """Heads of each group, of the fewest equal groups of at most `most`."""
    return -(-heads // -(-heads // min(most, heads)))


def is_masked(problem: Problem) -> bool:
    """Whether a mask hides pairs, besides the window."""
    return problem.features.mask is not None or problem.mask_mod is not None


def is_plain(problem: Problem) -> bool:
    """Whether nothing but a window changes scores."""
    changed = problem.softcap or problem.dropout or problem.score_mod is not None
    return problem.features == NO_FEATURES and not changed and not is_masked(problem)


def warpgroups_with_room(problem: Problem, device: Device, width: tuple[int, int]) -> tuple[int, ...]:
    """Numbers of a program's warpgroups that have registers for what the problem does with scores."""
    if width in SHARED_COLUMNS:
        return (1,)
    score_mod, masked = problem.score_mod, is_masked(problem)
    costly = score_mod is not None and not (isinstance(score_mod, Formula) and is_head_factor(score_mod))
    other_terms = problem.features._replace(bias=None).score_terms
    if problem.softcap or costly or (masked and not is_padded(problem)):
        return (2,)
    one = () if masked else (1,)
    if problem.features.bias is not None:
        return (*one, 2) if width in ONE_BOX and not other_terms and not problem.dropout else (2,)
    if other_terms or problem.dropout:
        return (*one, 2) if width in ONE_BOX else (2,)
    if masked:  # with lists, wider ones spill registers
        return (1, 2, 3) if width in ONE_BOX else (2,)
    fits = width in ONE_BOX or (compiler_version(device.arch) or NEWEST_3WG) <= NEWEST_3WG
    return (*one, 2, 3) if fits else (*one, 2)


def with_pages(config: ForwardConfig, problem: Problem) -> ForwardConfig:
    """The configuration for keys in pages, if they are: each part of a block lies in one page."""
    if problem.pages is None:
        return config
    size = problem.pages.size if problem.pages.several else None
    rows = config.block_n if size is None else gcd(size, config.block_n)
    return replace(config, page_rows=rows, page_size=size)


def tangents(problem: Problem) -> Iterator[TangentsConfig]:
    """The kernels of forward mode of a problem, behind its forward pass."""
    width = widths(problem)
    assert width is not None  # `support` declines others
    yield from (replace(config, heads_at_once=n) for config in TANGENTS[width] for n in forward_orders(problem))


def backward(problem: Problem, device: Device) -> Iterator[FusedBackwardConfig | SplitBackwardConfig]:
    width = widths(problem)
    assert width is not None  # `support` declines others
    float32 = problem.dtype is torch.float32
    if float32 or width in SPLIT_BACKWARD:
        plain = is_plain(problem) and not has_newer_compiler(device)
        pairs = (FLOAT32[width[0]].backward,) if float32 else SPLIT_BACKWARD[width]
        for pair in pairs[: None if plain else 1]:
            dq = replace(pair.dq, heads_at_once=forward_orders(problem)[0])
            for dkdv in shared_heads(pair.dkdv, problem, device):
                shared = {"head_splits": dkdv.head_splits, "heads_at_once": dkdv.heads_at_once}
                yield SplitBackwardConfig(dq, dkdv, pair.dv and replace(pair.dv, **shared))
        return
    limited = not problem.window.unlimited
    for config in FUSED_BACKWARD[width[0]]:
        if config.late_dq is not None and not adds_late(problem, device, width):
            continue
        in_order = problem.deterministic
        # Blocks in lists differ in length by the mask. Last keys first, each of them begins with its own diagonal, and
        # none waits for the first one to store its dq.
        lpt = limited and (not in_order or config.block_m < config.block_n) and not expects_lists(problem)
        yield from shared_rows(replace(config, lpt=lpt, in_order=in_order), problem, device)


def shared_rows(config: FusedBackwardConfig, problem: Problem, device: Device) -> Iterator[FusedBackwardConfig]:
    """The configuration with its splits of heads or rows, chunks of rows and orders."""
    if problem.layout != "dense":
        yield config
        return
    batch, rows, keys = problem.counts
    limited, masked = not problem.window.unlimited, is_masked(problem)
    m_blocks, n_blocks = -(-rows // config.block_m), -(-keys // config.block_n)
    tiles = n_blocks * batch * problem.num_heads_kv
    if rows > MAX_CHUNK_ROWS and not limited and not masked and (config.in_order or config.late_dq):
        config = replace(config, row_chunks=-(-rows // MAX_CHUNK_ROWS))
    for split in shared_heads(config, problem, device) if limited or masked else [config]:
        yield from in_turns(split, problem, device)
    uneven = limited and m_blocks >= 16 and config.in_order
    # Under a window, parts of rows are uneven. Those of a group's query heads are not, where they are enough.
    group = problem.num_heads_q // problem.num_heads_kv
    by_heads = limited and not config.in_order and group > 1 and tiles * group >= device.cores
    if (tiles < device.cores and not by_heads) or uneven:
        for n in splits_that_fill(SPLITS, min(tiles, device.cores // 8 if uneven else tiles), device.cores, m_blocks):
            yield from in_turns(replace(config, row_splits=n), problem, device)
    left = tiles % device.cores
    # Where dq is added in memory, a divided last wave gains too little for a kernel of its own.
    plain = not (limited or masked or config.row_chunks > 1) and config.late_dq is not None
    if plain and tiles > device.cores and left > 0:
        splits = min(device.cores // left, m_blocks, 16)
        if splits > 1:
            yield from in_turns(replace(config, last_splits=splits), problem, device)


def in_turns(config: FusedBackwardConfig, problem: Problem, device: Device) -> Iterator[FusedBackwardConfig]:
    """The configuration with all numbers of heads whose blocks take turns, and of accumulators of dq."""
    batch, rows, keys = problem.counts
    n_blocks, m_blocks = -(-keys // config.block_n), -(-rows // config.block_m)
    heads = batch * problem.num_heads_kv * config.head_splits
    group = problem.num_heads_q // problem.num_heads_kv // config.head_splits
    programs = min(device.cores, heads * n_blocks * config.row_splits)
    if config.in_order:
        waiting = m_blocks * problem.num_heads_q * batch
        config = replace(config, dq_parts=max(1, min(MAX_DQ_PARTS, -(-programs // waiting))))
    orders = backward_orders(problem, config, device, heads, group * rows * config.bytes_per_row)
    yield from (replace(config, heads_at_once=n) for n in orders)


def backward_orders(
    problem: Problem, config: FusedBackwardConfig | DkdvConfig, device: Device, heads: int, bytes_per_head: int
) -> list[int]:
    """Numbers of heads whose blocks of keys take turns: as many as run at once, as have room in the L2 cache, ..."""
    n_blocks = -(-problem.counts.keys // config.block_n)
    resident = max(1, device.cores // n_blocks)
    fitting = max(1, 48 * 2**20 // max(1, bytes_per_head))
    if problem.window.unlimited and not expects_lists(problem):
        choices = {resident, max(resident, min(4, fitting))}
    else:
        choices = {equal_groups(heads, max(1, min(2 * resident, fitting))), equal_groups(heads, fitting)}
        choices |= {heads} if heads <= 4 * resident else set()
    return sorted({min(n, heads) for n in choices})


def shared_heads(config: Any, problem: Problem, device: Device) -> Iterator[Any]:
    """The configuration with all numbers of programs that share a group of query heads."""
    batch, rows, _ = problem.counts
    group = problem.num_heads_q // problem.num_heads_kv
    parts = [n for n in range(1, group + 1) if group % n == 0] if problem.layout == "dense" else [1]
    for n in parts:
        split = replace(config, head_splits=n)
        if isinstance(split, DkdvConfig):
            bytes_per_head = group // n * rows * (problem.head_dim + problem.head_dim_v) * problem.dtype.itemsize
            orders = backward_orders(problem, split, device, batch * problem.num_heads_kv * n, bytes_per_head)
            yield from (replace(split, heads_at_once=order) for order in orders)
        else:
            yield split


def adds_late(problem: Problem, device: Device, width: tuple[int, int]) -> bool:
    """Whether warpgroups may add dq themselves, one step late: in plain calls, whose products leave registers."""
    few_registers = width == (128, 128) and has_newer_compiler(device)
    long = min(problem.counts.rows, problem.counts.keys) >= DQ_LENGTH
    fits = problem.window in (UNLIMITED, Window(right=0)) and not few_registers and not problem.deterministic
    return problem.layout == "dense" and is_plain(problem) and fits and long


def has_newer_compiler(device: Device) -> bool:
    """Whether the kernels' Triton is newer than the one with which kernels of many registers were measured."""
    return (compiler_version(device.arch) or NEWEST_LATE_DQ) > NEWEST_LATE_DQ
