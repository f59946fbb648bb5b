"""`flashtile ladder`: every step from pure Python to the product, measured on this machine beside published figures.

The steps are imported when the command runs: Triton alone takes a second, which other commands need not wait for.
"""

import importlib.util
import platform
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import torch
from rich.console import Console
from rich.table import Table as Printed

from ...call.device import describe_device
from ...progress import progress
from ..env import packages
from ..options import Device, OutputFile, json_option, print_json, print_table

if TYPE_CHECKING:
    from .measure import Table

EVERYWHERE = ("stack", "long", "lite", "intensity", "tiles", "rounding")
ON_A_GPU = ("cuda", "coalescing", "banks")
NAMES = EVERYWHERE + ON_A_GPU


@click.command()
@click.option("--device", type=Device(), default="cpu")
@click.option(
    "--table",
    "names",
    type=click.Choice(NAMES),
    multiple=True,
    help="May be repeated.  [default: all that the device has]",
)
@click.option("--plot", type=OutputFile(), help="A picture of step against time; png, svg.")
@json_option
def ladder(device: torch.device, names: tuple[str, ...], plot: Path | None, as_json: bool) -> None:
    """Measure every step of the ladder, from pure Python to `flashtile.attention`.

    Tables: `stack`, all steps at d = 16; `long`, time and memory of standard and fused attention at d = 64; `lite`, the
    error of a softmax that is local to its tile; `intensity`, operations for each byte, from the model; `tiles`, bytes
    and time of the two loop orders; `rounding`, how far equal formulas differ. On a GPU also `cuda`, step 9's kernels,
    and `coalescing` and `banks`, what orders of memory accesses cost. docs/ladder.md explains them and the steps; the
    code is in flashtile/ladder.
    """
    if device.type not in ("cpu", "cuda"):
        raise click.UsageError(f"--device {device}: times and memory are measured on the CPU and on CUDA devices")
    if plot is not None:
        refuse_plot_without(names, plot)
    start = time.perf_counter()
    tables: list[Table] = []
    try:
        measure(names or (NAMES if device.type == "cuda" else EVERYWHERE), device, tables)
    finally:  # an interruption loses none of the tables before it
        seconds = time.perf_counter() - start
        if as_json:
            found = {"machine": machine(device), "tables": {table.name: vars(table) for table in tables}}
            print_json(found | {"seconds": seconds})
        else:
            show(tables, device, seconds)
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
        raise click.UsageError("--plot needs matplotlib: pip install 'flashtile[plot]'")
    from matplotlib.backend_bases import FigureCanvasBase  # pyright: ignore[reportMissingImports]

    if plot.suffix[1:].lower() not in (known := FigureCanvasBase.get_supported_filetypes()):
        raise click.UsageError(f"--plot {plot}: the name should end with one of .{', .'.join(sorted(known))}")


def measure(names: tuple[str, ...], device: torch.device, tables: "list[Table]") -> None:
    """Add the tables asked for to `tables`, each when it is done. One that fails says so, and the others follow."""
    from ...ladder.triton_or_not import on
    from .measure import Table
    from .tables import TABLES

    names = tuple(dict.fromkeys(names))
    with on(device), progress() as bar:
        task = bar.add_task("", total=len(names))
        for name in names:
            measurement = TABLES[name](device)
            try:
                while True:
                    bar.update(task, description=f"{name}: {next(measurement)}")
            except StopIteration as finished:
                tables.append(finished.value)
            except Exception as error:
                tables.append(Table(name, name, notes=[f"Failed: {type(error).__name__}: {error}"], ok=False))
            bar.advance(task)


def show(tables: "list[Table]", device: torch.device, seconds: float) -> None:
    for table in tables:
        show_table(table)
    click.echo(", ".join(f"{name} {value}" for name, value in machine(device).items() if value is not None))
    click.echo(f"{seconds:.0f} s")


def machine(device: torch.device) -> dict[str, Any]:
    versions = packages()
    return {
        "device": describe_device(device).name,
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": versions["triton"],
    }


def show_table(table: "Table") -> None:
    """Rows under their keys; those of `stack` with a column for each length."""
    rows = pivoted(table.rows) if table.name == "stack" else table.rows
    printed = Printed(box=None, pad_edge=False, header_style="bold")
    if rows:
        for heading in rows[0]:
            words = isinstance(rows[0][heading], str) and heading != "published"
            printed.add_column(heading.replace("_", "\n"), justify="left" if words else "right", no_wrap=words)
        for row in rows:
            printed.add_row(*(in_figures(value) for value in row.values()))
    console = Console()
    console.print(table.title, style="bold")
    print_table(printed)
    for note in (*table.notes, *table.asides):
        console.print(note, highlight=False, markup=False)
    console.print()


def pivoted(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row for each step: a column for each N, with the published time in brackets; then the longest N's time for
    a row of q, and the largest error.
    """
    steps: dict[str, dict[str, Any]] = {}
    for row in rows:
        published = "" if row["published_ms"] is None else f" ({row['published_ms']:.3f})"
        step = steps.setdefault(row["step"], {"step": row["step"]})
        step[f"N = {row['n']}"] = f"{in_figures(row['ms'])}{published}"
    for name, step in steps.items():
        own = [row for row in rows if row["step"] == name]
        step["µs a row"] = 1e3 * own[-1]["ms"] / own[-1]["n"]
        step["error"] = max(row["error"] for row in own)
    return list(steps.values())


def in_figures(value: Any) -> str:
    """Three figures of a number."""
    if value is None:
        return ""
    if not isinstance(value, float):
        return str(value)
    return f"{value:.3g}" if value < 1000 else f"{value:.0f}"
