"""`flashtile prepare`: compile the kernels of a workload into the cache."""

from argparse import ArgumentParser, ArgumentTypeError
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from ..prebuilt.prepare import prepare
from ..prebuilt.ranges import FEATURES, LAYOUTS
from .explain import window
from .options import device, dtype, flag, input_file, integer, json_option, option, print_json


def bounds(text: str) -> tuple[int, int]:
    """`LEAST:GREATEST`, or one number."""
    try:
        least, _, greatest = text.partition(":")
        return int(least), int(greatest or least)
    except ValueError:
        raise ArgumentTypeError(f"{text!r} is not LEAST:GREATEST, such as 1:8192") from None


def arguments(parser: ArgumentParser) -> None:
    ways = parser.add_mutually_exclusive_group(required=True)
    option(ways, "--model", metavar="NAME_OR_PATH", help="A model of transformers, by its configuration.")
    option(
        ways,
        "--log",
        type=input_file,
        metavar="FILE",
        help="Calls that FLASHTILE_LOG_CALLS has recorded.",
    )
    option(ways, "--heads", type=integer(1), help="Query heads, with --head-dim and --dtype.")
    option(parser, "--heads-kv", type=integer(1), help="Key and value heads. [default: as many as query heads]")
    option(parser, "--head-dim", type=integer(1))
    option(parser, "--head-dim-v", type=integer(1), help="[default: as --head-dim]")
    option(parser, "--dtype", type=dtype, help="[default of --model: the model's]")
    option(parser, "--layout", choices=LAYOUTS, default="dense")
    option(parser, "--page-size", type=integer(1), help="Of a cache with pages, with --layout cache.")
    option(parser, "--lengths", type=bounds, default=(1, 8192), metavar="LEAST:GREATEST", help="Keys of a sequence.")
    option(parser, "--batches", type=bounds, default=(1, 64), metavar="LEAST:GREATEST", help="Sequences.")
    flag(parser, "--serving", help="Prompts and single queries; without it, forward and backward of training.")
    flag(parser, "--causal", help="The last query sees every key, and others no later ones.")
    option(parser, "--window", type=window, metavar="LEFT,RIGHT", help="Keys that a query sees to either side.")
    option(parser, "--softcap", type=float)
    option(
        parser,
        "--feature",
        dest="features",
        action="append",
        default=[],
        choices=FEATURES,
        help="A tensor of the usual shape. May be repeated.",
    )
    option(parser, "--device", type=device, help="[default: the GPU, or else the CPU]")
    option(parser, "--jobs", type=integer(1), help="Processes. [default: as many as cores, at most 16]")
    json_option(parser)


def run(
    *,
    model: str | None,
    log: Path | None,
    serving: bool,
    causal: bool,
    window: tuple[int | None, int | None] | None,
    softcap: float | None,
    features: list[str],
    device: torch.device | None,
    jobs: int | None,
    as_json: bool,
    **kind: Any,
) -> None:
    """Compile all kernels that a workload needs into the cache, in several processes.

    Later processes on this machine do not wait for a compiler, and others of its kind that get a copy of the cache.
    The workload is a model of transformers, a log of calls, or ranges of lengths and batches.
    """
    settings: dict[str, Any] = {"causal": True} if causal else {}
    settings |= {name: x for name, x in (("window", window), ("softcap", softcap)) if x is not None}
    settings |= dict.fromkeys(features, True)
    prepared = prepare(model=model, log=log, training=not serving, device=device, jobs=jobs, **kind, **settings)
    print_json(asdict(prepared)) if as_json else print(prepared)
