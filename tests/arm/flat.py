"""The kernels for ARM of an archive against the fp64 oracle, on an emulated processor with this process's memory:
`python -m arm.flat kernels-cpu.zip`. Needs the package `unicorn`.
"""

import ctypes
import itertools
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import click
import torch
from torch import Tensor

from flashtile.backend.cpu import archive, arguments, host_backward, host_cache, host_forward, targets
from flashtile.backend.cpu.launch import KernelLaunch
from flashtile.dispatch import fast_path
from flashtile.testing.case import Case
from flashtile.testing.oracle import solve
from flashtile.testing.tolerance import compare

PAGE, STACK_BYTES = 4096, 2**20
CODE, STACK, RETURN = 0x1000_0000, 0x2000_0000, 0x3000_0000  # addresses
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SHAPES = ((40, 50, 64), (3, 130, 64), (1, 900, 32), (33, 40, 18))  # rows, keys and features
FEATURES: tuple[dict[str, Any], ...] = (
    {},
    {"window": (9, 4)},
    {"mask": torch.rand(1, 1, 1, 900) < 0.6},
    {"softcap": 3.0},
    {"dropout_p": 0.2, "dropout_seed": 3},
    {"alibi_slopes": torch.rand(2)},
)


class FlatKernels:
    """The kernels for NEON of an archive, by numbers that stand for their addresses."""

    def __init__(self, path: Path):
        self.archive, self.loaded = archive.of_this_version(path), list[tuple[bytes, int]]()

    def function_address(self, name: str, variant: Any, target: targets.Target) -> int:
        digest, entry = self.archive.index["kernels"]["neon"][archive.key_of(name, variant, target)]
        self.loaded.append((self.archive.image(digest), entry))
        return len(self.loaded)

    def run(self, launch: KernelLaunch, tensors: dict[str, Tensor]) -> None:
        """As `launch.run`, on one thread of the emulated processor."""
        tensors = tensors | {"workspace": torch.empty(launch.work_size, dtype=torch.uint8)}
        block = arguments.with_fields(launch.block, {name: x.data_ptr() for name, x in tensors.items()})
        start, table = ctypes.addressof(block), launch.lengths.table
        block[arguments.FIELD_INDEX["counter"]] = start + arguments.COUNTERS_INDEX * 8
        storages = [x.untyped_storage() for x in tensors.values()]
        ranges = [(start, ctypes.sizeof(block)), (table.ctypes.data, table.nbytes)]
        ranges += [(x.data_ptr(), x.nbytes()) for x in storages if x.nbytes()]
        number = ctypes.cast(launch.function, ctypes.c_void_p).value
        assert number is not None
        execute(*self.loaded[number - 1], start, ranges)


def execute(code: bytes, entry: int, argument: int, ranges: list[tuple[int, int]]) -> None:
    """Call a function that reads and writes these ranges of this process's memory, addresses and sizes."""
    import unicorn  # pyright: ignore[reportMissingImports]
    from unicorn import arm64_const as registers  # pyright: ignore[reportMissingImports]

    processor = unicorn.Uc(unicorn.UC_ARCH_ARM64, unicorn.UC_MODE_ARM)
    pages = {n for address, size in ranges for n in range(address // PAGE, (address + size - 1) // PAGE + 1)}
    for n in pages:
        processor.mem_map_ptr(n * PAGE, PAGE, unicorn.UC_PROT_READ | unicorn.UC_PROT_WRITE, ctypes.c_void_p(n * PAGE))
    processor.mem_map(CODE, -(-len(code) // PAGE) * PAGE, unicorn.UC_PROT_READ | unicorn.UC_PROT_EXEC)
    processor.mem_write(CODE, code)
    processor.mem_map(STACK, STACK_BYTES)
    processor.mem_map(RETURN, PAGE)
    processor.reg_write(registers.UC_ARM64_REG_CPACR_EL1, 3 << 20)  # vector registers
    processor.reg_write(registers.UC_ARM64_REG_SP, STACK + STACK_BYTES)
    processor.reg_write(registers.UC_ARM64_REG_X0, argument)
    processor.reg_write(registers.UC_ARM64_REG_X30, RETURN)
    processor.emu_start(CODE + entry, RETURN)


@contextmanager
def emulated(kernels: FlatKernels) -> Iterator[None]:
    """Let `backend="cpu"` run them."""
    host: dict[str, Any] = {"function_address": kernels.function_address, "run": kernels.run}
    with ExitStack() as patches:
        for module in (host_forward, host_backward):
            patches.enter_context(mock.patch.multiple(module, **host, recorded=lambda *_: None))
        patches.enter_context(mock.patch.object(host_cache, "recorded", return_value=None))
        patches.enter_context(mock.patch.object(targets, "host", return_value=targets.make_target("neon")))
        fast_path.forget()
        yield
        fast_path.forget()


def cases() -> Iterator[Case]:
    g = torch.Generator().manual_seed(0)
    for dtype, (rows, keys, width), features in itertools.product(DTYPES, SHAPES, FEATURES):
        given = {name: x[..., :keys] if name == "mask" else x for name, x in features.items()}
        if features.keys() <= {"window"} or width % 4 == 0:  # others are not compiled ahead
            q, k, v, dout = (torch.randn(1, 2, n, width, generator=g).to(dtype) for n in (rows, keys, keys, rows))
            yield Case("attention", {"q": q, "k": k, "v": v, **given}, dout=dout)


@click.command()
@click.argument("path", type=click.Path(path_type=Path, exists=True))
def main(path: Path) -> None:
    """Exit code 1 if a result is outside of its error bound."""
    kernels, count, wrong = FlatKernels(path), 0, 0
    with emulated(kernels):
        for case in cases():
            worst = compare(case.run("cpu"), case, solve(case))[0]
            count += 1
            wrong += not worst.ok
            if not worst.ok:
                click.echo(f"{case.description}: {worst}")
    click.echo(f"{count} problems, {len({*kernels.loaded})} kernels, {wrong} wrong")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
