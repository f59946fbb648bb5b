"""A pass over a call's tensors: what is allocated, launched, and computed beside it.

Calls repeat. A pass is written down while it runs for the first time; with other tensors that lie in memory alike, its
steps are taken again, without all that they followed from.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C._dynamo import guards as allocators  # of compiled programs: torch.empty_strided takes twice as long

from ...remember import remember
from .launch import Step, launch
from .pointers import Described, Place, Pointers

MOST_PASSES = 4096
Results = Sequence[Tensor | None]


class Recorder:
    """A pass that runs for the first time.

    Its tensors are known by what they are, so that all of them have to come from here. `given` are views of those that
    were given: the same tensor may have come twice, and two the next time.
    """

    def __init__(self, given: Sequence[Tensor | None]):
        self.inputs = [None if x is None else x.detach() for x in given]
        self.tensors = [*self.inputs]
        self.numbers = {id(x): n for n, x in enumerate(self.tensors) if x is not None}
        self.views: dict[int, Tensor] = {}
        self.steps: list[Step] = []

    def number(self, x: Tensor | None) -> int | None:
        return None if x is None else self.numbers[id(x)]

    def new(self, x: Tensor) -> Tensor:
        """`x`, whose contents do not matter: each time, one that lies in memory likewise."""
        self.steps.append(allocation(x))
        return self._added(x)

    def op(self, function: Callable[..., Tensor], *tensors: Tensor | None) -> Tensor:
        """`function(*tensors)`. It may know no other tensor: that would be the first call's. Where it gives back what
        it was given, as for a tensor that is contiguous already, it does so each time.
        """
        result = function(*tensors)
        if id(result) in self.numbers:
            return result
        assert not any(id(x) in self.views for x in tensors)
        scalars = [self.number(x) for x in tensors]

        def step(known: list[Tensor | None]) -> None:
            known.append(function(*[None if n is None else known[n] for n in scalars]))

        self.steps.append(step)
        return self._added(result)

    def contiguous(self, x: Tensor | None) -> Tensor | None:
        return None if x is None else self.op(Tensor.contiguous, x)

    def view(self, base: Tensor, view: Tensor) -> Tensor:
        """`view`, for kernels only: they are told where the memory of `base` begins, which is where its own does."""
        if view is not base:
            self.numbers[id(view)] = self.numbers[id(base)]
            self.views[id(view)] = view
        return view

    def launch(self, kernel: Any, pointers: Pointers, programs: int, scalars: dict[str, Any]) -> None:
        """Run `kernel`; `scalars` are its arguments that are no pointers."""
        if programs == 0:
            return
        places = {name: self._place(x) for name, x in pointers.items()}
        self.steps.append(launch(kernel, programs, scalars, places, self.tensors))

    def _place(self, x: Tensor | Described | None) -> Place | None:
        if isinstance(x, Described):
            return Place(self.numbers[id(x.base)], x.describe, x.given)
        return None if x is None else Place(self.numbers[id(x)])

    def _added(self, x: Tensor) -> Tensor:
        self.numbers[id(x)] = len(self.tensors)
        self.tensors.append(x)
        return x


def allocation(x: Tensor) -> Step:
    """The allocation of another tensor like `x`, on the current device."""
    shape, strides, dtype, device = tuple(x.shape), x.stride(), x.dtype, x.device
    name = f"_empty_strided_{device.type}"

    def quick(known: list[Tensor | None]) -> None:
        known.append(getattr(allocators, name)(shape, strides, dtype))

    def usual(known: list[Tensor | None]) -> None:
        known.append(torch.empty_strided(shape, strides, dtype=dtype, device=device))

    return quick if device.type in ("cpu", "cuda") and hasattr(allocators, name) else usual


class Pass:
    """A pass as it was written down."""

    def __init__(self, steps: list[Step], results: list[int | None]):
        self.steps, self.results = steps, results

    def __call__(self, given: Sequence[Tensor | None]) -> Results:
        tensors = [*given]  # a name in use to the end: kernels know addresses alone
        for step in self.steps:
            step(tensors)
        return [None if n is None else tensors[n] for n in self.results]


_PASSES: dict[Hashable, Pass] = {}


def run(key: Hashable, given: Sequence[Tensor | None], record: Callable[..., Results], *arguments: Any) -> Results:
    """The results of a pass over `given`, the first of which is on the device to run on.

    `record(recorder, *arguments)` runs it on `recorder.inputs`. All that it does follows from `key`, short of addresses
    and of what tensors hold.
    """
    q = given[0]
    assert q is not None
    if q.is_cuda and torch.cuda.current_device() != q.get_device():  # Triton launches on the current one
        with torch.cuda.device(q.device):
            return run(key, given, record, *arguments)
    known = _PASSES.get(key)
    if known is not None:
        return known(given)
    recorder = Recorder(given)
    results = record(recorder, *arguments)
    remember(_PASSES, key, Pass(recorder.steps, [recorder.number(x) for x in results]), MOST_PASSES)
    return results
