"""`flashtile build-kernels`: compile the standard kernels into an archive, and put it into a wheel."""

import sys
from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path

from ..prebuilt.build import BuildError, build
from ..prebuilt.wheel import add
from .options import CommandError, input_file, integer, option


def arguments(parser: ArgumentParser) -> None:
    option(parser, "--arch", default="sm_90", help="The GPUs' architecture.")
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
    option(parser, "--only", default="", help="Kernels whose name contains this, for tests.")
    option(parser, "--wheel", type=input_file, help="A wheel that gets it.")


def run(*, arch: str, out: Path, jobs: int, sweeps: Sequence[Path], only: str, wheel: Path | None) -> None:
    """Compile the standard set of kernels for GPUs that need not be here.

    Needs Triton 3.6, the same for every archive, so that every PyTorch runs the same machine code.
    """
    try:
        if wheel is None or not out.is_file():
            count = build(arch, out, jobs, only, tuple(sweeps), lambda text: print(text, file=sys.stderr))
            print(f"{out}: {count} kernels for {arch}, {out.stat().st_size / 1e6:.1f} MB")
        if wheel is not None:
            print(f"{wheel}: {add(wheel, out, arch) / 1e6:.1f} MB")
    except (BuildError, ValueError) as error:
        raise CommandError(str(error)) from error
