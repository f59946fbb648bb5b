"""A function of pairs with its tensors and its key: what a ScoreMod and a MaskMod have in common."""

import copy
import functools
import pickle
import types
from collections.abc import Callable, Hashable, Iterable
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from ..dynamo import untraced
from ..errors import ArgumentError
from . import registry
from .content import cells_of, content_of, found_by_name
from .formula import PREFIX, Formula, Untraced, formula_of
from .purity import MASK_MOD, SCORE_MOD, Role, examine, sample
from .retyped import key_for, types_of
from .varying import Numbers, with_arguments


class Modifier:
    """A function of pairs, `fn`, with the tensors that it reads."""

    role: ClassVar[Role]
    each_call = False  # whether the function has another formula in each call
    kept_key: str | None = None  # the same as `key`; keeps a function that reads objects of this process

    @untraced
    def __init__(self, fn: Callable[..., Tensor], tensors: Iterable[Tensor] = ()):
        role = self.role
        if not callable(fn):
            accepted = f"a function {role.signature}, or a flashtile.{role.owner}"
            raise ArgumentError(role.argument, fn, accepted, role.example)
        name = f"{role.argument}.tensors"
        if isinstance(tensors, Tensor) or not isinstance(tensors, Iterable):
            raise ArgumentError(name, tensors, "a tuple of tensors, which may have one: (tensor,)", role.example)
        self.fn = fn  # function of the indices and `tensors`
        self.tensors: tuple[Tensor, ...] = tuple(tensors)
        for tensor in self.tensors:
            if not isinstance(tensor, Tensor):
                raise ArgumentError(name, tensor, "tensors only", role.example)
        self._take(formula_of(fn, self.tensors, role, once=True))

    def _take(self, traced: tuple[Formula, list[Tensor]] | Untraced) -> None:
        if isinstance(traced, Untraced):
            self._take_untraced(traced)
        else:
            formula, found = traced
            if len(found) > len(self.tensors):  # it reads others too, which its formula takes as arguments
                self.fn = formula
            self.tensors, self.key = tuple(found), formula.key
            registry.register(self.key, formula)

    def _take_untraced(self, reason: Untraced) -> None:
        """Find the key of a function that has no formula."""
        device = self.tensors[0].device if self.tensors else torch.get_default_device()
        fn, role = self.fn, self.role
        lifted = isinstance(fn, _Lifted)
        content, numbered = content_of(fn.fn, fn.captured, role) if lifted else content_of(fn, (), role)
        self.key = f"{role.argument} {getattr(fn, '__name__', type(fn).__name__)}#{content}"
        if registry.registered(self.key) is None:  # before it runs for anything else: it might write into `tensors`
            examine(fn, self.tensors, device, role)
        # Of functions with the same content the last one counts: its globals still are what they were when it was read.
        frozen = _frozen(fn) if isinstance(fn, types.FunctionType) else fn
        if registry.is_local(self.key):
            self.kept_key = registry.register_local(self.key, frozen, reason, numbered)
        else:
            registry.register(self.key, frozen, reason)
        self.each_call = reason.each_call
        if not self.each_call:
            self.reject_undeclared_gradients(device)

    @property
    def traced(self) -> bool:
        return self.key.startswith(PREFIX)

    @property
    def call_key(self) -> Hashable:
        """All that a call depends on of the function, without its tensors."""
        return self.key

    @property
    def current_key(self) -> str:
        """The key for the tensors as they are now: a conversion of their module may have changed their dtypes.

        Raises:
            ArgumentError: they have other dimensions than those that the formula was traced with, or another kind of
                numbers.
        """
        if self.traced:
            return key_for(self.key, types_of(self.tensors), self.role.hides)
        return self.key if self.kept_key is None or torch.compiler.is_compiling() else self.kept_key

    @classmethod
    def of(cls, modifier: "Self | Callable[..., Tensor]", q: Tensor | None = None) -> Self:
        """The value of an argument in one call, which may be the call of `q`. Of a bare function that cannot be traced,
        tensors in the closure become its `tensors`.
        """
        if isinstance(modifier, cls):
            return modifier.of_call(q) if modifier.each_call else modifier
        if not isinstance(modifier, types.FunctionType):
            return cls(modifier)  # type: ignore[arg-type]
        made = cls.__new__(cls)
        made.fn, made.tensors = modifier, ()
        return made.of_call(q)

    def of_call(self, q: Tensor | None) -> Self:
        """The modifier of one call, for which its function is traced; its numbers have the device and dtype of
        `q`.
        """
        made = object.__new__(type(self))
        made.__dict__.update(self.__dict__, each_call=False)
        fn = registry.function_of(self.key, self.role) if self.each_call else self.fn
        traced = formula_of(fn, self.tensors, self.role)
        if isinstance(traced, Untraced) and isinstance(fn, types.FunctionType) and not self.tensors:
            cells = cells_of(fn, (), self.role)
            captured = [n for n, value in enumerate(cells) if isinstance(value, Tensor)]
            if captured:
                made.fn, made.tensors = _Lifted(fn, captured, self.role), tuple(cells[n] for n in captured)
        if not isinstance(traced, Untraced) and q is not None:
            found, numbers = with_arguments(traced[0], dtype_of_reals(q))
            traced = found, [*traced[1], *as_tensors(found, numbers, q)]
        made._take(traced)
        return made

    def in_call(self, q: Tensor) -> Self:
        """The modifier of a call with `q`: numbers that differ from an earlier modifier's are among its tensors."""
        if not self.traced:
            return self
        found, numbers = _with_arguments(self.current_key, self.role.hides, dtype_of_reals(q))
        if not numbers:
            return self
        made = object.__new__(type(self))
        made.__dict__.update(self.__dict__)
        made._take((found, [*self.tensors, *as_tensors(found, numbers, q)]))
        return made

    def reject_undeclared_gradients(self, device: torch.device) -> None:
        """A tensor that `fn` reads behind our back would lose its gradient: find out on a single score.

        Raises:
            ArgumentError: the new score requires a gradient, although neither the score nor `tensors` did.
        """
        if self.traced or self.role.hides:
            return
        with torch.enable_grad():
            try:
                score, index, values = sample(self.tensors, device)
                score = self.fn(score, index, index, index, index, *values)
            except Exception:  # the call itself reports what fails on real scores, with their shapes
                return
        if isinstance(score, Tensor) and (score.requires_grad or has_tangent(score)):
            untraced = registry.formula_of(self.key, self.role)
            assert isinstance(untraced, Untraced)
            accepted = (
                "a function whose differentiable tensors are all passed as `tensors` of a flashtile.ScoreMod, or one "
                f"that can be traced; this one cannot: {untraced.reason}"
            )
            raise ArgumentError(self.role.argument, self.fn, accepted, self.role.example)

    def __reduce__(self) -> tuple[Any, ...]:
        if self.traced:
            return _of_formula, (type(self), self.key, self.tensors)
        fn: Any = self.fn
        while isinstance(fn, functools.partial):
            fn = fn.func
        if isinstance(fn, _Lifted) or (isinstance(fn, types.FunctionType) and not found_by_name(fn)):
            owner = self.role.owner
            raise pickle.PicklingError(
                f"a {owner} that cannot be traced is pickled with the name of its function, and no module has "
                f"{fn.__name__!r}.\n"
                "  accepted: no lambda or closure, but a function at the top level of a module, with what changes as "
                f"tensors: flashtile.{owner}(fn, (tensor,))"
            )
        return type(self), (self.fn, self.tensors)

    def __copy__(self) -> Self:
        return self.with_tensors(self.tensors)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self.with_tensors(copy.deepcopy(self.tensors, memo))

    def with_tensors(self, tensors: tuple[Tensor, ...]) -> Self:
        return _of_formula(type(self), self.key, tensors) if self.traced else type(self)(self.fn, tensors)

    def __str__(self) -> str:
        """The formula; its tensors are `tensor0`, `tensor1`, ..."""
        return str(registry.formula_of(self.key, self.role))

    def __repr__(self) -> str:
        return f"{self.role.owner}({'; '.join(str(self).splitlines())})"


@functools.lru_cache(maxsize=1024)
def _with_arguments(key: str, hides: bool, reals: str) -> tuple[Formula, Numbers]:
    formula = registry.formula_of(key, MASK_MOD if hides else SCORE_MOD)
    assert isinstance(formula, Formula)
    return with_arguments(formula, reals)


def dtype_of_reals(q: Tensor) -> str:
    return "float64" if q.dtype is torch.float64 else "float32"


def as_tensors(formula: Formula, numbers: Numbers, q: Tensor) -> list[Tensor]:
    """The values of a formula's last tensors on q's device: made in each call, on its stream and in its graph."""
    types = formula.tensors[len(formula.tensors) - len(numbers) :]
    return [
        torch.full((), x, dtype=getattr(torch, of.dtype), device=q.device) for x, of in zip(numbers, types, strict=True)
    ]


def _of_formula(cls: type[Any], key: str, tensors: tuple[Tensor, ...]) -> Any:
    made = object.__new__(cls)
    made.key, made.tensors, made.fn = key, tensors, registry.function_of(key, cls.role)
    return made


def has_tangent(x: Tensor) -> bool:
    forward_ad = torch.autograd.forward_ad
    return forward_ad._current_level >= 0 and forward_ad.unpack_dual(x).tangent is not None


class _Lifted:
    """A function whose closure cells `captured` have become trailing arguments: `g(score, b, h, i, j, *cells)`."""

    def __init__(self, fn: types.FunctionType, captured: list[int], role: Role):
        self.captured, self.__name__, self.own = captured, fn.__name__, 5 - role.hides
        closure = fn.__closure__ or ()
        self.fn = _rebound(fn, [types.CellType() if n in captured else _copied(x) for n, x in enumerate(closure)])

    def __call__(self, *arguments: Tensor) -> Tensor:
        cells = list(self.fn.__closure__ or ())
        for position, tensor in zip(self.captured, arguments[self.own :], strict=True):
            cells[position] = types.CellType(tensor)
        return _rebound(self.fn, cells)(*arguments[: self.own])


def _frozen(fn: types.FunctionType) -> types.FunctionType:
    """A function with the values that its closure has now."""
    return _rebound(fn, [_copied(cell) for cell in fn.__closure__ or ()])


def _copied(cell: types.CellType) -> types.CellType:
    return types.CellType(cell.cell_contents)


def _rebound(fn: types.FunctionType, cells: list[types.CellType]) -> types.FunctionType:
    rebound = types.FunctionType(fn.__code__, fn.__globals__, fn.__name__, fn.__defaults__, tuple(cells))
    rebound.__kwdefaults__ = fn.__kwdefaults__
    return rebound
