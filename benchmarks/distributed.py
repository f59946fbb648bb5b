"""Attention over several GPUs of one host against one of them:

    torchrun --nproc-per-node 2 benchmarks/distributed.py --store FILE.csv [--seconds 240] [--cells causal,65536]

Forward and backward of the calls of distributed.toml: the whole sequence on one GPU and its shards on all, in another
order in each round; medians over rounds, of the slowest rank. Short calls are measured several in a row, as the layers
of a model follow each other, until one GPU takes 0.1 s. `efficiency` is the time of one GPU over that of all, divided
by their number. Cells that the file has of this device and as many ranks are not run again without --again. First each
call's results and gradients are compared with those of one GPU, at 4096 tokens. With `--device cpu`, over gloo, the
program runs at small sizes (`--lengths 256`).
"""

import csv
import itertools
import os
import random
import statistics
import sys
import time
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import click
import sequence_peers
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import flashtile
import flashtile.distributed as sharded
from flashtile.distributed.simulate import preferred

SWEEP = Path(__file__).with_suffix(".toml")
MASKS: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "full": {},
    "window": {"causal": True, "window": (4095, 0)},
    "packed": {"causal": True},
}
DOCUMENTS = 16  # of a packed call, of random lengths
PEERS = {"zigzag ring": ("causal",), "torch": ("causal", "full")}  # and the masks that they have
CHECKED = {"cuda": 4096, "cpu": 256}  # tokens
ROW = 0.1  # seconds of one GPU, which short calls are repeated for
MOST = 16  # calls in a row
WARM = 0.5  # seconds of one GPU; longer calls have no round to warm up, as kernels are compiled by then
BOUND = 0.02  # of bfloat16, relative to the largest element


class Cell(NamedTuple):
    """A call of the sweep, and what computes it over all ranks."""

    mask: str
    seqlen: int
    calls: tuple[str, ...]


class Shapes(NamedTuple):
    heads: int
    kv_heads: int
    head_dim: int


def offsets(seqlen: int) -> list[int]:
    """Offsets of the documents of a packed call, `[DOCUMENTS + 1]`."""
    cuts = random.Random(seqlen).sample(range(1, seqlen), DOCUMENTS - 1)
    return [0, *sorted(cuts), seqlen]


def inputs(shapes: Shapes, cell: Cell, device: torch.device) -> list[Tensor]:
    """q, k, v and dout of the whole sequence, the same on all ranks: `[1, H, S, D]`, or packed ones `[S, H, D]`."""
    generator = torch.Generator(device).manual_seed(cell.seqlen)
    heads = (shapes.heads, shapes.kv_heads, shapes.kv_heads, shapes.heads)
    sizes = [(cell.seqlen, h) if cell.mask == "packed" else (1, h, cell.seqlen) for h in heads]
    return [
        torch.randn(*size, shapes.head_dim, generator=generator, device=device).to(torch.bfloat16) for size in sizes
    ]


def on_one(cell: Cell, device: torch.device) -> Callable[..., Tensor]:
    """The whole call on one device."""
    if cell.mask != "packed":
        return lambda q, k, v: flashtile.attention(q, k, v, **MASKS[cell.mask])  # type: ignore[return-value]
    bounds = torch.tensor(offsets(cell.seqlen), dtype=torch.int32, device=device)
    return lambda q, k, v: flashtile.attention_varlen(q, k, v, bounds, bounds, **MASKS[cell.mask])  # type: ignore[return-value]


def on_shards(cell: Cell, scheme: str, layout: Any, mesh: DeviceMesh) -> Callable[..., Tensor]:
    """The call of a rank's rows."""
    place = {"mesh": mesh, "layout": layout, "scheme": scheme} | MASKS[cell.mask]
    if cell.mask != "packed":
        return lambda q, k, v: sharded.attention(q, k, v, **place)  # type: ignore[return-value]
    bounds = offsets(cell.seqlen)
    return lambda q, k, v: sharded.attention_varlen(q, k, v, bounds, **place)  # type: ignore[return-value]


def layout_of(cell: Cell, mesh: DeviceMesh) -> Any:
    """The layout that suits a mask."""
    if cell.mask == "packed":
        return sharded.balanced(mesh, cell.seqlen, **MASKS[cell.mask], cu_seqlens=offsets(cell.seqlen))
    if cell.mask == "window":
        return sharded.balanced(mesh, cell.seqlen, **MASKS[cell.mask], contiguous=True)
    return {"causal": "zigzag"}.get(cell.mask, "contiguous")


def sequence_dim(cell: Cell) -> int:
    return 0 if cell.mask == "packed" else 2


def passes(attend: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> list[Tensor]:
    """The output and the gradients of q, k and v."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out = attend(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def sharded_passes(call: str, cell: Cell, mesh: DeviceMesh, whole: list[Tensor]) -> Callable[[], list[Tensor]]:
    """Both passes of this rank's rows, by a scheme or a peer."""
    layout, causal, dim = layout_of(cell, mesh), cell.mask == "causal", sequence_dim(cell)
    if call == "torch":  # which has no grouped heads
        whole = [x.repeat_interleave(whole[0].shape[1] // x.shape[1], dim=1) for x in whole]
    local = [sharded.shard(x, mesh, dim=dim, layout=layout) for x in whole]
    if call == "torch":

        def run() -> list[Tensor]:
            with sequence_peers.torch_context_parallel(mesh, causal=causal) as attend:
                return passes(attend, *local)

        return run
    attend = sequence_peers.zigzag_ring(mesh) if call == "zigzag ring" else on_shards(cell, call, layout, mesh)
    return lambda: passes(attend, *local)


def seconds(function: Callable[[], Any], device: torch.device, repeats: int) -> float:
    """The time of a call of several in a row; of all ranks that take part, the slowest one's."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(repeats):
        function()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return slowest((time.perf_counter() - start) / repeats, device)


def slowest(value: float, device: torch.device) -> float:
    x = torch.tensor([value], device=device)
    dist.all_reduce(x, dist.ReduceOp.MAX)
    return float(x)


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


class Run:
    """A run of the sweep on this rank."""

    def __init__(self, mesh: DeviceMesh, device: torch.device, shapes: Shapes):
        self.mesh, self.device, self.shapes, self.rank = mesh, device, shapes, dist.get_rank()
        self.wrong = False
        self.absent: set[tuple[str, str]] = set()  # masks and peers that do not run here

    def say(self, *words: Any) -> None:
        if self.rank == 0:
            print(*words, flush=True)

    def check(self, mask: str, call: str) -> None:
        """Compare a call's results with those of one device."""
        cell = Cell(mask, CHECKED[self.device.type], (call,))
        whole = inputs(self.shapes, cell, self.device)
        expected = passes(on_one(cell, self.device), *whole)
        try:
            found = sharded_passes(call, cell, self.mesh, whole)()
        except (NotImplementedError, RuntimeError) as error:
            if call not in PEERS:
                raise
            self.say(f"{mask} {call}: absent, {type(error).__name__}: {str(error).splitlines()[0]}")
            self.absent.add((mask, call))
            return
        layout, dim = layout_of(cell, self.mesh), sequence_dim(cell)
        errors = []
        for x, y in zip(found, expected, strict=True):
            x = sharded.unshard(x, self.mesh, dim=dim, layout=layout)
            if x.shape[1] != y.shape[1]:  # gradients of repeated heads
                x = x.float().unflatten(1, (y.shape[1], -1)).sum(dim=2)
            errors.append(float((x - y).abs().max() / y.abs().max()))
        self.say(f"{mask} {call}: largest differences of out, dq, dk, dv", *(f"{e:.4f}" for e in errors))
        self.wrong |= not max(errors) < BOUND

    def time(self, cell: Cell, rounds: int, rates: sharded.Rates) -> list[dict[str, Any]]:
        """A row for each call of a cell."""
        whole = inputs(self.shapes, cell, self.device)
        one_device = on_one(cell, self.device)
        calls = {"one": lambda: passes(one_device, *whole)}
        calls |= {
            call: sharded_passes(call, cell, self.mesh, whole)
            for call in cell.calls
            if (cell.mask, call) not in self.absent
        }
        alone = self.predicted_alone(cell, rates)
        repeats = min(max(round(ROW / alone), 1), MOST)
        times: dict[str, list[float]] = {call: [] for call in calls}
        for n in range(-(alone < WARM), rounds):
            order = sorted(calls)
            random.Random(n).shuffle(order)
            for call in order:
                dist.barrier()
                taken = seconds(calls[call], self.device, repeats if n >= 0 else 1)
                times[call] += [taken] if n >= 0 else []
        rows = []
        of_one, ranks = times.pop("one"), dist.get_world_size()
        one = statistics.median(of_one)
        for call, found in times.items():
            row = {"device": device_name(self.device), "ranks": ranks, "mask": cell.mask, "seqlen": cell.seqlen}
            row |= {"call": call, "in_a_row": repeats, "one_ms": round(1e3 * one, 3)}
            row |= {"one_least_ms": round(1e3 * min(of_one), 3), "one_most_ms": round(1e3 * max(of_one), 3)}
            row |= {"ms": round(1e3 * statistics.median(found), 3)}
            row |= {"least_ms": round(1e3 * min(found), 3), "most_ms": round(1e3 * max(found), 3)}
            row["efficiency"] = round(one / statistics.median(found) / ranks, 3)
            row |= self.predicted(cell, call, rates) | rounded(rates)
            self.say(*row.values())
            rows.append(row)
        return rows

    def arguments(self, cell: Cell) -> dict[str, Any]:
        """Those of `simulate` for a cell."""
        packed = {"cu_seqlens": offsets(cell.seqlen)} if cell.mask == "packed" else {}
        return self.shapes._asdict() | {"seqlen": cell.seqlen, "causal": False} | MASKS[cell.mask] | packed

    def predicted_alone(self, cell: Cell, rates: sharded.Rates) -> float:
        """The seconds of one device."""
        found = sharded.simulate("ring", (1,), rates=rates, layout="contiguous", **self.arguments(cell))
        return found.seconds_forward + found.seconds_backward

    def predicted(self, cell: Cell, call: str, rates: sharded.Rates) -> dict[str, Any]:
        """The scheme of a call, and its predicted time."""
        if call in PEERS:
            return {"scheme": "", "predicted_ms": ""}
        sizes = self.arguments(cell) | {"layout": layout_of(cell, self.mesh)}
        names = ["ring", "gather", "ulysses"] if call == "auto" else [call]
        ranks = (dist.get_world_size(),)
        found = [sharded.simulate(name, ranks, rates=rates, **sizes) for name in names]
        best = preferred(found)
        milliseconds = 1e3 * (best.seconds_forward + best.seconds_backward)
        return {"scheme": best.scheme, "predicted_ms": round(milliseconds, 3)}


def rounded(rates: sharded.Rates) -> dict[str, float]:
    """Measured rates, from which a prediction can be repeated."""
    return {
        "forward_tflops": round(rates.flops_per_second / 1e12, 1),
        "backward_tflops": round((rates.backward_flops_per_second or 0.0) / 1e12, 1),
        "link_gbytes": round(rates.bytes_per_second[0] / 1e9, 1),
        "copies_gbytes": round(rates.memory_bytes_per_second / 1e9, 1),
        "latency_us": round(rates.seconds_per_message * 1e6, 1),
    }


def cells_of(sweep: dict[str, Any], lengths: list[int], chosen: list[str]) -> list[Cell]:
    """The cells of a sweep whose words include all of one of the chosen."""
    found = []
    for part in sweep["sweep"]:
        for seqlen, mask in itertools.product(lengths or part["lengths"], part["masks"]):
            calls = tuple(call for call in part["calls"] if mask in PEERS.get(call, MASKS))
            words = {mask, str(seqlen)}
            if not chosen or any(words.issuperset(choice.split(",")) for choice in chosen):
                found.append(Cell(mask, seqlen, calls))
        if lengths:
            break
    return found


@click.command()
@click.option("--device", default="cuda", show_default=True)
@click.option("--lengths", default="", help="In place of the sweep's.")
@click.option("--cells", "chosen", multiple=True, help="A mask, a length, or both with a comma between them.")
@click.option("--rounds", default=3, show_default=True)
@click.option("--seconds", "limit", default=400.0, show_default=True, help="No cell begins after this time.")
@click.option("--store", type=click.Path(dir_okay=False, path_type=Path), help="A CSV file with the rows so far.")
@click.option("--again", is_flag=True, help="Run cells again that the file has.")
def main(
    device: str, lengths: str, chosen: tuple[str, ...], rounds: int, limit: float, store: Path | None, again: bool
) -> None:
    """Exit code 1 if a result is wrong."""
    begin = time.perf_counter()
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if device == "cuda":
        torch.cuda.set_device(rank)
    here = torch.device(device, rank) if device == "cuda" else torch.device(device)
    mesh = init_device_mesh(device, (ranks,))
    sweep = tomllib.loads(SWEEP.read_text())
    run = Run(mesh, here, Shapes(*(sweep[name] for name in Shapes._fields)))
    rates = sharded.measure_rates(mesh, num_bytes=2**28 if device == "cuda" else 2**20)
    run.say(f"{ranks} ranks of {device_name(here)}: {rates}")
    stored = list(csv.DictReader(store.read_text().splitlines())) if store is not None and store.exists() else []
    cells = cells_of(sweep, [int(n) for n in lengths.split(",") if n], list(chosen))
    this = {"device": device_name(here), "ranks": str(ranks)}
    done = {(row["mask"], int(row["seqlen"])) for row in stored if same(row, this) and not again}
    cells = [cell for cell in cells if (cell.mask, cell.seqlen) not in done]
    for mask, call in sorted({(cell.mask, call) for cell in cells for call in cell.calls if call != "auto"}):
        run.check(mask, call)
    for cell in cells:
        if slowest(time.perf_counter() - begin, here) > limit:
            run.say("no time for", cell)
            continue
        rows = run.time(cell, rounds, rates)
        cell_of_row = {name: str(rows[0][name]) for name in ("mask", "seqlen")} | this
        stored = [row for row in stored if not same(row, cell_of_row)] + rows
        if rank == 0 and store is not None:
            with store.open("w", newline="") as file:
                writer = csv.DictWriter(file, list(rows[0]))
                writer.writeheader()
                writer.writerows(stored)
        if device == "cuda":
            torch.cuda.empty_cache()
    dist.barrier()
    dist.destroy_process_group()
    sys.exit(run.wrong)


def same(row: dict[str, Any], other: dict[str, str]) -> bool:
    """Whether a stored row has these values."""
    return all(str(row[name]) == value for name, value in other.items())


if __name__ == "__main__":
    main()
