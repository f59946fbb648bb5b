"""Tensors that backward kernels write to, and sums of their parts."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from ....call.call import Call, new_rows, split_row_stats
from ...epilogue import RowStats, second_sink_gradient, sum_to_heads


def lse_of(out: Tensor, row_stats: Tensor) -> Tensor:
    return split_row_stats(out, row_stats)[0]


def residual_of(row_stats: Tensor) -> Tensor:
    return row_stats[1]


def no_gradient(out: Tensor) -> Tensor:
    return out.new_zeros(out.shape[-1]).expand(out.shape)


def new_bias_gradients(splits: int, written: bool, bias: Tensor) -> Tensor:
    """Gradients of a bias by split, `[splits, B, H, Sq, Sk]`; the kernel writes all elements, if it runs."""
    new = bias.new_empty if written else bias.new_zeros
    return new((splits, *bias.shape), dtype=bias.dtype if splits == 1 else torch.float32)


def sum_of_splits(gradients: Tensor) -> Tensor:
    return gradients[0] if len(gradients) == 1 else gradients.sum(dim=0)


def new_sums(x: Tensor) -> Tensor:
    """Exact sums, 0, for the elements of a tensor."""
    from ..kernels.exact_sum import WORDS  # imports Triton

    return x.new_zeros((x.numel(), WORDS.value), dtype=torch.int64)


def rounded_sums(x: Tensor, sums: Tensor) -> Tensor:
    """The values of exact sums, fp32, shaped as `x`: rounded to 53 bits word by word, then once more."""
    from ..kernels.exact_sum import LEAST_EXPONENT, NAN, NEGATIVE, POSITIVE, WORD_BITS  # imports Triton

    *words, special = sums.unbind(dim=1)
    total = words.pop().double()
    for word in reversed(words):
        total = total * 2.0**WORD_BITS.value + word
    total = total * 2.0**LEAST_EXPONENT.value
    for flag, value in ((POSITIVE, math.inf), (NEGATIVE, -math.inf), (NAN, math.nan)):
        total = torch.where((special & flag.value) > 0, total + value, total)
    return total.float().view(x.shape)


def from_row_stats(
    gradient: Callable[[RowStats], Tensor],
    sinks: Tensor | None,
    row_stats: Tensor,
    lse: Tensor,
    residual: Tensor | None,
    dlse: Tensor | None,
) -> Tensor:
    """A gradient from lse and delta, which is the second of the kernels' statistics of a row."""
    return gradient(RowStats(sinks, lse, row_stats[..., : lse.shape[-1], 1], lse, dlse, residual))


def second_from_row_stats(
    row_stats: Tensor, sinks: Tensor, tsinks: Tensor | None, lse: Tensor, residual: Tensor | None, tlse: Tensor,
    product: Tensor,
) -> Tensor:  # fmt: skip
    """The gradient of sinks in a second derivative, from the kernels' statistics of a row."""
    delta = row_stats[..., : lse.shape[-1], 1]
    return second_sink_gradient(sinks, tsinks, lse, residual, delta, tlse, product)


def slope_gradient(slopes: Tensor, cu_seqlens: Tensor | None, rows: Tensor) -> Tensor:
    """The gradient of slopes `[H]` or `[B, H]`: sums of the rows' parts, shaped as lse."""
    if slopes.dim() == 1:
        return sum_to_heads(rows)
    if cu_seqlens is None:
        return rows.sum(dim=-1)
    token = torch.arange(rows.shape[-1], device=rows.device)
    sequence = torch.searchsorted(cu_seqlens[1:].contiguous(), token, right=True)  # [T]; B for tokens of none
    total = rows.new_zeros((slopes.shape[0] + 1, slopes.shape[1]))
    return total.index_put_((sequence,), rows.t(), accumulate=True)[:-1]  # sorted, hence deterministic


def new_row_sums(shape: tuple[int, ...], q: Tensor) -> Tensor:
    """Sums of dq, fp32, 0."""
    return q.new_zeros(shape, dtype=torch.float32)


def new_key_rows(call: Call, x: Tensor) -> Tensor:
    """Uninitialized gradients for k or v. Pages may be shared: their gradients are by position, `[B, H, S, D]`."""
    if call.layout == "dense":
        return new_rows(x, x.shape[1], x.shape[-1], x.dtype)
    if call.layout == "varlen":
        return x.new_empty(x.shape)
    assert call.tensors.page_table is not None
    batch, columns = call.tensors.page_table.shape
    return x.new_empty((batch, x.shape[2], columns * x.shape[1], x.shape[-1]))


def in_pages(pages: Tensor, table: Tensor, by_position: Tensor) -> Tensor:
    """Gradients of pages `[P, page_size, H, D]`: sums over all positions in each slot."""
    page_size = pages.shape[1]
    exists = (table >= 0) & (table < pages.shape[0])
    page = torch.where(exists, table.long(), pages.shape[0])  # [B, columns]; a spare page for invalid entries
    total = pages.new_zeros((pages.shape[0] + 1, *pages.shape[1:]), dtype=torch.float32)
    given = by_position.unflatten(2, (-1, page_size)).permute(0, 2, 3, 1, 4)  # [B, columns, page_size, H, D]
    return total.index_put_((page,), given.float(), accumulate=True)[:-1]  # sorted, hence deterministic
