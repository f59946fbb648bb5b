"""A compiled kernel is launched with the bytes that Triton's launcher would give the driver."""

import ctypes
import struct
import threading
import weakref
from typing import Any

import pytest
import torch
from fake_driver import FakeDriver
from torch import Tensor

from flashtile.backend.gpu.binary import Binary, BinaryLaunch
from flashtile.backend.gpu.driver import (
    INVALID_CONTEXT,
    INVALID_HANDLE,
    MAP_ALIGNMENT,
    DriverError,
    LaunchAttribute,
    LaunchConfig,
    TensorMap,
)
from flashtile.backend.gpu.pointers import Part, Slot, TmaDescriptor
from flashtile.backend.gpu.signature import CONSTANT, PLAIN, SPECIALIZED

PARAMETERS = [
    ("q_desc", SPECIALIZED), ("lse", SPECIALIZED), ("absent", SPECIALIZED), ("n", PLAIN), ("far", PLAIN),
    ("factor", PLAIN), ("huge", PLAIN), ("flag", PLAIN), ("TILE", CONSTANT), ("last", SPECIALIZED),
]  # fmt: skip
FACTS: dict[str, Any] = {
    "function": "kernel",
    "types": ["map", "pointer", None, "i32", "i64", "fp32", "fp32", "u1", None, "pointer"],
    "maps": [(3, 9, 2, [1, 64])],
    "warps": 4,
    "cluster": 1,
    "shared": 50000,
    "programmatic": False,
    "cooperative": False,
    "scratch": [0, 0],
}
OFFSET = 128  # of the last argument in its workspace
SCALARS = {"n": -5, "far": 2**40, "factor": 0.1, "huge": 1e300, "flag": True, "TILE": "a tile", "num_warps": 4}
SLOTS = {"q_desc": Slot(0, lambda x, rows: TmaDescriptor(x, tuple(x.shape), x.stride(), (rows, 64)), 1), "lse": Slot(1)}
SLOTS |= {"absent": None, "last": Slot(2, part=Part(OFFSET, (4,), torch.float32))}  # type: ignore[dict-item]


def tensors() -> list[Tensor | None]:
    return [torch.randn(3, 64, dtype=torch.bfloat16), torch.randn(4), torch.zeros(OFFSET + 16, dtype=torch.uint8)]


def binary(driver: FakeDriver, **changes: Any) -> Binary:
    return Binary(PARAMETERS, FACTS | changes, lambda: b"machine code", driver)  # type: ignore[arg-type]


def slot_of(code: str, value: Any) -> int:
    """Eight bytes of an argument as one number, 0 behind it."""
    return struct.unpack("<Q", struct.pack(f"<{code}", value).ljust(8, b"\0"))[0]


def expected(given: list[Tensor | None]) -> list[int]:
    q, lse, last = (x.data_ptr() for x in given if x is not None)
    scalars = [("i", -5), ("q", 2**40), ("f", 0.1), ("f", float("inf")), ("B", 1)]
    of_map = [slot_of("i", 3), slot_of("i", 64), slot_of("q", 64), slot_of("q", 1)]
    return [q, *of_map, lse, *(slot_of(code, x) for code, x in scalars), last + OFFSET, 0, 0]


def test_structures_are_those_of_the_driver() -> None:
    """cuda.h: CUlaunchConfig has 7 ints, 2 pointers and an int; CUlaunchAttribute an enum, padding and 64 bytes."""
    assert ctypes.sizeof(LaunchConfig) == 56
    assert (LaunchConfig.stream.offset, LaunchConfig.attributes.offset, LaunchConfig.num_attributes.offset) == (
        32,
        40,
        48,
    )
    assert ctypes.sizeof(LaunchAttribute) == 72
    assert LaunchAttribute.value.offset == 8
    assert all(TensorMap().address % MAP_ALIGNMENT == 0 for _ in range(10))


def test_arguments() -> None:
    driver, first = FakeDriver(), tensors()
    launch = BinaryLaunch(binary(driver), 12, SCALARS, SLOTS, first)
    others = tensors()
    for given in (first, others, first):
        launch(given)
        done = driver.launched[-1]
        assert done.arguments == expected(given)
        assert done.function == 1001
        config = done.config
        assert (list(config.grid), list(config.block), config.shared, config.stream) == (
            [12, 1, 1],
            [128, 1, 1],
            50000,
            7,
        )
        assert done.attributes == []
    assert driver.loaded == [(b"machine code", "kernel", 128, 50000, 1)]
    assert [(address, shape, strides) for _, address, shape, strides in driver.encoded] == [
        (x[0].data_ptr(), (3, 64), (64, 1))
        for x in (first, others)  # type: ignore[union-attr]
    ]  # once for each address
    assert driver.encoded[0][0] == (3, 9, 2, [1, 64])


def test_attributes_in_triton_s_order() -> None:
    driver = FakeDriver()
    several = binary(driver, programmatic=True, cooperative=True, cluster=2)
    BinaryLaunch(several, 12, SCALARS, SLOTS, tensors())(tensors())
    done = driver.launched[-1]
    assert done.attributes == [(6, [1, 0, 0]), (2, [1, 0, 0]), (4, [2, 1, 1]), (5, [1, 0, 0])]
    assert list(done.config.grid) == [24, 1, 1]


def test_scratch_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    empty, made = torch.empty, []

    def on_cpu(count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        assert device == torch.device("cuda", 0)
        made.append(empty(count, dtype=dtype))
        return made[-1]

    monkeypatch.setattr(torch, "empty", on_cpu)
    driver, given = FakeDriver(), tensors()
    BinaryLaunch(binary(driver, scratch=[128, 0], cluster=2), 12, SCALARS, SLOTS, given)(given)
    assert [len(x) for x in made] == [12 * 2 * 128]
    assert driver.launched[-1].arguments[-2:] == [made[0].data_ptr(), 0]


@pytest.mark.parametrize("code", [INVALID_CONTEXT, INVALID_HANDLE])
def test_another_context(code: int) -> None:
    """A launch in a context that has not loaded the kernel loads it there, once."""
    driver, given = FakeDriver(), tensors()
    launch = BinaryLaunch(binary(driver), 12, SCALARS, SLOTS, given)
    launch(given)
    driver.current, driver.failures = 2, [code]
    launch(given)
    launch(given)
    assert [x.function for x in driver.launched] == [1001, 2002, 2002]
    assert len(driver.loaded) == 2


def test_other_errors_are_raised() -> None:
    driver, given = FakeDriver(), tensors()
    launch = BinaryLaunch(binary(driver), 12, SCALARS, SLOTS, given)
    driver.failures = [700]
    with pytest.raises(DriverError, match="700 while launching kernel"):
        launch(given)
    launch(given)
    assert driver.launched[-1].arguments == expected(given)


def test_threads_do_not_mix_their_arguments() -> None:
    """A thread that stops inside a launch keeps its arguments while another launches."""
    inside, go_on = threading.Event(), threading.Event()

    class Stopping(FakeDriver):
        def launch_kernel(self, *given: Any) -> int:
            if threading.current_thread() is not threading.main_thread():
                inside.set()
                go_on.wait(10)
            return super().launch_kernel(*given)

    driver, first, second = Stopping(), tensors(), tensors()
    launch = BinaryLaunch(binary(driver), 12, SCALARS, SLOTS, first)
    launch(first)
    thread = threading.Thread(target=launch, args=(first,))
    thread.start()
    assert inside.wait(10)
    launch(second)
    go_on.set()
    thread.join()
    assert [x.arguments for x in driver.launched] == [expected(x) for x in (first, second, first)]
    assert len(launch.frames) == 2


def test_no_tensor_is_kept() -> None:
    given: list[Tensor | None] = tensors()
    launch = BinaryLaunch(binary(FakeDriver()), 12, SCALARS, SLOTS, given)
    launch(given)
    references = [weakref.ref(x) for x in given if x is not None]
    del given
    assert all(x() is None for x in references)
