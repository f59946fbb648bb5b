"""A recording does with other tensors what it did when it was recorded."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from flashtile.testing.poison import poisoned_allocation

pytest.importorskip("triton")

from exhausted import exhausted

from flashtile.backend.gpu import replay
from flashtile.backend.gpu.pointers import Described
from flashtile.backend.gpu.replay import Recorder, Results
from flashtile.backend.scalars import rows_last
from flashtile.backend.triton.launch import semaphores


class Kernel:
    """Writes `x + n * y` into all but the last row of `written`. As if interpreted: nothing is compiled."""

    def __init__(self) -> None:
        self.launches = 0

    def __getitem__(self, grid: tuple[int]) -> Any:
        return self.run

    def run(self, x: Tensor, y: Tensor, written: Tensor, n: int, enable_fp_fusion: bool) -> None:
        assert enable_fp_fusion
        self.launches += 1
        written[:-1] = (x + n * y)[:-1]


class Function:
    """A host function with two results, the second computed from the first."""

    def __init__(self) -> None:
        self.kernel, self.times = Kernel(), 0

    def __call__(self, recorder: Recorder, n: int) -> Results:
        self.times += 1
        x, y, absent = recorder.inputs
        assert x is not None
        assert y is not None
        assert absent is None
        written = recorder.new(torch.empty_like(y))
        pointers = {"x": recorder.op(rows_last, x), "y": Described(y, Tensor.mul, 2), "written": written}
        recorder.launch(self.kernel, pointers, 1, {"n": n})
        recorder.launch(self.kernel, pointers, 0, {"n": n})  # no programs
        return written, None, recorder.op(Tensor.neg, written)


def given(*, same: bool = False, columns: bool = False) -> tuple[Tensor, Tensor, None]:
    x = torch.randn(8, 4)
    return x.t().contiguous().t() if columns else x, x if same else torch.randn(8, 4), None


def assert_right(results: Results, given: Sequence[Tensor | None]) -> None:
    x, y, _ = given
    assert x is not None
    assert y is not None
    written, nothing, negative = results
    assert written is not None
    assert negative is not None
    assert nothing is None
    torch.testing.assert_close(written[:-1], (x + 10 * y)[:-1])
    assert torch.equal(negative[:-1], -written[:-1])


@pytest.mark.parametrize("columns", [False, True])
def test_other_tensors(columns: bool) -> None:
    function, first = Function(), given(columns=columns)
    recording, results = replay.record(first, function, 5)
    kept = [(results, first)]
    for _ in range(2):
        tensors = given(columns=columns)
        kept.append((recording(tensors), tensors))
    for results, tensors in kept:  # each call has results of its own
        assert_right(results, tensors)
    assert function.times == 1
    assert function.kernel.launches == 3


def test_a_tensor_given_twice_and_then_two() -> None:
    function = Function()
    recording, _ = replay.record(given(same=True), function, 5)
    for same in (False, True):
        tensors = given(same=same)
        assert_right(recording(tensors), tensors)
    assert function.times == 1


def test_a_run_records_nothing() -> None:
    function, tensors = Function(), given(columns=True)
    recorders: list[Recorder] = []

    def watched(recorder: Recorder, n: int) -> Results:
        recorders.append(recorder)
        return function(recorder, n)

    assert_right(replay.run(tensors, watched, 5), tensors)
    assert recorders[0].steps == []


def test_a_description_begins_where_its_tensor_does() -> None:
    """A replay adds no offset to the tensor's address."""

    def function(recorder: Recorder, n: int) -> Results:
        x, y, _ = recorder.inputs
        assert y is not None
        pointers = {"x": x, "y": Described(y, Tensor.__getitem__, n), "written": recorder.new(torch.empty_like(y))}
        recorder.launch(Kernel(), pointers, 1, {"n": n})
        return [pointers["written"]]  # type: ignore[list-item]

    replay.record(given(), function, 0)
    with pytest.raises(AssertionError, match="for its base"):
        replay.record(given(), function, 1)


@pytest.mark.parametrize("kept", [True, False])
def test_a_constant_is_computed_once_if_it_is_small(kept: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    x, computed = torch.randn(4), []
    if not kept:
        monkeypatch.setattr(replay, "MOST_CONSTANT", 4 * 4 - 1)

    def ones() -> Tensor:
        computed.append(None)
        return torch.ones(4)

    def function(recorder: Recorder) -> Results:
        return [recorder.op(torch.add, recorder.inputs[0], recorder.constant(ones))]

    recording, (first,) = replay.record([x], function)
    second, third = recording([x])[0], recording([2 * x])[0]
    for result, right in ((first, x + 1), (second, x + 1), (third, 2 * x + 1)):
        assert result is not None
        assert torch.equal(result, right)
    assert len(computed) == (1 if kept else 3)


def test_nothing_is_kept_alive() -> None:
    tensors = given(columns=True)
    recording, results = replay.record(tensors, Function(), 5)
    results = (*results, *recording(tensors))
    memory = [StorageWeakRef(x.untyped_storage()) for x in (*tensors, *results) if x is not None]
    del tensors, results
    assert all(x.expired() for x in memory)


def test_allocations_are_poisoned_in_every_run() -> None:
    with poisoned_allocation():
        recording, first = replay.record(given(), Function(), 5)
        for written in (first[0], recording(given())[0]):
            assert written is not None
            assert written[-1].isnan().all()


def test_a_tensor_from_elsewhere_is_refused() -> None:
    def function(recorder: Recorder) -> Results:
        pointers = {"x": recorder.inputs[0], "y": torch.randn(8, 4), "written": recorder.new(torch.empty(8, 4))}
        recorder.launch(Kernel(), pointers, 1, {"n": 1})
        return ()

    for execute in (replay.run, replay.record):
        with pytest.raises(KeyError):
            execute(given(), function)


def test_a_workspace_is_one_allocation() -> None:
    """Kernels and operations take its tensors, each time another's memory."""
    kernel, calls = Kernel(), 0

    def function(recorder: Recorder) -> Results:
        nonlocal calls
        calls += 1
        x, y, _ = recorder.inputs
        assert x is not None
        layouts = {"flags": ((3,), torch.int32), "written": ((8, 4), torch.float32)}
        parts = recorder.workspace(x, layouts)
        assert len({part.untyped_storage().data_ptr() for part in parts.values()}) == 1
        assert [part.data_ptr() % replay.ALIGNMENT for part in parts.values()] == [
            parts["flags"].data_ptr() % replay.ALIGNMENT
        ] * 2
        recorder.launch(kernel, {"x": x, "y": y, "written": parts["written"]}, 1, {"n": 3})
        return (recorder.op(torch.clone, parts["written"]),)

    first = given()
    recording, results = replay.record(first, function)
    for tensors, (found, *_) in ((first, results), *((x, recording(x)) for x in (given(), given()))):
        x, y, _ = tensors
        assert found is not None
        assert torch.equal(found[:-1], (x + 3 * y)[:-1])
    assert calls == 1
    assert len(recording.steps) == 3  # an allocation, a launch, a copy


@pytest.mark.parametrize("dtype", [torch.float16, torch.int32, torch.bool])
def test_an_allocation_is_like_its_first(dtype: torch.dtype) -> None:
    first = torch.empty_strided((2, 3, 4), (12, 1, 3), dtype=dtype)
    found: list[Tensor | None] = []
    replay.allocation(first)(found)
    (x,) = found
    assert x is not None
    assert (x.shape, x.stride(), x.dtype, x.device) == (first.shape, first.stride(), dtype, first.device)
    assert not x.requires_grad


def test_counters_of_graphs_are_as_aligned_as_those_of_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that was compiled for a pointer that is a multiple of 16 gets no other when its pass is replayed."""
    device = torch.device("cpu")
    reserved = semaphores.zeros(device, 16)
    monkeypatch.setattr(semaphores, "_for_graphs", {device: [reserved]})
    places = [semaphores.of_a_graph(device, count).data_ptr() - reserved.data_ptr() for count in (3, 4, 1)]
    assert places == [0, 16, 32]
    assert len(semaphores.of_a_graph(device, 5)) == 5  # more than are left
    assert semaphores.of_a_graph(device, 4).data_ptr() - reserved.data_ptr() == 48


def test_counters_that_could_not_be_reserved(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cpu")
    monkeypatch.setattr(semaphores, "_for_graphs", {})
    with exhausted(0), pytest.raises(torch.OutOfMemoryError):
        semaphores.reserve(device)
    assert len(semaphores.of_a_graph(device, 3)) == 3
