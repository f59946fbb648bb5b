"""`flashtile build-kernels`: compile the standard kernels into an archive, and put it into a wheel."""

import sys
from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path

from ..backend.cpu.archive import ARCH
from ..prebuilt.build import BuildError, build
from ..prebuilt.wheel import add
from .options import CommandError, UsageError, flag, input_file, integer, option


def arguments(parser: ArgumentParser) -> None:
    target = parser.add_mutually_exclusive_group()
    option(target, "--arch", default="sm_90", help="The GPUs' architecture.")
    flag(target, "--cpu", help="Kernels for CPUs, of all kinds in one archive; needs no Triton.")
    option(
        parser,
        "--out",
        type=Path,
        required=True,
        help="The archive; written anew, unless it is there and --wheel is.",
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
    option(parser, "--wheel", type=input_file, help="A wheel that gets it.")


def run(*, arch: str, cpu: bool, out: Path, jobs: int, sweeps: Sequence[Path], only: str, wheel: Path | None) -> None:
    """Compile the standard set of kernels for GPUs, or for CPUs, that need not be here.

    For GPUs it needs Triton 3.6, the same for every archive, so that every PyTorch runs the same machine code.
    """
    arch = ARCH if cpu else arch
    try:
        if wheel is None or not out.is_file():
            count = build_archive(arch, out, jobs, only, tuple(sweeps))
            print(f"{out}: {count} kernels for {arch}, {out.stat().st_size / 1e6:.1f} MB")
        if wheel is not None:
            print(f"{wheel}: {add(wheel, out, arch) / 1e6:.1f} MB")
    except (BuildError, ValueError) as error:
        raise CommandError(str(error)) from error


def build_archive(arch: str, out: Path, jobs: int, only: str, sweeps: Sequence[Path]) -> int:
    def progress(text: str) -> None:
        print(text, file=sys.stderr)

    if arch != ARCH:
        return build(arch, out, jobs, only, sweeps, progress)
    if sweeps:
        raise UsageError("--sweep is for GPUs: the standard kernels for CPUs are for all shapes")
    from ..prebuilt import cpu  # imports LLVM

    return cpu.build(out, jobs, only, progress)
