"""Device functions of score_mod and mask formulas, and the captured tensors as arguments of kernels.

A device function is a compile-time argument of the kernels, which Triton compiles once for each. Its source is part of
the key under which Triton keeps compiled kernels, in memory and on disk.
"""

import functools
import hashlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ....call.call import Call
from ....call.formulas import mask_formula, score_formula
from ....expression import Formula
from ...gpu.captured import needs_wide_offsets
from ...gpu.formula import source
from ...gpu.generated import defined
from ...gpu.pointers import Pointers
from ...gpu.replay import Recorder


class DeviceFunction(NamedTuple):
    """A function under `triton.jit`, and the inputs that the position of its load depends on."""

    function: Any
    position_inputs: frozenset[str]


@functools.lru_cache(maxsize=1024)
def device_function(
    formula: Formula,
    *,
    accurate: bool,
    wide: bool = False,
    partial: bool = False,
    load: int | None = None,
    along: tuple[int, ...] = (),
) -> DeviceFunction:
    """The device function of a formula; `accurate` is for float32 inputs. For the rest see `backend.gpu.formula`."""
    from ..kernels import functions  # imports Triton

    role = "mask_mod" if formula.is_mask else "score_mod"
    text, position_inputs = source(role, formula, partial=partial, load=load, along=along, wide=wide)
    digest = hashlib.sha256(f"{accurate} {text}".encode()).hexdigest()[:16]
    name = f"{role}_{digest}"
    fast = "" if accurate else "fast_"
    names = {op: getattr(functions, fast + op) for op in ("exp", "tanh", "sigmoid")}
    names |= {op: getattr(functions, op) for op in ("floordiv", "mod", "inside", "load_pairs", "KEEP_NAN")}
    names |= {"__name__": functions.__name__, "tl": functions.tl}
    jit = functions.triton.jit  # pyright: ignore[reportAttributeAccessIssue]
    return DeviceFunction(jit(defined(name, text.replace(role, name, 1), name, names)), position_inputs)


def function_of(call: Call, formula: Formula, tangents: Sequence[Tensor] = (), **derivatives: Any) -> DeviceFunction:
    """The device function of a call's formula, with the `derivatives` that a kernel uses."""
    accurate = call.tensors.q.dtype is torch.float32
    wide = any(needs_wide_offsets(x) for x in (*call.tensors.score_mod_tensors, *tangents))
    return device_function(formula, accurate=accurate, wide=wide, **derivatives)


def launch(
    recorder: Recorder, call: Call, kernel: Any, pointers: Pointers, programs: int, scalars: dict[str, Any],
    tangents: Sequence[Tensor] = (), **derivatives: Any,
) -> None:  # fmt: skip
    """Launch a kernel for a call, with the device functions of its score_mod and mask. `derivatives` name what it uses
    of the former; `tangents` of captured tensors follow these among its arguments.
    """
    if dimensions := tuple(x.dim() for x in (*call.tensors.score_mod_tensors, *tangents)):
        from ..kernels.kernel import with_captured  # imports Triton

        kernel = with_captured(kernel.function(), dimensions)
    if (formula := score_formula(call)) is not None:
        scalars = scalars | {"score_mod": function_of(call, formula, tangents, **derivatives).function}
    if (formula := mask_formula(call)) is not None:
        scalars = scalars | {"mask_mod": function_of(call, formula).function}
    recorder.launch(kernel, pointers, programs, scalars)
