"""Time checkouts of flashtile, and other libraries, on the calls of a sweep: on one GPU, in alternation.

    python benchmarks/compare_sweep.py OLD/src NEW/src --sweep benchmarks/models.toml --store FILE.csv
        [--peers fa3,sdpa:cudnn] [--fa3-library PATH] [--warm 8] [--cells 3,4,6] [--seconds 60] [--rounds 5]

Each checkout and library has a process of its own, which is replaced if a call ends it. Times are the device's. A speed
is the median over rounds of the first checkout's time divided by another's. A cell that is in the file is left out, and
no cell begins after `--seconds`. `--warm 8` compiles all kernels beforehand, in eight processes for each checkout.
"""

import csv
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import csv_rows
from compare_sources import answer, tell, variables

FIELDS = ("cell", "name", "side", "us", "speed", "low", "high")
SAMPLE_SECONDS = 0.01
SHORT_SECONDS = 1e-4  # of a call, below which several of them are one CUDA graph


class Entrants:
    """The libraries that a process times, on one cell at a time."""

    def __init__(self, library: str | None) -> None:
        import torch

        from flashtile.bench.run import Bench
        from flashtile.bench.sweep import Timing

        self.library = Path(library) if library else None
        self.bench = Bench(torch.device("cuda"), [], Timing(), None, self.library)
        self.cell: Any = None
        self.found: dict[str, Any] = {}

    def seconds(self, cell: dict[str, Any], name: str) -> float:
        """The time of one call."""
        from flashtile.bench.rounds import timed

        entrant = self.entrant(cell, name)
        return timed(self.bench.clock, entrant, entrant.calls) / entrant.calls_in_run

    def entrant(self, cell: dict[str, Any], name: str) -> Any:
        from flashtile.bench.cell import Cell
        from flashtile.bench.inputs import make_case
        from flashtile.bench.providers import make
        from flashtile.bench.results import Row
        from flashtile.bench.rounds import calibrate

        if cell != self.cell:
            self.found.clear()
            self.cell, self.case = cell, make_case(Cell.from_dict(cell), self.bench.device)
        if name not in self.found:
            (provider,) = make([name], self.library)
            row = Row(Cell.from_dict(cell), name)
            prepared = provider.prepare(self.case, row.cell.measure == "decode")
            entrant = self.bench.entrant(provider, row, self.case, prepared)
            calibrate(self.bench.clock, entrant, SAMPLE_SECONDS)
            if entrant.seconds_of_call < SHORT_SECONDS:
                self.bench.capture(row, entrant)
                calibrate(self.bench.clock, entrant, SAMPLE_SECONDS)
            self.found[name] = entrant
        return self.found[name]


def work(library: str | None) -> None:
    """Answer each line, a cell and a library's name, with the seconds of one call."""
    entrants = Entrants(library)
    for line in sys.stdin:
        cell, name = json.loads(line)
        try:
            found: Any = entrants.seconds(cell, name)
        except Exception as error:
            found = f"{type(error).__name__}: {error}"[:200]
        print(json.dumps(found), flush=True)


class Side:
    """A library, and the process that times it with a checkout's benchmark."""

    def __init__(self, name: str, source: Path, provider: str, library: Path | None) -> None:
        self.name, self.source, self.provider, self.library = name, source, provider, library
        self.worker = started(source, library)

    def seconds(self, cell: dict[str, Any]) -> float | str:
        """The time of one call, or why there is none."""
        try:
            tell(self.worker, (cell, self.provider))
            return answer(self.worker)  # type: ignore[no-any-return]
        except (OSError, ValueError):
            self.worker.kill()
            self.worker = started(self.source, self.library)
            return "its process ended"


def started(source: Path, library: Path | None) -> subprocess.Popen[str]:
    command = [sys.executable, __file__, "--work", *([str(library)] if library else [])]
    environment = os.environ | variables(source.resolve())
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)


def cells_of(sweep: Path) -> list[dict[str, Any]]:
    from flashtile.bench.sweep import load

    return [{name: x for name, x in cell.as_dict().items() if x is not None} for cell in load(sweep).on("cuda").cells]


def compile_all(sources: Sequence[Path], cells: Sequence[dict[str, Any]], processes: int, seconds: float) -> None:
    """Run each cell once by each checkout, cells of one width in one process."""
    ordered = sorted(cells, key=lambda cell: (cell["head_dim"], cell["dtype"], cell["measure"]))
    workers = []
    for source in sources:
        for n in range(processes):
            worker = started(source, None)
            for cell in ordered[n * len(ordered) // processes : (n + 1) * len(ordered) // processes]:
                tell(worker, (cell, "flashtile"))
            assert worker.stdin is not None
            worker.stdin.close()
            workers.append(worker)
    end = time.monotonic() + seconds
    for worker in workers:
        try:
            worker.wait(max(0.1, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            worker.kill()


@click.command(help=__doc__)
@click.argument("sources", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path))
@click.option("--sweep", required=True, type=click.Path(exists=True, path_type=Path))
@click.option("--store", required=True, type=click.Path(path_type=Path))
@click.option("--peers", default="")
@click.option("--fa3-library", "library", type=click.Path(exists=True, path_type=Path))
@click.option("--warm", default=0)
@click.option("--warm-seconds", default=240.0)
@click.option("--cells", "numbers", default="", help="Numbers of cells, from 0. [default: all]")
@click.option("--seconds", default=1e9)
@click.option("--rounds", default=5)
def main(
    sources: tuple[Path, ...], sweep: Path, store: Path, peers: str, library: Path | None, warm: int,
    warm_seconds: float, numbers: str, seconds: float, rounds: int,
) -> None:  # fmt: skip
    """SOURCES are folders that hold the package `flashtile`."""
    rows = list(csv.DictReader(store.open())) if store.is_file() else []
    known, all_cells = {row["cell"] for row in rows}, cells_of(sweep)
    chosen = [int(x) for x in numbers.split(",")] if numbers else range(len(all_cells))
    missing = [n for n in chosen if str(n) not in known]
    if warm:
        compile_all(sources, [all_cells[n] for n in missing], warm, warm_seconds)
    end = time.monotonic() + seconds
    sides = [Side(f"{n} {x.resolve().parent.name}", x, "flashtile", None) for n, x in enumerate(sources)]
    sides += [Side(peer, sources[-1], peer, library) for peer in peers.split(",") if peer]
    for n in missing:
        if time.monotonic() < end:
            rows += measured(n, all_cells[n], sides, rounds)
            csv_rows.write(store, FIELDS, rows)
    for side in sides:
        side.worker.kill()


def measured(number: int, cell: dict[str, Any], sides: list[Side], rounds: int) -> list[dict[str, Any]]:
    """A row for each side that runs the cell; those that do not are printed."""
    name = f"{cell['model']}, {cell['measure']}"
    times: dict[str, list[float]] = {side.name: [] for side in sides}
    for turn in range(rounds + 1):
        for side in [x for x in sides if x.name in times]:
            found = side.seconds(cell)
            if isinstance(found, str):
                click.echo(f"{number} {name}, {side.name}: {found}")
                del times[side.name]
            elif turn > 0:
                times[side.name].append(found)
    rows = []
    for side, taken in times.items():
        ratios = sorted(one / other for one, other in zip(next(iter(times.values())), taken, strict=True))
        figures = (statistics.median(taken) * 1e6, statistics.median(ratios), ratios[1], ratios[-2])
        texts = (f"{figures[0]:.2f}", *(f"{x:.3f}" for x in figures[1:]))
        rows.append(dict(zip(FIELDS, (number, name, side, *texts), strict=True)))
    click.echo(f"{number} {name}: " + ", ".join(f"{row['side']} {row['us']} ({row['speed']})" for row in rows))
    return rows


if __name__ == "__main__":
    if sys.argv[1:2] == ["--work"]:
        work(sys.argv[2] if len(sys.argv) > 2 else None)
    else:
        main()
