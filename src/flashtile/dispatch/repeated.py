"""Repeated calls: a call of a public function that is written as an earlier one, with tensors of the same layouts.

`fast_path` finds a call by its normalized arguments. Here it is found by its arguments as they are written, and none of
them is looked at again. Scalars are compared as objects, and tensors by one guard of compiled programs, in C: types,
shapes, strides, dtypes, devices, `requires_grad` and dispatch keys, which also tell modes, autocast and transforms. Only
calls all of whose tensors are arguments are repeated: none with a seed that is drawn, an int for lengths, or a cast.
"""

from collections.abc import Callable, Hashable, Sequence
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from .. import private_torch
from ..call import sharding
from ..call.call import Call, Tensors, differentiable_positions
from ..call.eager import is_plain_eager
from ..call.memory import Layouts
from ..call.window import ExactWindow
from ..dynamo import untraced
from ..remember import remember
from . import autograd, fast_path, forking, operators

MOST_KEYS = 2048
MOST_OF_A_KEY = 16
SCALARS = (type(None), bool, int, float, str)
NAMED = Tensors._fields.index("score_mod_tensors")  # fields of one tensor
POSITIONS = differentiable_positions(NAMED)

Replays = tuple[list[fast_path.Pass], Callable[..., Sequence[Tensor | None]]]


class Repeated:
    """A recorded call as it was written. Its tensors are in the order of `Tensors`."""

    __slots__ = (
        "backward", "entry", "flat", "layouts", "places", "requires_grad", "return_lse", "scalars", "settings", "state",
        "tensors",
    )  # fmt: skip

    def __init__(self, call: Call, values: Sequence[Any], indices: dict[int, int], *, return_lse: bool):
        """`indices` has the index in `values`, the arguments, of each tensor by its place in `Tensors`."""
        self.settings, self.entry, self.return_lse = call.settings, call.entry, return_lse
        self.scalars = [(n, x) for n, x in enumerate(values) if n not in indices.values()]
        self.tensors = itemgetter(*indices.values())
        self.places = tuple(indices)
        orders = {place: n for n, place in enumerate(indices)}
        absent, captured = len(indices), len(indices) + 1  # of (*tensors, None, ())
        self.flat = itemgetter(*(orders.get(n, absent) for n in range(NAMED)), captured)
        tensors = self.tensors(values)
        self.layouts, self.state = Layouts(tensors), state_of(tensors[0])
        self.requires_grad = torch.is_grad_enabled() and autograd.requires_grad(tensors)
        self.backward: dict[Hashable, Replays] = {}

    def match(self, values: Sequence[Any]) -> tuple[Tensor, ...] | None:
        """The tensors of arguments that are those of this call but for their tensors' values."""
        for n, x in self.scalars:
            if values[n] is not x and not equal(values[n], x):
                return None
        tensors: tuple[Tensor, ...] = self.tensors(values)
        return tensors if self.layouts.match_plain(tensors) and state_of(tensors[0]) == self.state else None

    def call(self, tensors: tuple[Tensor, ...]) -> Call:
        return Call(Tensors._make(self.flat((*tensors, None, ()))), self.settings, self.entry, is_plain_eager=True)

    def replays(self, needed: Sequence[bool], results: tuple[Tensor | None, ...]) -> Replays:
        """The recordings of backward passes for these results, and the function that takes the inputs' gradients from
        theirs.
        """
        _, _, dout, dlse = results


def equal(x: Any, y: Any) -> bool:
    """Whether scalars are the same, with their types."""
    if type(x) is not type(y) or x != y:
        return False
    return not isinstance(x, tuple) or all(type(n) is type(m) for n, m in zip(x, y, strict=True))


def is_scalar(x: Any) -> bool:
    return type(x) in SCALARS or (type(x) in (tuple, ExactWindow) and all(type(n) in SCALARS for n in x))


def state_of(q: Tensor) -> Hashable:
    """All outside of the arguments that the call depends on, but for dispatch keys."""
    dtype = torch.get_autocast_dtype(q.device.type) if private_torch.is_any_autocast_enabled() else None
    deterministic = torch.are_deterministic_algorithms_enabled()
    return fast_path.state_of_process(q), deterministic, torch.is_grad_enabled(), dtype


@untraced
def attend(function: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The result of a repeated call, `NotImplemented` of another one."""
    if sharding.contexts_open or forking.forked or not is_plain_eager():
        return NotImplemented
    values = (*args, *kwargs.values())
    for known in fast_path.repeated.get(key_of(function, values, kwargs), ()):
        tensors = known.match(values)
        if tensors is not None:
            if known.requires_grad:
                return private_torch.apply_at_one_level(RepeatedAttention, known, *tensors)
            out, lse = fast_path.forward(known.call(tensors), operators.inside_operator)
            return (out, lse) if known.return_lse else out
    return NotImplemented


def key_of(function: str, values: Sequence[Any], kwargs: dict[str, Any]) -> Hashable:
    """What few calls share, in little time; `None` if the first two arguments are not tensors."""
    try:
        return function, values[0].shape, values[1].shape, *kwargs
    except (AttributeError, IndexError):
        return None


@untraced
def remember_call(function: str, args: Sequence[Any], kwargs: dict[str, Any], call: Call, *, return_lse: bool) -> None:
    """Keep a recorded call as it was written, if it can be repeated."""
    entry = call.entry
    if not call.is_plain_eager or type(call) is not Call or entry.forward.replay is None:
        return
    if entry.written >= MOST_OF_A_KEY:
        return
    entry.written += 1
    values = (*args, *kwargs.values())
    arguments = {id(x): n for n, x in enumerate(values) if isinstance(x, Tensor)}
    indices = {place: arguments.get(id(x), -1) for place, x in enumerate(call.tensors[:NAMED]) if x is not None}
    scalars = [x for n, x in enumerate(values) if n not in indices.values()]
    if -1 in indices.values() or call.tensors.score_mod_tensors or not all(map(is_scalar, scalars)):
        return
    key = key_of(function, values, kwargs)
    known = Repeated(call, values, indices, return_lse=return_lse)
    if key is not None and known.layouts.same is not None:
        others = fast_path.repeated.get(key, [])
        remember(fast_path.repeated, key, [known, *others[: MOST_OF_A_KEY - 1]], MOST_KEYS)


class RepeatedAttention(torch.autograd.Function):
    """`autograd.EagerAttention` of the tensors that are there; lse is a result only where it is asked for."""

    @staticmethod
    def forward(ctx: Any, known: Repeated, *tensors: Tensor) -> Any:
        call = known.call(tensors)
        out, lse = fast_path.forward(call, operators.inside_operator)
        ctx.known, ctx.kept = known, call.kept
        ctx.save_for_backward(out, lse, *tensors)
        ctx.set_materialize_grads(False)
        return (out, lse) if known.return_lse else out

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None = None) -> tuple[Any, ...]:
        out, lse, *tensors = ctx.saved_tensors
        known, needed, results = ctx.known, ctx.needs_input_grad, (out, lse, dout, dlse)
        call = known.call(tensors)
        call.kept = ctx.kept
        key = needed, dout is None, dlse is None, fast_path.state_of_process(tensors[0])
        found = known.backward.get(key)
        if found is not None and not torch.is_grad_enabled() and is_plain_eager() and not torch.compiler.is_compiling():
            passes, gradients_of = found
            present = [x for x in results if x is not None]
            present += tensors
            for one in passes:
                if one.replay is not None and one.layouts.match_plain(present):
                    with operators.inside_operator(call):
                        gradients = gradients_of((*one.replay(call, *results), None))
                    return None, *map(in_dtype_of, gradients, tensors)
        places = known.places
        flat_needed = [False] * NAMED
        for place, need in zip(places, needed[1:], strict=True):
            flat_needed[place] = need
        gradients = autograd.input_gradients(call, results, flat_needed)
        if found is None:
            needs = [flat_needed[n] for n in POSITIONS]
            passes = known.entry.backward.get(fast_path.backward_key(call, needs, results))
            if passes is not None:
                n_of = {p: n for n, p in enumerate(POSITIONS)}
                getter = itemgetter(*(n_of[p] if need else -1 for p, need in zip(places, needed[1:], strict=True)))
                known.backward[key] = passes, getter
        return None, *[gradients[n] for n in places]


def in_dtype_of(gradient: Tensor | None, x: Tensor) -> Tensor | None:
    return gradient if gradient is None or gradient.dtype is x.dtype else gradient.to(x.dtype)
