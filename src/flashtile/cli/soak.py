"""`flashtile soak`: random calls from several threads for minutes or hours, in memory that has to stay flat."""

import sys
import time
from argparse import ArgumentParser
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from .options import device, integer, json_option, number, option, print_json
from .verify import chosen

if TYPE_CHECKING:
    from ..soak.run import Soak

PROBLEMS = {"cuda": 12}  # each needs kernels of its own, and compiling them takes longest on a GPU
PROBLEMS_ELSEWHERE = 120
TOLD_EVERY = 60.0  # seconds


def arguments(parser: ArgumentParser) -> None:
    option(parser, "--minutes", type=number(0, above=True), default=10.0, help="For how long, in all.")
    option(parser, "--device", type=device, default="cpu")
    option(
        parser,
        "--threads",
        type=integer(1),
        default=4,
        help="That call at the same time; on a GPU, on streams.",
    )
    option(parser, "--seed", type=integer(0), default=0, help="Of the problems and of the order in which they come.")
    option(parser, "--problems", type=integer(1), help="How many different ones. [default: 12 on a GPU, 120 elsewhere]")
    option(
        parser,
        "--backend",
        dest="backends",
        action="append",
        default=[],
        help="May be repeated. [default: auto and all usable ones]",
    )
    json_option(parser)


def run(
    *,
    minutes: float,
    device: torch.device,
    threads: int,
    seed: int,
    problems: int | None,
    backends: Sequence[str],
    as_json: bool,
) -> int:
    """Call without pause from several threads, and check that results stay the same and memory stays flat.

    Problems are as in `flashtile verify`, each in several ways: forward and backward, compared with the oracle,
    deterministic, with a mistake that has to be refused; on a GPU also captured in graphs, and with memory that runs
    out in the middle. A first round runs every problem in every way. Then memory is sampled every ten seconds while
    nothing runs, and its median over the last third of the soak may exceed that over the middle third only by a limit.
    The exit code is 1 if anything fails.
    """
    from ..soak.calls import Problems
    from ..soak.run import Soak

    count = problems or PROBLEMS.get(device.type, PROBLEMS_ELSEWHERE)
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
    others = ("reference",) if device.type == "cpu" else ("reference", "cpu")
    usable = chosen(tuple(name for name in backends if name != "auto"))
    names = tuple(backends) or ("auto", *(name for name in usable if name not in others))
    work = Soak(Problems(range(seed, seed + count), names, device), minutes, threads, seed)
    last = -TOLD_EVERY

    def tell(line: str) -> None:
        nonlocal last
        if time.perf_counter() - last >= TOLD_EVERY:
            last = time.perf_counter()
            print(line, file=sys.stderr)

    try:
        work.run(tell)
    finally:
        if as_json:
            print_json(work.as_dict())
        else:
            print_soak(work)
    return 0 if work.passed else 1


def print_soak(work: "Soak") -> None:
    for failure in work.ledger.failures[:20]:
        print(f"FAILED {failure.kind}, {failure.call}\n  {failure.message}")
    calls = ", ".join(f"{n:,} {kind}" for kind, n in sorted(work.ledger.counts.items()))
    print(f"{work.seconds:.0f} s in {work.threads} threads, {work.warm_seconds:.0f} s of them to warm up: {calls}")
    for name, x in work.growth.items():
        words = "flat" if x.ok else "GROWS"
        more, limit = (x.last - x.middle) / 2**20, x.limit / 2**20
        print(f"{words}: {name}: {x.last / 2**20:,.1f} MiB, {more:+.2f} MiB since the middle third (limit {limit:g})")
    if not work.growth:
        print("too few samples to tell whether memory grows: give it more minutes or fewer problems")
    print("all well" if work.passed else "FAILED")
