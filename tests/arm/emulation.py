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

from flashtile.backend.cpu import arguments, host_backward, host_forward, jit, targets
from flashtile.backend.cpu.launch import KernelLaunch
from flashtile.backend.cpu.targets import Target
from flashtile.backend.cpu.variant import Variant
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
        neon = targets.make_target("neon", TRIPLE)
        return neon._replace(features="+sve" if self.sve else "", vector_bytes=self.vector_bytes)

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

    def there(self, address: int) -> int:
        """The address in the emulated process; 0 stays 0."""
        for start, size, offset in self.parts:
            if start <= address < start + size or (size == 0 and address == start):
                return BASE + offset + address - start
        assert address == 0, "an address that was not copied"
        return 0

    def write(self, file: Path, block: int) -> None:
        with file.open("wb") as out:
            out.truncate(-(-self.size // PAGE) * PAGE)
            out.write(struct.pack("3Q", BASE, -(-self.size // PAGE) * PAGE, self.there(block)))
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
        self.launches = 0

    def function_address(self, name: str, variant: Variant, target: Target, source: Callable[[], str]) -> int:
        """Compile a program. Its number stands for the kernel's address, which is never called."""
        number = len(self.programs) + 1
        kernel, program = self.folder / f"{number}.o", self.folder / str(number)
        kernel.write_bytes(jit.compile_object(source(), jit.target_machine(target)))
        command = [COMPILER, "-O1", "-static", f"-DKERNEL={name}", str(DRIVER), str(kernel), "-o", str(program), "-lm"]
        subprocess.run(command, check=True)
        self.programs.append(program)
        return number

    def captured_table(self, tensors: list[Tensor]) -> dict[str, Tensor]:
        self.captured = [*tensors]
        return arguments_captured_table(tensors)

    def run(self, launch: KernelLaunch, tensors: dict[str, Tensor]) -> None:
        """As `launch.run`, on one thread of the emulated processor."""
        if min(launch.max_threads, 1) == 0:
            return
        tensors = tensors | {"workspace": torch.empty(launch.work_size, dtype=torch.uint8)}
        block = arguments.bind(launch.block, tensors)
        memory, start = Memory(), ctypes.addressof(block)
        memory.add(start, ctypes.sizeof(block))
        table = launch.lengths.table
        memory.add(table.ctypes.data, table.nbytes)
        storages = {x.untyped_storage().data_ptr(): x.untyped_storage() for x in (*tensors.values(), *self.captured)}
        for address, storage in storages.items():
            if address:
                memory.add(address, storage.nbytes())
        kept = {start}
        if "captured" in tensors:
            entries, n = tensors["captured"], 0
            kept.add(entries.data_ptr())
            for x in self.captured:
                entries[n] = memory.there(x.data_ptr())
                n += 1 + 2 * x.dim()
        for name in ("sequences", "counter", *tensors):
            index = arguments.FIELD_INDEX[name]
            block[index] = memory.there(block[index]) if block[index] else 0
        file = self.folder / "memory"
        memory.write(file, start)
        program = self.programs[ctypes.cast(launch.function, ctypes.c_void_p).value - 1]  # type: ignore[operator]
        subprocess.run([EMULATOR, *self.processor.options, str(program), str(file)], check=True)
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
            patches.enter_context(mock.patch.multiple(module, **host))
        patches.enter_context(mock.patch.object(targets, "host", return_value=processor.target))
        patches.enter_context(mock.patch.object(arguments, "captured_table", emulation.captured_table))
        for cached in (host_forward.forward_address, host_backward.backward_address):
            cached.cache_clear()
        fast_path.forget()
        try:
            yield emulation
        finally:
            for cached in (host_forward.forward_address, host_backward.backward_address):
                cached.cache_clear()
            fast_path.forget()
