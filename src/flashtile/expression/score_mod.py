"""A score modification, its tensors, and the short key by which an operator's schema can name it.

An operator takes tensors and scalars, no Python functions. So each function is registered under a key, the key
travels through the operator, and the backend looks the function up again. Equal functions (same code, same
closure values) get the same key: a lambda written in a training loop registers once.
"""

import types
import warnings
from collections.abc import Callable, Hashable, Iterable
from typing import Any

import torch
from torch import Tensor

from ..errors import ArgumentError, AttentionWarning
from .purity import EXAMPLE, SIGNATURE, examine, sample

_functions: dict[str, Callable[..., Tensor]] = {}
_keys: dict[Hashable, str] = {}
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

    Under `torch.compile`, make the ScoreMod outside the compiled function. The signature is that of `score_mod` in
    Dong et al., "Flex Attention", 2024, with the tensors at its end.

    Args:
        fn: the function of torch operations.
        tensors: what `fn` reads: tensors of any shape and dtype, on q's device.

    Raises:
        ArgumentError: `fn` is not callable, an entry of `tensors` is no tensor, or `fn` reads a tensor that
            requires a gradient and is not among `tensors` (its gradient would silently be lost); or it draws random
            numbers, works in place, or returns a bool, an integer or a number without dimensions.
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
        self.key = _register(fn, _identity(fn))
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
        cells = [cell.cell_contents for cell in score_mod.__closure__]
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

    def __repr__(self) -> str:
        return f"ScoreMod({self.key}, {len(self.tensors)} tensors)"


def has_tangent(x: Tensor) -> bool:
    forward_ad = torch.autograd.forward_ad
    return forward_ad._current_level >= 0 and forward_ad.unpack_dual(x).tangent is not None


def score_mod_function(key: str) -> Callable[..., Tensor]:
    """The function registered under a key that `ScoreMod.key` gave."""
    return _functions[key]


def _register(fn: Callable[..., Tensor], identity: Hashable) -> str:
    key = _keys.get(identity)
    if key is None:
        key = f"{getattr(fn, '__name__', type(fn).__name__)}#{len(_keys)}"
        _keys[identity] = key
        _functions[key] = fn
        if len(_keys) == MANY_FUNCTIONS:
            message = (
                f"{MANY_FUNCTIONS} different score_mod functions have been registered, and each stays in memory. "
                "If a number in the closure changes from call to call, pass it as a tensor: ScoreMod(fn, (tensor,))."
            )
            warnings.warn(message, AttentionWarning, stacklevel=5)
    return key


def _identity(fn: Any) -> Hashable:
    """What makes two functions the same: their code and every value they are bound to, not their address."""
    lifted: tuple[int, ...] = ()
    if isinstance(fn, _Lifted):
        fn, lifted = fn.fn, tuple(fn.captured)
    if isinstance(fn, types.MethodType):  # each access makes a new object of the same function and instance
        return _identity(fn.__func__), _Same(fn.__self__)
    if not isinstance(fn, types.FunctionType):
        return _Same(fn)
    closure = fn.__closure__ or ()
    cells = tuple(_hashable(cell.cell_contents) for n, cell in enumerate(closure) if n not in lifted)
    defaults = tuple(_hashable(value) for value in fn.__defaults__ or ())
    keywords = tuple((name, _hashable(value)) for name, value in (fn.__kwdefaults__ or {}).items())
    return (fn.__code__, id(fn.__globals__), cells, lifted, defaults, keywords)


class _Same:
    """Compares an unhashable or mutable object by identity, and keeps it alive so that the identity stays its own."""

    def __init__(self, value: Any):
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


def _hashable(value: Any) -> Hashable:
    if isinstance(value, int | float | complex | str | bytes | bool | types.NoneType | torch.dtype | torch.device):
        return type(value), repr(value)  # 1, 1.0 and True are equal, as are 0.0 and -0.0, and mean different programs
    return _identity(value) if isinstance(value, types.FunctionType) else _Same(value)


class _Lifted:
    """A function whose closure cells `captured` have become trailing arguments: `g(score, b, h, i, j, *cells)`."""

    def __init__(self, fn: types.FunctionType, captured: list[int]):
        self.captured, self.__name__ = captured, fn.__name__
        closure = fn.__closure__ or ()
        self.fn = _rebound(fn, [types.CellType() if n in captured else cell for n, cell in enumerate(closure)])

    def __call__(self, score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, k_idx: Tensor, *tensors: Tensor) -> Tensor:
        cells = list(self.fn.__closure__ or ())
        for position, tensor in zip(self.captured, tensors, strict=True):
            cells[position] = types.CellType(tensor)
        return _rebound(self.fn, cells)(score, b, h, q_idx, k_idx)


def _rebound(fn: types.FunctionType, cells: list[types.CellType]) -> types.FunctionType:
    rebound = types.FunctionType(fn.__code__, fn.__globals__, fn.__name__, fn.__defaults__, tuple(cells))
    rebound.__kwdefaults__ = fn.__kwdefaults__
    return rebound
