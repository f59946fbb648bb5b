"""A compiled kernel of an archive: loaded into a context at first use, launched by address.

The driver reads all arguments of a launch from a `Frame`, eight bytes each. A recorded launch keeps frames with
everything but addresses in place, and with the tensor maps of its last launch. A thread takes a frame out of the list
while it launches, so that no lock is needed.
"""

import ctypes
import struct
from collections.abc import Callable, Mapping
from ctypes import c_float, c_uint, c_uint64, c_void_p
from typing import Any

import torch
from torch import Tensor

from ...remember import remember
from .driver import INVALID_CONTEXT, INVALID_HANDLE, Driver, LaunchConfig, MapLayout, TensorMap, attributes_of
from .pointers import Slot, Slots, TmaDescriptor, described_tensors, resolved
from .signature import Parameters

MOST_ADDRESSES = 256  # addresses of tensor maps that a launch keeps
POINTER, MAP = "pointer", "map"  # types of arguments that have addresses
FORMATS = {POINTER: "Q", MAP: "Q", "i32": "i4x", "i64": "q", "u64": "Q", "fp32": "f4x", "u1": "B7x"}  # eight bytes each
WARP = 32


class Binary:
    """A kernel's machine code and how it is launched. `facts` are its entry in the archive's index, `image` reads the
    code, checked.
    """

    def __init__(self, parameters: Parameters, facts: Mapping[str, Any], image: Callable[[], bytes], driver: Driver):
        self.facts, self.image, self.driver = facts, image, driver
        self.arguments = [(name, kind) for (name, _), kind in zip(parameters, facts["types"], strict=True) if kind]
        self.layouts = [MapLayout(*layout) for layout in facts["maps"]]
        self.threads = WARP * facts["warps"]
        self.attributes = attributes_of(facts["programmatic"], facts["cooperative"], facts["cluster"])
        self.scratch = facts["scratch"]  # bytes of a program: Triton's global scratch memory, and its profiler's
        self.functions: dict[int, Any] = {}  # by context
        # A tensor map is followed by its sizes and strides.
        ranks = (len(layout.box) for layout in self.layouts)
        shapes = (FORMATS["i32"] * n + FORMATS["i64"] * n for n in ranks)
        formats = [FORMATS[kind] + (next(shapes) if kind == MAP else "") for _, kind in self.arguments]
        self.frame = struct.Struct("".join(["=", *formats, *[FORMATS[POINTER]] * len(self.scratch)]))

    def function(self) -> Any:
        """The function in the current context.

        Raises:
            ValueError: the archive is damaged.
            DriverError: the driver or the device cannot run the kernel.
        """
        context = self.driver.context()
        if (known := self.functions.get(context)) is None:
            facts = self.facts
            given = (facts["function"], self.threads, facts["shared"], facts["cluster"])
            known = self.functions[context] = c_void_p(self.driver.load(self.image(), *given))
        return known

    def config(self, programs: int) -> LaunchConfig:
        config = LaunchConfig()
        config.grid = (c_uint * 3)(programs * self.facts["cluster"], 1, 1)
        config.block = (c_uint * 3)(self.threads, 1, 1)
        config.shared = self.facts["shared"]
        if self.attributes is not None:
            config.attributes, config.num_attributes = self.attributes, len(self.attributes)
        return config


class Frame:
    """The arguments of a launch, in memory."""

    def __init__(self, values: bytes, config: LaunchConfig, maps: int):
        count = len(values) // 8
        self.slots = (c_uint64 * count).from_buffer_copy(values)
        base = ctypes.addressof(self.slots)
        self.params = (c_uint64 * count)(*range(base, base + 8 * count, 8))  # the address of each argument
        self.config, self.config_pointer = config, ctypes.byref(config)
        self.maps: list[TensorMap | None] = [None] * maps  # alive while the driver reads them
        self.mapped: list[int] = []  # addresses of the tensors that they are of


class BinaryLaunch:
    """A step that launches a binary for tensors of one layout, on the device that was current when it was made."""

    def __init__(self, binary: Binary, programs: int, scalars: Mapping[str, Any], slots: Slots, tensors: Any):
        self.binary, self.programs = binary, programs
        self.device, self.stream = binary.driver.device(), binary.driver.stream
        self.function = binary.function()
        self.launch = binary.driver.launch_kernel
        self.pointers: list[tuple[int, int, int]] = []  # place in the frame, index of the tensor, bytes from there
        self.mapped = described_tensors(slots)  # indices of the tensors of maps, and perhaps of others
        # Place in the frame, that of the tensor in `mapped`, bytes from there, and what makes the map.
        self.maps: list[tuple[int, int, int, Slot, MapLayout, dict[int, TensorMap]]] = []
        self.frames: list[Frame] = []
        self.values = self.packed({**scalars, **resolved(slots, tensors)}, slots)

    def packed(self, arguments: Mapping[str, Any], slots: Slots) -> bytes:
        """The memory of a frame, with 0 for addresses; fills `pointers` and `maps`."""
        values, layouts = [], iter(self.binary.layouts)
        for name, kind in self.binary.arguments:
            x = arguments[name]
            place, slot = len(values), slots.get(name)
            if kind not in (POINTER, MAP):
                values.append(c_float(x).value if kind == "fp32" else x)  # rounds as C does: no overflow error
                continue
            values.append(0)
            assert slot is not None
            if kind == POINTER:
                self.pointers.append((place, slot.index, slot.offset))
                continue
            assert isinstance(x, TmaDescriptor)
            self.maps.append((place, self.mapped.index(slot.index), slot.offset, slot, next(layouts), {}))
            values += [*x.shape, *x.strides]
        self.scratch = [(len(values) + n, size) for n, size in enumerate(self.binary.scratch) if size]
        return self.binary.frame.pack(*values, *[0] * len(self.binary.scratch))

    def __call__(self, tensors: list[Tensor | None]) -> None:
        try:
            frame = self.frames.pop()
        except IndexError:
            frame = Frame(self.values, self.binary.config(self.programs), len(self.maps))
        slots = frame.slots
        for n, index, offset in self.pointers:
            slots[n] = tensors[index].data_ptr() + offset  # type: ignore[union-attr]
        if self.maps:
            addresses = [tensors[n].data_ptr() for n in self.mapped]  # type: ignore[union-attr]
            if addresses != frame.mapped:
                self.put_maps(frame, addresses, tensors)
        frame.config.stream = self.stream(self.device)
        if self.scratch:
            self.with_scratch(frame)
        elif code := self.launch(frame.config_pointer, self.function, frame.params, None):
            self.retry(frame, code)
        self.frames.append(frame)

    def put_maps(self, frame: Frame, addresses: list[int], tensors: list[Tensor | None]) -> None:
        """Let the frame have the maps of tensors at these addresses."""
        params, maps = frame.params, frame.maps
        for number, (n, place, offset, slot, layout, by_address) in enumerate(self.maps):
            address = addresses[place] + offset
            tensor_map = by_address.get(address)
            if tensor_map is None:
                x = slot.resolve(tensors)
                tensor_map = self.binary.driver.tensor_map(layout, address, x.shape, x.strides)
                remember(by_address, address, tensor_map, MOST_ADDRESSES)
            params[n] = tensor_map.address
            maps[number] = tensor_map
        frame.mapped = addresses

    def with_scratch(self, frame: Frame) -> None:
        """Launch with scratch memory, which the stream's later work may have when the launch is queued."""
        blocks = []
        for n, size in self.scratch:
            count = self.programs * self.binary.facts["cluster"] * size
            blocks.append(torch.empty(count, dtype=torch.uint8, device=torch.device("cuda", self.device)))
            frame.slots[n] = blocks[-1].data_ptr()
        if code := self.launch(frame.config_pointer, self.function, frame.params, None):
            self.retry(frame, code)

    def retry(self, frame: Frame, code: int) -> None:
        """Launch again where only the context was another: a new thread has none, and others may have been made."""
        driver = self.binary.driver
        if code in (INVALID_CONTEXT, INVALID_HANDLE):
            self.function = self.binary.function()
            code = self.launch(frame.config_pointer, self.function, frame.params, None)
        driver.check(code, f"launching {self.binary.facts['function']}")
