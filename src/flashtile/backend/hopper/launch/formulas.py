"""Device functions of score_mod and mask formulas, and the launch of kernels with them.

They are part of a kernel's constant CONFIG, so that Triton compiles a kernel once for each formula. Their source is
part of the key under which Triton keeps compiled kernels, in memory and on disk.
"""

import functools
import hashlib
from dataclasses import dataclass, field, replace
from typing import Any

from ....call.call import Call
from ....call.formulas import mask_formula, score_formula
from ....expression import Formula
from ....expression.program import REAL, Instruction, Program
from ....expression.scaling import is_homogeneous
from ...gpu.captured import captured_pointers, captured_scalars, needs_wide_offsets
from ...gpu.formula import source as source_of
from ...gpu.generated import defined
from ...gpu.grouped import with_captured
from ...gpu.pairs import pair_pointers, pair_scalars, row_align
from ...gpu.pointers import Pointers
from ...gpu.replay import Recorder
from ...gpu.staged import staged_source
from ...gpu.visibility import summaries_source, visibility_source
from ...scalars import score_units
from .dropout import dropout_pointers, dropout_scalars

CALLED = (
    "exp", "tanh", "sigmoid", "floordiv", "mod", "inside", "in_run", "load_pairs", "load_run", "scaled_distance",
    "KEEP_NAN",
)  # fmt: skip
CALLED_BY_FORMULA = ("exp", "tanh", "sigmoid", "floordiv", "mod", "inside", "load_pairs", "KEEP_NAN")
CALLED_BY_VISIBILITY = ("floordiv", "mod", "inside", "least", "largest", "least_real", "largest_real", "KEEP_NAN")
ORIGIN = ("b0", "h0", "i0", "j0")  # where the call lies in the whole one, for a formula
NO_INPUTS: dict[str, Any] = dict.fromkeys(ORIGIN)
THE_SCORE = Program((Instruction("input", REAL, value="score"),), (0,))


@dataclass(frozen=True)
class ScoreModFunctions:
    """Functions under `gluon.jit` (`backend.gpu.staged`). Equal sources are equal."""

    source: str = field(repr=False)
    linear: bool = field(compare=False, repr=False)  # the derivative does not depend on the score,
    same: bool = field(compare=False, repr=False)  # and is the same for all pairs of a head
    mask_only: bool = field(compare=False, repr=False)  # pairs that are visible keep their scores
    by_distance: bool = field(compare=False, repr=False)  # whether it reads distances
    head: Any = field(compare=False, repr=False)
    rows: Any = field(compare=False, repr=False)
    keys: Any = field(compare=False, repr=False)
    pairs: Any = field(compare=False, repr=False)
    reach: int | None = field(repr=False)  # the distance from which `before` and `after` hold
    factor: Any = field(default=None, compare=False, repr=False)  # for a formula that is the score times a number
    before: Any = field(default=None, compare=False, repr=False)
    after: Any = field(default=None, compare=False, repr=False)
    unmasked: Any = field(default=None, compare=False, repr=False)  # for a mask: `pairs` where all are visible

    def __repr__(self) -> str:
        """Key of the sources and of all that they call, for Triton's disk cache."""
        functions = (
            self.head, self.rows, self.keys, self.pairs, self.before, self.after, self.unmasked, self.factor
        )  # fmt: skip
        keys = (getattr(x, "cache_key", self.source) for x in functions)
        return hashlib.sha256(" ".join((*keys, str(self.reach))).encode()).hexdigest()


@functools.lru_cache(maxsize=1024)
def score_mod_functions(
    formula: Formula, mask: Formula | None, *, partial: bool, wide: bool, contiguous: tuple[bool, ...]
) -> ScoreModFunctions:
    """The device functions of formulas. For the parameters see `backend.gpu.staged`."""
    from ..kernels.shared import functions  # imports Triton

    staged = staged_source(formula, mask, partial=partial, wide=wide, contiguous=contiguous)
    texts, inputs = staged.texts, staged.derivative_inputs
    source = "".join(texts.values())
    digest = hashlib.sha256(source.encode()).hexdigest()[:16]
    names = {name: getattr(functions, name) for name in CALLED}
    names |= {"__name__": functions.__name__, "gl": functions.gl}
    jitted = {}
    for stage, text in texts.items():
        name = f"score_mod_{stage}_{digest}"
        text = text.replace(stage, name, 1)
        jitted[stage] = functions.gluon.jit(defined(name, text, name, dict(names)))
    linear, same = "score" not in inputs, inputs <= {"b", "h"}
    # Blocks of a mask have an order of their own, that of lists.
    by_distance = staged.by_distance and mask is None
    mask_only = formula.program == THE_SCORE
    return ScoreModFunctions(source, linear, same, mask_only, by_distance, reach=staged.reach, **jitted)


@dataclass(frozen=True)
class DeviceFunction:
    """A formula's function, jitted for the kernel that calls it. Equal sources are equal."""

    source: str = field(repr=False)
    function: Any = field(compare=False, repr=False)

    def __repr__(self) -> str:
        """Key of the source and of all that it calls, for Triton's disk cache."""
        return hashlib.sha256(getattr(self.function, "cache_key", self.source).encode()).hexdigest()


@functools.lru_cache(maxsize=1024)
def visibility_function(mask: Formula, wide: bool, *, stored: bool = False) -> DeviceFunction | None:
    """The function of a mask's formula under `triton.jit`, by `backend.gpu.visibility`; `None` if it has none."""
    source = visibility_source(mask, wide, stored=stored)
    return None if source is None else jitted_function("visibility", source)


@functools.lru_cache(maxsize=1024)
def summaries_function(mask: Formula, wide: bool) -> tuple[DeviceFunction, int] | None:
    """The function of what visibility takes of blocks of keys, and how many numbers it returns."""
    found = summaries_source(mask, wide)
    return None if found is None else (jitted_function("summaries", found[0]), found[1])


def jitted_function(name: str, source: str) -> DeviceFunction:
    """A function with this source under `triton.jit`."""
    from ..kernels import visible_blocks  # imports Triton

    unique = f"{name}_{hashlib.sha256(source.encode()).hexdigest()[:16]}"
    names = {name: getattr(visible_blocks, name) for name in CALLED_BY_VISIBILITY}
    names |= {"__name__": visible_blocks.__name__, "tl": visible_blocks.tl}
    return DeviceFunction(source, visible_blocks.jit(defined(unique, source.replace(name, unique, 1), unique, names)))


@functools.lru_cache(maxsize=1024)
def pair_function(formula: Formula, wide: bool) -> DeviceFunction:
    """The function of a formula under `gluon.jit`."""
    from ..kernels.shared import functions  # imports Triton

    text = source_of("formula", formula, wide=wide, language="gl").text
    name = f"formula_{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    names = {name: getattr(functions, name) for name in CALLED_BY_FORMULA}
    names |= {"__name__": functions.__name__, "gl": functions.gl}
    function = defined(name, text.replace("formula", name, 1), name, names)
    return DeviceFunction(text, functions.gluon.jit(function))


def formulas_of(call: Call) -> tuple[Formula | None, Formula | None]:
    """The formulas of a call's score_mod, which is the score itself where there is a mask function alone, and of its
    mask function.
    """
    formula, mask = score_formula(call), mask_formula(call)
    if formula is None and mask is not None:
        formula = Formula(THE_SCORE, mask.tensors)
    return formula, mask


def units(call: Call) -> dict[str, Any]:
    """The scalars of `score_units`. With a score_mod through which factors pass, the softmax still takes the scale."""
    formula = score_formula(call)
    if formula is not None and is_homogeneous(formula):
        call = call._replace(settings=call.settings._replace(score_mod=None))
    return score_units(call)


def is_natural(call: Call) -> bool:
    """Whether a kernel takes differences of scores before any factor rounds these, as they may have a large term in
    common: those with a bias or a score_mod, unless the softmax takes the scale (`units`).
    """
    return call.keeps_residual and units(call)["multiplier"] is not None


def launch(
    recorder: Recorder, call: Call, kernel: Any, pointers: Pointers, programs: int, scalars: dict[str, Any],
    partial: bool = False,
) -> None:  # fmt: skip
    """Launch a kernel for a call, with the device functions of its score_mod and mask; `partial`: also of a derivative.
    `call.tensors` belong to the recorder; keys of its bias and mask are contiguous (`gpu.pairs`). A kernel with bits
    of a mask takes nothing else of it.
    """
    if pointers.get("mask_bits") is not None:
        call = call._replace(tensors=call.tensors._replace(mask=None))
    pairs = {**pair_scalars(call.tensors, row_align(call.tensors))}
    if (align := pairs.pop("pair_align")) > 1:
        scalars = {**scalars, "CONFIG": replace(scalars["CONFIG"], pair_align=align)}
    if is_natural(call):
        scalars = {**scalars, "CONFIG": replace(scalars["CONFIG"], natural=True)}
    pointers = {**pointers, **pair_pointers(call.tensors), **dropout_pointers(call)}
    scalars = {**scalars, **pairs, **dropout_scalars(call)}
    launch_with_formulas(recorder, call, kernel, pointers, programs, scalars, partial)


def launch_with_formulas(
    recorder: Recorder, call: Call, kernel: Any, pointers: Pointers, programs: int, scalars: dict[str, Any],
    partial: bool = False,
) -> None:  # fmt: skip
    """Launch a kernel with the device functions of a call's score_mod and mask, if it does not take the mask's bits."""
    formula, mask = formulas_of(call)
    if formula is None or pointers.get("mask_bits") is not None:
        recorder.launch(kernel, pointers, programs, scalars | NO_INPUTS)
        return
    tensors = call.tensors.score_mod_tensors
    wide = any(needs_wide_offsets(x) for x in tensors)
    contiguous = tuple(x.dim() > 0 and (x.stride(-1) == 1 or x.shape[-1] <= 1) for x in tensors)
    functions = score_mod_functions(formula, mask, partial=partial, wide=wide, contiguous=contiguous)
    launch_with(recorder, call, kernel, pointers, programs, scalars, functions)


def launch_with(
    recorder: Recorder, call: Call, kernel: Any, pointers: Pointers, programs: int, scalars: dict[str, Any],
    functions: Any,
) -> None:  # fmt: skip
    """Launch a kernel with device functions of the captured tensors."""
    tensors = call.tensors.score_mod_tensors
    kernel = with_captured(kernel.function(), tuple(x.dim() for x in tensors))
    scalars = {
        **scalars,
        **captured_scalars(tensors),
        **{name: getattr(call.settings, name) for name in ORIGIN},
        "CONFIG": replace(scalars["CONFIG"], score_mod=functions),
    }
    recorder.launch(kernel, {**pointers, **captured_pointers(tensors)}, programs, scalars)
