"""`flashtile build-kernels`: compile the standard kernels into an archive, and put it into a wheel."""

from pathlib import Path

import click

from ..prebuilt.build import BuildError, build
from ..prebuilt.wheel import add

FILE = click.Path(dir_okay=False, path_type=Path)


@click.command("build-kernels")
@click.option("--arch", default="sm_90", help="The GPUs' architecture.")
@click.option("--out", type=FILE, required=True, help="The archive; written anew, unless it is there and --wheel is.")
@click.option("--jobs", type=click.IntRange(1), default=1, help="Processes that compile.")
@click.option(
    "--sweep",
    "sweeps",
    multiple=True,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="A sweep, as of `flashtile bench`, whose calls get their kernels too.",
)
@click.option("--only", default="", help="Kernels whose name contains this, for tests.")
@click.option("--wheel", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="A wheel that gets it.")
def build_kernels(arch: str, out: Path, jobs: int, sweeps: tuple[Path, ...], only: str, wheel: Path | None) -> None:
    """Compile the standard set of kernels for GPUs that need not be here.

    Needs Triton 3.6, the same for every archive, so that every PyTorch runs the same machine code.
    """
    try:
        if wheel is None or not out.is_file():
            count = build(arch, out, jobs, only, sweeps, lambda text: click.echo(text, err=True))
            click.echo(f"{out}: {count} kernels for {arch}, {out.stat().st_size / 1e6:.1f} MB")
        if wheel is not None:
            click.echo(f"{wheel}: {add(wheel, out, arch) / 1e6:.1f} MB")
    except (BuildError, ValueError) as error:
        raise click.ClickException(str(error)) from error
