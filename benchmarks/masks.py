"""Time calls with masks and biases beside FlexAttention, FlashAttention-3 where it can, SDPA's kernels and packed
sequences:

    python benchmarks/masks.py --store FILE.jsonl --seconds 280 --warm 12

The cells are those of `masks.toml`. Before it is timed, each library's results are compared with the fp64 oracle, on
two pieces of the call, within the contract's bound. Forward, backward and FlexAttention's block mask are timed on the
device, in alternation, in milliseconds: medians, and quantiles of 20% and 80%. A cell that is in the file is left out,
so that a run goes on where one was ended; no cell begins after `--seconds`. `--warm 12` compiles all kernels
beforehand, in twelve processes. `--table` prints a table of the file. A row in the file has the seconds of each first
call and of the oracle, too. A library whose first call takes longer than `--patience` is left out of the cell, so that
one that compiles for minutes does not end the run.
"""

import json
import math
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import click
import torch
from mask_calls import PROVIDERS, Cell, Flex, Inputs, calls_of, inputs_of, load_cells
from torch import Tensor
from torch._functorch import config as functorch

from flashtile.as_arch import install_inherited
from flashtile.bench.clocks import clock_of
from flashtile.bench.origin import commit, device_name
from flashtile.bench.parts import cotangent, cut, pairwise, parts, pick
from flashtile.bench.providers.flash_attn_3 import FlashAttention3
from flashtile.bench.rounds import Entrant, band, interleave
from flashtile.bench.sweep import Timing
from flashtile.testing.case import Case
from flashtile.testing.oracle import solve
from flashtile.testing.threads import one_thread
from flashtile.testing.tolerance import worst

CREATIONS = 5  # of a block mask that are timed
COMPILED = ("flashtile", "flashtile dense", "packed", "flex")  # those whose kernels are compiled at their first call
Attend = Callable[..., Tensor]


def checked(case: Case, inputs: Inputs, attend: Attend, expected: dict[str, Any]) -> tuple[float, str]:
    """The worst error of a library's results in units of their bounds, and where it is. `expected` keeps the oracle's
    results of the pieces.
    """
    names = ("q", "k", "v", "bias")[: len(inputs.leaves)]
    out = attend(*inputs.leaves)
    found = []
    for part in parts(case):
        if str(part) not in expected:
            with one_thread():
                expected[str(part)] = solve(cut(case, part))
        results = {"out": pick(case, part, "out", out)}
        gradients = torch.autograd.grad(out, inputs.leaves, cotangent(case, part), retain_graph=True)
        for name, x in zip(names, gradients, strict=True):
            of_head = slice(part.head_kv, part.head_kv + 1)
            results[f"d{name}"] = pairwise(x, part, of_head).cpu() if name == "bias" else pick(case, part, name, x)
        found += [worst(x, expected[str(part)][name], case.dtype, name) for name, x in results.items()]
    largest = max(found, key=lambda x: x.ratio)
    return largest.ratio, str(largest)


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raise `TimeoutError` after these seconds, as soon as Python code runs: not in the middle of LLVM."""

    def stop(*_: Any) -> None:
        raise TimeoutError(f"not prepared within {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


class Measurement:
    """One cell: its calls, their checks and their times."""

    def __init__(self, cell: Cell, device: torch.device, timing: Timing, patience: float):
        self.cell, self.device, self.timing, self.clock = cell, device, timing, clock_of(device)
        self.patience = patience  # seconds for the first call of a library
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.inputs = inputs_of(cell, device, dtype)
        torch._dynamo.reset()  # or it stops compiling after eight calls
        self.flex = Flex(cell, self.inputs)
        self.failures: dict[str, str] = {}
        self.ratios: dict[str, float] = {}
        self.seconds: dict[str, float] = {}  # of each first call, and of the checks

    def failed(self, name: str, error: Exception) -> str:
        self.failures[name] = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        return self.failures[name]

    def prepared(self, providers: Sequence[str]) -> dict[str, tuple[Attend, Tensor]]:
        """The calls that work, each with a result to differentiate."""
        found = {}
        for name, attend in calls_of(self.cell, self.inputs, self.flex):
            if name not in providers and name.split()[0] not in providers:
                continue
            begin = time.monotonic()
            try:
                # Backward runs more than once.
                with functorch.patch(donated_buffer=False), limited(self.patience):
                    out = attend(*self.inputs.leaves)
                    torch.autograd.grad(out, self.inputs.leaves, self.inputs.dout, retain_graph=True)
            except Exception as error:
                self.failed(name, error)
            else:
                found[name] = attend, out
            self.seconds[name] = round(time.monotonic() - begin, 1)
        return found

    def check(self, calls: dict[str, tuple[Attend, Tensor]]) -> None:
        """Compare all results with the oracle's; calls of ours that are wrong are failures."""
        q, k, v = self.inputs.leaves[:3]
        arguments = {"q": q.detach(), "k": k.detach(), "v": v.detach()}
        if self.inputs.bias is not None:
            arguments["bias"] = self.inputs.bias.detach()
        if self.inputs.visible is not None:
            arguments["mask"] = self.inputs.visible
        case = Case("attention", arguments, self.inputs.dout, description=str(self.cell))
        expected: dict[str, Any] = {}
        begin = time.monotonic()
        for name, (attend, _) in [*calls.items()]:
            self.ratios[name], words = checked(case, self.inputs, attend, expected)
            if self.ratios[name] > 1 and name.split()[0] in ("flashtile", "packed"):
                self.failures[name] = f"outside of its bound: {words}"
                del calls[name]
        self.seconds["checks"] = round(time.monotonic() - begin, 1)

    def times(self, calls: dict[str, tuple[Attend, Tensor]]) -> list[dict[str, Any]]:
        """A row for each call and pass."""
        leaves, dout = self.inputs.leaves, self.inputs.dout
        rows = []
        for direction in ("forward", "backward"):
            entrants = []
            for name, (attend, out) in calls.items():
                forward = partial(attend, *leaves)
                backward = partial(torch.autograd.grad, out, leaves, dout, retain_graph=True)
                entrants.append(Entrant(name, forward if direction == "forward" else backward))
            interleave(self.clock, entrants, self.timing, lambda error: f"{type(error).__name__}: {error}"[:300])
            rows += [self.row(x.name, direction, x.seconds) for x in entrants if x.failure is None and x.seconds]
            self.failures |= {f"{x.name}, {direction}": x.failure for x in entrants if x.failure is not None}
        if "flex" in calls and self.inputs.mask is not None:
            seconds = [self.clock.eager_seconds(self.flex.create_block_mask, 1) for _ in range(CREATIONS)]
            rows.append(self.row("flex", "block mask", seconds))
        return rows

    def row(self, provider: str, direction: str, seconds: Sequence[float]) -> dict[str, Any]:
        of_rounds = band(seconds).map(lambda x: float(f"{1e3 * x:.5g}"))
        return {"provider": provider, "pass": direction, **dict(zip(("ms", "low", "high"), of_rounds, strict=True))}

    def line(self, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
        ratios = {name: float(f"{x:.3g}") if math.isfinite(x) else str(x) for name, x in self.ratios.items()}
        about: dict[str, Any] = {"device": device_name(self.device), "torch": torch.__version__, "commit": commit()}
        about |= {"seconds": self.seconds, "date": time.strftime("%Y-%m-%d")}
        values = {"cell": str(self.cell), "settings": asdict(self.cell), "rows": rows, "errors": ratios}
        return {**values, "failures": self.failures, **about}


def stored(path: Path) -> list[dict[str, Any]]:
    """The cells in a file. A line that was cut short by the end of its process is left out."""
    found = {}
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            values = json.loads(line)
        except ValueError:
            continue
        found[values["cell"]] = values
    return [*found.values()]


def append(path: Path, values: dict[str, Any]) -> None:
    cut_short = path.exists() and path.read_bytes()[-1:] not in (b"", b"\n")
    with path.open("a") as file:
        file.write("\n" * cut_short + json.dumps(values) + "\n")


def warm(cells: Sequence[Cell], processes: int, seconds: float, options: Sequence[str]) -> None:
    """Compile the kernels of all cells into the caches on disk."""
    shares = [share for n in range(processes) if (share := cells[n::processes])]
    running, environment = [], {**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "1"}  # or each starts processes too
    for share in shares:
        words = [word for cell in share for word in ("--cell", str(cell))]
        words += [word for provider in COMPILED for word in ("--provider", provider)]
        command = [sys.executable, __file__, "--rounds", "0", *options, *words]
        running.append(subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment))
    end = time.monotonic() + seconds
    for process in running:
        try:
            process.wait(max(0.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def table(values: Sequence[dict[str, Any]]) -> str:
    """Milliseconds of forward and backward, and FlexAttention's in units of ours, in Markdown."""
    names = [*PROVIDERS[:3], "flashtile function", *PROVIDERS[3:], "block mask"]
    lines = [f"| call | {' | '.join(names)} | flex / flashtile |", f"|{'---|' * (len(names) + 2)}"]
    speeds = []
    for value in values:
        times = {(row["provider"], row["pass"]): row["ms"] for row in value["rows"]}
        cells = []
        for name in names[:-1]:
            both = [times.get((name, x)) for x in ("forward", "backward")]
            cells.append("" if None in both else ", ".join(f"{x:.3g}" for x in both))
        creation = times.get(("flex", "block mask"))
        own = [
            times[("flex", x)] / times[("flashtile", x)]
            for x in ("forward", "backward")
            if ("flex", x) in times and ("flashtile", x) in times
        ]
        speeds += own
        words = ", ".join(f"{x:.2f}" for x in own)
        lines.append(f"| {value['cell']} | {' | '.join(cells)} | {creation or ''} | {words} |")
    if speeds:
        lines.append(f"\nFlexAttention's time in units of ours: {statistics.geometric_mean(speeds):.2f} on the mean.")
    return "\n".join(lines)


@click.command()
@click.option("--store", type=click.Path(dir_okay=False, path_type=Path), help="A JSON Lines file, which is extended.")
@click.option("--seconds", default=280.0, show_default=True, help="No cell begins later.")
@click.option("--warm", "processes", default=0, help="Processes that compile beforehand.")
@click.option("--cell", "chosen", multiple=True, help="Its name; may be repeated.  [default: all]")
@click.option("--provider", "providers", multiple=True, default=PROVIDERS, help="May be repeated.")
@click.option(
    "--fa3-library", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="Of FlashAttention-3."
)
@click.option("--patience", default=120.0, show_default=True, help="Seconds for the first call of a library.")
@click.option("--rounds", default=5, show_default=True, help="0 compiles only.")
@click.option("--sample-seconds", default=0.01, show_default=True, help="Least time of a sample.")
@click.option("--device", default="cuda", show_default=True)
@click.option("--tiny", is_flag=True, help="Calls of a few positions, to try the program.")
@click.option("--table", "only_table", is_flag=True, help="Print a table of the file, and measure nothing.")
def main(
    store: Path | None, seconds: float, processes: int, chosen: tuple[str, ...], providers: tuple[str, ...],
    fa3_library: Path | None, patience: float, rounds: int, sample_seconds: float, device: str, tiny: bool,
    only_table: bool,
) -> None:  # fmt: skip
    """Measure the cells that are missing in the file."""
    begin = time.monotonic()
    install_inherited()
    if fa3_library is not None:
        FlashAttention3(fa3_library).operators()
    if only_table:
        click.echo(table(stored(store) if store else []))
        return
    cells = [cell.tiny() if tiny else cell for cell in load_cells()]
    if unknown := {*chosen} - {str(cell) for cell in cells}:
        raise click.ClickException(f"no cell is called {', '.join(unknown)}")
    known = {value["cell"] for value in stored(store)} if store else set()
    cells = [cell for cell in cells if str(cell) not in known and (not chosen or str(cell) in chosen)]
    if processes:
        warm(cells, processes, 0.5 * seconds, ["--device", device, *["--tiny"] * tiny])
        click.echo(f"compiled after {time.monotonic() - begin:.0f} s")
    timing = Timing(rounds=rounds, sample_seconds=sample_seconds, rest_seconds=0.002)
    for n, cell in enumerate(cells):
        if time.monotonic() - begin > seconds:
            click.echo(f"stopped before {len(cells) - n} cells")
            return
        measurement = Measurement(cell, torch.device(device), timing, patience)
        calls = measurement.prepared(providers)
        rows = []
        if rounds > 0:
            measurement.check(calls)
            rows = measurement.times(calls)
        values = measurement.line(rows)
        if store:
            append(store, values)
        told = ", ".join(f"{name} {x}" for name, x in measurement.seconds.items())
        click.echo(f"{time.monotonic() - begin:.0f} s: {cell}; seconds of first calls: {told}")
        for row in rows:
            click.echo(f"  {row['provider']}, {row['pass']}: {row['ms']} ms")
        for name, reason in values["failures"].items():
            click.echo(f"  {name} failed: {reason}")
        del measurement, calls
        if device != "cpu":
            torch.cuda.empty_cache()  # processes that compile share the device's memory


if __name__ == "__main__":
    main()
