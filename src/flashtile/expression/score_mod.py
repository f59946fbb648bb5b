"""A score modification, its tensors, and the short key by which an operator's schema can name it.

An operator takes tensors and scalars, no Python functions. So each function is registered under a key, the key
travels through the operator, and the backend looks the function up again. Keys follow from content: equal functions
(same code, same closure values) have the same key, so that a lambda written in a training loop registers once, and a
program that was exported by one process finds in another either the same function or none.
"""

import copy
import functools
import pickle
import types
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import ArgumentError, AttentionError, AttentionWarning
from .content import LOCAL, cells_of, content_of, found_by_name
from .formula import Formula, Untraced, formula_of, types_of
from .program import TensorType
from .purity import EXAMPLE, SIGNATURE, examine, sample

_functions: dict[str, Callable[..., Tensor]] = {}
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

    Under `torch.compile`, make the ScoreMod outside the compiled function. A program of `torch.export` keeps the name
    of `fn` and a digest of its content: a process that loads it has to make a ScoreMod of the same function first. A
    ScoreMod can be pickled if `fn` can, as functions at the top level of a module can. The signature is that of
    `score_mod` in Dong et al., "Flex Attention", 2024, with the tensors at its end.

    Args:
        fn: the function of torch operations.
        tensors: what `fn` reads: tensors of any shape and dtype, on q's device.

    Raises:
        ArgumentError: `fn` is not callable, a variable of its closure has no value yet, an entry of `tensors` is no
            tensor, or `fn` reads a tensor that requires a gradient and is not among `tensors` (its gradient would
            silently be lost); or it draws random numbers, works in place, or returns a bool, an integer or a number
            without dimensions.
    """

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
        device = self.tensors[0].device if self.tensors else torch.get_default_device()
        self.key = _register(fn, _content(fn))
        if self.key not in _examined:  # before it runs for anything else: it might write into `tensors`
            examine(fn, self.tensors, device)
            _examined.add(self.key)
        self.reject_undeclared_gradients(device)

    @classmethod
    def of(cls, score_mod: "ScoreMod | Callable[..., Tensor]") -> "ScoreMod":
        """The ScoreMod of what a user passed; tensors in a bare function's closure become its `tensors`."""
        if isinstance(score_mod, ScoreMod):
            return score_mod
        if not isinstance(score_mod, types.FunctionType) or score_mod.__closure__ is None:
            return cls(score_mod)
        cells = cells_of(score_mod)
        captured = [n for n, value in enumerate(cells) if isinstance(value, Tensor)]
        return cls(_Lifted(score_mod, captured), [cells[n] for n in captured]) if captured else cls(score_mod)

    def reject_undeclared_gradients(self, device: torch.device) -> None:
        """A tensor that `fn` reads behind our back would lose its gradient: find out on a single score.

        Raises:
            ArgumentError: the new score requires a gradient, although neither the score nor `tensors` did.
        """
        with torch.enable_grad():
            try:
                score, index, values = sample(self.tensors, device)
                score = self.fn(score, index, index, index, index, *values)
            except Exception:  # the call itself reports what fails on real scores, with their shapes
                return
        if isinstance(score, Tensor) and (score.requires_grad or has_tangent(score)):
            accepted = "a function whose differentiable tensors are all passed as `tensors` of a flashtile.ScoreMod"
            raise ArgumentError("score_mod", self.fn, accepted, EXAMPLE)

    def __reduce__(self) -> tuple[Any, ...]:
        fn: Any = self.fn
        while isinstance(fn, functools.partial):
            fn = fn.func
        if isinstance(fn, _Lifted) or (isinstance(fn, types.FunctionType) and not found_by_name(fn)):
            raise pickle.PicklingError(
                f"a ScoreMod is pickled with the name of its function, and no module has {fn.__name__!r}.\n"
                "  accepted: no lambda or closure, but a function at the top level of a module, with what changes as "
                "tensors: flashtile.ScoreMod(fn, (tensor,))"
            )
        return ScoreMod, (self.fn, self.tensors)

    def __copy__(self) -> "ScoreMod":
        return ScoreMod(self.fn, self.tensors)

    def __deepcopy__(self, memo: dict[int, Any]) -> "ScoreMod":
        return ScoreMod(self.fn, copy.deepcopy(self.tensors, memo))

    def __repr__(self) -> str:
        return f"ScoreMod({self.key}, {len(self.tensors)} tensors)"


def has_tangent(x: Tensor) -> bool:
    forward_ad = torch.autograd.forward_ad
    return forward_ad._current_level >= 0 and forward_ad.unpack_dual(x).tangent is not None


def score_mod_function(key: str) -> Callable[..., Tensor]:
    """The function registered under a key that `ScoreMod.key` gave.

    Raises:
        AttentionError: no such function has been registered in this process.
    """
    fn = _functions.get(key)
    if fn is None:
        accepted = "a flashtile.ScoreMod of the same function, made in this process before the program runs: " + (
            "a function that reads no objects but constants, modules and functions; what it reads of tensors are its "
            "`tensors`"
            if is_local(key)
            else "the same code, the same numbers in its closure, defaults and globals, and the same version of Python"
        )
        raise AttentionError(
            f"a program contains the score_mod {key!r}, which this process does not know: a program that was exported "
            f"has the name of the function, not its code.\n  accepted: {accepted}"
        )
    return fn


def is_local(key: str) -> bool:
    """Whether a function reads objects of this process that may change, so that nothing can be kept for it."""
    return key.endswith(LOCAL)


def score_mod_formula(key: str, tensors: Sequence[Tensor], real: torch.dtype) -> Formula | Untraced:
    """The formula of the function under a key, for tensors like these and scores of dtype `real`.

    Raises:
        AttentionError: as `score_mod_function`.
    """
    fn, types_ = score_mod_function(key), types_of(tensors)
    # What a local function reads may have changed since it was traced.
    return formula_of(fn, types_, real) if is_local(key) else _formula(key, types_, real)


@functools.lru_cache(maxsize=1024)
def _formula(key: str, types_: tuple[TensorType, ...], real: torch.dtype) -> Formula | Untraced:
    return formula_of(score_mod_function(key), types_, real)


def _register(fn: Callable[..., Tensor], content: str) -> str:
    """The key of a function. Of those with the same content the last one counts: its globals still are what they were
    when it was read.
    """
    key = f"{getattr(fn, '__name__', type(fn).__name__)}#{content}"
    new = key not in _functions
    _functions[key] = _frozen(fn) if isinstance(fn, types.FunctionType) else fn
    if new and len(_functions) == MANY_FUNCTIONS:
        message = (
            f"{MANY_FUNCTIONS} different score_mod functions have been registered, and each stays in memory. "
            "If a number in the closure changes from call to call, pass it as a tensor: ScoreMod(fn, (tensor,))."
        )
        warnings.warn(message, AttentionWarning, stacklevel=5)
    return key


def _content(fn: Any) -> str:
    return content_of(fn.fn, fn.captured) if isinstance(fn, _Lifted) else content_of(fn)


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
