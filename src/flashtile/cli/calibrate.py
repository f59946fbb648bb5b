"""`flashtile calibrate`: measure the ways to run calls on this machine, and fit the rates by which plans choose."""

import statistics
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

import torch

from .options import (
    CommandError,
    arch_option,
    device,
    input_file,
    install_arch,
    json_option,
    number,
    option,
    output_file,
    print_json,
)

RESERVE = 60.0  # seconds to fit, out of the time
PASSES = ("forward", "backward", "tangents")


def arguments(parser: ArgumentParser) -> None:
    option(parser, "--device", type=device, default="cuda")
    option(
        parser,
        "--store",
        type=output_file,
        required=True,
        help="A file of measured calls. Those that it has are not measured again, so that a run goes on where another "
        "one ended.",
    )
    option(parser, "--rates", type=output_file, help="The chip's file of rates, written at the end.")
    option(
        parser,
        "--sweep",
        dest="sweeps",
        action="append",
        default=[],
        type=input_file,
        help="A TOML file of benchmarks/, whose calls are measured besides those that are drawn. May be repeated.",
    )
    option(
        parser,
        "--only",
        dest="passes",
        action="append",
        default=[],
        choices=PASSES,
        help="Measure calls of this pass alone; tangents is forward mode. May be repeated.",
    )
    arch_option(parser)
    option(parser, "--minutes", type=number(0, above=True), default=20.0)
    json_option(parser)


def run(
    device: torch.device, store: Path, rates: Path | None, sweeps: list[Path], passes: list[str], as_arch: str | None,
    minutes: float, as_json: bool,
) -> None:  # fmt: skip
    """Measure all candidates of calls on a GPU or on one thread of a CPU, and fit the rates of the chip to them."""
    from ..calibrate.calls import standard
    from ..calibrate.run import measure_all
    from ..calibrate.store import pass_of, read
    from ..calibrate.written import write
    from ..call.device import describe_device

    if device.type == "cpu":
        report(*on_cpu(store, rates, sweeps, passes, 60 * minutes), rates, as_json)
        return
    if device.type != "cuda":
        raise CommandError(f"the time of plans is counted for GPUs and CPUs, not for {device.type}")
    install_arch(as_arch)
    cells = [cell for cell in standard(sweeps) if not passes or pass_of(cell) in passes]
    left = measure_all(cells, store, 60 * minutes - (0 if rates is None else RESERVE))
    rows = [row for row in read(store) if row.device == describe_device(device).name and not row.stale]
    errors = write(rates, rows, describe_device(device)).errors if rates is not None and rows else None
    report(len(cells), left, len(rows), errors, rates, as_json)


def on_cpu(
    store: Path, rates: Path | None, sweeps: list[Path], passes: list[str], seconds: float
) -> tuple[int, int, int, Any]:
    """The calls of a CPU, how many are left to measure, how many are fitted, and the errors of the fit."""
    from ..backend.cpu.rates import processor_name
    from ..calibrate.processor import measure_all, standard, write
    from ..calibrate.store import pass_of, read

    cells = [cell for cell in standard(sweeps) if not passes or pass_of(cell) in passes]
    left = measure_all(cells, store, seconds)
    rows = [row for row in read(store) if row.device == processor_name() and not row.stale]
    if rates is None or not rows:
        return len(cells), left, len(rows), None
    given = "".join(f" --sweep {path}" for path in sweeps)
    command = f"flashtile calibrate --device cpu --store {store.name}{given} --rates {rates}"
    return len(cells), left, len(rows), write(rates, rows, command).errors


def report(calls: int, left: int, rows: int, errors: Any, rates: Path | None, as_json: bool) -> None:
    """Print what was measured and fitted; `errors` is `None` without a fit."""
    found: dict[str, float] = {"calls": calls, "missing": left, "fitted": rows if errors is not None else 0}
    if errors is not None:
        found["median_error"] = float(statistics.median(map(abs, errors)))
    if as_json:
        print_json(found)
        return
    print(f"{calls - left} of {calls} calls are measured" + "; the next run goes on" * (left > 0))
    if errors is not None:
        print(f"{rates}: rates of {rows} calls, which their times differ from by {found['median_error']:.1%}")
