"""Skip normalization for a public call with the same arguments as an earlier one, and tensors of the same layouts.

Scalars are compared by value and type, tensors by one guard of compiled programs, in C: type, shape, strides, dtype,
device, `requires_grad` and dispatch keys, which include autocast, traces and transforms. `sources` makes the inputs
that are no arguments.
"""

from collections.abc import Callable, Hashable, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import private_torch
from ..call import counting, sharding
from ..call.cache import CacheCall, writes_descales
from ..call.cache_tensors import CacheTensors
from ..call.call import Call, Tensors, differentiable_positions, split_row_stats
from ..call.check_cache import check_writable
from ..call.eager import is_observed_without_key
from ..call.memory import Layouts
from ..call.written import mark_written
from ..dispatch import autograd, fast_path, forking, operators
from ..dispatch.gradients import Results, input_gradients
from ..dispatch.passes import inside_operator
from ..dynamo import untraced
from .out import filled
from .sources import Sources, sources_of

MOST_OF_A_KEY = 16
NAMED = len(Tensors._fields) - 1  # fields of one tensor
NUM_CACHE = len(CacheTensors._fields)
CACHES = itemgetter(*(NAMED + CacheTensors._fields.index(name) for name in ("k_cache", "v_cache")))
DESCALES = [NAMED + CacheTensors._fields.index(name) for name in ("k_descale", "v_descale")]
APPENDED = NAMED + CacheTensors._fields.index("k"), NAMED + CacheTensors._fields.index("v")


class Gradients(NamedTuple):
    """The recorded backward passes of a call for some of its gradients. `present` picks the guarded tensors from all
    that backward gets, `requested` the gradients in autograd's order, after a `None` for the call itself.
    """

    passes: list[fast_path.Pass]
    present: Callable[..., tuple[Tensor, ...]]
    requested: Callable[..., tuple[Tensor | None, ...]]


class Repeated:
    """A recorded call and its guard. `tensors` picks the arguments that are tensors; the call's inputs are in the
    columns that `sources` describes, and `flat` puts them in order.
    """

    __slots__ = (
        "appends", "autocast", "backward", "backward_flat", "descales", "deterministic", "entry", "flat", "function",
        "grad_mode", "guard", "places", "positions", "process_state", "recording", "requires_grad", "return_lse",
        "rotary", "same", "scalars", "settings", "sources", "state", "tensors", "unique",
    )  # fmt: skip

    def __init__(self, function: str, call: Call, values: Sequence[Any], sources: Sources, *, return_lse: bool):
        self.function, self.settings, self.entry, self.return_lse = function, call.settings, call.entry, return_lse
        self.sources = None if sources.only_arguments else sources
        self.rotary = call.rotary if isinstance(call, CacheCall) else None
        self.descales: list[int] = []  # places of scales that the call writes
        if isinstance(call, CacheCall):
            self.descales = [n for n, writes in zip(DESCALES, writes_descales(call.cache), strict=True) if writes]
        self.appends = self.rotary is not None and call.inputs[APPENDED[0]] is not None
        self.scalars = [(n, values[n]) for n in sources.scalars]
        self.tensors, self.places = itemgetter(*sources.arguments), sources.places
        count = len(sources.places)
        self.flat = itemgetter(*[count if n is None else n for n in sources.columns])  # picks from (*columns, None)
        # Picks a backward pass's inputs from (out, lse, *columns, dout, dlse, kept, None).
        of_backward = [count + 5 if n is None else n + 2 for n in sources.columns]
        self.backward_flat = itemgetter(*of_backward, 0, 1, *range(count + 2, count + 5))
        self.positions = differentiable_positions(len(sources.columns))
        tensors = sources.captured(values, self.tensors(values))
        assert tensors is not None
        first = {id(x): n for n, x in reversed([*enumerate(tensors)])}
        self.unique = None if len(first) == len(tensors) else picker(sorted(first.values()))
        self.same = [(n, first[id(x)]) for n, x in enumerate(tensors) if first[id(x)] != n]
        self.guard = Layouts(tensors if self.unique is None else self.unique(tensors))
        self.process_state = fast_path.process_state(tensors[0])
        self.state, self.deterministic = self.process_state(), private_torch.is_deterministic()
        self.autocast = autocast_dtype(tensors[0]) if private_torch.is_any_autocast_enabled() else None
        self.grad_mode = torch.is_grad_enabled()
        self.requires_grad = self.grad_mode and autograd.requires_grad(call.inputs)
        self.recording = None if private_torch.is_any_autocast_enabled() else call.entry.forward.recording
        self.backward: dict[Hashable, Gradients] = {}

    def match(self, values: Sequence[Any]) -> tuple[Tensor, ...] | None:
        """The columns of a call with these arguments, `None` if it is another one."""
        for n, x in self.scalars:
            if values[n] is not x and not equal(values[n], x):
                return None
        tensors: tuple[Tensor, ...] = self.tensors(values)
        if self.sources is not None:
            captured = self.sources.captured(values, tensors)
            if captured is None:
                return None
            tensors = captured
        guarded = tensors
        if self.unique is not None:
            if any(tensors[n] is not tensors[m] for n, m in self.same):
                return None
            guarded = self.unique(tensors)
        if (
            not self.guard.match_plain(guarded)
            or self.process_state() != self.state
            or torch.is_grad_enabled() is not self.grad_mode
            or private_torch.is_deterministic() is not self.deterministic
            or (self.autocast is not None and self.autocast is not autocast_dtype(tensors[0]))
        ):
            return None
        return tensors if self.sources is None else self.sources.complete(self.function, values, tensors)

    def call(self, tensors: Sequence[Tensor], *, is_plain_eager: bool) -> Call:
        inputs = self.flat((*tensors, None))
        if self.rotary is None:
            flat = Tensors.from_flat(inputs)
            return Call(flat, self.settings, self.entry, is_plain_eager=is_plain_eager)
        flat = Tensors.from_flat((*inputs[:NAMED], *inputs[NAMED + NUM_CACHE :]))
        call = Call(flat, self.settings, self.entry, is_plain_eager=is_plain_eager)
        return CacheCall(call, CacheTensors(*inputs[NAMED : NAMED + NUM_CACHE]), self.rotary)

    def backward_call(self, tensors: Sequence[Tensor], kept: Tensor | None) -> Call:
        """The call of saved tensors, which may have been replaced, or freed."""
        call = self.call(tensors, is_plain_eager=False)
        call.kept = kept
        return call

    def forward(self, tensors: Sequence[Tensor]) -> Sequence[Tensor | None]:
        """`out` and `lse`, and perhaps what is kept for backward."""
        inputs = self.flat((*tensors, None))
        if self.appends:
            caches = CACHES(inputs)
            check_writable(self.entry, *caches, *(inputs[n] for n in APPENDED))
            mark_written(*caches, *(inputs[n] for n in self.descales))
        if self.recording is not None:
            results = self.recording(inputs)
            if results is not None:
                return results
        call = self.call(tensors, is_plain_eager=True)
        results = fast_path.forward(call)
        return results if call.kept is None else (*results, call.kept)

    @untraced
    def gradients(
        self,
        requested: Sequence[bool],
        saved: tuple[Tensor, ...],
        dout: Tensor | None,
        dlse: Tensor | None,
        kept: Tensor | None,
    ) -> tuple[Tensor | None, ...]:
        """The gradients of the call itself, which has none, and of the tensors, as the flags of `requested`. `saved`
        are out, lse and the columns.
        """
        key = requested, dout is None, dlse is None, self.process_state()
        known = self.backward.get(key)
        if known is not None and not (torch.is_grad_enabled() or is_observed_without_key() or counting.opened):
            values = *saved, dout, dlse, kept, None
            present = known.present(values)
            for one in known.passes:
                if one.replay is not None and one.layouts is not None and one.layouts.match_plain(present):
                    if one.recording is not None:
                        found = one.recording(self.backward_flat(values))
                    else:
                        call = self.backward_call(saved[2:], kept)
                        with inside_operator(call):
                            found = one.replay(call, *saved[:2], dout, dlse)
                    gradients = known.requested((None, *found))
                    if one.in_dtypes:
                        return gradients
                    of = zip(gradients[1:], saved[2:], strict=True)
                    return None, *[x if x is None else operators.in_dtype(x, y.dtype) for x, y in of]
        out, lse, *tensors = saved
        return self.new_backward(key, (out, lse, dout, dlse), tensors, kept, requested[1:])

    def new_backward(
        self,
        key: Hashable,
        results: Results,
        tensors: Sequence[Tensor],
        kept: Tensor | None,
        needed: Sequence[bool],
    ) -> tuple[Tensor | None, ...]:
        """The gradients as `gradients` returns them, planned or recorded."""
        call = self.backward_call(tensors, kept)
        by_place = dict(zip(self.places, needed, strict=True))
        count = len(call.inputs)
        gradients = input_gradients(call, results, [by_place.get(n, False) for n in range(count)])
        needs = [by_place.get(n, False) for n in self.positions]
        passes = self.entry.backward.get(fast_path.backward_key(call, needs, results))
        if passes is not None:
            count = len(tensors)
            of_results = (n if n < 2 else count + n for n, x in enumerate(results) if x is not None)
            present = *of_results, *range(2, count + 2)
            requested = (self.positions.index(n) + 1 if by_place[n] else 0 for n in self.places)
            self.backward[key] = Gradients(passes, itemgetter(*present), itemgetter(0, *requested))
        return None, *[gradients[n] for n in self.places]


def picker(columns: Sequence[int]) -> Callable[[Sequence[Tensor]], tuple[Tensor, ...]]:
    """As `itemgetter`, but a tuple for a single column, too."""
    return itemgetter(*columns) if len(columns) > 1 else lambda tensors: (tensors[columns[0]],)


def equal(x: Any, y: Any) -> bool:
    """Whether scalars are the same, with their types."""
    if type(x) is not type(y) or x != y:
        return False
    return not isinstance(x, tuple) or all(type(n) is type(m) for n, m in zip(x, y, strict=True))


def autocast_dtype(q: Tensor) -> torch.dtype:
    return torch.get_autocast_dtype(q.device.type)


def key_of(function: str, values: Sequence[Any], kwargs: dict[str, Any]) -> Hashable:
    """A coarse, cheap key; `None` if the first two arguments are not tensors. It has the number of arguments without a
    name, since more than the function takes are an error.
    """
    try:
        return function, len(values), values[0].numel(), values[1].numel(), *kwargs
    except (AttributeError, IndexError, RuntimeError):  # the last one of nested tensors
        return None


@untraced
def run_repeated(function: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The result if the call is a repeated one, else `NotImplemented`."""
    values = (*args, *kwargs.values())
    try:
        calls = fast_path.table.get(key_of(function, values, kwargs))
    except TypeError:  # sizes that are symbols
        return NotImplemented
    if calls is None or sharding.contexts_open or forking.forked or counting.opened or not fast_path.enabled:
        return NotImplemented
    if is_observed_without_key():
        return NotImplemented
    for known in calls:
        tensors = known.match(values)
        if tensors is not None:
            if known.requires_grad:
                return apply(known, *tensors)
            out, lse, *_ = known.forward(tensors)
            if known.sources is not None and known.sources.out is not None:
                out = filled(values[known.sources.out], values[known.sources.out], out)
            return (out, split_row_stats(tensors[0], lse)[0]) if known.return_lse else out
    return NotImplemented


@untraced
def remember_call(
    function: str,
    positional: Sequence[str],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    call: Call,
    *,
    return_lse: bool,
) -> None:
    """Keep a recorded call under its arguments, if it can be repeated. `positional` names those without a keyword."""
    entry = call.entry
    if not call.is_plain_eager or entry is None or entry.num_repeated >= MOST_OF_A_KEY or entry.forward.replay is None:
        return
    entry.num_repeated += 1
    values = (*args, *kwargs.values())
    key = key_of(function, values, kwargs)
    sources = sources_of(function, call, values, (*positional[: len(args)], *kwargs))
    if key is None or sources is None:
        return
    known = Repeated(function, call, values, sources, return_lse=return_lse)
    if known.guard.same is not None:
        others = fast_path.table.get(key) or []
        fast_path.table.put(key, [known, *others[: MOST_OF_A_KEY - 1]])


class RepeatedAttention(torch.autograd.Function):
    """`autograd.Attention` of a repeated call, without absent tensors; lse is an output only if requested."""

    @staticmethod
    def forward(ctx: Any, known: Repeated, *tensors: Tensor) -> Any:
        results = known.forward(tensors)
        out, lse = results[:2]
        ctx.known, ctx.kept = known, results[2] if len(results) > 2 else None
        ctx.save_for_backward(out, lse, *tensors)  # in the order of `autograd.Attention`, which may compute this again
        ctx.set_materialize_grads(False)
        if not known.return_lse:
            return out
        assert lse is not None
        return out, split_row_stats(tensors[0], lse.view_as(lse))[0]

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None = None) -> tuple[Any, ...]:
        requested = ctx.needs_input_grad
        if dout is None and dlse is None:  # a second derivative passes here without a gradient of the results
            return (None,) * len(requested)
        return ctx.known.gradients(requested, ctx.saved_tensors, dout, dlse, ctx.kept)  # type: ignore[no-any-return]


apply = private_torch.apply_at_one_level(RepeatedAttention)
private_torch.skip_lookup_of_backward(RepeatedAttention)
