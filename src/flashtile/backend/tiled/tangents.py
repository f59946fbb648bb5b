"""The forward pass with tangents in torch operations: PyTorch's forward mode of `forward_rows`, by blocks of rows."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ... import private_torch
from ...call.call import Call, Tangents, Tensors, differentiable_positions
from ..blockwise.scores import Scores
from ..blockwise.tiles import Side, Slab, TileShape, slabs
from .forward import forward_rows
from .loop import row_blocks

Duals = list[Tensor | None]


def forward(call: Call, tangents: Tangents, shape: TileShape, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """As `forward.forward`, and then the tangents of `out` and `lse [..., 1]`."""
    t = call.tensors
    queries, keys = Side(call, keys=False), Side(call, keys=True)
    num_heads = t.q.shape[1]
    out, dout = (queries.buffer(t.q, num_heads, t.v.shape[-1], call.out_dtype) for _ in range(2))
    lse = queries.buffer(t.q, num_heads, 1, dtype, fill=-torch.inf)
    residual, dlse = (queries.buffer(t.q, num_heads, 1, dtype) for _ in range(2))
    results = out, lse, residual, dout, dlse
    for slab in slabs(call, queries, keys, shape):
        of_slab = [slab.query_rows(x) for x in results]
        for rows in row_blocks(slab, shape):
            found = along(partial(of_rows, call, slab, shape, dtype, rows), t.flat(), tangents)
            for result, x in zip(of_slab, found, strict=True):
                result.store(rows, x)
    return tuple(queries.result(x) for x in results)


def of_rows(call: Call, slab: Slab, shape: TileShape, dtype: torch.dtype, rows: slice, flat: Duals) -> Any:
    call = call._replace(tensors=Tensors.from_flat(flat))
    bound = slab.bound_to(call)
    return forward_rows(call, bound, shape, Scores(call, bound, dtype), rows)


def along(function: Callable[[Duals], Any], flat: Any, tangents: Tangents) -> tuple[Tensor, ...]:
    """`out`, `lse` and its residual of a function of dual tensors, and the tangents of the first two."""
    moving = {
        p: dx for p, dx in zip(differentiable_positions(len(flat)), tangents.flat(), strict=True) if dx is not None
    }
    with dual_level():
        duals = [forward_ad.make_dual(x.data, moving[n].data) if n in moving else x for n, x in enumerate(flat)]
        (out, dout), (lse, dlse), (residual, _) = map(forward_ad.unpack_dual, function(duals))
        still = (torch.zeros_like(x) if dx is None else dx for x, dx in ((out, dout), (lse, dlse)))
        return out, lse, residual, *still


@contextmanager
def dual_level() -> Iterator[None]:
    """A level of forward mode. Inside of another one's operator this is the same: tensors there have no tangents."""
    open_level = nullcontext() if private_torch.forward_level() >= 0 else forward_ad.dual_level()
    with open_level, private_torch.forward_mode():
        yield
