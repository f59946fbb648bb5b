"""The `cpu` backend with kernels that are cross-compiled and run under qemu, each launch in a process of its own.

All that a kernel reads or writes (tensors, tables, the argument block) is copied into a file, which that process maps
at a fixed address; addresses in the block and in tables are changed accordingly.
"""

import ctypes
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from llvmlite import binding as llvm
from torch import Tensor

from flashtile.backend.cpu import (
    arguments,
    distance_table,
    host_backward,
    host_cache,
    host_forward,
    jit,
    machine_code,
    targets,
)
from flashtile.backend.cpu.launch import KernelLaunch
from flashtile.backend.cpu.targets import Target
from flashtile.backend.cpu.variant import TableVariant, Variant
from flashtile.dispatch import fast_path

COMPILER, EMULATOR = "aarch64-linux-gnu-gcc", "qemu-aarch64-static"
DRIVER = Path(__file__).parent / "driver.c"
TRIPLE = "aarch64-unknown-linux-gnu"
BASE, PAGE = 0x20_0000_0000, 4096


class Processor(NamedTuple):
    """An ARM processor. Vectors wider than its registers are split by LLVM."""

    vector_bytes: int
    sve: bool = False  # with registers as wide as the vectors

    @property
    def target(self) -> Target:
        return targets.make_target("neon")._replace(vector_bytes=self.vector_bytes)

    @property
    def compiled_for(self) -> targets.Processor:
        neon = targets.generic("neon", TRIPLE)
        return neon._replace(features="+sve") if self.sve else neon

    @property
    def options(self) -> list[str]:
        return ["-cpu", f"max,sve-default-vector-length={self.vector_bytes}" if self.sve else "cortex-a72"]


PROCESSORS = {
    "NEON": Processor(16),
    "NEON, vectors of 32 bytes": Processor(32),
    "NEON, vectors of 64 bytes": Processor(64),
    "SVE, 32 bytes": Processor(32, sve=True),
    "SVE, 64 bytes": Processor(64, sve=True),
}


def missing() -> str | None:
    """Tools that this machine lacks; `None` if it has all."""
    lacking = [name for name in (COMPILER, EMULATOR) if shutil.which(name) is None]
    return f"needs {' and '.join(lacking)}" if lacking else None


class Memory:
    """The content of the file, and where each range of this process's memory is in it."""

    def __init__(self) -> None:
        self.size = PAGE
        self.parts: list[tuple[int, int, int]] = []  # address here, bytes, offset in the file

    def add(self, address: int, size: int) -> None:
        """Copy a range. Its place in a page stays, and with it every alignment."""
        offset = -(-self.size // PAGE) * PAGE + address % PAGE
        self.parts.append((address, size, offset))
        self.size = offset + size + PAGE  # a gap in which a stray access is a fault

    def add_storages(self, *tensors: Tensor) -> None:
        """Copy the memory of tensors, some of which may share it."""
        storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}
        for address, size in storages.items():
            if address:
                self.add(address, size)

    def there(self, address: int) -> int:
        """The address in the emulated process; 0 stays 0."""
        for start, size, offset in self.parts:
            if start <= address < start + size or (size == 0 and address == start):
                return BASE + offset + address - start
        assert address == 0, "an address that was not copied"
        return 0

    def write(self, file: Path, *arguments: int) -> None:
        size = -(-self.size // PAGE) * PAGE
        with file.open("wb") as out:
            out.truncate(size)
            out.write(struct.pack("7Q", BASE, size, *arguments, *[0] * (5 - len(arguments))))
            for address, size, offset in self.parts:
                out.seek(offset)
                out.write(ctypes.string_at(address, size))

    def read(self, file: Path, kept: set[int]) -> None:
        """Copy everything back but the ranges that begin at `kept`, whose addresses were changed."""
        content = file.read_bytes()
        for address, size, offset in self.parts:
            if address not in kept:
                ctypes.memmove(address, content[offset : offset + size], size)


class Emulation:
    """Kernels compiled for a processor, and their launches."""

    def __init__(self, processor: Processor, folder: Path):
        self.processor, self.folder = processor, folder
        self.programs: list[Path] = []
        self.captured: list[Tensor] = []
        self.entries = torch.empty(0)  # addresses, sizes and strides of these
        self.real_bytes: dict[int, int] = {}  # of an element of a table of distances, by the number of its program
        self.launches = 0

    def function_address(self, name: str, variant: Variant | TableVariant, target: Target) -> int:
        """Compile a program. Its number stands for the kernel's address, which is never called."""
        number = len(self.programs) + 1
        program, machine = self.folder / str(number), jit.target_machine(self.processor.compiled_for)
        codes = [
            jit.compile_object(text, machine) for text in machine_code.source_of(name, variant, target).texts().values()
        ]
        kernel = [self.folder / f"{number}-{n}.o" for n in range(len(codes))]
        for file, code in zip(kernel, codes, strict=True):
            file.write_bytes(code)
        command = [COMPILER, "-O1", "-static", f"-DKERNEL={name}", str(DRIVER), *map(str, kernel)]
        subprocess.run([*command, "-o", str(program), "-lm"], check=True)
        self.programs.append(program)
        self.real_bytes[number] = 8 if variant.real_dtype == "float64" else 4
        return number

    def captured_table(self, tensors: list[Tensor]) -> dict[str, Tensor]:
        self.captured, table = [*tensors], arguments_captured_table(tensors)
        self.entries = table.get("captured", self.entries)
        return table

    def run(self, launch: KernelLaunch, tensors: dict[str, Tensor]) -> None:
        """As `launch.run`, on one thread of the emulated processor."""
        if min(launch.max_threads, 1) == 0:
            return
        tensors = tensors | {"workspace": torch.empty(launch.work_size, dtype=torch.uint8)}
        block = arguments.with_fields(launch.block, {name: x.data_ptr() for name, x in tensors.items()})
        memory, start = Memory(), ctypes.addressof(block)
        block[arguments.FIELD_INDEX["counter"]] = start + arguments.COUNTERS_INDEX * 8
        memory.add(start, ctypes.sizeof(block))
        table = launch.lengths.table
        memory.add(table.ctypes.data, table.nbytes)
        memory.add_storages(*tensors.values(), *self.captured)
        kept = {start}
        if "captured" in tensors:
            self.move_entries(memory)
            kept.add(self.entries.data_ptr())
        for name in ("sequences", "counter", *tensors):
            index = arguments.FIELD_INDEX[name]
            block[index] = memory.there(block[index]) if block[index] else 0
        number = ctypes.cast(launch.function, ctypes.c_void_p).value
        assert number is not None
        self.execute(number, memory, kept, memory.there(start))

    def table_function(self, number: int) -> Callable[..., None]:
        """As the kernel of `distance_table` that `function_address` has compiled."""

        def run(captured: int, table: int, heads: int, width: int, reach: int) -> None:
            memory = Memory()
            memory.add(table, heads * width * self.real_bytes[number])
            if captured:
                memory.add_storages(self.entries, *self.captured)
                self.move_entries(memory)
            addresses = memory.there(captured), memory.there(table)
            self.execute(number, memory, {captured}, *addresses, heads, width, reach)

        return run

    def move_entries(self, memory: Memory) -> None:
        """Change the addresses in the table of captured tensors."""
        n = 0
        for x in self.captured:
            self.entries[n] = memory.there(x.data_ptr())
            n += 1 + 2 * x.dim()

    def execute(self, number: int, memory: Memory, kept: set[int], *arguments: int) -> None:
        """Run a program on the copied memory, and copy back all but the ranges that begin at `kept`."""
        file = self.folder / "memory"
        memory.write(file, *arguments)
        subprocess.run([EMULATOR, *self.processor.options, str(self.programs[number - 1]), str(file)], check=True)
        memory.read(file, kept)
        self.launches += 1


arguments_captured_table = arguments.captured_table


@contextmanager
def emulated(processor: Processor) -> Iterator[Emulation]:
    """Let `backend="cpu"` run on this processor."""
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    if processor.sve:  # for all that this process compiles from now on
        llvm.set_option("arm", f"--aarch64-sve-vector-bits-min={8 * processor.vector_bytes}")
    with tempfile.TemporaryDirectory() as folder, ExitStack() as patches:
        emulation = Emulation(processor, Path(folder))
        host: dict[str, Any] = {"function_address": emulation.function_address, "run": emulation.run}
        for module in (host_forward, host_backward):
            patches.enter_context(mock.patch.multiple(module, **host, recorded=lambda *_: None))
        patches.enter_context(mock.patch.object(host_cache, "recorded", return_value=None))
        of_tables: dict[str, Any] = {
            "function_address": emulation.function_address,
            "FUNCTION": emulation.table_function,
        }
        patches.enter_context(mock.patch.multiple(distance_table, **of_tables))
        patches.enter_context(mock.patch.object(targets, "host", return_value=processor.target))
        patches.enter_context(mock.patch.object(arguments, "captured_table", emulation.captured_table))
        forget()
        try:
            yield emulation
        finally:
            forget()


def forget() -> None:
    """Compile every kernel anew."""
    for cached in (machine_code.loaded, distance_table.distance_table):
        cached.cache_clear()
    fast_path.forget()
