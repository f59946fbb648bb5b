"""Eight processes of a gloo world: sharded calls over meshes of the first ranks, compared with one device."""

import contextlib
import datetime
import functools
import os
import runpy
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import balancing
import compiling
import decoding
import faults
import in_contexts
import pytest
import rounding
import torch
import torch.distributed as dist
import with_dtensors
import with_weights
from features import DV, B, D, Shapes, arguments, draw, offsets
from gathered import without_objects
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import flashtile
from flashtile.bench.byte_gpt import flashtile_attention, new_model, train
from flashtile.distributed import Layout, attention, attention_varlen, balanced, explain, measure_rates, shard, unshard
from flashtile.distributed.group import Group
from flashtile.distributed.schemes import rates_of
from flashtile.distributed.simulate import RATES, preferred

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_long.py"
WORLD = 8
MESHES = {2: [(2,), (1, 2)], 3: [(3,)], 4: [(4,), (2, 2)], 8: [(8,), (2, 4), (4, 2)]}
SEEDS = {2: 30, 3: 30, 4: 30, 8: 12}  # for each size; each mesh has each of its schemes
HAS_KERNELS = any(x.name == "cpu" and x.usable for x in flashtile.backends())
COMPILED = 2, 4  # size of the world that runs compiled kernels, as each process compiles its own; one seed in so many


class Example:
    """A call of a seed: its tensors, and the results of one device."""

    def __init__(self, seed: int, size: int, dtype: torch.dtype):
        self.names, self.shapes = draw(seed, size)
        self.generator = torch.Generator().manual_seed(seed)
        self.dtype, self.check, s = dtype, seed % 3 == 0, self.shapes
        b = () if s.packed else (B,)
        dims = [(*b, n, h, w) for n, h, w in ((s.rows, s.heads, D), (s.keys, s.kv_heads, D), (s.keys, s.kv_heads, DV))]
        self.whole = [self.random(*shape) for shape in dims]
        self.dout, self.dlse = self.random(*b, s.rows, s.heads, DV), self.random(*b, s.heads, s.rows)
        if not s.packed:
            self.whole, self.dout = [x.transpose(1, 2) for x in self.whole], self.dout.transpose(1, 2)
        self.whole = [x.requires_grad_() for x in self.whole]
        self.arguments = arguments(self.names, s, self.random)
        compiled = size == COMPILED[0] and seed % COMPILED[1] == 0
        self.arguments["backend"] = "cpu" if compiled and HAS_KERNELS else "tiled"
        self.shared = [
            x
            for value in self.arguments.values()
            for x in (value, *getattr(value, "tensors", ()))
            if isinstance(x, Tensor) and x.requires_grad
        ]

    def random(self, *shape: int) -> Tensor:
        return torch.randn(shape, dtype=self.dtype, generator=self.generator)

    @property
    def lengths(self) -> list[Tensor]:
        return [torch.tensor(n, dtype=torch.int32) for n in offsets(self.shapes)]

    def expected(self) -> list[Tensor]:
        """out, lse, and gradients of q, k, v and features."""
        if self.shapes.packed:
            results = flashtile.attention_varlen(*self.whole, *self.lengths, return_lse=True, **self.arguments)
        else:
            results = flashtile.attention(*self.whole, return_lse=True, **self.arguments)
        return [*results, *torch.autograd.grad(results, [*self.whole, *self.shared], (self.dout, self.dlse))]

    def sharded(self, mesh: DeviceMesh, layout: str | Layout, scheme: str) -> list[Tensor]:
        """The same over a mesh, gathered."""
        s, dim = self.shapes, 0 if self.shapes.packed else 2
        place: dict[str, Any] = {"mesh": mesh, "layout": layout}
        lengths = s.rows, s.keys, s.keys
        local = [
            shard(x.detach(), dim=dim, length=n, **place).requires_grad_()
            for x, n in zip(self.whole, lengths, strict=True)
        ]
        if s.packed:
            call = functools.partial(attention_varlen, *local, *self.lengths)
        else:
            call = functools.partial(attention, *local, length=(s.rows, s.keys))
        with contextlib.nullcontext() if self.check else without_objects():
            results = call(return_lse=True, scheme=scheme, check=self.check, **place, **self.arguments)
        rows = s.rows
        incoming = [
            shard(self.dout, dim=dim, length=rows, **place),
            shard(self.dlse, dim=-1, length=rows, **place),
        ]
        out, lse, dq, dk, dv, *shared = [
            *results, *torch.autograd.grad(results, [*local, *self.shared], incoming)
        ]  # fmt: skip
        for x in shared:
            for n in range(mesh.ndim):
                dist.all_reduce(x, group=mesh.get_group(n))
        gathered = [
            unshard(x.detach(), dim=at, length=n, **place)
            for x, at, n in ((out, dim, rows), (lse, -1, rows), (dq, dim, rows), (dk, dim, s.keys), (dv, dim, s.keys))
        ]
        return [*gathered, *shared]

    def compare(self, results: list[Tensor], expected: list[Tensor]) -> None:
        names = ["out", "lse", "dq", "dk", "dv", *(f"gradient {n} of a feature" for n in range(len(self.shared)))]
        for name, x, reference in zip(names, results, expected, strict=True):
            # A feature's gradient sums over all rows, of slopes times distances.
            tolerance = 1e-11 if self.dtype == torch.float64 else 1e-3 if "feature" in name else 3e-5
            torch.testing.assert_close(
                x, reference.detach(), atol=tolerance, rtol=tolerance, msg=lambda m, name=name: f"{name}: {m}"
            )


def schemes_of(mesh: DeviceMesh) -> list[str]:
    return ["ring", "gather", "ulysses"] if mesh.ndim == 1 else ["ring+ulysses", "gather+ulysses"]


def compare_seeds(meshes: list[DeviceMesh], rank: int, seeds: range) -> None:
    """Random calls, each over one of the meshes in one layout and scheme; rank 0 compares."""
    size = meshes[0].size()
    for seed in seeds:
        mesh = meshes[seed % len(meshes)]
        dtype = (torch.float64, torch.float32)[seed % 2]
        schemes = schemes_of(mesh)
        scheme = schemes[seed // len(meshes) % len(schemes)]
        example = Example(seed, size, dtype)
        layout = layout_of_seed(seed, size, example.shapes)
        try:
            results = example.sharded(mesh, layout, scheme)
            if rank == 0:
                example.compare(results, example.expected())
        except Exception as error:
            words = f"seed {seed}: {example.names} {example.shapes} {layout} {scheme} {dtype} on {mesh.shape}"
            raise AssertionError(words) from error


def layout_of_seed(seed: int, size: int, s: Shapes) -> str | Layout:
    """One of the layouts, of which chunks in the order of their work are for as many rows as keys."""
    names = "contiguous", "zigzag"
    if seed // 3 % 3 < 2 or s.rows != s.keys:
        return names[seed // 3 % 2]
    return balanced(size, s.rows, causal=True, cu_seqlens=offsets(s)[0] if s.packed else None, chunk=3 + seed % 9)


def count_bytes(mesh: DeviceMesh, layout: str, arguments: dict[str, Any]) -> None:
    """The model of time knows the bytes that a rank sends, and "auto" takes the scheme that it predicts to be best."""
    sent = [0]
    original = Group.all_to_all

    def counted(group: Group, x: Tensor, leaving: list[int], arriving: list[int]) -> Any:
        sent[0] += x.element_size() * sum(n for rank, n in enumerate(leaving) if rank != group.rank)
        return original(group, x, leaving, arriving)

    def most(value: int) -> int:
        busiest = torch.tensor(value)
        dist.all_reduce(busiest, dist.ReduceOp.MAX, group=mesh.get_group(0))
        if mesh.ndim == 2:
            dist.all_reduce(busiest, dist.ReduceOp.MAX, group=mesh.get_group(1))
        return int(busiest)

    rows = 8
    q, k = (torch.randn(1, heads, rows, D, requires_grad=True) for heads in (2 * mesh.size(), 2))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Group, "all_to_all", counted)
        explanation = explain(q, k, k, mesh=mesh, layout=layout, **arguments)
        for prediction in explanation.simulations:
            sent[0] = 0
            out = attention(q, k, k, mesh=mesh, layout=layout, scheme=prediction.scheme, **arguments)
            assert isinstance(out, Tensor)
            assert most(sent[0]) == prediction.bytes_forward, prediction
            sent[0] = 0
            out.sum().backward()
            assert most(sent[0]) == prediction.bytes_backward, prediction
    assert sorted(s.scheme for s in explanation.simulations) == sorted(schemes_of(mesh))
    assert explanation.scheme == preferred(explanation.simulations).scheme
    assert f"-> {explanation.scheme}" in str(explanation)


def differentiate_layouts(mesh: DeviceMesh, layout: str | Layout) -> None:
    """The gradient through shard and unshard is that of the whole tensor."""
    x = torch.arange(22.0).reshape(2, 11).requires_grad_()
    weights = torch.arange(22.0).reshape(2, 11).cos()
    again = unshard(shard(x, mesh, 1, layout=layout, length=11) ** 2, mesh, 1, layout=layout, length=11)
    assert torch.equal(again, x**2)
    (again * weights).sum().backward()
    torch.testing.assert_close(x.grad, 2 * weights * x.detach())


def refused(mesh: DeviceMesh, rank: int) -> None:
    """Calls that differ between ranks are refused on all of them, by the name of what differs."""
    q = torch.randn(1, 2, 8, 16)
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"scale": 0.5 if rank == 1 else 0.25}, "on rank 1"),
        ({"causal": 7 if rank == 1 else True}, "causal"),
        ({"scheme": "tree"}, "scheme"),
        ({"mask": torch.ones(1, 1, 8, 7, dtype=torch.bool)}, "mask"),
        ({"bias": torch.ones(1, 1, 8 - (rank == 1), 8 * mesh.size())}, "bias"),
        ({"dropout_p": 0.5}, "dropout_seed"),
        ({"sinks": torch.tensor([0.5, 1.0 + (rank == 1)])}, "values of sinks. differ"),
        ({"bias": torch.full((1, 1, 1, 1), float(rank == 1))}, "values of bias. differ"),
        ({"score_mod": later if rank == 1 else earlier}, "functions"),
        ({"mask": flashtile.mask_mods.prefix(torch.tensor([3 + (rank == 1)]))}, "values of captured tensor 0. differ"),
    ]
    for given, words in wrong:
        with pytest.raises(flashtile.AttentionError, match=words):
            attention(q, q, q, mesh=mesh, check=True, **given)
    rows = torch.randn(1, 2, 8 + 2 * (rank == 1), 16)
    with pytest.raises(flashtile.ArgumentError, match="shard"):
        attention(rows, rows, rows, mesh=mesh, check=True)


def earlier(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return score + 0.1 * (i - j)


def later(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return score + 0.2 * (i - j)


def refused_alone(mesh: DeviceMesh) -> None:
    """Mistakes that a rank finds by itself need no exchange."""
    x = torch.randn(1, 2, 7, 16)
    with pytest.raises(flashtile.ArgumentError, match="length"):
        shard(x, mesh, 2)
    with pytest.raises(flashtile.ArgumentError, match="length"):
        attention(x, x, x, mesh=mesh, layout="zigzag")
    with pytest.raises(flashtile.ArgumentError, match="as `shard` gives them"):
        attention(x, x, x, mesh=mesh, length=7 * mesh.size() + mesh.size())
    with pytest.raises(flashtile.ArgumentError, match="cu_seqlens_q"):
        attention_varlen(x[0], x[0], x[0], [0, 5, 3], mesh=mesh)
    with pytest.raises(TypeError, match="'bias'"):
        attention_varlen(x[0], x[0], x[0], [0, 7], mesh=mesh, bias=x)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="'num_splits'"):
        explain(x, x, x, mesh=mesh, num_splits=2)


def train_like_one(mesh: DeviceMesh, rank: int) -> None:
    """The example's losses are those of one process."""
    found = runpy.run_path(str(EXAMPLE))["losses"](mesh, 3, 2, 48, torch.float64)
    if rank == 0:
        expected = list(train(new_model(dtype=torch.float64), flashtile_attention, 3, batch=2, seqlen=48))
        torch.testing.assert_close(found, expected, atol=1e-9, rtol=1e-9)


def run(rank: int, store: str) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD, timeout=datetime.timedelta(seconds=60)
    )
    first_seed = 0
    for size, shapes in MESHES.items():
        start = time.monotonic()
        meshes = [
            DeviceMesh("cpu", torch.arange(size).view(shape), mesh_dim_names=("other", "sequence")[-len(shape) :])
            for shape in shapes
        ]
        seeds = range(first_seed, first_seed := first_seed + SEEDS[size])
        if rank < size:
            for layout in ("contiguous", "zigzag", balanced(size, 11, chunk=2)):
                differentiate_layouts(meshes[-1], layout)
            for mesh in meshes[:2]:
                count_bytes(mesh, "zigzag", {"causal": True})
                count_bytes(mesh, "contiguous", {"window": (3, 0)})
            assert rates_of(meshes[0]) == RATES["cpu"]  # some of these ranks have measured alone
            assert measure_rates(meshes[-1], num_bytes=2**12) == rates_of(meshes[0])
            refused(meshes[0], rank)
            refused_alone(meshes[0])
            decoding.decode(meshes[0], every_room=size < 4)
            decoding.refused_alone(meshes[0])
            compare_seeds(meshes, rank, seeds)
            if size < WORLD:
                rounding.calls(meshes[0])
                rounding.steps(meshes[0])
                decoding.refused(meshes[0])
                decoding.compared(meshes[0])
                for mesh in meshes:
                    in_contexts.public_functions(mesh)
            if size < 4:
                balancing.calls(meshes[0])
            if size in (2, 4):
                with_dtensors.calls_of_dtensors(meshes[size // 4])
            if size == 4:
                with_weights.gradients(meshes[1])
            if size == 2:
                compiling.calls(meshes)
                in_contexts.programs(meshes[0])
                train_like_one(meshes[0], rank)
            if size == WORLD:
                cube = DeviceMesh("cpu", torch.arange(size).view(2, 2, 2), mesh_dim_names=("a", "b", "c"))
                with_dtensors.all_placements(cube)
        if rank == 0:
            print(f"{size} ranks: {time.monotonic() - start:.1f} s", flush=True)
    dist.barrier()
    dist.destroy_process_group()


def fork(store: str) -> dict[int, str]:
    """Processes of all ranks, by their ids. PyTorch is imported once."""
    children = {}
    for rank in range(WORLD):
        if (pid := os.fork()) == 0:
            code = 1
            try:
                run(rank, store)
                code = 0
            except BaseException:
                print(f"rank {rank}:\n{traceback.format_exc()}", flush=True)
            finally:
                os._exit(code)
        children[pid] = f"rank {rank}"
    return children


def main(store: str) -> int:
    """Wait for all ranks, and for the faults that run meanwhile. The first failure ends the
    others, which would wait for it.
    """
    torch.set_num_threads(1)
    children = faults.fork(store) | fork(store)
    while children:
        pid, status = os.wait()
        name = children.pop(pid)
        if status != 0:
            print(f"failed: {name}", flush=True)
            time.sleep(0.5)  # for what the others have to say
            for other in children:
                os.kill(other, 9)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
