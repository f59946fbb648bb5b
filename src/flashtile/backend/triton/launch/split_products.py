"""PyTorch's products of float32 operands in bfloat16 parts (`products`), which are float32's within its bound."""

import math

import torch
from torch import Tensor

from ....call.call import Needs
from ....call.problem import power_of_two
from ...gpu.kernel import Kernel
from ...gpu.replay import Recorder
from ...scalars import rows_last, strides
from ..score_blocks import Block, Sizes, round_up
from . import KERNELS
from . import arguments as args
from .score_views import scores_of, sums_of

OPERAND = Kernel(f"{KERNELS}.signed_split", "operand_kernel")
PARTS = True  # what kernels store between products
ROWS_AT_ONCE, NUM_WARPS = 16, 8
# One product: [hi, mid, low, hi, mid, hi] @ [low, mid, hi, mid, hi, hi]. Three: [hi, mid, low] @ [low, mid, hi],
# [hi, mid] @ [mid, hi] and [hi] @ [hi].
LEFT, RIGHT, REVERSED = (0, 1, 2, 0, 1, 0), (2, 1, 0, 1, 0, 0), (2, 1, 0)


def prepared(recorder: Recorder, x: Tensor) -> Tensor:
    """An input as the functions below take it."""
    return recorder.op(rows_last, x)


def left(recorder: Recorder, x: Tensor) -> Tensor:
    """The left operand of inner products of rows."""
    return operand(recorder, x, LEFT)


def right(recorder: Recorder, x: Tensor) -> Tensor:
    """The right operand of inner products of rows."""
    return operand(recorder, x, RIGHT)


def summands(recorder: Recorder, x: Tensor, chunk: int) -> Tensor:
    """The rows that sums over keys or rows weigh, `chunk` at once."""
    return operand(recorder, x, REVERSED, chunk)


def new_probabilities(recorder: Recorder, s: Tensor, blocks: tuple[Block, ...], dtype: torch.dtype) -> Tensor:
    """Memory for the probabilities of a block in forward."""
    return recorder.new(new_parts(s, max(x.num_heads * x.num_rows * x.padded_keys for x in blocks)))


def new_weights(
    recorder: Recorder, s: Tensor, dp: Tensor, sizes: Sizes, blocks: tuple[Block, ...], dtype: torch.dtype, needs: Needs
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Memory for probabilities and gradients of scores in backward: those for sums over rows, and gradients for sums
    over keys.
    """
    most = max(x.num_heads * round_up(x.num_rows, sizes.row_chunk) * x.pitch for x in blocks)
    p_t, ds_t = (recorder.new(new_parts(s, most)) if needed else None for needed in (needs.v, needs.k))
    ds = new_probabilities(recorder, dp, blocks, dtype) if needs.q else None
    return p_t, ds_t, ds


def operand(recorder: Recorder, x: Tensor, order: tuple[int, ...], chunk: int = 1) -> Tensor:
    """The parts of `x [B, H, S, D]`, `[B * H, chunks, parts, chunk, D]`."""
    batch, heads, rows, width = x.shape
    padded = round_up(rows, chunk)
    shape = (batch * heads, padded // chunk, len(order), chunk, width)
    parts = recorder.new(x.new_empty(shape, dtype=torch.bfloat16))
    align = args.alignment([x])
    scalars = {
        **strides("x", x, align),
        "num_heads": heads,
        "rows": rows,
        "padded_rows": padded,
        "D": width,
        "WIDTH": power_of_two(width),
        "CHUNK": chunk,
        "ORDER": order,
        "ALIGN": align,
        "BLOCK_M": ROWS_AT_ONCE,
        "num_warps": NUM_WARPS,
    }
    recorder.launch(OPERAND, {"x": x, "operand": parts}, -(-padded // ROWS_AT_ONCE) * batch * heads, scalars)
    return parts


def new_parts(like: Tensor, elements: int) -> Tensor:
    """Memory for the parts of probabilities or gradients."""
    return like.new_empty(3 * elements, dtype=torch.bfloat16)


def multiply_rows(block: Block, s: Tensor, x: Tensor, y: Tensor) -> None:
    """Store the inner products of rows and keys in `s`."""
    x, y = x[block.heads, block.rows].flatten(2), y[block.heads, block.keys].flatten(2)
    torch.bmm(x, y.transpose(1, 2), torch.float32, out=scores_of(block, s))


def add_over_keys(sizes: Sizes, block: Block, alpha: float, whole: bool, sums: Tensor, x: Tensor, y: Tensor) -> None:
    """Store `alpha * x @ y` for the rows of a block, from parts of `x [rows, keys]` and `y [keys, D]`."""
    chunk = sizes.keys_at_once
    shape = block.num_heads, block.num_rows, block.padded_keys // chunk, 3 * chunk
    x = x[: math.prod(shape)].view(shape)
    sums = sums_of(block, whole, sums)
    for n in range(shape[2]):
        of_chunk = y[block.heads, block.key // chunk + n].flatten(1, 2)
        add_product(sums, x[:, :, n], of_chunk, chunk, alpha, first=n == 0)


def add_over_rows(sizes: Sizes, block: Block, alpha: float, sums: Tensor, x: Tensor, y: Tensor) -> None:
    """Add `alpha * x^T @ y` for the rows of a block, from parts of `x [rows, keys]` and `y [rows, D]`."""
    chunk = sizes.row_chunk
    chunks, before = -(-block.num_rows // chunk), block.row // chunk
    shape = block.num_heads, chunks, 3 * chunk, block.pitch
    x = x[: math.prod(shape)].view(shape)[..., : block.num_keys]
    sums = sums[block.heads, block.keys]
    for n in range(chunks):
        of_chunk, first = y[block.heads, before + n].flatten(1, 2), block.empty and n == 0
        add_product(sums, x[:, n].transpose(1, 2), of_chunk, chunk, alpha, first=first)


def add_product(sums: Tensor, x: Tensor, y: Tensor, chunk: int, alpha: float, *, first: bool) -> None:
    """Add `alpha * x @ y` to the sums, which hold nothing before the `first` one: `x [H, M, 3 * chunk]` as hi, mid and
    low, `y [H, 3 * chunk, D]` as low, mid and hi. The smallest products come first.
    """
    for n in range(3):
        beta = 0.0 if first and n == 0 else 1.0
        x_n, y_n = x[..., : (3 - n) * chunk], y[:, n * chunk :]
        torch.baddbmm(sums, x_n, y_n, torch.float32, beta=beta, alpha=alpha, out=sums)
