"""A pass is written down while it runs for the first time, and does the same with other tensors afterwards."""

from collections.abc import Iterator, Sequence
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
from flashtile.backend.triton import semaphores


class Kernel:
    """Writes `x + n * y` into all but the last row of `written`. As if interpreted: nothing is compiled."""

    def __init__(self) -> None:
        self.launches = 0

    def __getitem__(self, grid: tuple[int]) -> Any:
        return self.run

    def run(self, x: Tensor, y: Tensor, written: Tensor, n: int) -> None:
        self.launches += 1
        written[:-1] = (x + n * y)[:-1]


class Recording:
    """A pass of two results, the second computed from the first."""

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


@pytest.fixture
def recording() -> Iterator[Recording]:
    replay._PASSES.clear()
    yield Recording()
    replay._PASSES.clear()


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
def test_other_tensors(recording: Recording, columns: bool) -> None:
    kept = []
    for _ in range(3):
        tensors = given(columns=columns)
        kept.append((replay.run("key", tensors, recording, 5), tensors))
    for results, tensors in kept:  # each call has results of its own
        assert_right(results, tensors)
    assert recording.times == 1
    assert recording.kernel.launches == 3


def test_a_tensor_given_twice_and_then_two(recording: Recording) -> None:
    for same in (True, False, True):
        tensors = given(same=same)
        assert_right(replay.run("key", tensors, recording, 5), tensors)
    assert recording.times == 1


def test_another_key_is_another_pass(recording: Recording) -> None:
    for key in ("key", "other", "key"):
        replay.run(key, given(), recording, 5)
    assert recording.times == 2


def test_nothing_is_kept_alive(recording: Recording) -> None:
    tensors = given(columns=True)
    results = replay.run("key", tensors, recording, 5)
    memory = [StorageWeakRef(x.untyped_storage()) for x in (*tensors, *results) if x is not None]
    del tensors, results
    assert all(x.expired() for x in memory)


def test_allocations_are_poisoned_in_every_run(recording: Recording) -> None:
    with poisoned_allocation():
        for _ in range(2):
            written, *_ = replay.run("key", given(), recording, 5)
            assert written is not None
            assert written[-1].isnan().all()


def test_a_tensor_from_elsewhere_is_refused(recording: Recording) -> None:
    def record(recorder: Recorder) -> Results:
        pointers = {"x": recorder.inputs[0], "y": torch.randn(8, 4), "written": recorder.new(torch.empty(8, 4))}
        recorder.launch(recording.kernel, pointers, 1, {"n": 1})
        return ()

    with pytest.raises(KeyError):
        replay.run("key", given(), record)
    assert replay._PASSES == {}


def test_few_are_remembered(recording: Recording, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "MOST_PASSES", 2)
    for key in range(5):
        replay.run(key, given(), recording, 5)
    assert list(replay._PASSES) == [3, 4]


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
