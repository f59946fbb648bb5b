"""`flashtile bench`: this library and others on the same inputs, each result checked before it is timed."""

import sys
from argparse import ArgumentParser
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..progress import progress
from .env import survey
from .options import (
    CommandError,
    UsageError,
    arch_option,
    device,
    flag,
    folder,
    input_file,
    install_arch,
    integer,
    json_option,
    number,
    option,
    output_file,
    print_json,
)

if TYPE_CHECKING:
    from ..bench.providers import Provider
    from ..bench.sweep import Sweep

DEFAULT_CELLS = (
    {"measure": ["forward", "backward"], "seqlen_q": [512, 2048], "causal": [False, True]},
    {"measure": ["decode"], "seqlen_q": 1, "seqlen_k": 4096},
)


def arguments(parser: ArgumentParser) -> None:
    option(parser, "--device", type=device, default="cpu")
    arch_option(parser)
    option(
        parser,
        "--sweep",
        dest="sweep_file",
        type=input_file,
        help="A TOML file of benchmarks/. [default: a small sweep]",
    )
    option(parser, "--providers", help="Names with commas between. [default: the sweep's, or all]")
    option(
        parser,
        "--cells",
        dest="filters",
        action="append",
        default=[],
        metavar="FIELD=VALUE...",
        help="Only cells where every FIELD has one of the values, as in 'measure=forward head_dim=64|128'. May be "
        "repeated: a cell that one filter lets through is measured.",
    )
    option(parser, "--rounds", type=integer(1), help="[default: the sweep's]")
    option(parser, "--sample-seconds", type=number(0, above=True), help="[default: the sweep's]")
    option(parser, "--reference", help="The provider that ratios are against. [default: the sweep's]")
    option(
        parser,
        "--fa3-library",
        type=Path,
        help="FlashAttention-3's compiled operators; a libcudart.so.12 in the same folder is loaded first.",
    )
    option(parser, "--out", type=folder, help="Write results.json, .csv and samples.csv, after each result.")
    option(
        parser,
        "--store",
        dest="store_file",
        type=output_file,
        help="Add each cell to this file, and leave out the cells that it has. Cells are measured in a process that is "
        "replaced if a provider crashes or hangs.",
    )
    option(parser, "--seconds", type=number(0, above=True), help="With --store: the most that this run takes.")
    flag(parser, "--again", help="With --store: measure the cells anew.")
    json_option(parser)


def run(
    *,
    device: torch.device,
    as_arch: str | None,
    sweep_file: Path | None,
    filters: Sequence[str],
    out: Path | None,
    store_file: Path | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Time attention of several libraries on the same inputs, interleaved in this process.

    Every result is first compared with an fp64 oracle; a wrong one has no speed. In each round every provider is timed
    once after the same rest. Figures are medians over rounds with their 20% and 80% quantiles; FLOPs count
    visible pairs, 2.5 times as many backward. Cells that cannot be measured are listed with the reason.
    """
    install_arch(as_arch)
    from ..bench.origin import origin
    from ..bench.providers import all_names, make
    from ..bench.results import Results
    from ..bench.run import Bench, stamp
    from ..bench.sweep import Sweep, expand, load

    try:
        sweep = load(sweep_file) if sweep_file else Sweep("default", tuple(c for t in DEFAULT_CELLS for c in expand(t)))
        sweep = sweep.on(device.type).only(tuple(filters))
        names = (options["providers"] or "").replace(",", " ").split()
        providers = make(names or sweep.providers or all_names(), options["fa3_library"])
    except ValueError as error:
        raise CommandError(str(error)) from error
    changes = {name: options[name] for name in ("rounds", "sample_seconds") if options[name] is not None}
    timing = replace(sweep.timing, **changes)
    reference = reference_of(options["reference"], sweep.reference, providers, device)
    if store_file is not None:
        names = [provider.name for provider in providers]
        return into_store(replace(sweep, timing=timing, reference=reference), names, store_file, device, out, options)
    if options["again"] or options["seconds"] is not None:
        raise UsageError("--seconds and --again are for --store")
    about = origin(device, providers, survey()[0]) | {"sweep": str(sweep_file or "default"), "started": stamp()}
    results = Results(sweep.name, reference, about)
    work = Bench(device, providers, timing, reference, options["fa3_library"], specialists=sweep.specialists)
    try:
        with progress() as bar:
            task = bar.add_task(sweep.name, total=len(sweep.cells))
            for row in work.run(sweep, lambda cell: bar.advance(task)):
                results.rows.append(row)
                bar.update(task, description=row.cell.label())
                if out is not None:
                    results.write(out)  # a process that dies loses only the current row
    finally:  # an interruption keeps all results
        about |= {"ended": stamp(), "clocks after": work.clock.state()}
        if out is not None:
            results.write(out)
        if as_json:
            print_json(results.as_dict())
        else:
            print_results(results)


STEP_SECONDS = 120.0  # time of a provider's preparation with its compilation and check, and of a cell's rounds


def into_store(
    sweep: "Sweep", names: list[str], path: Path, device: torch.device, out: Path | None, options: dict[str, Any]
) -> None:
    """Measure the cells that the store lacks, and print all comparisons of the sweep, losses first."""
    from ..bench.results import Results
    from ..bench.store import Store
    from ..bench.supervise import Unable, Work, about, measure
    from ..report.models import lines_of

    store, library = Store(path), options["fa3_library"]
    work = Work(
        sweep.cells,
        tuple(names),
        str(device),
        sweep.timing,
        sweep.reference,
        str(library) if library else None,
        str(path),
        STEP_SECONDS,
        specialists=sweep.specialists,
    )
    if options["again"]:
        store.forget(sweep.cells)
    try:
        left = measure(work, options["seconds"], lambda words: print(words, file=sys.stderr))
    except Unable as error:
        raise CommandError(f"nothing can be measured: {error}") from error
    stored = {cell: rows for cell, rows in store.read().items() if cell in sweep.cells}
    if out is not None:
        rows = [row for cell in sweep.cells for row in stored.get(cell, [])]
        Results(sweep.name, sweep.reference, about(device), rows).write(out)
    for line in lines_of(stored):
        print(line)
    print(f"{len(sweep.cells) - len(left)} of {len(sweep.cells)} cells are in {path}")
    if left:
        print("the same command goes on with the others")


def reference_of(
    requested: str | None, of_sweep: str | None, providers: "list[Provider]", device: torch.device
) -> str | None:
    """The denominator of ratios: the requested provider, which has to run here, or the sweep's, if it is measured.

    Raises:
        UsageError: the requested provider is not measured.
    """
    known = {provider.name: provider for provider in providers}
    if requested is None:
        return of_sweep if of_sweep in known else None
    if requested not in known:
        raise UsageError(f"--reference {requested!r} is not measured; providers: {', '.join(known)}")
    if (reason := known[requested].unusable(device)) is not None:
        raise UsageError(f"--reference {requested!r} is not measured: {reason}")
    return requested


def print_results(results: Any) -> None:
    from ..bench.tables import reasons, tables

    for grid in tables(results):
        print(f"{grid}\n")
    for status, provider, reason, count in reasons(results):
        cells = "1 cell" if count == 1 else f"{count} cells"
        print(f"{provider}: {status}, {cells}: {reason}")
    about = results.about
    print(f"\n{about['device']}, torch {about['torch']}, commit {about['commit']}: {about['command']}")
