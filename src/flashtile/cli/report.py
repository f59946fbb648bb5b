"""`flashtile report`: one page on correctness, speed, memory, error and plans on this machine."""

import importlib.util
import sys
import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import click
import torch

from ..errors import AttentionWarning
from .env import survey
from .options import Device, Folder, json_option, print_json

NEEDS = ("matplotlib", "jinja2")


class Lengths(click.ParamType):
    """Sequence lengths with commas between."""

    name = "n,n,..."

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        try:
            lengths = tuple(sorted({int(n) for n in value.split(",")}))
        except ValueError:
            self.fail(f"{value!r} is not a list of lengths such as 256,512,1024", param, ctx)
        if len(lengths) < 2 or lengths[0] < 2:
            self.fail(f"{value!r} has not two lengths of at least 2", param, ctx)
        return lengths


@click.command()
@click.option("--quick", is_flag=True, help="Within two minutes on two cores, without a GPU.")
@click.option("--device", type=Device(), default="cpu")
@click.option("--out", type=Folder(), default="flashtile-report", help="For the page, and for figures as they come.")
@click.option("--images", is_flag=True, help="Also write each plot as an SVG of its own.")
@click.option("--seqlens", type=Lengths(), help="Of speed.  [default: by device]")
@click.option("--memory-seqlens", type=Lengths(), help="Of memory.  [default: by device]")
@click.option(
    "--cases",
    type=click.IntRange(1),
    help="Random problems of the gate; a third as many captured ones, a thirtieth of long ones.",
)
@click.option("--steps", type=click.IntRange(1), help="Of training.")
@click.option("--rounds", type=click.IntRange(1), help="In which everything is timed.")
@json_option
def report(quick: bool, device: torch.device, out: Path, images: bool, as_json: bool, **options: Any) -> None:
    """Measure this machine and write report.html, with the figures as JSON and CSV in the same folder.

    Correctness, speed and memory against sequence length, error against fp64, the planner's choices, and every case in
    which flashtile is slower than others. The exit code is 1 if a check fails.
    """
    missing = [name for name in NEEDS if importlib.util.find_spec(name) is None]
    if missing:
        raise click.ClickException(f"{' and '.join(missing)} not installed: pip install 'flashtile[report]'")
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
            click.echo(f"{section.title}{'' if section.ok else ' FAILED'}")
            click.echo(click.wrap_text(section.summary, 100, "  ", "  "))
        click.echo(f"\n{path} in {results.seconds:.0f} s; its folder has the figures as JSON and CSV")
    sys.exit(0 if results.ok else 1)
