"""`flashtile build-kernels`: compile the standard kernels into archives, and put them into a wheel."""

import sys
import time
from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path

from ..backend.archive import file_name
from ..backend.cpu.archive import ARCH
from ..prebuilt.build import ARCHITECTURES, BuildError, build
from ..prebuilt.wheel import add
from .options import CommandError, UsageError, flag, input_file, integer, option

ALL = "all"


def arguments(parser: ArgumentParser) -> None:
    target = parser.add_mutually_exclusive_group()
    option(
        target,
        "--arch",
        dest="archs",
        action="append",
        help=f"The GPUs' architecture; may be repeated. `{ALL}`: {', '.join(ARCHITECTURES)}. [default: sm_90]",
    )
    flag(target, "--cpu", help="Kernels for CPUs, of all kinds in one archive; needs no Triton.")
    option(
        parser,
        "--out",
        type=Path,
        required=True,
        help="The archive, or a folder for those of several architectures. What is there is written anew, unless "
        "--wheel is given.",
    )
    option(parser, "--jobs", type=integer(1), default=1, help="Processes that compile.")
    option(
        parser,
        "--sweep",
        dest="sweeps",
        action="append",
        default=[],
        type=input_file,
        help="A sweep, as of `flashtile bench`, whose calls get their kernels too. May be repeated.",
    )
    option(
        parser,
        "--only",
        default="",
        help="For tests: kernels whose name, or with --cpu that of their vectors, has this.",
    )
    option(
        parser,
        "--wheel",
        type=input_file,
        help="A wheel that gets them, in this order; those that do not fit are left out.",
    )


def run(
    *, archs: Sequence[str] | None, cpu: bool, out: Path, jobs: int, sweeps: Sequence[Path], only: str,
    wheel: Path | None,
) -> None:  # fmt: skip
    """Compile the standard set of kernels for GPUs, or for CPUs, that need not be here.

    For GPUs it needs Triton 3.6, the same for every archive, so that every PyTorch runs the same machine code.
    """
    given = [ARCH] if cpu else archs or ["sm_90"]
    archs = [*dict.fromkeys(x for arch in given for x in (ARCHITECTURES if arch == ALL else (arch,)))]
    if len(archs) > 1:
        if out.is_file():
            raise UsageError(f"--out {out} is a file; for several architectures it is a folder")
        out.mkdir(parents=True, exist_ok=True)
    begin, total = time.monotonic(), 0
    try:
        for arch in archs:
            archive, start = out / file_name(arch) if out.is_dir() else out, time.monotonic()
            if wheel is None or not archive.is_file():
                count = build_archive(arch, archive, jobs, only, tuple(sweeps))
                total += count
                size, seconds = archive.stat().st_size / 1e6, time.monotonic() - start
                print(f"{archive}: {count} kernels for {arch}, {size:.1f} MB, {seconds:.0f} s", flush=True)
            if wheel is not None:
                print(added(wheel, archive, arch, alone=len(archs) == 1), flush=True)
    except (BuildError, ValueError) as error:
        raise CommandError(str(error)) from error
    if len(archs) > 1 and total:
        print(f"{total} kernels for {len(archs)} architectures, {time.monotonic() - begin:.0f} s")


def added(wheel: Path, archive: Path, arch: str, *, alone: bool) -> str:
    """A line about a wheel that got an archive. Of several, those that do not fit are left out."""
    try:
        return f"{wheel}: {add(wheel, archive, arch) / 1e6:.1f} MB with {archive.name}"
    except BuildError as error:
        if alone:
            raise
        return f"{wheel}: without {archive.name}: {error}"


def build_archive(arch: str, out: Path, jobs: int, only: str, sweeps: Sequence[Path]) -> int:
    def progress(text: str) -> None:
        print(text, file=sys.stderr)

    if arch != ARCH:
        return build(arch, out, jobs, only, sweeps, progress)
    if sweeps:
        raise UsageError("--sweep is for GPUs: the standard kernels for CPUs are for all shapes")
    from ..prebuilt import cpu  # imports LLVM

    return cpu.build(out, jobs, only, progress)
