"""The standard kernels for CPUs, compiled into one archive for all kinds of processors, on any of them."""

import contextlib
import hashlib
import itertools
import multiprocessing
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from llvmlite import binding as llvm

from ..backend.cpu import jit
from ..backend.cpu.archive import ARCH, key_of, sources
from ..backend.cpu.machine_code import CpuKernel, source_of
from ..backend.cpu.targets import NARROWEST, Processor, generic, make_target
from ..backend.cpu.variant import BACKWARD, FORWARD, Variant
from .build import write_archive
from .link import flat

X86_64, AARCH64 = "x86_64-unknown-linux-gnu", "aarch64-unknown-linux-gnu"
WIDTHS = {"amx": X86_64, "avx512": X86_64, "avx2": X86_64, "neon": AARCH64}
SLOPES = ("slopes",)  # ALiBi's
DTYPES = ("float32", "bfloat16", "float16")


class Compiled(NamedTuple):
    """A kernel's machine code, and where in it the kernel begins."""

    kernel: CpuKernel
    code: bytes
    entry: int


def standard_kernels(width: str, dtype: str) -> Iterator[CpuKernel]:
    """The kernels of calls without score functions, for every length, head dimension and visibility, which are
    arguments: for panels of few and of many rows, and features that are whole vectors or not. Those of frequent
    features, one at a time, have whole vectors, or forward's matrix tiles.
    """
    target = make_target(width)
    matrix_tiles = target.tiles is not None and dtype == "bfloat16"
    for vectors, whole in itertools.product((1, target.vectors), (True, False)):
        plain = Variant(dtype, vectors, row_values=whole)
        tiles_of_features = matrix_tiles and not whole
        for variant in (plain, *with_features(plain)) if whole or tiles_of_features else (plain,):
            if variant == plain or not tiles_of_features:
                yield CpuKernel(BACKWARD, variant, target)
            if not variant.bias_gradient and not variant.slope_gradient and not (matrix_tiles and whole):
                yield CpuKernel(FORWARD, variant._replace(tiles=matrix_tiles), target)
    for variant in (plain := Variant(dtype, vectors=1, row_values=True, decode=True), *with_features(plain)):
        yield CpuKernel(FORWARD, variant, target)
    vector_bytes = target.vector_bytes // 2
    while vector_bytes >= NARROWEST:  # decoding heads that do not fill wider vectors
        narrow = target._replace(vector_bytes=vector_bytes)
        yield CpuKernel(FORWARD, plain._replace(row_values=False), narrow)
        vector_bytes //= 2


def with_features(plain: Variant) -> Iterator[Variant]:
    """The variants with one frequent feature; with its gradient, which backward alone has, too."""
    yield plain._replace(mask=True)
    yield plain._replace(softcap=True)
    yield plain._replace(dropout=True)
    for needed in (False, True):
        yield plain._replace(bias=plain.dtype, bias_gradient=needed)
        yield plain._replace(head_terms=SLOPES, slope_gradient=needed)


def build(out: Path, jobs: int, only: str, progress: Callable[[str], None]) -> int:
    """Compile the standard kernels for processors whose width's name contains `only`, and write the archive; returns
    their number.

    Raises:
        LinkError: code needs what an archive does not have.
    """
    work = [(width, dtype) for width in WIDTHS if only in width for dtype in DTYPES]
    found: list[Compiled] = []
    with multiprocessing.get_context("spawn").Pool(jobs) if jobs > 1 else contextlib.nullcontext() as pool:
        for part in map(compile_share, work) if pool is None else pool.imap(compile_share, work):
            found += part
            progress(f"{len(found)} kernels")
    write(out, found)
    return len(found)


def compile_share(work: tuple[str, str]) -> list[Compiled]:
    """Compile the kernels of a width and dtype."""
    width, dtype = work
    return compiled(width, standard_kernels(width, dtype))


def compiled(width: str, kernels: Iterable[CpuKernel]) -> list[Compiled]:
    """Compile kernels of a width."""
    machine = machine_of(generic(width, WIDTHS[width]))
    objects: dict[str, bytes] = {}  # by their IR: kernels share parts
    found = []
    for kernel in kernels:
        texts = source_of(*kernel).texts().values()
        for text in texts:
            if text not in objects:
                objects[text] = jit.compile_object(text, machine)
        found.append(Compiled(kernel, *flat([objects[text] for text in texts], kernel.name)))
    return found


def machine_of(processor: Processor) -> Any:
    """LLVM's compiler of code that runs wherever it lies."""
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    triple, cpu, features = processor
    return llvm.Target.from_triple(triple).create_target_machine(
        cpu=cpu, features=features, opt=2, reloc="pic", codemodel="small"
    )


def write(path: Path, found: list[Compiled]) -> None:
    """Write an archive; equal kernels give equal bytes."""
    kernels: dict[str, dict[str, Any]] = {}
    images = {}
    for (name, variant, target), code, entry in found:
        digest = hashlib.sha256(code).hexdigest()
        images[digest] = code
        kernels.setdefault(target.width, {})[key_of(name, variant, target)] = digest, entry
    write_archive(path, ARCH, {"sources": sources(), "kernels": kernels}, images)
