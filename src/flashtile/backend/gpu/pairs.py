"""Arguments of the kernels for bias and mask, `[B, H, Sq, Sk]` with any dimension broadcast."""

from typing import Any

import torch
from torch import Tensor

from ...call.call import Call, Tensors
from ..scalars import rows_last
from .pointers import Described
from .replay import Recorder

ALIGN = 8  # elements: those of a vector load
ALIGNED_ADDRESS = 16  # bytes


def has_pairs(t: Tensors) -> bool:
    """Whether there is a bias or a mask."""
    return t.bias is not None or t.mask is not None


def with_contiguous_keys(recorder: Recorder, call: Call) -> Call:
    """The call with a bias and mask whose keys are contiguous, as kernels need. Its tensors are the recorder's."""
    t = call.tensors
    if not has_pairs(t):
        return call
    bias, mask = (None if x is None else recorder.op(rows_last, x) for x in (t.bias, t.mask))
    return call._replace(tensors=t._replace(bias=bias, mask=mask))


def with_aligned_bias(recorder: Recorder, call: Call, longer_than: int) -> Call:
    """A call with a bias of 16-bit numbers in rows of whole units: a copy, if they are not, of dense calls with more
    rows and keys. Kernels load units of ALIGN keys; without them, some spill, and take up to seven times as long
    (docs/journal/2026-11-26-forms.md).
    """
    t, bias = call.tensors, call.tensors.bias
    if call.layout != "dense" or bias is None or t.mask is not None or bias.element_size() != 2:
        return call
    if min(bias.shape[2:]) <= longer_than or pair_align(t) == ALIGN:
        return call
    return call._replace(tensors=t._replace(bias=recorder.op(in_units, bias)))


def in_units(x: Tensor) -> Tensor:
    """A copy with zeros after the last key, up to whole units. Expanded dimensions stay expanded."""
    own = x[tuple(slice(1 if stride == 0 else None) for stride in x.stride()[:3])]
    return torch.nn.functional.pad(own, (0, -x.shape[-1] % ALIGN)).expand(*x.shape[:3], -1)


def pair_pointers(t: Tensors) -> dict[str, Tensor | Described | None]:
    """Pointers of bias and mask; of the mask as bytes."""
    return {"bias": t.bias, "mask": None if t.mask is None else Described(t.mask, Tensor.view, torch.uint8)}


def pair_align(t: Tensors) -> int:
    """Elements that divide the addresses of all rows and the numbers of keys: the unit of strides."""
    given = [x for x in (t.bias, t.mask) if x is not None]
    whole = all(x.shape[-1] == 1 or x.shape[-1] % ALIGN == 0 for x in given)
    return ALIGN if whole and all(map(has_aligned_rows, given)) else 1


def has_aligned_rows(x: Tensor) -> bool:
    """Whether ALIGN divides the addresses of all rows."""
    strides = (stride for n, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True) if n > 1)
    return all(n % ALIGN == 0 for n in strides) and x.data_ptr() % ALIGNED_ADDRESS == 0


def row_align(t: Tensors) -> int:
    """As `pair_align`, but 1 of tensors that are broadcast over rows, so that one kernel serves all numbers of keys."""
    return pair_align(t) if any(x is not None and x.shape[2] > 1 for x in (t.bias, t.mask)) else 1


def pair_scalars(t: Tensors, unit: int) -> dict[str, Any]:
    """Strides in a unit, this unit, and the rows of tensors that are not broadcast over them."""
    if not has_pairs(t):
        return ABSENT
    rows = next((x.shape[2] for x in (t.bias, t.mask) if x is not None and x.shape[2] > 1), 1)
    strides = pair_strides("bias", t.bias, unit) | pair_strides("mask", t.mask, unit)
    return {**strides, "pair_rows": rows, "pair_align": unit}


def pair_strides(name: str, x: Tensor | None, unit: int) -> dict[str, Any]:
    """Strides of one tensor: `None` for a broadcast row or column, 0 for a broadcast sequence or head. That of keys is
    1, whatever the unit.
    """
    if x is None:
        return {f"stride_{name}_{dim}": None for dim in "bhmn"}
    found: dict[str, Any] = {f"stride_{name}_n": None if x.shape[3] == 1 else 1}
    for dim, n, stride in zip("bhm", x.shape[:3], x.stride()[:3], strict=True):
        found[f"stride_{name}_{dim}"] = stride // unit if n > 1 else None if dim == "m" else 0
    return found


ABSENT = {**pair_strides("bias", None, 1), **pair_strides("mask", None, 1), "pair_rows": 1, "pair_align": 1}
