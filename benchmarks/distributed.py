"""Attention over several GPUs of one host against one of them:

    torchrun --nproc-per-node 2 benchmarks/distributed.py [--out FILE.csv] [--seconds 120]

First each scheme's results and gradients are compared with those of one GPU, at 4096 tokens. Then come times: for each
length, forward and backward of the whole sequence on one GPU and of its shards on all, in alternation; the median over
rounds of the slowest rank counts. `efficiency` is the time of one GPU over that of all, divided by their number. With
`--device cpu`, over gloo, the program runs at small sizes.
"""

import csv
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import click
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import flashtile
import flashtile.distributed as sharded

HEADS, KEY_HEADS, HEAD_DIM = 32, 8, 128
MASKS: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "full": {},
    "window": {"causal": True, "window": (4095, 0)},
}
LAYOUTS = {"causal": "zigzag", "full": "contiguous", "window": "contiguous"}
SCHEMES = ("ring", "gather", "ulysses")
CHECKED = 4096  # tokens
BOUND = 0.02  # of bfloat16, relative to the largest element


def inputs(seqlen: int, device: torch.device) -> list[Tensor]:
    """q, k, v and dout of the whole sequence, the same on all ranks."""
    generator = torch.Generator(device).manual_seed(seqlen)
    heads = (HEADS, KEY_HEADS, KEY_HEADS, HEADS)
    return [torch.randn(1, h, seqlen, HEAD_DIM, generator=generator, device=device).to(torch.bfloat16) for h in heads]


def passes(attend: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> list[Tensor]:
    """The output and the gradients of q, k and v."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out = attend(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def seconds(function: Callable[[], Any], device: torch.device) -> float:
    """The time of a call; of all ranks that take part, the slowest one's."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    function()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def slowest(value: float, device: torch.device) -> float:
    x = torch.tensor([value], device=device)
    dist.all_reduce(x, dist.ReduceOp.MAX)
    return float(x)


@click.command()
@click.option("--device", default="cuda", show_default=True)
@click.option("--lengths", default="32768,65536,131072", show_default=True)
@click.option("--rounds", default=3, show_default=True)
@click.option("--seconds", "limit", default=120.0, show_default=True, help="No cell begins after this time.")
@click.option("--out", help="A CSV file.")
def main(device: str, lengths: str, rounds: int, limit: float, out: str | None) -> None:
    """Exit code 1 if a result is wrong."""
    begin = time.perf_counter()
    rank = int(os.environ["RANK"])
    if device == "cuda":
        torch.cuda.set_device(rank)
    here = torch.device(device, rank) if device == "cuda" else torch.device(device)
    mesh = init_device_mesh(device, (int(os.environ["WORLD_SIZE"]),))
    rows: list[dict[str, Any]] = []

    def say(*words: Any) -> None:
        if rank == 0:
            print(*words, flush=True)

    rates = sharded.measure_rates(mesh, num_bytes=2**28 if device == "cuda" else 2**20)
    say(f"{dist.get_world_size()} ranks of {torch.cuda.get_device_name() if device == 'cuda' else 'the CPU'}: {rates}")

    def on_shards(scheme: str, layout: str, options: dict[str, Any], whole: list[Tensor]) -> Callable[[], list[Tensor]]:
        q, k, v, dout = (sharded.shard(x, mesh, dim=2, layout=layout) for x in whole)
        placed = {"mesh": mesh, "layout": layout, "scheme": scheme}
        return lambda: passes(lambda *x: sharded.attention(*x, **placed, **options), q, k, v, dout)

    wrong = False
    for name, options in MASKS.items():
        whole = inputs(CHECKED if device == "cuda" else 256, here)
        expected = passes(lambda *x, o=options: flashtile.attention(*x, **o), *whole)
        for scheme in SCHEMES:
            found = on_shards(scheme, LAYOUTS[name], options, whole)()
            errors = []
            for x, y in zip(found, expected, strict=True):
                x = sharded.unshard(x, mesh, dim=2, layout=LAYOUTS[name])
                errors.append(float((x - y).abs().max() / y.abs().max()))
            say(f"{name} {scheme}: largest differences of out, dq, dk, dv", *(f"{e:.4f}" for e in errors))
            wrong |= not max(errors) < BOUND
    for seqlen in map(int, lengths.split(",")):
        for name, options in MASKS.items():
            if slowest(time.perf_counter() - begin, here) > limit:
                break
            whole = inputs(seqlen, here)
            calls = {"one": lambda w=whole, o=options: passes(lambda *x: flashtile.attention(*x, **o), *w)}
            calls |= {scheme: on_shards(scheme, LAYOUTS[name], options, whole) for scheme in SCHEMES}
            times: dict[str, list[float]] = {call: [] for call in calls}
            for n in range(rounds + 2):  # two to warm up
                for call, function in calls.items():
                    dist.barrier()
                    taken = slowest(seconds(function, here), here)
                    times[call] += [taken] if n >= 2 else []
            one = statistics.median(times["one"])
            for scheme in SCHEMES:
                taken = statistics.median(times[scheme])
                predicted = sharded.simulate(
                    scheme, (dist.get_world_size(),), rates=rates, seqlen=seqlen, **prediction(name, options)
                )
                row = {
                    "ranks": dist.get_world_size(), "mask": name, "seqlen": seqlen, "scheme": scheme,
                    "one_ms": round(1e3 * one, 3), "ms": round(1e3 * taken, 3),
                    "efficiency": round(one / taken / dist.get_world_size(), 3),
                    "predicted_ms": round(1e3 * (predicted.seconds_forward + predicted.seconds_backward), 3),
                }  # fmt: skip
                say(*row.values())
                rows.append(row)
    if rank == 0 and out is not None and rows:
        with open(out, "w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    dist.barrier()
    dist.destroy_process_group()
    sys.exit(wrong)


def prediction(name: str, options: dict[str, Any]) -> dict[str, Any]:
    """The call as the simulator takes it."""
    sizes = {"heads": HEADS, "kv_heads": KEY_HEADS, "head_dim": HEAD_DIM, "layout": LAYOUTS[name]}
    return sizes | {"causal": False} | options


if __name__ == "__main__":
    main()
