"""`flashtile report`: one page on correctness, speed, memory, error and plans on this machine."""

import importlib.util
import textwrap
import warnings
from argparse import ArgumentParser, ArgumentTypeError
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ..errors import AttentionWarning
from .env import survey
from .options import CommandError, device, flag, folder, integer, json_option, option, print_json

NEEDS = ("matplotlib", "jinja2")


def lengths(text: str) -> tuple[int, ...]:
    """Sequence lengths with commas between."""
    try:
        found = tuple(sorted({int(n) for n in text.split(",")}))
    except ValueError:
        raise ArgumentTypeError(f"{text!r} is not a list of lengths such as 256,512,1024") from None
    if len(found) < 2 or found[0] < 2:
        raise ArgumentTypeError(f"{text!r} has not two lengths of at least 2")
    return found


def arguments(parser: ArgumentParser) -> None:
    flag(parser, "--quick", help="Within two minutes on two cores, without a GPU.")
    option(parser, "--device", type=device, default="cpu")
    option(parser, "--out", type=folder, default="flashtile-report", help="For the page, and for figures as they come.")
    flag(parser, "--images", help="Also write each plot as an SVG of its own.")
    option(parser, "--seqlens", type=lengths, metavar="N,N,...", help="Of speed. [default: by device]")
    option(parser, "--memory-seqlens", type=lengths, metavar="N,N,...", help="Of memory. [default: by device]")
    option(
        parser,
        "--cases",
        type=integer(1),
        help="Random problems of the gate; a third as many captured ones, a thirtieth of long ones.",
    )
    option(parser, "--steps", type=integer(1), help="Of training.")
    option(parser, "--rounds", type=integer(1), help="In which everything is timed.")
    json_option(parser)


def run(*, quick: bool, device: torch.device, out: Path, images: bool, as_json: bool, **options: Any) -> int:
    """Measure this machine and write report.html, with the figures as JSON and CSV in the same folder.

    Correctness, speed and memory against sequence length, error against fp64, the planner's choices, and every case in
    which flashtile is slower than others. The exit code is 1 if a check fails.
    """
    missing = [name for name in NEEDS if importlib.util.find_spec(name) is None]
    if missing:
        raise CommandError(f"{' and '.join(missing)} not installed: pip install 'flashtile[report]'")
    from ..report.gather import gather
    from ..report.page import as_dict, write, write_sections
    from ..report.settings import settings_for

    settings = settings_for(device, quick)
    changes = {name: x for name in ("seqlens", "memory_seqlens", "cases", "steps") if (x := options[name]) is not None}
    if options["cases"] is not None:
        changes["captured_cases"] = max(1, options["cases"] // 3)
        changes["long_cases"] = max(1, options["cases"] // 30)
    if options["rounds"] is not None:
        changes["timing"] = replace(settings.timing, rounds=options["rounds"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", AttentionWarning)  # the page says which backend runs
        results = gather(replace(settings, **changes), survey()[0], partial(write_sections, folder=out))
    path = write(results, out, images)
    if as_json:
        print_json(as_dict(results))
    else:
        for section in results.sections:
            print(f"{section.title}{'' if section.ok else ' FAILED'}")
            print(textwrap.fill(section.summary, 100, initial_indent="  ", subsequent_indent="  "))
        print(f"\n{path} in {results.seconds:.0f} s; its folder has the figures as JSON and CSV")
    return 0 if results.ok else 1
