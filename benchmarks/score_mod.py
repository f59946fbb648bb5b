"""Time score functions in flashtile and in FlexAttention on a GPU: `python benchmarks/score_mod.py --out FILE.csv`.

Forward, backward, and backward with the gradients of captured tensors, in alternation, as medians with quartiles of the
device's time: it is held up while the host queues calls. The rows `plain` are the same call of the same backend without
a function. A cell that fails is reported, and the run goes on; after `--seconds` no cell begins. `--warm 8` compiles
all kernels beforehand, in eight processes at a time.
"""

import csv
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import click
import torch
from torch import Tensor

import flashtile
from flashtile.bench.clocks.cuda import CudaClock

BATCH, HEADS, SEQLEN, RADIUS, BUCKETS = 2, 16, 4096, 128, 32
SAMPLE_MS = 12
PASSES = ("forward", "backward", "backward with captured")
BACKENDS = ("hopper", "triton", "auto")
ScoreFunction = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


def functions(device: str) -> dict[str, tuple[ScoreFunction, tuple[Tensor, ...]]]:
    """Score functions and the tensors of theirs that have a gradient."""
    table = torch.randn(HEADS, 2 * RADIUS + 1, device=device)
    buckets = torch.randn(BUCKETS, HEADS, device=device)
    slopes = torch.exp2(-torch.arange(1, HEADS + 1, device=device) * (8 / HEADS))
    documents = (torch.arange(SEQLEN, device=device) // 1000).int()
    factors = 1 + 0.25 * torch.randn(HEADS, device=device)
    rates = torch.rand(HEADS, device=device) * 0.01

    def soft_cap(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, k_idx: Tensor) -> Tensor:
        return 20 * torch.tanh(score / 20)

    def alibi(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, k_idx: Tensor) -> Tensor:
        return score - slopes[h] * (q_idx - k_idx).abs()

    def relative_table(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, k_idx: Tensor) -> Tensor:
        return score + table[h, (q_idx - k_idx).clamp(-RADIUS, RADIUS) + RADIUS]

    def t5(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, k_idx: Tensor) -> Tensor:
        """Raffel et al., "Exploring the limits of transfer learning", 2020: exact near, then by logarithms."""
        exact = BUCKETS // 2
        distance = (q_idx - k_idx).clamp(min=0)
        ratio = torch.log(distance.clamp(min=1) / exact) / math.log(128 / exact)
        far = (exact + (ratio * (BUCKETS - exact)).to(torch.int32)).clamp(max=BUCKETS - 1)
        return score + buckets[torch.where(distance < exact, distance, far), h]

    def causal(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, k_idx: Tensor) -> Tensor:
        return torch.where(q_idx >= k_idx, score, -math.inf)

    def document(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, k_idx: Tensor) -> Tensor:
        return torch.where(documents[q_idx] == documents[k_idx], score, -math.inf)

    def temperature(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, k_idx: Tensor) -> Tensor:
        return score * factors[h]

    def decay(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, k_idx: Tensor) -> Tensor:
        return score * torch.exp(-rates[h] * (q_idx - k_idx).abs())

    return {
        "soft_cap": (soft_cap, ()),
        "relative_table": (relative_table, (table,)),
        "alibi": (alibi, (slopes,)),
        "document": (document, ()),
        "temperature": (temperature, (factors,)),
        "t5": (t5, (buckets,)),
        "causal": (causal, ()),
        "decay": (decay, (rates,)),
    }


def calls(function: ScoreFunction) -> dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]]:
    """The implementations, by name."""
    from torch.nn.attention.flex_attention import flex_attention

    torch.compiler.reset()  # or it stops compiling after eight functions
    flex = torch.compile(flex_attention, dynamic=False)
    found: dict[str, Any] = {"flex": lambda q, k, v: flex(q, k, v, score_mod=function)}
    for backend in BACKENDS:
        found[f"{backend} plain"] = lambda q, k, v, x=backend: flashtile.attention(q, k, v, backend=x)
        found[backend] = lambda q, k, v, x=backend: flashtile.attention(q, k, v, score_mod=function, backend=x)
    del found["auto plain"]
    return found


def prepared(call: Callable[..., Tensor], name: str, inputs: list[Tensor], captured: tuple[Tensor, ...]) -> Any:
    """A function that runs one pass of a call."""
    wanted = [*inputs, *(captured if name == PASSES[2] else ())]
    for x in (*inputs, *captured):
        x.requires_grad_(name != PASSES[0] and any(x is y for y in wanted))
    if name == PASSES[0]:
        return lambda: call(*inputs)
    out = call(*inputs)
    dout = torch.randn_like(out)
    return lambda: torch.autograd.grad(out, wanted, dout, retain_graph=True)


def measured(runs: dict[str, Callable[[], Any]], rounds: int) -> Iterator[tuple[str, tuple[float, float, float]]]:
    """First quartile, median and third quartile of each, measured in alternation. Slow ones take fewer samples."""
    clock = CudaClock(torch.device("cuda"))
    times: dict[str, list[float]] = {name: [] for name in runs}
    counts = {name: max(1, int(SAMPLE_MS / (1e3 * clock.seconds(run, 2)))) for name, run in runs.items()}
    for n in range(rounds):
        for name, run in runs.items():
            if counts[name] > 1 or n < 3:
                times[name].append(1e3 * clock.seconds(run, counts[name]))
    for name, values in times.items():
        low, median, high = statistics.quantiles(values, n=4)
        yield name, (low, median, high)


def warmed(cells: list[tuple[str, int]], processes: int) -> None:
    """Compile the kernels of all cells into the caches on disk."""
    command = [sys.executable, __file__, "--out", os.devnull, "--rounds", "0"]
    running: list[subprocess.Popen[bytes]] = []
    for function_name, head_dim in cells:
        if len(running) == processes:
            running.pop(0).wait()
        arguments = ["--function", function_name, "--head-dim", str(head_dim)]
        running.append(subprocess.Popen(command + arguments, stdout=subprocess.DEVNULL))
    for process in running:
        process.wait()


def measure_cell(
    function_name: str, head_dim: int, captured: tuple[Tensor, ...], function: ScoreFunction, passes: Sequence[str],
    rounds: int,
) -> Iterator[tuple[Any, ...]]:  # fmt: skip
    """Rows of one function and head dimension."""
    shape = (BATCH, HEADS, SEQLEN, head_dim)
    inputs = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    implementations = calls(function)
    for pass_name in passes:
        runs = {}
        for name, call in implementations.items():
            if pass_name == PASSES[2] and ("plain" in name or name == "hopper"):  # as before; declined
                continue
            try:
                runs[name] = prepared(call, pass_name, inputs, captured)
                runs[name]()
            except Exception as error:
                runs.pop(name, None)
                click.echo(f"{function_name} {head_dim} {pass_name} {name}: {str(error)[:300]}")
        try:
            for name, (low, median, high) in measured(runs, rounds) if rounds > 0 else ():
                yield function_name, head_dim, pass_name, name, *(f"{x:.4f}" for x in (median, low, high))
        except Exception as error:
            click.echo(f"{function_name} {head_dim} {pass_name}: {str(error)[:300]}")


@click.command()
@click.option("--out", type=click.Path(path_type=Path), required=True, help="A CSV file, to which rows are added.")
@click.option("--seconds", default=330, help="No cell begins later.")
@click.option("--head-dim", "head_dims", multiple=True, type=int, default=(64, 128), help="May be repeated.")
@click.option("--function", "chosen", multiple=True, help="May be repeated.  [default: all]")
@click.option("--captured", "with_captured", is_flag=True, help="Also backward with gradients of captured tensors.")
@click.option("--rounds", default=9)
@click.option("--warm", default=0, help="Processes that compile beforehand.")
def main(
    out: Path, seconds: int, head_dims: tuple[int, ...], chosen: tuple[str, ...], with_captured: bool, rounds: int,
    warm: int,
) -> None:  # fmt: skip
    """Measure every function, head dimension and pass."""
    begin = time.monotonic()
    torch.manual_seed(0)
    cells = [(name, head_dim) for name in chosen or functions("cpu") for head_dim in head_dims]
    if warm:
        warmed(cells, warm)
        click.echo(f"compiled after {time.monotonic() - begin:.0f} s")
    known = functions("cuda")
    new = not out.exists()
    with out.open("a", newline="") as file:
        writer = csv.writer(file)
        if new:
            writer.writerow(("gpu", "torch", "function", "head_dim", "pass", "implementation", "ms", "low", "high"))
        for function_name, head_dim in cells:
            if time.monotonic() - begin > seconds:
                click.echo(f"stopped before {function_name} {head_dim}")
                return
            function, captured = known[function_name]
            passes = PASSES[: 3 if captured and with_captured else 2]
            for row in measure_cell(function_name, head_dim, captured, function, passes, rounds):
                writer.writerow((torch.cuda.get_device_name(), torch.__version__, *row))
                click.echo(" ".join(map(str, row)))
                file.flush()


if __name__ == "__main__":
    main()
