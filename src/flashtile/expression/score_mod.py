"""A score modification, its tensors, and the key by which an operator's schema can name it.

An operator takes tensors and scalars, no Python functions, so a key travels through it. The key of a function that can
be traced is its formula: a program that was exported by one process has all of it. Other functions are registered under
a digest of their content: a lambda written in a training loop registers once, and a program that was exported finds in
another process either the same function or none.
"""

import copy
import functools
import pickle
import types
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from ..dynamo import untraced
from ..errors import ArgumentError, AttentionError, AttentionWarning
from .content import LOCAL, cells_of, content_of, found_by_name
from .formula import PREFIX, Formula, Untraced, formula_of
from .purity import EXAMPLE, SIGNATURE, examine, sample

_functions: dict[str, Callable[..., Tensor]] = {}
_untraced: dict[str, Untraced] = {}
_examined: set[str] = set()
MANY_FUNCTIONS = 1000


class ScoreMod:
    """A score modification `fn(score, b, h, q_idx, k_idx, *tensors)` with the tensors it reads.

    `fn` gets the score of a tile after softcap, bias and ALiBi, in the accumulation dtype, and int64 index tensors
    that broadcast against it; it returns the new score, of floating point and with dimensions. It must be a pure
    function of torch operations, elementwise in the score, without random numbers and in-place operations on its
    arguments: it runs on tiles of any size, again in backward, and also on pairs that a mask hides (their result is
    dropped).
    Floating-point `tensors` reach `fn` in the accumulation dtype; those that require a gradient get one.

    Example:
        >>> def farther_is_less(score, b, h, q_idx, k_idx, decay):
        ...     return score - decay[h] * (q_idx - k_idx).abs()
        >>> decay = torch.rand(2, requires_grad=True)  # one number for each head
        >>> q, k, v = (torch.randn(1, 2, 64, 32) for _ in range(3))
        >>> out = flashtile.attention(q, k, v, score_mod=flashtile.ScoreMod(farther_is_less, (decay,)))
        >>> out.sum().backward()
        >>> decay.grad.shape
        torch.Size([2])

    The function is traced once, on stand-ins, into a formula from which kernels are made: `str(score_mod)` shows it.
    A tensor that it finds in a closure, a global or an object becomes one of its `tensors`. A number there is a
    constant of the formula: one that changes from call to call compiles new kernels, so pass it as a tensor. Reals are
    in the accumulation dtype; a conversion rounds to float16 and bfloat16 only. An index below 0 counts from the end of
    a tensor; what is read outside of it is NaN, or 0 of integers. A function that cannot be traced, as one that
    branches on a value, runs in the backends of torch operations; `flashtile.explain` names the line.

    Under `torch.compile`, make the ScoreMod outside the compiled function. A program of `torch.export` contains the
    formula; of a function that cannot be traced it has the name and a digest, and a process that loads it has to make a
    ScoreMod of the same function first. A ScoreMod can be pickled if it was traced, or if `fn` can be. The signature is
    that of `score_mod` in Dong et al., "Flex Attention", 2024, with the tensors at its end.

    Args:
        fn: the function of torch operations.
        tensors: what `fn` gets after the indices: tensors of any shape and dtype, on q's device.

    Raises:
        ArgumentError: `fn` is not callable, a variable of its closure has no value yet, or an entry of `tensors` is no
            tensor; or `fn` draws random numbers, works in place, or returns a bool, an integer or a number without
            dimensions; or it cannot be traced and reads a tensor that requires a gradient and is not among `tensors`
            (its gradient would silently be lost).
    """

    @untraced
    def __init__(self, fn: Callable[..., Tensor], tensors: Iterable[Tensor] = ()):
        if not callable(fn):
            raise ArgumentError("score_mod", fn, f"a function {SIGNATURE}, or a flashtile.ScoreMod", EXAMPLE)
        if isinstance(tensors, Tensor) or not isinstance(tensors, Iterable):
            raise ArgumentError(
                "score_mod.tensors", tensors, "a tuple of tensors, which may have one: (tensor,)", EXAMPLE
            )
        self.fn = fn
        self.tensors: tuple[Tensor, ...] = tuple(tensors)
        for tensor in self.tensors:
            if not isinstance(tensor, Tensor):
                raise ArgumentError("score_mod.tensors", tensor, "tensors only", EXAMPLE)
        self._take(formula_of(fn, self.tensors))

    def _take(self, traced: tuple[Formula, list[Tensor]] | Untraced) -> None:
        if isinstance(traced, Untraced):
            self._take_untraced(traced)
        else:
            formula, found = traced
            self.tensors, self.key = tuple(found), formula.key
            _register(self.key, formula)

    def _take_untraced(self, reason: Untraced) -> None:
        """Find the key of a function that has no formula."""
        device = self.tensors[0].device if self.tensors else torch.get_default_device()
        fn = self.fn
        content = content_of(fn.fn, fn.captured) if isinstance(fn, _Lifted) else content_of(fn)
        self.key = f"{getattr(fn, '__name__', type(fn).__name__)}#{content}"
        # Of functions with the same content the last one counts: its globals still are what they were when it was read.
        _register(self.key, _frozen(fn) if isinstance(fn, types.FunctionType) else fn)
        _untraced[self.key] = reason
        if self.key not in _examined:  # before it runs for anything else: it might write into `tensors`
            examine(fn, self.tensors, device)
            _examined.add(self.key)
        self.reject_undeclared_gradients(device)

    @property
    def traced(self) -> bool:
        return self.key.startswith(PREFIX)

    @classmethod
    def of(cls, score_mod: "ScoreMod | Callable[..., Tensor]") -> "ScoreMod":
        """The ScoreMod of an argument. Of a bare function that cannot be traced, tensors in the closure become its
        `tensors`.
        """
        if isinstance(score_mod, ScoreMod):
            return score_mod
        if not isinstance(score_mod, types.FunctionType):
            return cls(score_mod)
        made, traced = cls.__new__(cls), formula_of(score_mod)
        made.fn, made.tensors = score_mod, ()
        if isinstance(traced, Untraced):
            cells = cells_of(score_mod)
            captured = [n for n, value in enumerate(cells) if isinstance(value, Tensor)]
            if captured:
                made.fn, made.tensors = _Lifted(score_mod, captured), tuple(cells[n] for n in captured)
        made._take(traced)
        return made

    def reject_undeclared_gradients(self, device: torch.device) -> None:
        """A tensor that `fn` reads behind our back would lose its gradient: find out on a single score.

        Raises:
            ArgumentError: the new score requires a gradient, although neither the score nor `tensors` did.
        """
        if self.traced:
            return
        with torch.enable_grad():
            try:
                score, index, values = sample(self.tensors, device)
                score = self.fn(score, index, index, index, index, *values)
            except Exception:  # the call itself reports what fails on real scores, with their shapes
                return
        if isinstance(score, Tensor) and (score.requires_grad or has_tangent(score)):
            accepted = (
                "a function whose differentiable tensors are all passed as `tensors` of a flashtile.ScoreMod, or one "
                f"that can be traced; this one cannot: {_untraced[self.key].reason}"
            )
            raise ArgumentError("score_mod", self.fn, accepted, EXAMPLE)

    def __reduce__(self) -> tuple[Any, ...]:
        if self.traced:
            return _of_formula, (self.key, self.tensors)
        fn: Any = self.fn
        while isinstance(fn, functools.partial):
            fn = fn.func
        if isinstance(fn, _Lifted) or (isinstance(fn, types.FunctionType) and not found_by_name(fn)):
            raise pickle.PicklingError(
                f"a ScoreMod that cannot be traced is pickled with the name of its function, and no module has "
                f"{fn.__name__!r}.\n"
                "  accepted: no lambda or closure, but a function at the top level of a module, with what changes as "
                "tensors: flashtile.ScoreMod(fn, (tensor,))"
            )
        return ScoreMod, (self.fn, self.tensors)

    def __copy__(self) -> "ScoreMod":
        return self._with(self.tensors)

    def __deepcopy__(self, memo: dict[int, Any]) -> "ScoreMod":
        return self._with(copy.deepcopy(self.tensors, memo))

    def _with(self, tensors: tuple[Tensor, ...]) -> "ScoreMod":
        return _of_formula(self.key, tensors) if self.traced else ScoreMod(self.fn, tensors)

    def __str__(self) -> str:
        """The formula; its tensors are `tensor0`, `tensor1`, ..."""
        return str(score_mod_formula(self.key))

    def __repr__(self) -> str:
        return f"ScoreMod({'; '.join(str(self).splitlines())})"


def _of_formula(key: str, tensors: tuple[Tensor, ...]) -> ScoreMod:
    made = ScoreMod.__new__(ScoreMod)
    made.key, made.tensors, made.fn = key, tensors, score_mod_function(key)
    return made


def has_tangent(x: Tensor) -> bool:
    forward_ad = torch.autograd.forward_ad
    return forward_ad._current_level >= 0 and forward_ad.unpack_dual(x).tangent is not None


def score_mod_function(key: str) -> Callable[..., Tensor]:
    """The function of torch operations with the key of a ScoreMod.

    Raises:
        AttentionError: it could not be traced, and has not been registered in this process.
    """
    fn = _functions.get(key)
    if fn is None and key.startswith(PREFIX):
        fn = Formula.of_key(key)
        _register(key, fn)
    if fn is None:
        accepted = "a flashtile.ScoreMod of the same function, made in this process before the program runs: " + (
            "a function that reads no objects but constants, modules and functions; what it reads of tensors are its "
            "`tensors`"
            if is_local(key)
            else "the same code, the same numbers in its closure, defaults and globals, and the same version of Python"
        )
        raise AttentionError(
            f"a program contains the score_mod {key!r}, which this process does not know: a program that was exported "
            f"has the name of a function that cannot be traced, not its code.\n  accepted: {accepted}"
        )
    return fn


def score_mod_formula(key: str) -> Formula | Untraced:
    """The formula with the key of a ScoreMod, or why there is none.

    Raises:
        AttentionError: as `score_mod_function`.
    """
    fn = score_mod_function(key)
    return fn if isinstance(fn, Formula) else _untraced[key]


def is_local(key: str) -> bool:
    """Whether a function reads objects of this process that may change, so that nothing can be kept for it."""
    return key.endswith(LOCAL)


def _register(key: str, fn: Callable[..., Tensor]) -> None:
    new = key not in _functions
    _functions[key] = fn
    if new and len(_functions) == MANY_FUNCTIONS:
        message = (
            f"{MANY_FUNCTIONS} different score_mod functions have been registered, and each stays in memory. "
            "If a number in the closure changes from call to call, pass it as a tensor: ScoreMod(fn, (tensor,))."
        )
        warnings.warn(message, AttentionWarning, stacklevel=5)


class _Lifted:
    """A function whose closure cells `captured` have become trailing arguments: `g(score, b, h, i, j, *cells)`."""

    def __init__(self, fn: types.FunctionType, captured: list[int]):
        self.captured, self.__name__ = captured, fn.__name__
        closure = fn.__closure__ or ()
        self.fn = _rebound(fn, [types.CellType() if n in captured else _copied(x) for n, x in enumerate(closure)])

    def __call__(self, score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, k_idx: Tensor, *tensors: Tensor) -> Tensor:
        cells = list(self.fn.__closure__ or ())
        for position, tensor in zip(self.captured, tensors, strict=True):
            cells[position] = types.CellType(tensor)
        return _rebound(self.fn, cells)(score, b, h, q_idx, k_idx)


def _frozen(fn: types.FunctionType) -> types.FunctionType:
    """A function with the values that its closure has now."""
    return _rebound(fn, [_copied(cell) for cell in fn.__closure__ or ()])


def _copied(cell: types.CellType) -> types.CellType:
    return types.CellType(cell.cell_contents)


def _rebound(fn: types.FunctionType, cells: list[types.CellType]) -> types.FunctionType:
    rebound = types.FunctionType(fn.__code__, fn.__globals__, fn.__name__, fn.__defaults__, tuple(cells))
    rebound.__kwdefaults__ = fn.__kwdefaults__
    return rebound
