"""Record and replay of a call's allocations and launches.

`run` executes a host function on a `Recorder`: the function allocates with `new`, computes with `op` what no kernel
does, and starts kernels with `launch`. `record` does the same and also returns a `Recording`, which repeats these
steps for other tensors with the same layouts, without the work that led to them.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ... import private_torch
from ..replays import Results
from .launch import launch, replayable
from .pointers import Described, Layout, Part, Pointers, Slot, Slots, resolved
from .step import Step
from .streams import current_stream_key

ALIGNMENT = 128  # bytes of a cache line, at which the tensors of a workspace begin
MOST_CONSTANT = 2**20  # bytes of a tensor that a recording keeps


class Launch(NamedTuple):
    """A launch that was collected instead of executed."""

    kernel: Any
    scalars: dict[str, Any]
    slots: Slots
    tensors: list[Tensor | None]

    @property
    def pointers(self) -> dict[str, Any]:
        """Arguments that have addresses, by name."""
        return resolved(self.slots, self.tensors)


_collected: ContextVar[list[Launch] | None] = ContextVar("collected", default=None)


@contextlib.contextmanager
def collected_launches() -> Iterator[list[Launch]]:
    """Inside, launches are collected instead of executed. Tensors have shapes, but no values."""
    found: list[Launch] = []
    token = _collected.set(found)
    try:
        yield found
    finally:
        _collected.reset(token)


class Recorder:
    """Execution of a host function, step by step.

    Tensors are known by identity, so all of them have to come from here. `inputs` are views of the caller's tensors,
    because one tensor may be passed twice now and two tensors the next time.
    """

    def __init__(self, inputs: Sequence[Tensor | None], *, keep: bool = True):
        self.inputs = [None if x is None else x.detach() for x in inputs]
        self.keep = keep  # whether steps are recorded, or executed only
        self.tensors = [*self.inputs]
        self.indices = {id(x): n for n, x in enumerate(self.tensors) if x is not None}
        self.views: dict[int, Tensor] = {}
        self.parts: dict[int, tuple[Tensor, Part]] = {}  # parts of workspaces
        self.steps: list[Step] = []

    def index(self, x: Tensor | None) -> int | None:
        return None if x is None else self.indices[id(x)]

    def new(self, x: Tensor) -> Tensor:
        """Register the uninitialized tensor `x`. A replay allocates one with its layout."""
        if self.keep:
            self.steps.append(allocation(x))
        return self._added(x)

    def op(self, function: Callable[..., Tensor], *tensors: Tensor | None) -> Tensor:
        """Compute `function(*tensors)`. The function must not close over other tensors of this call. If it returns one
        of its inputs, as `Tensor.contiguous` may, it does so in each replay.
        """
        result = function(*tensors)
        if id(result) in self.indices:
            return result
        assert not any(id(x) in self.views for x in tensors)
        again = self._repeated(function, tensors)

        def step(known: list[Tensor | None]) -> None:
            known.append(again(known))

        if self.keep:
            self.steps.append(step)
        return self._added(result)

    def constant(self, function: Callable[[], Tensor]) -> Tensor:
        """As `op`, for a result that follows from the layouts alone: a recording keeps it, if it is small."""
        result = function()
        # Memory of a graph has no values before the graph is replayed.
        kept = result.nbytes <= MOST_CONSTANT and not (result.is_cuda and private_torch.is_capturing())
        if self.keep:
            self.steps.append(Constant(function, result) if kept else computed(function))
        return self._added(result)

    def effect(self, function: Callable[..., Any], *tensors: Tensor | None) -> None:
        """Compute `function(*tensors)`, which writes into some of them; under the conditions of `op`."""
        if _collected.get() is not None:
            return
        function(*tensors)
        if self.keep:
            self.steps.append(self._repeated(function, tensors))

    def contiguous(self, x: Tensor | None) -> Tensor | None:
        return None if x is None else self.op(Tensor.contiguous, x)

    def view(self, base: Tensor, view: Tensor) -> Tensor:
        """Register `view`, for kernels only: they get the data pointer of `base`, which is also the view's."""
        if view is not base:
            self.indices[id(view)] = self.indices[id(base)]
            self.views[id(view)] = view
        return view

    def workspace(self, like: Tensor, layouts: Mapping[str, Layout]) -> dict[str, Tensor]:
        """Uninitialized tensors on the device of `like`, for nothing but this call. They are one allocation."""
        parts, end = {}, 0
        for name, (shape, dtype) in layouts.items():
            parts[name] = Part(-(-end // ALIGNMENT) * ALIGNMENT, shape, dtype)
            end = parts[name].end
        base = self.new(like.new_empty(end, dtype=torch.uint8))
        tensors = {name: part.of(base) for name, part in parts.items()}
        for name, x in tensors.items():
            self.indices[id(x)], self.parts[id(x)] = self.indices[id(base)], (x, parts[name])
        return tensors

    def launch(self, kernel: Any, pointers: Pointers, programs: int, scalars: dict[str, Any]) -> None:
        """Launch `kernel`; `scalars` are its arguments that are no pointers."""
        if programs == 0:
            return
        slots = {name: self._slot(x) for name, x in pointers.items()}
        if (collected := _collected.get()) is not None:
            collected.append(Launch(kernel, scalars, slots, [*self.tensors]))
        elif self.keep:
            self.steps.append(replayable(kernel, programs, scalars, slots, self.tensors))
        else:
            launch(kernel, programs, scalars, slots, self.tensors)

    def recording(self, results: Results) -> "Recording":
        return Recording(self.steps, [self.index(x) for x in results], self.inputs[0])

    def _repeated(self, function: Callable[..., Any], tensors: Sequence[Tensor | None]) -> Callable[..., Any]:
        """`function(*tensors)` in a replay."""
        if not tensors:
            return lambda _: function()
        slots = [self._slot(x) for x in tensors]
        return lambda known: function(*[None if slot is None else slot.resolve(known) for slot in slots])

    def _slot(self, x: Tensor | Described | None) -> Slot | None:
        if isinstance(x, Described):
            return Slot(self.indices[id(x.base)], x.describe, x.given, self._part(x.base))
        return None if x is None else Slot(self.indices[id(x)], part=self._part(x))

    def _part(self, x: Tensor) -> Part | None:
        return self.parts[id(x)][1] if id(x) in self.parts else None

    def _added(self, x: Tensor) -> Tensor:
        self.indices[id(x)] = len(self.tensors)
        self.tensors.append(x)
        return x


class Constant:
    """The step that adds the same tensor in each replay."""

    def __init__(self, function: Callable[[], Tensor], value: Tensor):
        self.function, self.value = function, value
        if value.is_cuda:
            torch.cuda.current_stream().synchronize()  # replays may be on other streams
            self.stream = current_stream_key()

    def __call__(self, known: list[Tensor | None]) -> None:
        if not self.value.is_cuda:
            known.append(self.value)
        elif private_torch.is_capturing():  # a graph holds addresses, and may be replayed when nothing keeps the value
            known.append(self.function())
        else:
            if current_stream_key() != self.stream:
                self.value.record_stream(torch.cuda.current_stream())
            known.append(self.value)


class Recording:
    """Recorded steps on the device of q, and where their results are."""

    def __init__(self, steps: list[Step], results: list[int | None], q: Tensor | None):
        self.steps, self.device = steps, q.get_device() if q is not None and q.is_cuda else None
        # -1 is the `None` behind all tensors; the last one makes a tuple of a single result, too.
        self.results = itemgetter(*[-1 if n is None else n for n in results], -1)

    def __call__(self, inputs: Sequence[Tensor | None]) -> Results:
        if self.device is not None and private_torch.current_device() != self.device:
            with torch.cuda.device(self.device):  # Triton launches on the current device
                return self(inputs)
        tensors = [*inputs]  # keeps them alive until the last launch: kernels know addresses only
        for step in self.steps:
            step(tensors)
        tensors.append(None)
        return self.results(tensors)[:-1]


def run(inputs: Sequence[Tensor | None], function: Callable[..., Results], *arguments: Any) -> Results:
    """Return `function(recorder, *arguments)`, on the device of the first input."""
    with current_device_of(inputs[0]):
        return function(Recorder(inputs, keep=False), *arguments)


def record(
    inputs: Sequence[Tensor | None], function: Callable[..., Results], *arguments: Any
) -> tuple[Recording, Results]:
    """As `run`, with a recording. All that `function` does must follow from its arguments and from the layouts of the
    inputs, not from their addresses or values.
    """
    with current_device_of(inputs[0]):
        recorder = Recorder(inputs)
        results = function(recorder, *arguments)
    return recorder.recording(results), results


def current_device_of(x: Tensor | None) -> Any:
    """Make the device of `x` current. -1 leaves it as it is."""
    return torch.cuda.device(x.get_device() if x is not None and x.is_cuda else -1)


def computed(function: Callable[[], Tensor]) -> Step:
    """Build the step that computes a tensor from nothing."""
    return lambda known: known.append(function())


def allocation(x: Tensor) -> Step:
    """Build the step that allocates a tensor with the layout of `x` on the current device."""
    shape, strides, dtype, device = tuple(x.shape), x.stride(), x.dtype, x.device
    allocators, name = private_torch.guards, f"_empty_strided_{device.type}"

    def quick(known: list[Tensor | None]) -> None:
        known.append(getattr(allocators, name)(shape, strides, dtype))  # found now: tests poison it

    def usual(known: list[Tensor | None]) -> None:
        known.append(torch.empty_strided(shape, strides, dtype=dtype, device=device))

    return usual if private_torch.allocator(device.type) is None else quick
