"""Compile the kernel of every plan: `PYTHONPATH=src:tests:tests/support python -m offline.plans --out FILE.jsonl`.

The calls are those of the sweeps of a GPU in `benchmarks/`, random ones, as `flashtile verify` draws them, and packed
ones with offsets of 64 bits, as nested tensors have. Each kernel that one of their plans launches is compiled once,
without a GPU. FILE gets a line for each; a run that finds it goes on where the last one ended.
"""

import hashlib
import json
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import click
import torch
import triton

import flashtile
from flashtile.backend.gpu.replay import Launch
from flashtile.backend.hopper.plan import candidates
from flashtile.bench import sweep
from flashtile.prebuilt.build import PINNED, key_of_launch, source_of
from flashtile.prebuilt.launches import device_of, launches
from flashtile.prebuilt.standard import StandardCall, empty
from flashtile.prebuilt.sweeps import call_of
from flashtile.testing.case import ExactSides, MaskFunction
from flashtile.testing.generate import random_case

SWEEPS = Path(__file__).parents[2] / "benchmarks"
LENGTHS = ((30, 1, 129), (300, 1, 2000), (3000, 1, 129), (30, 1, 129) * 20)
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def sweep_calls() -> Iterator[tuple[str, StandardCall]]:
    for path in sorted(SWEEPS.glob("*.toml")):
        if path.stem not in ("distributed", "masks", "derivatives"):  # of programs of their own
            for cell in sweep.load(path).on("cuda").cells:
                yield f"{path.stem}: {cell.label()}", call_of(cell)


def random_calls(count: int) -> Iterator[tuple[str, StandardCall]]:
    for seed in range(count):
        case = random_case(seed, dtypes=DTYPES, on_hopper=True)
        arguments = dict(case.arguments)
        if arguments["q"].numel() == 0:
            continue
        if (modifier := arguments.get("score_mod")) is not None:
            arguments["score_mod"] = flashtile.ScoreMod(modifier.fn, on_meta(modifier.tensors))
        if isinstance(mask := arguments.get("mask"), MaskFunction):
            arguments["mask"] = flashtile.MaskMod(mask.fn, on_meta(mask.tensors))
        if isinstance(sides := arguments.get("window"), ExactSides):
            arguments["window"] = flashtile.ExactWindow(*sides)
        named = tuple(x for x in case.differentiable() if x not in "qkv" and not x.startswith("score_mod"))
        backward = case.differentiates and case.function != "attention_with_kvcache"
        yield f"random {seed}", StandardCall(case.function, arguments, backward, named)


def on_meta(tensors: Iterable[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    return tuple(x.to("meta") for x in tensors)


def jagged_calls() -> Iterator[tuple[str, StandardCall]]:
    for lengths in LENGTHS:
        q = empty(4, sum(lengths), 64, dtype=torch.bfloat16).transpose(0, 1)
        offsets = empty(len(lengths) + 1, dtype=torch.int64)
        for causal in (False, True, "top_left"):
            arguments: dict[str, Any] = {"q": q, "k": q, "v": q, "cu_seqlens_q": offsets, "cu_seqlens_k": offsets}
            arguments |= {"causal": causal, "max_seqlen_q": max(lengths), "max_seqlen_k": max(lengths)}
            yield (
                f"offsets of 64 bits, {len(lengths)} sequences, {causal}",
                StandardCall("attention_varlen", arguments, True),
            )


class Made:
    """A kernel that is made for a formula, with the interface of one that is in a file."""

    def __init__(self, kernel: Any):
        self.kernel, self.title = kernel, kernel.fn.__name__

    def function(self) -> Any:
        return self.kernel


def distinct(arch: str, count: int, report: Any) -> dict[str, tuple[str, Launch]]:
    """Launches of different kernels, by what distinguishes these, each with the first call that has it."""
    found: dict[str, tuple[str, Launch]] = {}
    device = device_of(arch)
    with mock.patch.object(candidates, "compiler_version", return_value=PINNED), torch.no_grad():
        for name, call in (*jagged_calls(), *sweep_calls(), *random_calls(count)):
            try:
                planned = launches(call, device)
            except LookupError:  # no kernel takes it
                continue
            except Exception as error:
                report(f"not planned: {name}: {type(error).__name__}: {str(error)[:200]}")
                continue
            for launch in planned:
                if not hasattr(launch.kernel, "title"):
                    launch = launch._replace(kernel=Made(launch.kernel))
                key = launch.kernel.title + key_of_launch(launch)
                found.setdefault(hashlib.sha256(key.encode()).hexdigest(), (name, launch))
    return found


@click.command()
@click.option("--arch", default="sm_90", show_default=True)
@click.option("--random", "count", default=500, show_default=True, help="Random calls.")
@click.option("--seconds", default=float("inf"), help="No kernel is compiled after this time.")
@click.option("--out", type=click.Path(path_type=Path), required=True)
def main(arch: str, count: int, seconds: float, out: Path) -> None:
    """Exit code 1 if a call could not be planned, or a kernel does not compile."""
    wrong: list[str] = []
    end = time.monotonic() + seconds
    found = distinct(arch, count, wrong.append)
    known = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
    done = {row["kernel"]: row["error"] for row in known if row["triton"] == triton.__version__}
    with out.open("a") as file:
        for key, (name, launch) in found.items():
            if key not in done and time.monotonic() < end:
                start = time.perf_counter()
                try:
                    source, target, options = source_of(launch, arch)
                    triton.compile(source, target=target, options=options)
                    done[key] = ""
                except Exception as error:
                    done[key] = f"{type(error).__name__}: {str(error)[-500:]}"
                row = {"kernel": key, "title": launch.kernel.title, "call": name, "error": done[key]}
                row |= {"seconds": round(time.perf_counter() - start, 1), "triton": triton.__version__}
                print(json.dumps(row), file=file, flush=True)
            if done.get(key):
                wrong.append(f"{launch.kernel.title} of {name}: {done[key]}")
    compiled = sum(key in done for key in found)
    click.echo(
        "\n".join(
            [*wrong, f"{compiled} of {len(found)} kernels compiled, {len(wrong)} wrong, Triton {triton.__version__}"]
        )
    )
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
