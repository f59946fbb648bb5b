"""One causal sequence that is too long for a GPU's time, over all of a host:

    torchrun --nproc-per-node 4 benchmarks/long_sequence.py --store FILE.csv [--seqlen 2097152] [--scheme auto]

Forward and then backward, once, of 32 query and 8 key heads of 128 features in bfloat16, zigzag; seconds of the slowest
rank, and TFLOP/s of a GPU. Rates are measured before, from which "auto" takes its scheme. Each rank makes its own rows.
Some rows of out, lse and dq, and some of dk and dv, are compared with float64: all ranks add what their keys, or rows,
contribute. With `--device cpu`, over gloo, the program runs at small lengths.
"""

import csv
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import flashtile.distributed as sharded
from flashtile.iomodel import backward_flops, forward_flops

HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
SAMPLED = 5  # rows, and keys
WARM_LENGTH = {"cuda": 2**14, "cpu": 2**7}  # of a call that compiles kernels and connects ranks
BOUND = 0.02  # of bfloat16, relative to the largest element of a row


class Sequence:
    """This rank's rows of a sequence: q, k, v and dout `[1, H, S / ranks, D]`, and their positions."""

    def __init__(self, seqlen: int, mesh: DeviceMesh, device: torch.device):
        layout = sharded.Layout("zigzag", seqlen, mesh.size())
        pieces = layout.pieces(mesh.get_local_rank())
        self.positions = torch.cat([torch.arange(p.start, p.stop, device=device) for p in pieces])
        self.tensors = [
            torch.cat([normal(n, p.start, p.length, heads, device) for p in pieces], dim=2)
            for n, heads in enumerate((HEADS, KV_HEADS, KV_HEADS, HEADS))
        ]


def normal(tensor: int, first: int, length: int, heads: int, device: torch.device) -> Tensor:
    generator = torch.Generator(device).manual_seed(4 * first + tensor)
    return torch.randn(1, heads, length, HEAD_DIM, generator=generator, device=device, dtype=torch.bfloat16)


def total(x: Tensor) -> Tensor:
    dist.all_reduce(x)
    return x


def rows_at(x: Tensor, positions: Tensor, wanted: Tensor) -> Tensor:
    """Rows `[H, n, ...]` in float64, on all ranks, of `x [1, H, rows, ...]` over ranks."""
    found = torch.zeros(x.shape[1], len(wanted), *x.shape[3:], dtype=torch.float64, device=x.device)
    mine, place = (positions == wanted[:, None]).nonzero(as_tuple=True)
    found[:, mine] = x[0, :, place].double()
    return total(found)


def row_results(sequence: Sequence, wanted: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """out, lse and dq of some rows in float64, `[H, n, D]` and `[H, n]`: sums over the keys of all ranks."""
    q, k, v, dout = sequence.tensors
    q_i, dout_i = (rows_at(x, sequence.positions, wanted) for x in (q, dout))
    parts = []
    for head in range(HEADS):
        k_j = k[0, head * KV_HEADS // HEADS].double()
        s = (q_i[head] @ k_j.mT) * HEAD_DIM**-0.5
        parts.append(s.masked_fill_(sequence.positions > wanted[:, None], -torch.inf))
    most = torch.stack([s.amax(-1) for s in parts])
    dist.all_reduce(most, dist.ReduceOp.MAX)
    lse = total(torch.stack([(s - m[:, None]).exp().sum(-1) for s, m in zip(parts, most, strict=True)])).log() + most
    out, dq = torch.zeros_like(q_i), torch.zeros_like(q_i)
    for head, s in enumerate(parts):
        out[head] = s.sub_(lse[head][:, None]).exp_() @ v[0, head * KV_HEADS // HEADS].double()
    delta = (total(out) * dout_i).sum(-1)
    for head, p in enumerate(parts):
        k_j, v_j = (x[0, head * KV_HEADS // HEADS].double() for x in (k, v))
        dq[head] = (p * (dout_i[head] @ v_j.mT - delta[head][:, None])) @ k_j
    return out, lse, total(dq) * HEAD_DIM**-0.5


def key_results(sequence: Sequence, out: Tensor, lse: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """dk and dv of some keys in float64, `[Hk, n, D]`: sums over the rows of all ranks, by their results of forward."""
    q, k, v, dout = sequence.tensors
    k_j, v_j = (rows_at(x, sequence.positions, wanted) for x in (k, v))
    dk, dv = torch.zeros_like(k_j), torch.zeros_like(v_j)
    for head in range(HEADS):
        kv_head = head * KV_HEADS // HEADS
        q_i, dout_i, out_i = (x[0, head].double() for x in (q, dout, out))
        s = (k_j[kv_head] @ q_i.mT) * HEAD_DIM**-0.5
        p = (s - lse[0, head].double()).exp_().masked_fill_(sequence.positions < wanted[:, None], 0.0)
        dv[kv_head] += p @ dout_i
        dk[kv_head] += (p * (v_j[kv_head] @ dout_i.mT - (out_i * dout_i).sum(-1))) @ q_i
    return total(dk) * HEAD_DIM**-0.5, total(dv)


def worst(found: Tensor, expected: Tensor) -> float:
    """The largest difference, relative to the largest element of its row."""
    return float(((found - expected).abs().amax(-1) / expected.abs().amax(-1)).max())


def timed(function: Callable[[], Any], device: torch.device) -> tuple[Any, float]:
    """The result, and the seconds of the slowest rank."""
    dist.barrier()
    synchronize(device)
    start = time.perf_counter()
    found = function()
    synchronize(device)
    taken = torch.tensor([time.perf_counter() - start], device=device)
    dist.all_reduce(taken, dist.ReduceOp.MAX)
    return found, float(taken)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def passes(sequence: Sequence, mesh: DeviceMesh, scheme: str, device: torch.device) -> tuple[list[Tensor], list[float]]:
    """out, lse, dq, dk and dv of this rank's rows, and the seconds of forward and of backward."""
    *inputs, dout = sequence.tensors
    leaves = [x.detach().requires_grad_() for x in inputs]
    place = {"mesh": mesh, "layout": "zigzag", "scheme": scheme}
    (out, lse), forward = timed(lambda: sharded.attention(*leaves, causal=True, return_lse=True, **place), device)  # type: ignore[arg-type]
    gradients, backward = timed(lambda: torch.autograd.grad(out, leaves, dout), device)
    return [out.detach(), lse.detach(), *gradients], [forward, backward]


def errors(sequence: Sequence, results: list[Tensor], seqlen: int) -> dict[str, float]:
    """The largest errors of sampled rows, by result; that of lse is absolute."""
    out, lse, *gradients = results
    generator = torch.Generator().manual_seed(seqlen)
    wanted = torch.randint(seqlen, (2, SAMPLED), generator=generator)
    rows, keys = wanted.to(out.device)
    rows[-1] = seqlen - 1
    exact = row_results(sequence, rows)
    found = [rows_at(x, sequence.positions, rows) for x in (out, lse, gradients[0])]
    exact_keys = key_results(sequence, out, lse, keys)
    found_keys = [rows_at(x, sequence.positions, keys) for x in gradients[1:]]
    return {
        "error_out": worst(found[0], exact[0]),
        "error_lse": float((found[1] - exact[1]).abs().max()),
        "error_dq": worst(found[2], exact[2]),
        "error_dk": worst(found_keys[0], exact_keys[0]),
        "error_dv": worst(found_keys[1], exact_keys[1]),
    }


@click.command()
@click.option("--device", default="cuda", show_default=True)
@click.option("--seqlen", default=2**21, show_default=True)
@click.option("--scheme", default="auto", show_default=True)
@click.option("--store", type=click.Path(dir_okay=False, path_type=Path), help="A CSV file, to which a row is added.")
def main(device: str, seqlen: int, scheme: str, store: Path | None) -> None:
    """Exit code 1 if a sampled row is wrong."""
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if device == "cuda":
        torch.cuda.set_device(rank)
    here = torch.device(device, rank) if device == "cuda" else torch.device(device)
    mesh = init_device_mesh(device, (ranks,))
    sharded.measure_rates(mesh, num_bytes=2**28 if device == "cuda" else 2**20)
    sequence = Sequence(seqlen, mesh, here)
    q, k, v, _ = sequence.tensors
    scheme = sharded.explain(q, k, v, mesh=mesh, layout="zigzag", scheme=scheme, causal=True).scheme
    passes(Sequence(WARM_LENGTH[device], mesh, here), mesh, scheme, here)
    results, (forward, backward) = passes(sequence, mesh, scheme, here)
    pairs = HEADS * seqlen * (seqlen + 1) // 2
    flops = [count(pairs, HEAD_DIM, HEAD_DIM) for count in (forward_flops, backward_flops)]
    row: dict[str, Any] = {"device": torch.cuda.get_device_name(here) if device == "cuda" else "CPU", "ranks": ranks}
    row |= {"seqlen": seqlen, "scheme": scheme, "forward_s": round(forward, 4), "backward_s": round(backward, 4)}
    row |= {
        f"{name}_tflops": round(n / taken / ranks / 1e12, 1)
        for name, n, taken in zip(("forward", "backward"), flops, (forward, backward), strict=True)
    }
    row["gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 1) if device == "cuda" else ""
    if rank == 0:
        print(*row.values(), flush=True)
    found = errors(sequence, results, seqlen)
    row |= {name: float(f"{x:.2g}") for name, x in found.items()}
    if rank == 0:
        print(found, flush=True)
        if store is not None:
            new = not store.exists()
            with store.open("a", newline="") as file:
                writer = csv.DictWriter(file, list(row))
                if new:
                    writer.writeheader()
                writer.writerow(row)
    dist.barrier()
    dist.destroy_process_group()
    sys.exit(not max(found.values()) < BOUND)


if __name__ == "__main__":
    main()
