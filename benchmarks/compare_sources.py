"""Time checkouts of flashtile, archives of its kernels, and other libraries on one GPU, in alternation.

    python benchmarks/compare_sources.py OLD/src NEW/src [--cells WORDS] [--rounds 5] [--store FILE.csv]
    python benchmarks/compare_sources.py triton-3.6.zip triton-3.9.zip --cells hopper
    FLASHTILE_AS_ARCH=sm_80 python benchmarks/compare_sources.py OLD/src NEW/src --cells mma
    python benchmarks/compare_sources.py OLD/src NEW/src --sweep benchmarks/models.toml --store FILE.csv
        [--peers fa3,sdpa:cudnn] [--fa3-library PATH] [--warm 8] [--cells 3,4,6] [--seconds 60]

The calls are those of `source_cells.py`, or of a sweep by the checkout's benchmark, whose libraries are the peers. Each
side has a process of its own, which is replaced if a call ends it. All hold their kernels and inputs while they wait,
so that clocks, heat and neighbors are the same for all. Times are the device's. A speed is the median over rounds of
the first side's time divided by another's. A cell that is in the file is left out, and no cell begins after
`--seconds`. `--warm 8` compiles all kernels beforehand, in eight processes for each checkout.
"""

import contextlib
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
import source_cells

FIELDS = ("cell", "name", "side", "us", "speed", "low", "high")
SAMPLE_SECONDS = 0.01
SHORT_SECONDS = 1e-4  # of a call of a sweep, below which several of them are one CUDA graph


class Entrants:
    """The libraries that a process times by the benchmark, on one cell of a sweep at a time."""

    def __init__(self, library: str | None, device: str) -> None:
        import torch

        from flashtile.bench.run import Bench
        from flashtile.bench.sweep import Timing

        self.library = Path(library) if library else None
        self.bench = Bench(torch.device(device), [], Timing(), None, self.library)
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


def work(device: str, library: str | None = None) -> None:
    """Answer each line, a cell and a library's name, with the seconds of one call. A cell without a library is one of
    `source_cells`.
    """
    if "FLASHTILE_AS_ARCH" in os.environ:
        from flashtile.as_arch import install_inherited

        install_inherited()
    entrants, calls = None, {}
    for line in sys.stdin:
        cell, provider = json.loads(line)
        try:
            if provider is not None:
                entrants = entrants or Entrants(library, device)
                found: Any = entrants.seconds(cell, provider)
            else:
                if cell["name"] not in calls:
                    calls.clear()
                    calls[cell["name"]] = source_cells.sampled(cell)
                found = source_cells.seconds(*calls[cell["name"]])
        except Exception as error:
            found = f"{type(error).__name__}: {error}"[:200]
        print(json.dumps(found), flush=True)


class Side:
    """A checkout, an archive or another library, and the process that times it."""

    def __init__(self, name: str, source: Path, provider: str | None, device: str, library: Path | None = None) -> None:
        self.name, self.source, self.provider, self.device, self.library = name, source, provider, device, library
        self.worker = started(source, device, library)

    def seconds(self, cell: dict[str, Any]) -> float | str:
        """The time of one call, or why there is none."""
        self.tell(cell)
        return self.answer()

    def tell(self, cell: dict[str, Any]) -> None:
        """Ask for it, without waiting."""
        with contextlib.suppress(OSError):  # `answer` tells
            tell(self.worker, (cell, self.provider))

    def answer(self) -> float | str:
        """The answer to `tell`."""
        assert self.worker.stdout is not None
        try:
            return json.loads(self.worker.stdout.readline())  # type: ignore[no-any-return]
        except (OSError, ValueError):
            self.worker.kill()
            self.worker = started(self.source, self.device, self.library)
            return "its process ended"


def started(source: Path, device: str, library: Path | None = None) -> subprocess.Popen[str]:
    command = [sys.executable, __file__, "--work", device, *([str(library)] if library else [])]
    environment = os.environ | variables(source.resolve())
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)


def tell(worker: subprocess.Popen[str], job: Any) -> None:
    assert worker.stdin is not None
    print(json.dumps(job), file=worker.stdin, flush=True)


def variables(side: Path) -> dict[str, str]:
    """The environment of a side."""
    if side.is_file():
        return {"FLASHTILE_KERNELS": str(side)}
    return {"PYTHONPATH": f"{side}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}


def cells_of(sweep: Path | None, device: str, words: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Cells by their names, or by numbers in a sweep: those whose number is one of `words`, or whose name has one."""
    if sweep is None:
        named = {cell["name"]: (cell["name"], cell) for cell in source_cells.CELLS}
    else:
        from flashtile.bench.sweep import load

        cells = load(sweep).on(device).cells
        named = {
            str(n): (f"{cell.model}, {cell.measure}", {name: x for name, x in cell.as_dict().items() if x is not None})
            for n, cell in enumerate(cells)
        }
    return {
        key: cell
        for key, (name, cell) in named.items()
        if not words or any(key == word if word.isdigit() else word in name for word in words)
    }


def compile_all(
    sources: Sequence[Path], cells: Sequence[dict[str, Any]], device: str, processes: int, seconds: float
) -> None:
    """Run each cell of a sweep once by each checkout, cells of one width in one process."""
    ordered = sorted(cells, key=lambda cell: (cell["head_dim"], cell["dtype"], cell["measure"]))
    workers = []
    for source in sources:
        for n in range(processes):
            worker = started(source, device)
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
@click.option("--sweep", type=click.Path(exists=True, path_type=Path))
@click.option("--store", "--out", "store", type=click.Path(path_type=Path))
@click.option("--peers", default="")
@click.option("--fa3-library", "library", type=click.Path(exists=True, path_type=Path))
@click.option("--warm", default=0)
@click.option("--warm-seconds", default=240.0)
@click.option("--cells", "words", default="", help="Numbers of a sweep's cells, from 0, or words of names.")
@click.option("--seconds", default=1e9)
@click.option("--rounds", default=5)
@click.option("--device", default="cuda")
def main(
    sources: tuple[Path, ...], sweep: Path | None, store: Path | None, peers: str, library: Path | None, warm: int,
    warm_seconds: float, words: str, seconds: float, rounds: int, device: str,
) -> None:  # fmt: skip
    """SOURCES are folders that hold the package `flashtile`, or archives for the one in use."""
    rows = list(csv.DictReader(store.open())) if store is not None and store.is_file() else []
    known = {row["cell"] for row in rows}
    chosen = cells_of(sweep, device, [word for word in words.split(",") if word])
    missing = {key: cell for key, cell in chosen.items() if key not in known}
    if (warm or peers) and sweep is None:
        raise click.UsageError("--warm and --peers are for the calls of a --sweep")
    if warm:
        compile_all(sources, [*missing.values()], device, warm, warm_seconds)
    end, provider = time.monotonic() + seconds, None if sweep is None else "flashtile"
    names = [x.stem if x.is_file() else x.resolve().parent.name for x in sources]
    sides = [Side(f"{n} {name}", x, provider, device) for n, (name, x) in enumerate(zip(names, sources, strict=True))]
    sides += [Side(peer, sources[-1], peer, device, library) for peer in peers.split(",") if peer]
    for key, cell in missing.items():
        if time.monotonic() < end:
            rows += measured(key, cell, sides, rounds)
            if store is not None:
                csv_rows.write(store, FIELDS, rows)
    for side in sides:
        side.worker.kill()


def measured(key: str, cell: dict[str, Any], sides: list[Side], rounds: int) -> list[dict[str, Any]]:
    """A row for each side that runs the cell; those that do not are printed."""
    name = cell["name"] if "name" in cell else f"{cell['model']}, {cell['measure']}"
    label = name if name == key else f"{key} {name}"
    together = sides[0].provider is None  # all compile at once; in a sweep, the first time decides on a CUDA graph
    for side in sides if together else ():
        side.tell(cell)
    first = {side.name: side.answer() if together else side.seconds(cell) for side in sides}
    for side, found in first.items():
        if isinstance(found, str):
            click.echo(f"{label}, {side}: {found}")
    running = [side for side in sides if not isinstance(first[side.name], str)]
    times: dict[str, list[float]] = {side.name: [] for side in running}
    for _ in range(rounds):
        for side in [x for x in running if x.name in times]:
            found = side.seconds(cell)
            if isinstance(found, str):
                click.echo(f"{label}, {side.name}: {found}")
                del times[side.name]
            else:
                times[side.name].append(found)
    rows = []
    for side, taken in times.items():
        ratios = sorted(one / other for one, other in zip(next(iter(times.values())), taken, strict=True))
        inner = ratios[1:-1] or ratios
        figures = (statistics.median(taken) * 1e6, statistics.median(ratios), inner[0], inner[-1])
        texts = (f"{figures[0]:.2f}", *(f"{x:.3f}" for x in figures[1:]))
        rows.append(dict(zip(FIELDS, (key, name, side, *texts), strict=True)))
    texts = [f"{row['side']} {row['us']} us, {row['speed']} ({row['low']} to {row['high']})" for row in rows]
    click.echo(f"{label}: " + "; ".join(texts))
    return rows


if __name__ == "__main__":
    if sys.argv[1:2] == ["--work"]:
        work(*sys.argv[2:])
    else:
        main()
