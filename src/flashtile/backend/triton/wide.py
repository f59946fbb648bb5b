"""Which calls of wide heads leave their matrix products to PyTorch: by counted times on an H100
(docs/journal/2026-11-26-wide-heads.md).
"""

from typing import NamedTuple

import torch

from ...call.device import Device
from ...call.problem import Problem
from ...call.window import Window, visible_pairs

# Head dimensions above which tiles are too small to be fast, and the pairs times features of a call from which
# PyTorch's matrix products may need less time (docs/journal/2026-11-25-few-rows.md, -wide-heads.md).
WIDE_FLOAT32, MANY_FLOAT32 = 128, 2**30
WIDE_HALF, MANY_HALF = 256, 2**26
WIDE_HALF_FORWARD = 320  # kernels with 264 features are faster, in forward
MOST_KEYS = 2**16  # of a row, which one program reads
HIDDEN = 8  # keys of a row that kernels multiply at a side of its window
PRODUCTS, BANDWIDTH = 650e12, 3.2e12  # of PyTorch's products and of memory, a second


class Pass(NamedTuple):
    """What a pass of half precision takes."""

    products: int
    score_bytes: int  # from products to the kernel between them, and back
    row_bytes: int  # of a feature of a row: operands in the order of rows, and sums
    block: float  # seconds of a block's launches
    kernels: float  # operations of the kernels a second
    least: float  # seconds of the kernels


FORWARD = Pass(2, 12, 12, 10e-6, 140e12, 0.0)
BACKWARD = Pass(5, 26, 20, 20e-6, 45e12, 100e-6)


def is_wide(problem: Problem) -> bool:
    """Whether heads are so wide, and pairs so many, that PyTorch's products may be faster than those of kernels."""
    p = problem
    width = max(p.head_dim, p.head_dim_v)
    wide, many = (WIDE_FLOAT32, MANY_FLOAT32) if p.dtype is torch.float32 else (WIDE_HALF, MANY_HALF)
    products = p.batch * p.num_heads_q * p.seqlen_q * p.seqlen_k * width
    # PyTorch's products on a GPU are not deterministic without settings in the environment.
    return p.layout == "dense" and width > wide and products >= many and not p.deterministic


def is_faster(problem: Problem, *, backward: bool) -> bool:
    """Whether PyTorch's products of half precision take less time than kernels, which multiply visible tiles alone."""
    from .score_blocks import blocks_of, sizes_of_problem  # not needed by `import flashtile`

    p, this = problem, BACKWARD if backward else FORWARD
    sizes = sizes_of_problem(p, parts=False)
    blocks, operations = blocks_of(sizes), this.products * (p.head_dim + p.head_dim_v)
    scores = sum(x.num_heads * x.num_rows * x.num_keys for x in blocks)
    rows = sizes.heads * sizes.rows * max(p.head_dim, p.head_dim_v)
    by_pytorch = scores * (operations / PRODUCTS + this.score_bytes / BANDWIDTH) + this.block * len(blocks)
    by_pytorch += rows * this.row_bytes / BANDWIDTH
    multiplied = visible_pairs(widened(p.window), p.seqlen_q, p.seqlen_k) * p.num_heads_q * p.batch
    return by_pytorch < multiplied * operations / this.kernels + this.least


def widened(window: Window) -> Window:
    """The window with as many keys more as kernels multiply at its sides, where tiles are visible in part."""
    left, right = (None if side is None else side + HIDDEN for side in (window.left, window.right))
    return window._replace(left=left, right=right)


def takes_products(problem: Problem, device: Device, *, backward: bool = False) -> bool:
    """Whether PyTorch multiplies, and this backend's kernels do the rest (`host_products`): on Hopper, where six
    products of bfloat16 numbers take less time than one of float32.
    """
    p = problem
    if device.arch != "sm_90" or not is_wide(p) or p.seqlen_k > MOST_KEYS:
        return False
    # Rows are whole vectors, and random numbers of a row begin with a whole counter.
    if p.head_dim % 8 or p.head_dim_v % 8 or p.octet_start:
        return False
    if p.dtype is torch.float32:
        return True
    if not backward and (p.mask_mod is not None or max(p.head_dim, p.head_dim_v) < WIDE_HALF_FORWARD):
        return False  # kernels skip what a mask function hides
    return is_faster(p, backward=backward)
