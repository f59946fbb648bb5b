"""Time how long Triton compiles Hopper's kernels with score functions, without a GPU:

    python benchmarks/compile_functions.py --out FILE.csv

Seconds of the forward and the backward kernel of `benchmarks/score_mod.py`'s calls, medians in alternation, without a
cache.
"""

import csv
import os
import statistics
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import score_mod
import torch

from flashtile.backend.gpu.kernel import function_under_jit
from flashtile.backend.gpu.replay import Launch
from flashtile.prebuilt.build import source_of
from flashtile.prebuilt.launches import device_of, launches
from flashtile.prebuilt.standard import StandardCall, empty

ARCH, PLAIN = "sm_90", "none"
KERNELS = ("forward_kernel", "backward_kernel")


def launches_of(function: Any, head_dim: int) -> dict[str, Launch]:
    """The launches of the two kernels."""
    shape = (score_mod.BATCH, score_mod.HEADS, score_mod.SEQLEN, head_dim)
    arguments: dict[str, Any] = {name: empty(*shape, dtype=torch.bfloat16) for name in "qkv"}
    call = StandardCall("attention", arguments | {"score_mod": function}, backward=True)
    named = ((function_under_jit(x.kernel).fn.__name__, x) for x in launches(call, device_of(ARCH)))
    return {name: x for name, x in named if name in KERNELS}


def seconds(launch: Launch) -> float:
    import triton  # pyright: ignore[reportMissingImports]

    function = function_under_jit(launch.kernel)
    source, target, options = source_of(launch._replace(kernel=SimpleNamespace(function=lambda: function)), ARCH)
    start = time.perf_counter()
    triton.compile(source, target=target, options=options)  # pyright: ignore[reportAttributeAccessIssue]
    return time.perf_counter() - start


@click.command()
@click.option("--out", type=click.Path(path_type=Path), required=True, help="A CSV file.")
@click.option("--head-dim", "head_dims", multiple=True, type=int, default=(64, 128), help="May be repeated.")
@click.option("--rounds", default=3)
def main(out: Path, head_dims: tuple[int, ...], rounds: int) -> None:
    """Compile the kernels of every function and of none."""
    os.environ["TRITON_ALWAYS_COMPILE"] = "1"
    functions = {PLAIN: None} | {name: function for name, (function, _) in score_mod.functions("meta").items()}
    times: dict[tuple[str, int, str], list[float]] = {}
    for _ in range(rounds):
        for head_dim in head_dims:
            for name, function in functions.items():
                for kernel, launch in launches_of(function, head_dim).items():
                    times.setdefault((name, head_dim, kernel), []).append(seconds(launch))
    with out.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("function", "head_dim", "kernel", "seconds", "of plain"))
        for (name, head_dim, kernel), found in times.items():
            median = statistics.median(found)
            ratio = median / statistics.median(times[PLAIN, head_dim, kernel])
            writer.writerow((name, head_dim, kernel, f"{median:.2f}", f"{ratio:.2f}"))


if __name__ == "__main__":
    main()
