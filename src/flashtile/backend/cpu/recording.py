"""Recordings of launches. All that a repeated call needs of its host is to allocate, to fill in addresses and to call
the kernel, if the kernel reads the call's tensors as they are and writes the results themselves.
"""

from collections.abc import Mapping, Sequence

from torch import Tensor

from ...call.call import Call, Tensors
from ..replays import Results
from . import arguments as args
from .launch import KernelLaunch, TensorSpec, allocate, start

# The places of a kernel's tensors among the call's inputs, by the names of its fields. Those of rows follow.
PLACES = {"q": 0, "k": 1, "v": 2, **dict(args.PAIR_INPUTS), **dict(args.HEAD_INPUTS)}
PLACES |= {"seed": Tensors._fields.index("dropout_seed"), "out": Tensors._fields.index("out")}
ROWS = ("out", "lse", "dout", "dlse")
NEW = ("out", "lse", "partial_out", "partial_lse", "delta", "dq", "dk", "dv")  # which a kernel writes as a whole


class Recording:
    """A launch, with the slots of its tensors and of the results. Slot n is input n; allocated tensors follow the
    inputs.
    """

    def __init__(
        self,
        launch: KernelLaunch,
        slots: Sequence[tuple[int, int]],
        specs: Sequence[TensorSpec],
        results: Sequence[int | None],
    ):
        self.launch, self.slots, self.specs, self.results = launch, slots, specs, results

    def __call__(self, inputs: Results) -> Results:
        return self.run(inputs, self.launch)

    def run(self, inputs: Results, launch: KernelLaunch) -> Results:
        known = [*inputs, *[allocate(*spec) for spec in self.specs]]  # alive until the kernel returns
        block = type(launch.block).from_buffer_copy(launch.block)  # `arguments.copied`, without a call
        for field, n in self.slots:
            block[field] = known[n].data_ptr()  # type: ignore[union-attr]
        start(launch, block)
        return [None if n is None else known[n] for n in self.results]


def recorded(
    call: Call,
    launch: KernelLaunch,
    tensors: Mapping[str, Tensor],
    results: Results,
    rows: Results = (),
    of_cache: Mapping[str, int] | None = None,
) -> Recording | None:
    """The recording of a launch with `tensors`, by the names of its fields; `None` if a replay has more to do. `rows`
    are out, lse, dout and dlse of a backward pass; `of_cache` are places of a cache's tensors.
    """
    inputs, places = (*call.inputs, *rows), {**PLACES, **(of_cache or {})}
    places |= {name: len(call.inputs) + n for n, name in enumerate(ROWS[: len(rows)])}
    num_inputs = len(inputs) + (1 if rows else 0)  # with what forward has kept
    slots, specs, written = [], [], {}
    for name, x in tensors.items():
        given = inputs[places[name]] if name in places else None
        if given is not None and given.data_ptr() == x.data_ptr():  # no copy, for all calls of the same layout
            slots.append((args.FIELD_INDEX[name], places[name]))
        elif given is None and name in NEW:
            slots.append((args.FIELD_INDEX[name], num_inputs + len(specs)))
            specs.append(TensorSpec.of(x))
        else:
            return None
        if name in NEW:
            written[id(x)] = slots[-1][1]
    if any(x is not None and id(x) not in written for x in results):  # a sum of splits
        return None
    return Recording(launch, slots, specs, [None if x is None else written[id(x)] for x in results])
