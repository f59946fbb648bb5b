"""`flashtile tune`: a search of tiles for this GPU that are faster than the shipped ones."""

from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch

from ..backend.triton import support, tuned
from ..call.device import describe_device
from .options import CommandError, UsageError, dtype, flag, folder, integer, json_option, number, option, print_json
from .options import device as device_of

if TYPE_CHECKING:
    from ..tuning.search import SearchResult
    from ..tuning.trial import Subject

PASSES = {"forward": ("forward",), "backward": ("dkdv", "dq"), "dkdv": ("dkdv",), "dq": ("dq",)}


def no_gpu() -> str | None:
    if (reason := support.unusable()) is not None:
        return reason
    return "they run in Triton's interpreter here" if support.interpreted() else None


def arguments(parser: ArgumentParser) -> None:
    several = {"action": "append", "default": []}
    option(
        parser, "--head-dim", dest="head_dims", type=integer(1, 512), help="May be repeated. [default: 128]", **several
    )
    option(parser, "--pass", dest="passes", choices=tuple(PASSES), help="[default: forward and backward]", **several)
    option(parser, "--dtype", type=dtype, default="bfloat16")
    option(parser, "--seqlen", type=integer(128), default=4096, help="Rows and keys of the timed calls.")
    option(parser, "--seconds", type=number(1), default=60.0, help="For the search of one kernel, about.")
    option(parser, "--device", help="[default: cuda]")
    flag(parser, "--dry-run", help="Save nothing.")
    json_option(parser)


def run(
    *,
    head_dims: Sequence[int],
    passes: Sequence[str],
    dtype: torch.dtype,
    seqlen: int,
    seconds: float,
    device: str | None,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Search tiles of the Triton kernels for this GPU, and save those that are faster than the shipped ones.

    The search starts at the shipped tile and goes to faster neighbors while time is left. A tile is timed only after
    its results are within the contract's bound of an fp64 oracle. The result is for this GPU and this version of
    Triton, and for all plain calls up to the width of its row in the shipped table: 64, 128, 256 or 512. Later
    processes use it, and `flashtile explain` shows it. It is saved in `triton-tiles.json` in the user's cache
    directory, or in $FLASHTILE_CACHE_DIR. Calls never search.
    """
    from ..tuning.trial import Subject

    if (reason := no_gpu()) is not None:
        raise UsageError(f"tiles are searched on a GPU that runs Triton's kernels: {reason}")
    try:
        place = device_of(device or "cuda")
    except ArgumentTypeError as error:
        raise UsageError(f"--device {error}") from None
    if dtype is torch.float64:
        raise UsageError("--dtype float64: the Triton kernels do not take it")
    kernels = dict.fromkeys(kernel for name in passes or ("forward", "backward") for kernel in PASSES[name])
    if not dry_run:
        try:
            folder(str(tuned.path().parent))
        except FileNotFoundError as error:
            raise UsageError(str(error)) from error
    rows = []
    try:
        for head_dim in head_dims or (128,):
            for kernel in kernels:
                subject = Subject(kernel, dtype, head_dim, seqlen, place)
                result, saved = searched(subject, seconds, dry_run)
                rows.append(asdict(result) | {"kernel": kernel, "head_dim": head_dim, "saved": saved})
                if not as_json:
                    print_found(subject, result, saved)
    finally:  # an interruption loses no kernel before it
        if as_json:
            print_json({"device": describe_device(place)._asdict(), "dtype": dtype, "found": rows})


def searched(subject: "Subject", seconds: float, dry_run: bool) -> "tuple[SearchResult, str | None]":
    """The result of a search, and the file that has it now."""
    from ..tuning.search import TuningError, search
    from ..tuning.trial import GpuTrial

    try:
        result = search(getattr(subject.shipped(), subject.kernel), GpuTrial(subject), seconds)
    except TuningError as error:
        raise CommandError(str(error)) from error
    if result.best == result.shipped or dry_run:
        return result, None
    return result, str(save(subject, result))


def save(subject: "Subject", result: "SearchResult") -> Any:
    from ..backend.triton import configs

    device = describe_device(subject.device)
    before, after = result.seconds
    measured = {"head_dim": subject.head_dim, "dtype": str(subject.dtype).removeprefix("torch.")}
    measured |= {"seqlen": subject.seqlen, "shipped": result.shipped[:4], "shipped_ms": before * 1e3, "ms": after * 1e3}
    return tuned.save(
        tuned.Entry(
            device.name,
            device.arch,
            tuned.installed(),
            configs.family(subject.dtype),
            subject.shipped().width,
            subject.kernel,
            result.best[:4],
            measured,
        )
    )


def print_found(subject: "Subject", result: "SearchResult", saved: str | None) -> None:
    print(f"{subject.kernel}, head_dim {subject.head_dim}, {str(subject.dtype).removeprefix('torch.')}")
    for tried in result.tried:
        outcome = f"{-tried.gain:+.1%} time" if tried.gain is not None else f"refused, {tried.refused}"
        print(f"  {tried.launch}: {outcome}")
    end = "" if result.finished else "; time was up before all neighbors were tried"
    if result.best == result.shipped:
        print(f"  the shipped tile stays: {result.shipped}{end}")
        return
    print(f"  {result.best} takes {result.gain:.1%} less time than the shipped {result.shipped}{end}")
    print(f"  saved in {saved}" if saved else "  not saved")
