"""`flashtile-ladder`: every step from pure Python to the product, measured on this machine beside published figures.

The steps are imported when the command runs: Triton alone takes a second, which other commands need not wait for.
"""

import datetime
import importlib.metadata
import importlib.util
import os
import platform
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import torch

from . import stored
from .options import Device, OutputFile, print_json

if TYPE_CHECKING:
    from .measure import Table

EVERYWHERE = (
    "stack",
    "long",
    "backward",
    "features",
    "lite",
    "intensity",
    "tiles",
    "widths",
    "pointwise",
    "layers",
    "approximate",
    "rounding",
)
ON_A_GPU = ("cuda", "large", "shared", "memory", "coalescing", "banks")
LONG_RUNS = ("dtypes", "blocks")  # minutes on a GPU: where they are not asked for, their stored run is shown
NAMES = EVERYWHERE + ON_A_GPU + LONG_RUNS


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.version_option(package_name="flashtile-ladder", prog_name="flashtile-ladder")
@click.option("--device", type=Device(), default="cpu")
@click.option(
    "--table",
    "names",
    type=click.Choice(NAMES),
    multiple=True,
    help="May be repeated.  [default: all that the device has]",
)
@click.option("--all", "everything", is_flag=True, help="Measure also what takes long; else its stored run is shown.")
@click.option("--save", type=OutputFile(), help="Put the tables into this file of stored runs; implies --all.")
@click.option("--plot", type=OutputFile(), help="A picture of step against time; png, svg.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON and nothing else.")
def main(
    device: torch.device, names: tuple[str, ...], everything: bool, save: Path | None, plot: Path | None, as_json: bool
) -> None:
    """Measure the steps of the ladder, from pure Python to a library's attention.

    Tables: `stack`, the steps from the second on at d = 16, as far as they run here; `long`, time and memory of
    standard and fused attention at d = 64; `backward`
    and `features`, what these cost; `lite`, the error of a softmax that is local to its tile; `intensity`, operations
    for each byte, from the model; `tiles` and `widths`, bytes and time by tile and by head dimension; `pointwise`,
    operations that memory limits; `layers`, attention in a transformer, from the model; `approximate`, linear
    attention and hashed buckets; `rounding`, how far equal formulas differ. On a GPU also `cuda`, kernels in CUDA C++;
    `large`, steps with tensor cores on a call that fills the GPU;
    `shared`, tiles of more than 48 KB; `memory`, latency and rate of each level; `coalescing` and `banks`, what orders
    of memory accesses cost; `dtypes`, all kernels in all dtypes by device time; `blocks`, Triton's tiles.
    Kernels of a GPU have no row on a CPU, and step 1, whose loops are Python's, none at all. docs/ladder.md explains
    them and the steps; the code is in flashtile_ladder. The last step is `flashtile.attention` where flashtile is
    installed, else PyTorch's own.

    Each table appears when it is measured, with a sentence that says what to see. All run on one thread.
    """
    if device.type not in ("cpu", "cuda"):
        raise click.UsageError(f"--device {device}: times and memory are measured on the CPU and on CUDA devices")
    if plot is not None:
        refuse_plot_without(names, plot)
    everything = everything or save is not None
    tables: list[Table] = []
    start, about = time.perf_counter(), machine(device)
    try:
        for table, seconds in measured(names, device, everything):
            tables.append(table)
            if save is not None and table.ok and table.rows:
                stored.save(save, table.name, vars(table) | {"machine": about, "seconds": seconds})
            if not as_json:
                from .show import show_table

                show_table(table)
    finally:  # an interruption loses none of the tables before it
        seconds = time.perf_counter() - start
        if as_json:
            found = {"machine": about, "tables": {table.name: vars(table) for table in tables}}
            print_json(found | {"seconds": seconds})
        else:
            click.echo(", ".join(f"{name} {value}" for name, value in about.items() if value is not None))
            click.echo(f"{seconds:.0f} s")
    stack = next((table for table in tables if table.name == "stack" and table.ok), None)
    if plot is not None and stack is not None:
        from .plot import draw

        draw(stack, plot)
        if not as_json:
            click.echo(f"plot in {plot}")
    sys.exit(0 if all(table.ok for table in tables) else 1)


def refuse_plot_without(names: tuple[str, ...], plot: Path) -> None:
    """Before anything is measured: the plot needs the table of all steps, matplotlib, and a name that it knows."""
    if names and "stack" not in names:
        raise click.UsageError("--plot draws the table `stack`: add --table stack, or leave --table out")
    if importlib.util.find_spec("matplotlib") is None:
        raise click.UsageError("--plot needs matplotlib: pip install 'flashtile-ladder[plot]'")
    from matplotlib.backend_bases import FigureCanvasBase  # pyright: ignore[reportMissingImports]

    if plot.suffix[1:].lower() not in (known := FigureCanvasBase.get_supported_filetypes()):
        raise click.UsageError(f"--plot {plot}: the name should end with one of .{', .'.join(sorted(known))}")


def measured(names: tuple[str, ...], device: torch.device, everything: bool) -> "Iterator[tuple[Table, float]]":
    """Each table and its seconds, when it is done. One that fails says so, and the others follow."""
    from .._host.triton_or_not import on
    from .measure import Table, one_thread

    kept = stored.load(stored.path_for(device))
    named = tuple(dict.fromkeys(names))
    on_device = EVERYWHERE + (ON_A_GPU + LONG_RUNS if device.type == "cuda" else ())
    token = stored.slow_rows.set(() if everything else stored.slow(kept))
    try:
        for name in named or on_device:
            start = time.perf_counter()
            if device.type != "cuda" and name in ON_A_GPU + LONG_RUNS:
                table = stored_table(name, stored.load(stored.path_for(torch.device("cuda"))))
            elif name in LONG_RUNS and name not in named and not everything:
                table = stored_table(name, kept)
            else:
                try:
                    with on(device), one_thread():
                        table = finished(name, device)
                except Exception as error:
                    table = Table(name, name, notes=[f"Failed: {type(error).__name__}: {error}"], ok=False)
            yield table, time.perf_counter() - start
    finally:
        stored.slow_rows.reset(token)


def finished(name: str, device: torch.device) -> "Table":
    """The table, measured with a line of progress on a terminal."""
    from rich.console import Console

    from .tables import TABLES

    measurement = TABLES[name](device)
    with Console(stderr=True).status("") as line:
        while True:
            try:
                line.update(f"{name}: {next(measurement)}")
            except StopIteration as done:
                return done.value


def stored_table(name: str, tables: dict[str, Any]) -> "Table":
    """A table of the stored run, with a note on where it comes from."""
    from .measure import Table

    how = f"`--device cuda --table {name}` measures it on a GPU."
    if name not in tables:
        return Table(name, name, notes=[f"Not measured, and not stored: {how}"])
    found = tables[name]
    where = f"Stored, from {found['machine']['device']}: {how}"
    fields = {field: found[field] for field in ("title", "see", "rows", "asides") if field in found}
    return Table(name, **fields, notes=[where, *found["notes"]])


def machine(device: torch.device) -> dict[str, Any]:
    """Machine and date; the load is that of the last minute before this run."""
    return {
        "device": device_name(device),
        "processor": processor(),
        "cores": os.cpu_count(),
        "threads": 1,
        "load": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": version("triton"),
        "numba": version("numba"),
    }


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).name
    return f"CPU ({torch.backends.cpu.get_cpu_capability()})"


def version(package: str) -> str | None:
    """The version of an installed package, without importing it; `None` if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def processor() -> str:
    """The CPU's name, as Linux tells it."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("model name")]
    return names[0] if names else platform.processor()
