"""Device functions of score_mod formulas, and the captured tensors as arguments of kernels.

A device function is a compile-time argument of the kernels, which Triton compiles once for each. Its source is part of
the key under which Triton keeps compiled kernels, in memory and on disk.
"""

import functools
import hashlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...expression.formula import Formula
from ..gpu.formula import source
from ..gpu.pointers import Described
from .kernels import functions
from .kernels.kernel import defined, with_captured


class DeviceFunction(NamedTuple):
    """A function under `triton.jit`, and the inputs that the position of its load depends on."""

    function: Any
    position_inputs: frozenset[str]


@functools.lru_cache(maxsize=1024)
def device_function(
    formula: Formula, *, accurate: bool, partial: bool = False, load: int | None = None
) -> DeviceFunction:
    """The device function of a formula; `accurate` is for float32 inputs. For the rest see `backend.gpu.formula`."""
    text, position_inputs = source("score_mod", formula, partial=partial, load=load)
    digest = hashlib.sha256(f"{accurate} {text}".encode()).hexdigest()[:16]
    name = f"score_mod_{digest}"
    fast = "" if accurate else "fast_"
    names = {op: getattr(functions, fast + op) for op in ("exp", "tanh", "sigmoid")}
    names |= {op: getattr(functions, op) for op in ("floordiv", "mod", "inside")}
    names |= {"__name__": functions.__name__, "tl": tl}
    return DeviceFunction(triton.jit(defined(name, text.replace("score_mod", name, 1), name, names)), position_inputs)


def captured_scalars(tensors: Sequence[Tensor]) -> dict[str, int]:
    """Sizes and strides of captured tensors."""
    return {
        f"{name}_captured{n}_{dim}": values[dim]
        for n, x in enumerate(tensors)
        for name, values in (("size", x.shape), ("stride", x.stride()))
        for dim in range(x.dim())
    }


def captured_pointers(tensors: Sequence[Tensor]) -> dict[str, Tensor | Described]:
    """The captured tensors; of bools as bytes."""
    return {
        f"captured{n}": Described(x, Tensor.view, torch.uint8) if x.dtype is torch.bool else x
        for n, x in enumerate(tensors)
    }


def kernel_of(kernel: Any, formula: Formula | None) -> Any:
    """The kernel that takes a formula's captured tensors."""
    return kernel if formula is None else with_captured(kernel, tuple(x.ndim for x in formula.tensors))
