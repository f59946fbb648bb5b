"""Both passes of float32 above 128 features: PyTorch's matrix products of operands in bfloat16 parts, and kernels for
what lies between them (`kernels.signed_split`). Scores of a block of heads and rows are in memory at a time.
"""

import math
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...call.call import Call, Gradients, Needs, lse_shape, new_rows
from ...call.problem import power_of_two
from ..gpu.kernel import Kernel
from ..gpu.replay import Recorder, Results
from ..scalars import LOG2E, rows_last, strides
from . import arguments as args
from .launches import BackwardLaunches

OPERAND, SOFTMAX, GRADIENT = (
    Kernel(f"{__package__}.kernels.signed_split", f"{name}_kernel") for name in ("operand", "softmax", "gradient")
)
UNIT = 16  # of strides, in elements
SCORES = 2**25  # of a block: 320 MiB of scores and probabilities in forward, 832 MiB with gradients in backward
# Terms that matrix units add before a sum is rounded: each 16 are truncated (docs/contract.md allows 32 units, and 64
# times half a unit of half the sum is half of that).
CHUNK = 1024
ROWS_AT_ONCE, NUM_WARPS = 16, 8
# One product: [hi, mid, low, hi, mid, hi] @ [low, mid, hi, mid, hi, hi]. Three: [hi, mid, low] @ [low, mid, hi],
# [hi, mid] @ [mid, hi] and [hi] @ [hi].
LEFT, RIGHT, REVERSED = (0, 1, 2, 0, 1, 0), (2, 1, 0, 1, 0, 0), (2, 1, 0)


class Sizes(NamedTuple):
    heads: int  # of all sequences
    rows: int
    keys: int

    @property
    def padded_keys(self) -> int:
        return round_up(self.keys, chunk_of(self.keys))

    @property
    def pitch(self) -> int:
        """Elements from row to row of scores."""
        return round_up(self.keys, UNIT)

    @property
    def block(self) -> tuple[int, int]:
        """Heads and rows of a block, whole chunks of rows unless it has all."""
        rows = max(CHUNK, SCORES // self.padded_keys // CHUNK * CHUNK)
        rows = min(rows, self.rows)
        return max(1, min(SCORES // (rows * self.padded_keys), self.heads)), rows

    def blocks(self) -> Iterator["Block"]:
        heads, rows = self.block
        for h in range(0, self.heads, heads):
            for r in range(0, self.rows, rows):
                yield Block(h, min(heads, self.heads - h), r, min(rows, self.rows - r))


class Block(NamedTuple):
    """Heads and rows whose scores are in memory together."""

    head: int
    num_heads: int
    row: int
    num_rows: int

    @property
    def heads(self) -> slice:
        return slice(self.head, self.head + self.num_heads)

    @property
    def rows(self) -> slice:
        return slice(self.row, self.row + self.num_rows)


def round_up(n: int, unit: int) -> int:
    return -(-n // unit) * unit


def chunk_of(n: int) -> int:
    return min(CHUNK, round_up(n, UNIT))


def sizes_of(call: Call) -> Sizes:
    q, k = call.tensors.q, call.tensors.k
    return Sizes(q.shape[0] * q.shape[1], q.shape[2], k.shape[2])


def launch_forward(recorder: Recorder, call: Call) -> Results:
    """`out` and `lse`."""
    q, k, v = (recorder.op(rows_last, x) for x in call.tensors[:3])
    sizes = sizes_of(call)
    lse = recorder.new(q.new_empty(lse_shape(q), dtype=torch.float32))
    out, sums = new_sums(recorder, call.tensors.q, q.shape[1], v.shape[-1], call.tensors.out)
    q_parts, k_parts = operand(recorder, q, LEFT), operand(recorder, k, RIGHT)
    v_parts = operand(recorder, v, REVERSED, chunk_of(sizes.keys))
    s = recorder.new(new_scores(q, sizes))
    p = recorder.new(new_parts(q, sizes, sizes.block[1], sizes.padded_keys))
    for block in sizes.blocks():
        recorder.effect(partial(multiply_rows, sizes, block), s, q_parts, k_parts)
        scalars = {
            **block_scalars(call, sizes, block),
            "first": block.head * sizes.rows + block.row,
            "stride_lse": sizes.rows,
        }
        recorder.launch(SOFTMAX, {"s": s, "p": p, "lse": lse}, block.num_heads * block.num_rows, scalars)
        recorder.effect(partial(add_over_keys, sizes, block, 1.0), sums, p, v_parts)
    stored(recorder, out, sums)
    return out, lse


def launch_backward(
    launches: BackwardLaunches, needs: Needs, out: Tensor, lse: Tensor, dlse: Tensor | None
) -> Gradients:
    """The gradients of q, k and v that are needed."""
    recorder, call = launches.recorder, launches.call
    q, k, v, dout = launches.q, launches.k, launches.v, launches.dout
    sizes, scale, t = sizes_of(call), call.settings.scale, call.tensors
    row_chunk, chunk = chunk_of(sizes.rows), chunk_of(sizes.keys)
    launches.preprocess(out, lse, dlse)
    stats_rows = launches.row_stats.shape[-2]
    q_parts, dout_parts = (operand(recorder, x, LEFT) for x in (q, dout))
    k_parts, v_parts = (operand(recorder, x, RIGHT) for x in (k, v))
    s, dp = (recorder.new(new_scores(q, sizes)) for _ in range(2))
    most_rows = round_up(sizes.block[1], row_chunk)
    p_t, ds_t = (
        recorder.new(new_parts(q, sizes, most_rows, sizes.pitch)) if needed else None for needed in (needs.v, needs.k)
    )
    ds = recorder.new(new_parts(q, sizes, sizes.block[1], sizes.padded_keys)) if needs.q else None
    (dq, dq_sums), (dk, dk_sums), (dv, dv_sums) = (
        new_sums(recorder, x, x.shape[1], x.shape[-1]) if needed else (None, None)
        for x, needed in zip((t.q, t.k, t.v), (needs.q, needs.k, needs.v), strict=True)
    )
    k_chunks = operand(recorder, k, REVERSED, chunk) if needs.q else None
    q_chunks = operand(recorder, q, REVERSED, row_chunk) if needs.k else None
    dout_chunks = operand(recorder, dout, REVERSED, row_chunk) if needs.v else None
    for block in sizes.blocks():
        recorder.effect(partial(multiply_rows, sizes, block), s, q_parts, k_parts)
        recorder.effect(partial(multiply_rows, sizes, block), dp, dout_parts, v_parts)
        padded_rows = round_up(block.num_rows, row_chunk)
        scalars = {
            **block_scalars(call, sizes, block),
            "padded_rows": padded_rows,
            "ROW_CHUNK": row_chunk,
            "first": block.head * stats_rows + block.row,
            "stride_row_stats": stats_rows,
        }
        pointers = {"s": s, "dp": dp, "p_t": p_t, "ds_t": ds_t, "ds": ds, "row_stats": launches.pointers["row_stats"]}
        recorder.launch(GRADIENT, pointers, block.num_heads * padded_rows, scalars)
        if dv_sums is not None:
            recorder.effect(partial(add_over_rows, sizes, block, 1.0), dv_sums, p_t, dout_chunks)
        if dk_sums is not None:
            recorder.effect(partial(add_over_rows, sizes, block, scale), dk_sums, ds_t, q_chunks)
        if dq_sums is not None:
            recorder.effect(partial(add_over_keys, sizes, block, scale), dq_sums, ds, k_chunks)
    for x, sums in ((dq, dq_sums), (dk, dk_sums), (dv, dv_sums)):
        if x is not None:
            stored(recorder, x, sums)
    return Gradients(q=dq, k=dk, v=dv)


def new_sums(
    recorder: Recorder, like: Tensor, heads: int, width: int, result: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """A result with the rows of `like`, unless it is given, and the memory in which it is summed: the same one, if
    heads follow each other there.
    """
    if result is None:
        result = recorder.new(new_rows(like, heads, width, torch.float32))
    return result, result if result.is_contiguous() else recorder.new(result.new_empty(result.shape))


def stored(recorder: Recorder, result: Tensor, sums: Tensor | None) -> None:
    if sums is not result:
        recorder.effect(Tensor.copy_, result, sums)


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


def new_scores(like: Tensor, sizes: Sizes) -> Tensor:
    heads, rows = sizes.block
    return like.new_empty(heads * rows * sizes.pitch)


def new_parts(like: Tensor, sizes: Sizes, rows: int, keys: int) -> Tensor:
    """Memory for the parts of a block of probabilities or gradients."""
    return like.new_empty(3 * sizes.block[0] * rows * keys, dtype=torch.bfloat16)


def multiply_rows(sizes: Sizes, block: Block, s: Tensor, x: Tensor, y: Tensor) -> None:
    """Store the inner products of rows in `s`."""
    shape = block.num_heads, block.num_rows, sizes.pitch
    out = s[: math.prod(shape)].view(shape)[..., : sizes.keys]
    x, y = x[block.heads, block.rows].flatten(2), y[block.heads].flatten(2)
    torch.bmm(x, y.transpose(1, 2), torch.float32, out=out)


def add_over_keys(sizes: Sizes, block: Block, alpha: float, sums: Tensor, x: Tensor, y: Tensor) -> None:
    """Store `alpha * x @ y` for the rows of a block, from parts of `x [rows, keys]` and `y [keys, D]`."""
    chunk = chunk_of(sizes.keys)
    shape = block.num_heads, block.num_rows, sizes.padded_keys // chunk, 3 * chunk
    x = x[: math.prod(shape)].view(shape)
    sums = sums.flatten(0, 1)[block.heads, block.rows]
    for n in range(shape[2]):
        add_product(sums, x[:, :, n], y[block.heads, n].flatten(1, 2), chunk, alpha, first=n == 0)


def add_over_rows(sizes: Sizes, block: Block, alpha: float, sums: Tensor, x: Tensor, y: Tensor) -> None:
    """Add `alpha * x^T @ y` for the rows of a block, from parts of `x [rows, keys]` and `y [rows, D]`."""
    chunk = chunk_of(sizes.rows)
    chunks, before = -(-block.num_rows // chunk), block.row // chunk
    shape = block.num_heads, chunks, 3 * chunk, sizes.pitch
    x = x[: math.prod(shape)].view(shape)[..., : sizes.keys]
    sums = sums.flatten(0, 1)[block.heads]
    for n in range(chunks):
        first = n + before == 0
        add_product(sums, x[:, n].transpose(1, 2), y[block.heads, before + n].flatten(1, 2), chunk, alpha, first=first)


def add_product(sums: Tensor, x: Tensor, y: Tensor, chunk: int, alpha: float, *, first: bool) -> None:
    """Add `alpha * x @ y` to the sums, which hold nothing before the `first` one: `x [H, M, 3 * chunk]` as hi, mid and
    low, `y [H, 3 * chunk, D]` as low, mid and hi. The smallest products come first.
    """
    for n in range(3):
        beta = 0.0 if first and n == 0 else 1.0
        x_n, y_n = x[..., : (3 - n) * chunk], y[:, n * chunk :]
        torch.baddbmm(sums, x_n, y_n, torch.float32, beta=beta, alpha=alpha, out=sums)


def block_scalars(call: Call, sizes: Sizes, block: Block, *, parts: bool = True) -> dict[str, Any]:
    """Scalars of both kernels between products."""
    return {
        "factor": call.settings.scale * LOG2E,
        "rows": block.num_rows,
        "keys": sizes.keys,
        "stride_s": sizes.pitch // UNIT,
        "padded_keys": sizes.padded_keys // UNIT,
        "CHUNK": chunk_of(sizes.keys),
        "WIDTH": power_of_two(sizes.padded_keys if parts else sizes.pitch),
        "PARTS": parts,
        "num_warps": NUM_WARPS,
    }
