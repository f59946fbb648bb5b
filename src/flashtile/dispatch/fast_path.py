"""The fast path: all that a repeated call needs, by the settings and tensor layouts of the call.

The first plain eager call of a layout checks its arguments and makes a plan; the second one skips both and records its
allocations and launches; later ones replay them. One-off layouts, as of a sequence that grows with each call, are never
recorded. `api.repeated` finds calls in the same table by the arguments as the caller passed them. Without the table
(`enabled` is false) every call is normalized, checked and planned, with the same results.
"""

import functools
import os
from collections.abc import Callable, Hashable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from .. import private_torch
from ..backend.compiling import expecting
from ..backend.cpu.targets import VECTORS_VARIABLE
from ..backend.replays import Recording
from ..call import check, counting, device
from ..call.call import Call, Needs, Settings, Tangents, differentiable_positions
from ..call.check_results import check_needs, check_results
from ..call.memory import Layouts, layout_key
from ..call.plan import Plan
from ..expression import is_local
from . import forking, planner
from .expected import backward_kernels
from .passes import function_of, inside_operator, recorder_of
from .planner import BACKEND_VARIABLE, plan_call

GENERATION = 2048  # keys
MOST_PASSES = 64  # layouts of the backward passes of one call, and of its passes in forward mode

# Where os.environ looks a name up. It raises an error where there is none, which takes longer than all of the lookup.
_ENVIRONMENT: Any = getattr(os.environ, "_data", os.environ)
_BACKEND, _VECTORS = (
    os.environ.encodekey(name) if hasattr(os.environ, "_data") else name  # type: ignore[attr-defined]
    for name in (BACKEND_VARIABLE, VECTORS_VARIABLE)
)


class Pass:
    """A forward or backward pass or one of forward mode, of one layout: not yet seen, planned, or recorded."""

    __slots__ = ("in_dtypes", "layouts", "plan", "recording", "replay")

    def __init__(self, layouts: Layouts | None = None) -> None:
        self.layouts = layouts  # `None` of a forward pass: an entry has one
        self.plan: Plan | None = None
        self.replay: Callable[..., Any] | None = None
        self.recording: Recording | None = None  # the replay's, if it has one, and needs no context around it
        self.in_dtypes = False  # whether recorded gradients have their inputs' dtypes

    def run(self, call: Call, kind: str, needs: Needs | None, *rest: Any, moves: Needs | None = None) -> Any:
        """Run the `kind` function of the planned backend, or record it at the second call."""
        later = functools.partial(backward_kernels, call) if call.is_differentiated else None
        if self.plan is None:
            call, record = call.with_own_indices(), None
            chosen = plan_call(call, needs=needs, moves=moves)
            if needs is not None:
                _, *results = rest
                check_results(call, *results)
            self.plan = chosen
        else:
            call, record = checked(call), recorder_of(self.plan, kind)
        with inside_operator(call):
            if record is None:
                with nullcontext() if later is None else expecting(later):
                    return function_of(self.plan, kind)(self.plan, call, *rest)
            replay, results = record(self.plan, call, *rest)
        if replay is not None and call.layout != "dense" and device.host_readable(call.tensors.q):
            self.replay = lambda call, *rest: replay(checked(call), *rest)
            self.recording = getattr(replay, "checked_recording", None)
        else:
            self.replay, self.recording = replay, getattr(replay, "recording", None)
        if kind == "backward":
            inputs = call.tensors.flat()
            of = zip(results.flat(), differentiable_positions(len(inputs)), strict=True)
            self.in_dtypes = all(x is None or (y := inputs[n]) is None or x.dtype is y.dtype for x, n in of)
            if private_torch.is_any_autocast_enabled():  # which the layouts of a backward pass tell from none
                self.recording = None
        return results


def checked(call: Call) -> Call:
    """A call of a known signature with indices of its own, whose values are checked."""
    call = call.with_own_indices()
    check.values(call.attention())
    return call


class Entry:
    """Everything kept for the calls with one key."""

    __slots__ = ("apart", "backward", "forward", "num_repeated", "paged", "reads_copy", "rooms", "tangents")

    def __init__(self) -> None:
        self.forward = Pass()
        self.backward: dict[Hashable, list[Pass]] = {}  # by needs and absent tensors; each for other layouts
        self.tangents: dict[Hashable, list[Pass]] = {}  # passes of forward mode, by the inputs that move
        self.paged: Settings | None = None  # settings of a KV-cache call whose cache has been checked
        self.reads_copy: bool | None = None  # whether a cache of packed latent rows has no kernel that reads them
        self.rooms: set[int] = set()  # positions in sharded caches for which the call was accepted
        self.apart: set[tuple[int, ...]] = set()  # distances in bytes between caches and new keys that do not overlap
        self.num_repeated = 0  # sets of arguments that `repeated.py` keeps for this call


class Table:
    """What is known of calls: an `Entry` by a call and its layouts, a list of `api.repeated.Repeated` by arguments.

    Least recently used keys go first: a full generation becomes the older one, whose unused keys are dropped. There is
    no lock, which a forked process could inherit locked.
    """

    __slots__ = ("older", "recent")

    def __init__(self) -> None:
        self.recent: dict[Hashable, Any] = {}
        self.older: dict[Hashable, Any] = {}

    def get(self, key: Hashable) -> Any:
        known = self.recent.get(key)
        if known is None:
            known = self.older.get(key)
            if known is not None:
                self.put(key, known)
        return known

    def put(self, key: Hashable, value: Any) -> None:
        if len(self.recent) >= GENERATION:
            self.recent, self.older = {}, self.recent
        self.recent[key] = value


table = Table()
enabled = True


def forget() -> None:
    """Drop all entries and plans: for tests that change what a support module says."""
    table.recent, table.older = {}, {}
    planner.forget_plans()


def find_call(call: Call) -> Entry | None:
    """The entry of a call, made if there is none; `None` where nothing is kept: in a forked process, for a tensor that
    has no memory, and for a function that reads objects of this process.
    """
    functions = (call.settings.score_mod, call.settings.mask_mod)
    if not enabled or forking.forked or any(key is not None and is_local(key) for key in functions):
        return None
    layouts = layout_key(call.inputs)
    if layouts is None:
        return None
    key = call.key, state_of_process(call.tensors.q), layouts
    known = table.get(key)
    if known is None:
        known = Entry()
        table.put(key, known)
    return known  # type: ignore[no-any-return]


def bypasses_dispatcher(call: Call) -> bool:
    """Whether a call runs without an operator: nothing looks at it, and it has an entry. A call without one, whose
    tensors may have no memory, takes the operators' way.
    """
    if call.is_plain_eager and call.entry is None:
        call.entry = find_call(call)
        call.is_plain_eager = call.entry is not None
    return call.is_plain_eager


def state_of_process(q: Tensor) -> Hashable:
    """Settings outside of the call that its plan or launches depend on."""
    return process_state(q)()


def process_state(q: Tensor) -> Callable[[], Hashable]:
    """`state_of_process` of all calls with q's device and dtype."""
    if q.is_cpu:
        return lambda: (_ENVIRONMENT.get(_BACKEND), torch.get_num_threads(), _ENVIRONMENT.get(_VECTORS))
    if q.dtype is torch.float32:
        return lambda: (_ENVIRONMENT.get(_BACKEND), torch.backends.cuda.matmul.fp32_precision)
    return lambda: _ENVIRONMENT.get(_BACKEND)


def forward(call: Call) -> tuple[Tensor, Tensor]:
    """`out` and `lse` of a call that has an entry."""
    known = call.entry.forward
    if known.replay is None:
        return known.run(call, call.kind, None)
    if call.is_plain_eager and not private_torch.is_any_autocast_enabled():
        return known.replay(call)
    with inside_operator(call):
        return known.replay(call)


def backward(call: Call, needs: Sequence[bool], results: tuple[Tensor | None, ...]) -> Sequence[Tensor | None] | None:
    """Gradients of a call that has an entry, flat, or `None` where a tensor has no memory. `results` are out, lse, dout
    and dlse.
    """
    recorded = pass_of(call.entry.backward, backward_key(call, needs, results), present(call, results))
    if recorded is None:
        return None
    if recorded.replay is None:
        requested = check_needs(call, needs)
        gradients = recorded.run(call, "backward", requested, requested, *results).flat()
    else:
        with inside_operator(call):
            gradients = recorded.replay(call, *results)
    if counting.opened and recorded.plan is not None:
        planner.count(call, recorded.plan, "backward")
    return gradients


def tangents(call: Call, given: Tangents) -> tuple[Tensor, ...] | None:
    """`out`, `lse` and their tangents, of a call that has an entry; `None` where a tensor has no memory."""
    key = *given.moves.flat(), state_of_process(call.tensors.q)
    recorded = pass_of(call.entry.tangents, key, present(call, given.flat()))
    if recorded is None:
        return None
    if recorded.replay is None:
        results = recorded.run(call, "tangents", None, given, moves=given.moves)
    else:
        with inside_operator(call):
            results = recorded.replay(call, given)
    if counting.opened and recorded.plan is not None:
        planner.count(call, recorded.plan, "tangents")
    return results  # type: ignore[no-any-return]


def pass_of(passes: dict[Hashable, list[Pass]], key: Hashable, tensors: list[Tensor]) -> Pass | None:
    """The pass of a key and of the tensors' layouts, made if there is none; `None` where a tensor has no memory."""
    for one in passes.get(key, ()):
        if one.layouts is not None and one.layouts.match(tensors):
            return one
    layouts = Layouts(tensors)
    if layouts.key is None:
        return None
    if sum(map(len, passes.values())) >= MOST_PASSES:
        passes.clear()
    made = Pass(layouts)
    passes.setdefault(key, []).append(made)
    return made


def replayed_backward(
    call: Call, needs: Sequence[bool], results: tuple[Tensor | None, ...]
) -> Sequence[Tensor | None] | None:
    """As `backward` for a call without modes around it: `None` if it was not recorded, or a tensor is more than its
    memory.
    """
    passes = call.entry.backward.get(backward_key(call, needs, results))
    if passes is not None:
        tensors = present(call, results)
        for one in passes:
            if one.replay is not None and one.layouts.match_plain(tensors):
                with inside_operator(call):
                    return one.replay(call, *results)
    return None


def backward_key(call: Call, needs: Sequence[bool], results: tuple[Tensor | None, ...]) -> Hashable:
    """Everything but layouts that the launches of a backward pass depend on."""
    _, _, dout, dlse = results
    return *needs, state_of_process(call.tensors.q), dout is None, dlse is None, call.kept is None


def present(call: Call, results: Sequence[Tensor | None]) -> list[Tensor]:
    return [x for x in (*results, *call.inputs) if x is not None]
