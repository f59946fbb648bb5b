"""Device functions of score_mod formulas, and the captured tensors as arguments of kernels.

A device function is a compile-time argument of the kernels, which Triton compiles once for each. Its source is part of
the key under which Triton keeps compiled kernels, in memory and on disk.
"""

import functools
import hashlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...call.call import Call
from ...expression import Formula, score_mod_formula
from ..gpu.formula import source
from ..gpu.pointers import Described, Pointers
from ..gpu.replay import Recorder


class DeviceFunction(NamedTuple):
    """A function under `triton.jit`, and the inputs that the position of its load depends on."""

    function: Any
    position_inputs: frozenset[str]


@functools.lru_cache(maxsize=1024)
def device_function(
    formula: Formula, *, accurate: bool, wide: bool = False, partial: bool = False, load: int | None = None
) -> DeviceFunction:
    """The device function of a formula; `accurate` is for float32 inputs. For the rest see `backend.gpu.formula`."""
    from .kernels import functions  # they import Triton
    from .kernels.kernel import defined

    text, position_inputs = source("score_mod", formula, partial=partial, load=load, wide=wide)
    digest = hashlib.sha256(f"{accurate} {text}".encode()).hexdigest()[:16]
    name = f"score_mod_{digest}"
    fast = "" if accurate else "fast_"
    names = {op: getattr(functions, fast + op) for op in ("exp", "tanh", "sigmoid")}
    names |= {op: getattr(functions, op) for op in ("floordiv", "mod", "inside", "load_pairs")}
    names |= {"__name__": functions.__name__, "tl": functions.tl}
    jit = functions.triton.jit  # pyright: ignore[reportAttributeAccessIssue]
    return DeviceFunction(jit(defined(name, text.replace("score_mod", name, 1), name, names)), position_inputs)


def formula_of(call: Call) -> Formula | None:
    """The formula of a call's score_mod."""
    if call.settings.score_mod is None:
        return None
    formula = score_mod_formula(call.settings.score_mod)
    assert isinstance(formula, Formula)  # `support` declines others
    return formula


def function_of(call: Call, formula: Formula, **derivatives: Any) -> DeviceFunction:
    """The device function of a call's formula, with the `derivatives` that a kernel uses."""
    accurate = call.tensors.q.dtype is torch.float32
    wide = any(needs_wide_offsets(x) for x in call.tensors.score_mod_tensors)
    return device_function(formula, accurate=accurate, wide=wide, **derivatives)


def launch(
    recorder: Recorder, call: Call, kernel: Any, pointers: Pointers, programs: int, scalars: dict[str, Any],
    **derivatives: Any,
) -> None:  # fmt: skip
    """Launch a kernel for a call, with the device function of its score_mod; `derivatives` are those it uses."""
    formula = formula_of(call)
    if formula is not None:
        from .kernels.kernel import with_captured  # imports Triton

        kernel = with_captured(kernel.function(), tuple(x.ndim for x in formula.tensors))
        scalars = scalars | {"score_mod": function_of(call, formula, **derivatives).function}
    recorder.launch(kernel, pointers, programs, scalars)


def needs_wide_offsets(x: Tensor) -> bool:
    return sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True)) >= 2**31


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
