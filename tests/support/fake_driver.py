"""A CUDA driver that records launches: what `backend.gpu.driver.Driver` gives a compiled kernel, on CPU tensors."""

import ctypes
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

from flashtile.backend.gpu import archive
from flashtile.backend.gpu.archive import Archive
from flashtile.backend.gpu.driver import DriverError, LaunchConfig, MapLayout, NotRunnableError, TensorMap


class Launched(NamedTuple):
    """One launch: the arguments' eight bytes each, or a tensor map's 128."""

    function: int
    config: LaunchConfig
    arguments: list[int]
    maps: dict[int, bytes]  # by the argument's place

    @property
    def attributes(self) -> list[tuple[int, list[int]]]:
        count = self.config.num_attributes
        return [(x.id, list(x.value[:3])) for x in self.config.attributes[:count]]


class FakeDriver:
    """Records what it loads and launches. `failures` are results of launches to come."""

    def __init__(self, unrunnable: bool = False) -> None:
        self.unrunnable = unrunnable
        self.loaded: list[tuple[bytes, str, int, int, int]] = []
        self.launched: list[Launched] = []
        self.encoded: list[tuple[MapLayout, int, tuple[int, ...], tuple[int, ...]]] = []
        self.failures: list[int] = []
        self.current = 1  # the context

    def device(self) -> int:
        return 0

    def stream(self, device: int) -> int:
        return 7

    def context(self) -> int:
        return self.current

    def load(self, image: bytes, name: str, threads: int, shared: int, cluster: int) -> int:
        if self.unrunnable:
            raise NotRunnableError("no binary for this GPU")
        self.loaded.append((image, name, threads, shared, cluster))
        return 1000 * self.current + len(self.loaded)

    def tensor_map(self, layout: MapLayout, address: int, shape: Sequence[int], strides: Sequence[int]) -> TensorMap:
        self.encoded.append((layout, address, tuple(shape), tuple(strides)))
        made = TensorMap()
        ctypes.memmove(made.address, struct.pack("Q", address), 8)
        return made

    def launch_kernel(self, config: Any, function: Any, params: Any, extra: None) -> int:
        if self.failures:
            return self.failures.pop(0)
        values, maps = [], {}
        for n, address in enumerate(params):
            values.append(struct.unpack("Q", ctypes.string_at(address, 8))[0])
            if address % 64 == 0:  # as a tensor map's has to be; others may be, too
                maps[n] = ctypes.string_at(address, 8)
        copied = LaunchConfig.from_buffer_copy(config._obj)
        self.launched.append(Launched(function.value, copied, values, maps))
        return 0

    def check(self, code: int, doing: str) -> None:
        if code:
            raise DriverError(f"CUDA error {code} while {doing}")


@contextmanager
def opened(archives: Callable[[], Archive | None]) -> Iterator[None]:
    """Inside, all devices have the archive that the function returns."""
    with mock.patch.object(archive, "archive_of", side_effect=lambda device: archives()):
        yield
