"""`flashtile.prepare`: compile the kernels of a workload before its first call."""

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..backend import compiling
from ..call.call import Call, Needs
from ..call.device import Device, describe_device
from ..call.record import Record, record_of
from ..dispatch import observed
from ..errors import ArgumentError
from .helpers import compiled_by_helpers, default_jobs
from .needed import (
    Kernels,
    can_be_sent,
    compile_kernel,
    in_archive,
    is_loaded_from_cache,
    kernels_of,
    kernels_of_record,
)
from .ranges import records_of_ranges
from .transformers_model import records_of_model

EXAMPLE = (
    "flashtile.prepare(heads=32, heads_kv=8, head_dim=128, dtype=torch.bfloat16, causal=True), "
    "flashtile.prepare(model='path/of/a/model'), flashtile.prepare(log='calls.jsonl') or "
    "flashtile.prepare(lambda: model(tokens))"
)
WAYS = "one of: an example to call, `model`, `log`, or `heads` with `head_dim` and `dtype`"


@dataclass(frozen=True)
class Prepared:
    """The result of `flashtile.prepare`. `str(prepared)` is a sentence.

    Attributes:
        device: its name.
        kernels: kernels that the workload needs.
        ahead: how many an archive of the package has.
        compiled: those that were compiled now; the others were in the cache.
        seconds: the time that it took.
        jobs: processes that compiled.
    """

    device: str
    kernels: int
    ahead: int
    compiled: int
    seconds: float
    jobs: int

    def __str__(self) -> str:
        ahead = f", {self.ahead} of them in the archive" if self.ahead else ""
        return (
            f"{self.kernels} kernels for {self.device}{ahead}; {self.compiled} compiled in {self.seconds:.1f} s "
            f"by {self.jobs} {'process' if self.jobs == 1 else 'processes'}"
        )


class Work:
    """Kernels, and for each the record of a call that needs it: `None` for those that no other process can make."""

    def __init__(self, device: Device):
        self.device = device
        self.kernels: Kernels = {}
        self.records: dict[str, Record | None] = {}

    def add_record(self, record: Record) -> None:
        self._add(kernels_of_record(record, self.device), record)

    def add_call(self, call: Call, needs: Needs | None, moves: Needs | None = None) -> None:
        self._add(kernels_of(call, needs, self.device, moves), record_of(call, needs, moves))

    def _add(self, found: Kernels, record: Record | None) -> None:
        for key, kernel in found.items():
            if key not in self.kernels:
                self.kernels[key] = kernel
                self.records[key] = record if can_be_sent(kernel) else None


def prepare(
    example: Callable[[], Any] | None = None,
    *,
    model: Any = None,
    log: str | os.PathLike[str] | None = None,
    heads: int | None = None,
    heads_kv: int | None = None,
    head_dim: int | None = None,
    head_dim_v: int | None = None,
    dtype: torch.dtype | None = None,
    layout: str = "dense",
    page_size: int | None = None,
    lengths: tuple[int, int] = (1, 8192),
    batches: tuple[int, int] = (1, 64),
    training: bool = True,
    device: torch.device | str | None = None,
    jobs: int | None = None,
    **settings: Any,
) -> Prepared:
    """Compile all kernels that a workload needs, in several processes, so that no call of it waits for a compiler.

    The workload is given in one of four ways: by an example, whose calls have zeros for results meanwhile, in all
    threads, and are not computed; by the configuration of a model of transformers; by a log of calls, which processes
    with the environment variable `FLASHTILE_LOG_CALLS` have written; or by ranges of lengths and batches. What is
    compiled stays in the cache on disk, for other processes too. Servers call this before they capture CUDA graphs.

    Example:
        >>> prepared = flashtile.prepare(
        ...     heads=4, head_dim=16, dtype=torch.float32, lengths=(16, 64), batches=(1, 1), causal=True, device="cpu"
        ... )
        >>> prepared.kernels > 0
        True

    Args:
        example: a function of no arguments that makes the calls, also of backward passes.
        model: a configuration of transformers, or the name or folder of one.
        log: a file of recorded calls; those on other kinds of devices are left out.
        heads, heads_kv, head_dim, head_dim_v: sizes of q, k and v; `heads_kv` is by default `heads`, `head_dim_v`
            `head_dim`.
        dtype: of q, k and v; by default the model's.
        layout: "dense", "packed" (`attention_varlen`), "cache" (`attention_with_kvcache`, without gradients).
        page_size: of a cache with pages.
        lengths: the least and the greatest number of keys.
        batches: the least and the greatest number of sequences.
        training: also the backward passes, of ranges and of a model. Otherwise a prompt and decoding.
        device: by default the current GPU, and a CPU where there is none.
        jobs: processes; by default as many as cores are free, at most 16.
        settings: further arguments of `flashtile.attention`, such as `causal`, `window` and `softcap`; `bias`, `mask`,
            `alibi_slopes` and `sinks` are `True` for a tensor of the usual shape.

    Returns:
        A `Prepared`: how many kernels there are, how many were compiled, and the seconds.

    Raises:
        ArgumentError: none or several of the four ways, a file that is no log, or values that do not fit together.
        AttentionError: a call of the workload has an error of its own.
    """
    begin = time.monotonic()
    ways = [name for name, x in {"example": example, "model": model, "log": log, "heads": heads}.items() if x]
    if len(ways) != 1:
        raise ArgumentError("the workload", ways or None, WAYS, EXAMPLE)
    place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    work = Work(describe_device(place))
    with current(place):
        if example is not None:
            with observed.example(work.add_call):
                example()
        else:
            shared = {"lengths": lengths, "batches": batches, "training": training, "device": place.type}
            if log is not None:
                records: Any = records_of_log(Path(log), place.type)
            elif model is not None:
                records = records_of_model(model, dtype, settings, **shared)
            else:
                sizes = {"heads": heads, "heads_kv": heads_kv, "head_dim": head_dim, "head_dim_v": head_dim_v}
                kind = sizes | {"dtype": dtype, "layout": layout, "page_size": page_size}
                records = records_of_ranges(kind, settings, **shared)
            for record in records:
                work.add_record(record)
        return finished(work, default_jobs() if jobs is None else jobs, begin)


def records_of_log(path: Path, device: str) -> Iterator[Record]:
    """The calls of a log on this kind of device."""
    try:
        lines = dict.fromkeys(path.read_text().splitlines())
        records = [json.loads(line) for line in lines if line.strip()]
        yield from (x for x in records if x["device"] == device)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ArgumentError("log", path, f"a file that FLASHTILE_LOG_CALLS named; {error}", EXAMPLE) from error


def finished(work: Work, jobs: int, begin: float) -> Prepared:
    """Load what is in caches, and compile the others: in other processes first, and then here what these left."""
    others = {key: kernel for key, kernel in work.kernels.items() if not in_archive(kernel, work.device)}
    before = compiling.compiled
    missing = [key for key, kernel in others.items() if not is_loaded_from_cache(kernel)]
    sent = {key: record for key in missing if (record := work.records[key]) is not None}
    jobs = max(1, min(jobs, len(sent)))
    compiled = compiled_by_helpers(sent, work.device, jobs) if jobs > 1 else 0
    for key in missing:
        compile_kernel(work.kernels[key], load=True)
    compiled += compiling.compiled - before
    seconds = time.monotonic() - begin
    ahead = len(work.kernels) - len(others)
    return Prepared(work.device.name, len(work.kernels), ahead, compiled, seconds, jobs)


def current(place: torch.device) -> contextlib.AbstractContextManager[Any]:
    return torch.cuda.device(place) if place.type == "cuda" else contextlib.nullcontext()
