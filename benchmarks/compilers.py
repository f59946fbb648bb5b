"""Hopper's dense kernels compiled by the installed Triton, whichever version that is, to compare compilers:

    PYTHONPATH=TRITON:src python benchmarks/compilers.py triton-3.9.zip
    python benchmarks/compare_sources.py triton-3.6.zip triton-3.9.zip --cells hopper

The first command needs no GPU, the second one no other Triton than the installed one.
"""

from pathlib import Path
from unittest import mock

import click
import torch

from flashtile.backend.gpu.installed import triton_release, triton_version
from flashtile.backend.hopper.plan import candidates
from flashtile.backend.hopper.plan.widths import WIDTHS
from flashtile.prebuilt.build import compile_launch, distinct, write
from flashtile.prebuilt.launches import all_launches, device_of
from flashtile.prebuilt.standard import plain

ARCH = "sm_90"


@click.command()
@click.argument("out", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--tiles-of", help="Take the tiles of another version of Triton, such as 3.6.")
def main(out: Path, tiles_of: str | None) -> None:
    """Write the archive OUT."""
    release = triton_release()
    assert release is not None
    version = tuple(map(int, tiles_of.split("."))) if tiles_of else triton_version()
    calls = [
        call
        for call in plain(torch.bfloat16)
        if call.function == "attention"
        and not call.arguments.get("deterministic")
        and (call.arguments["q"].shape[-1], call.arguments["v"].shape[-1]) in WIDTHS
    ]
    with mock.patch.object(candidates, "compiler_version", return_value=version):
        launches = list(distinct(all_launches(iter(calls), device_of(ARCH))))
        compiled = [compile_launch(launch, ARCH) for launch in launches]
    write(out, ARCH, tiles_of or release, compiled)
    click.echo(f"{out}: {len(compiled)} kernels by Triton {release}")


if __name__ == "__main__":
    main()
