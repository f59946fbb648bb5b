"""One of two ranks over NCCL: `nccl.py SCENARIO RANK STORE`. What ends by a fault says nothing at its end."""

import copy
import datetime
import os
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.attention.flex_attention import create_block_mask

import flashtile
import flashtile.nn
from flashtile.distributed import (
    attention,
    attention_varlen,
    attention_with_kvcache,
    balanced,
    context_parallel,
    shard,
    unshard,
)

RANKS, SECONDS = 2, 10.0  # of the process group's timeout
LENGTH, HEADS, KV_HEADS, D = 2048, 8, 2, 64
OFFSETS = [0, 300, 1500, LENGTH]
BOUND = 0.02  # of bfloat16, relative to the largest element


def whole(length: int = LENGTH, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    """q, k, v and dout, the same on all ranks."""
    generator = torch.Generator("cuda").manual_seed(0)
    shapes = [(1, heads, length, D) for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)]
    return [torch.randn(shape, generator=generator, device="cuda", dtype=dtype) for shape in shapes]


def passes(call: Any, q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> list[Tensor]:
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out = call(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def seen(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return (j <= i) | (j < 500)


def results(mesh: DeviceMesh, rank: int) -> None:
    """Each scheme in each layout has the results of one GPU."""
    flex = create_block_mask(seen, 1, 1, LENGTH, LENGTH, device="cuda")
    calls: dict[str, dict[str, Any]] = {"causal": {"causal": True}, "prefix": {"mask": seen}, "lists": {"mask": flex}}
    tensors = whole()
    for name, arguments in calls.items():
        expected = passes(lambda *x, given=arguments: flashtile.attention(*x, **given), *tensors)
        named = ("contiguous", "zigzag") if name == "causal" else ()
        for layout in (balanced(mesh, LENGTH, chunk=128, **arguments), *named):
            local = [shard(x, mesh, 2, layout=layout) for x in tensors]
            for scheme in ("ring", "gather", "ulysses"):
                given = {"mesh": mesh, "layout": layout, "scheme": scheme, **arguments}
                found = passes(lambda *x, given=given: attention(*x, **given), *local)
                compare((name, scheme, layout), [unshard(x, mesh, 2, layout=layout) for x in found], expected)


def packed(mesh: DeviceMesh, rank: int) -> None:
    tensors = [x[0].transpose(0, 1) for x in whole()]
    offsets = torch.tensor(OFFSETS, dtype=torch.int32, device="cuda")
    expected = passes(lambda *x: flashtile.attention_varlen(*x, offsets, offsets, causal=True), *tensors)
    layout = balanced(mesh, LENGTH, causal=True, cu_seqlens=OFFSETS)
    local = [shard(x, mesh, 0, layout=layout) for x in tensors]
    for scheme in ("ring", "gather", "ulysses"):
        given = {"mesh": mesh, "layout": layout, "scheme": scheme, "causal": True}
        found = passes(lambda *x, given=given: attention_varlen(*x, OFFSETS, **given), *local)
        compare(("packed", scheme), [unshard(x, mesh, 0, layout=layout) for x in found], expected)


def compare(name: Any, found: list[Tensor], expected: list[Tensor]) -> None:
    errors = [float((x - y).abs().max() / y.abs().max()) for x, y in zip(found, expected, strict=True)]
    assert max(errors) < BOUND, (name, errors)


def graph(mesh: DeviceMesh, rank: int) -> None:
    """A captured forward and backward pass, replayed with other values."""
    for scheme in ("ring", "gather", "ulysses"):
        local = [shard(x, mesh, 2, layout="zigzag") for x in whole()]

        def call(q: Tensor, k: Tensor, v: Tensor, scheme: str = scheme) -> Any:
            return attention(q, k, v, mesh=mesh, layout="zigzag", scheme=scheme, causal=True)

        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                passes(call, *local)
        torch.cuda.current_stream().wait_stream(stream)
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            found = passes(call, *local)
        for x in local:
            x.copy_(x.flip(2))
        captured.replay()
        replayed = [x.clone() for x in found]
        expected = passes(call, *local)
        torch.cuda.synchronize()
        compare(scheme, replayed, expected)


def compiled(mesh: DeviceMesh, rank: int) -> None:
    """Calls in compiled programs, of which the mesh is a constant."""
    layout = balanced(mesh, LENGTH, causal=True)
    for scheme, place in (("ring", "zigzag"), ("ulysses", layout)):
        local = [shard(x, mesh, 2, layout=place) for x in whole()]

        def call(q: Tensor, k: Tensor, v: Tensor, scheme: str = scheme, place: Any = place) -> Any:
            return 2 * attention(q + 1, k, v, mesh=mesh, layout=place, scheme=scheme, causal=True)  # type: ignore[operator]

        compare(("compiled", scheme), passes(torch.compile(call, fullgraph=True), *local), passes(call, *local))


def decoding(mesh: DeviceMesh, rank: int) -> None:
    """A step over a sharded cache, and a captured one, replayed with other queries and a longer cache."""
    _, k, v, _ = whole()
    lengths = torch.tensor([LENGTH - 2], dtype=torch.int32, device="cuda")
    q, new = (torch.randn(1, heads, 1, D, device="cuda", dtype=k.dtype) for heads in (HEADS, KV_HEADS))
    dist.broadcast(q, 0)
    dist.broadcast(new, 0)
    caches = [shard(x, mesh, 2) for x in (k, v)]

    def step() -> Tensor:
        return attention_with_kvcache(q, *caches, mesh=mesh, cache_seqlens=lengths, k=new, v=new, causal=True)  # type: ignore[return-value]

    def one_device() -> Tensor:
        return flashtile.attention_with_kvcache(q, k, v, cache_seqlens=lengths, k=new, v=new, causal=True)

    expected = one_device()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            compare("step", [step()], [expected])
    torch.cuda.current_stream().wait_stream(stream)
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        found = step()
    lengths += 1
    q.copy_(q.flip(1))
    captured.replay()
    compare("captured step", [found], [one_device()])
    for cache, x in zip(caches, (k, v), strict=True):
        assert torch.equal(cache, shard(x, mesh, 2))


def sharded_weights(mesh: DeviceMesh, rank: int) -> None:
    """FSDP2 over the ranks of the sequence, in a context."""
    torch.manual_seed(0)
    layers = [flashtile.nn.Attention(128, 2, causal=True, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
    model = torch.nn.Sequential(*layers)
    one, x = copy.deepcopy(model), torch.randn(1, 512, 128, device="cuda", dtype=torch.bfloat16)
    dist.broadcast(x, 0)
    one(x).float().square().sum().backward()
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    with context_parallel(mesh, layout="zigzag"):
        model(shard(x, mesh, 1, layout="zigzag")).float().square().sum().backward()
    sharded: list[Any] = [p.grad for p in model.parameters()]
    expected: list[Any] = [p.grad for p in one.parameters()]
    compare("gradients of weights", [RANKS * x.full_tensor() for x in sharded], expected)  # sums, not means of ranks


def raises_in_forward(mesh: DeviceMesh, rank: int) -> None:
    local = [shard(x, mesh, 2) for x in whole()]
    passes(lambda *x: attention(*x, mesh=mesh, scheme="ring"), *local)
    attention(*local[:3], mesh=mesh, scheme="ring", causal="left" if rank == 1 else False)  # type: ignore[arg-type]
    torch.cuda.synchronize()


def raises_in_backward(mesh: DeviceMesh, rank: int) -> None:
    local = [shard(x, mesh, 2).requires_grad_() for x in whole()]
    out: Any = attention(*local[:3], mesh=mesh, scheme="gather")
    if rank == 1:
        out.register_hook(on_purpose)
    out.backward(local[3])
    torch.cuda.synchronize()


def on_purpose(gradient: Tensor) -> None:
    raise ValueError("on purpose")


def ends(mesh: DeviceMesh, rank: int) -> None:
    local = [shard(x, mesh, 2) for x in whole()]
    attention(*local[:3], mesh=mesh, scheme="gather")
    torch.cuda.synchronize()
    if rank == 1:
        os._exit(3)
    attention(*local[:3], mesh=mesh, scheme="gather")
    torch.cuda.synchronize()


def too_late(mesh: DeviceMesh, rank: int) -> None:
    local = [shard(x, mesh, 2) for x in whole()]
    attention(*local[:3], mesh=mesh, scheme="ring")
    torch.cuda.synchronize()
    if rank == 1:
        time.sleep(2 * SECONDS)
    attention(*local[:3], mesh=mesh, scheme="ring")
    torch.cuda.synchronize()


FAULTS = raises_in_forward, raises_in_backward, ends, too_late
SCENARIOS = {
    function.__name__: function for function in (results, packed, graph, compiled, decoding, sharded_weights, *FAULTS)
}


def main(scenario: str, rank: int, store: str) -> None:
    torch.cuda.set_device(rank)
    faulty = SCENARIOS[scenario] in FAULTS
    seconds = SECONDS if faulty else 60.0
    dist.init_process_group(
        "nccl", init_method=f"file://{store}", rank=rank, world_size=RANKS, timeout=datetime.timedelta(seconds=seconds)
    )
    SCENARIOS[scenario](DeviceMesh("cuda", torch.arange(RANKS)), rank)
    print(f"rank {rank} is done", flush=True)
    if not faulty:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
