"""The argument `out`: a preallocated tensor for the result, which kernels write where they can."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ..call.eight_bit import OUT_DTYPES, is_eight_bit
from ..call.overlap import overlaps_itself
from ..call.written import is_frozen, mark_written
from ..errors import ArgumentError, call_of
from ..expression import MaskMod, ScoreMod

ALIGNMENT = 16  # bytes, of rows that every kernel can write


def direct_out(
    function: str, out: Any, q: Any, v: Any, inputs: Iterable[Any], out_dtype: torch.dtype | None = None
) -> Tensor | None:
    """Check `out`, and return it if kernels may write into it, `None` where the result is copied: under a compiler, if
    its rows are not aligned, or if it shares storage with an input. `inputs` are all tensors of the call, and its
    functions of pairs. `out_dtype` is the requested one of queries of 8 bits.

    Raises:
        ArgumentError: its shape, dtype or device is not the result's, its elements share memory, or a derivative
            would be lost; or it is an inference tensor outside of inference mode.
    """

    def fail(accepted: str) -> None:
        raise ArgumentError("out", out, accepted, call_of(function, "out=torch.empty_like(q)"))

    if not isinstance(out, Tensor):
        fail("a torch.Tensor or None")
    if not isinstance(q, Tensor) or not isinstance(v, Tensor) or 0 in (q.dim(), v.dim()):
        return None  # the error is theirs
    inputs = list(inputs)
    tensors = [x for x in inputs if isinstance(x, Tensor)]
    tensors += [x for modifier in inputs if isinstance(modifier, ScoreMod) for x in modifier.tensors]
    if torch.is_grad_enabled() and any(x.requires_grad for x in (out, *tensors)):
        fail("None where a tensor requires a gradient, which `out` would lose; or a call under torch.no_grad()")
    shape, dtype = (*q.shape[:-1], v.shape[-1]), result_dtype(q, out_dtype)
    if out.shape != shape or out.dtype != dtype or out.device != q.device:
        fail(f"shape {list(shape)}, dtype {dtype}, on {q.device}")
    if torch.compiler.is_compiling():
        return None
    if is_frozen(out):
        fail("a tensor made outside of torch.inference_mode(); or a call inside it")
    if not spread_out(out) and overlaps_itself(out):
        fail(f"a tensor of which no two elements share memory; its strides are {out.stride()}")
    try:
        tensors += [x for mask in inputs if isinstance(mask, MaskMod) for x in mask.tensors]
        storages = {x.untyped_storage().data_ptr() for x in tensors}
        apart = out.untyped_storage().data_ptr() not in storages
        aligned = out.data_ptr() % ALIGNMENT == 0 and rows_aligned(out)
    except (RuntimeError, NotImplementedError):  # a transform's wrapper
        return None
    return out if apart and aligned else None


def spread_out(out: Tensor) -> bool:
    """Whether strides alone show that no two elements share memory."""
    reach = 0  # span of the dimensions with smaller strides
    for stride, n in sorted(zip(out.stride(), out.shape, strict=True)):
        if n > 1 and stride <= reach:
            return False
        reach += (n - 1) * stride
    return True


def rows_aligned(out: Tensor) -> bool:
    """Whether features are contiguous, and all rows begin at multiples of ALIGNMENT."""
    steps = [stride for stride, n in zip(out.stride()[:-1], out.shape[:-1], strict=True) if n > 1]
    contiguous = out.stride(-1) == 1 or out.shape[-1] <= 1
    return contiguous and all(stride * out.element_size() % ALIGNMENT == 0 for stride in steps)


def result_dtype(q: Tensor, requested: torch.dtype | None) -> torch.dtype:
    """The dtype of the result: q's, or autocast's in its place; of queries of 8 bits, the requested one."""
    if is_eight_bit(q):
        return OUT_DTYPES[0] if requested is None else requested
    kind = q.device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind) or q.dtype is torch.float64:
        return q.dtype
    return torch.get_autocast_dtype(kind)


def filled(out: Tensor, direct: Tensor | None, result: Tensor) -> Tensor:
    """The caller's `out` with the result, which backends without a kernel leave elsewhere."""
    if direct is None or result.data_ptr() != out.data_ptr():
        out.copy_(result)
    else:
        mark_written(out)
    return out
