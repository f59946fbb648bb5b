"""Compile the shipped kernels for every architecture:

PYTHONPATH=src:tests:tests/support python -m offline --full --out FILE.csv
"""

import csv
import sys
import time
from dataclasses import asdict
from itertools import product
from pathlib import Path

import click
import hopper_variants as hopper
import triton
from rich.console import Console
from rich.progress import track

from flashtile.backend.gpu.chips import SHARED_MEMORY

from .compiled import KIB, compile_launch
from .derivatives import HEAD_DIMS, launches_of_derivatives
from .families import ARCHITECTURES, FAMILIES, call_of_family, most_registers
from .launches import hopper_launches_of, launches_of
from .loops import loops_of
from .mma import launches_by_width


@click.command()
@click.option("--full", is_flag=True, help="Every family; else one.")
@click.option("--arch", "architectures", multiple=True, help="May be repeated.  [default: all]")
@click.option("--family", "names", multiple=True, help="A family of problems. May be repeated.")
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    help="A CSV file of the results; rows of other architectures and families stay.",
)
def main(full: bool, architectures: tuple[str, ...], names: tuple[str, ...], out: Path | None) -> None:
    """Exit code 1 if a kernel does not compile, exceeds its chip's shared memory or registers, or is miscompiled."""
    chosen = architectures or ARCHITECTURES
    families = [x for x in names if x in FAMILIES] if names else FAMILIES if full else FAMILIES[:1]
    work = [
        (arch, family, launch)
        for family in families
        for arch in chosen
        for launch in launches_of(call_of_family(family), arch)
    ]
    if "sm_90" in chosen and not names:
        work += [
            ("sm_90", f"{name}, hdim {head_dim}, {seqlen} keys", launch)
            for name, head_dim, seqlen in (hopper.FAMILIES if full else hopper.FAMILIES[:1])
            for launch in hopper_launches_of(hopper.call_of_family(name, head_dim, seqlen))
        ]
    if not names:
        work += [(arch, *found) for arch in chosen for found in launches_by_width(arch, full=full)]
    for arch, n in product(chosen, HEAD_DIMS if full or names else ()):
        work += [(arch, *x) for x in launches_of_derivatives(n, arch) if not names or x[0] in names]
    rows, wrong = [], []
    for arch, family, launch in track(work, "compiling", console=Console(stderr=True)):
        start = time.perf_counter()
        try:
            found = asdict(compile_launch(launch, arch, read=True))
            found |= loops_of(found.pop("code"))._asdict()
        except Exception as error:
            wrong.append(f"{arch} {family} {launch.name}: {type(error).__name__}: {str(error)[-300:]}")
            continue
        if found["shared"] > SHARED_MEMORY[arch] * KIB:
            wrong.append(f"{arch} {family} {launch.name}: {found['shared']} bytes of shared memory")
        if found["registers"] > most_registers(arch):
            wrong.append(f"{arch} {family} {launch.name}: {found['registers']} registers")
        if found["unset"]:
            wrong.append(f"{arch} {family} {launch.name}: reads registers that nothing has written")
        seconds = round(time.perf_counter() - start, 1)
        rows.append({"triton": triton.__version__, "arch": arch, "family": family, **found, "seconds": seconds})
    compiled = len(rows)
    if out is not None and rows:
        kept = list(csv.DictReader(out.open(newline=""))) if out.exists() else []
        done = {(row["arch"], row["family"]) for row in rows}
        rows = [x for x in kept if x["arch"] not in chosen or (names and (x["arch"], x["family"]) not in done)] + rows
        with out.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[-1]))
            writer.writeheader()
            writer.writerows(rows)
    click.echo("\n".join([*wrong, f"{compiled} kernels compiled, {len(wrong)} wrong, Triton {triton.__version__}"]))
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
