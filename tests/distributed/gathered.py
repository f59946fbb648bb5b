"""Sharded calls of a `Case`, gathered and compared with the oracle."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from flashtile.distributed import Layout, shard, unshard
from flashtile.testing.case import Case
from flashtile.testing.oracle import solve
from flashtile.testing.tolerance import compare

HEADS, KV_HEADS, D, DV = 4, 2, 16, 24


def dense_case(
    batch: int,
    rows: int,
    keys: int,
    *,
    heads: tuple[int, int] = (HEADS, KV_HEADS),
    dv: int = DV,
    seed: int = 0,
    **arguments: Any,
) -> Case:
    """A dense call in float64 with random inputs and cotangents, the same on all ranks."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=generator)

    q, k = random(batch, heads[0], rows, D), random(batch, heads[1], keys, D)
    tensors = {"q": q, "k": k, "v": random(batch, heads[1], keys, dv)}
    return Case("attention", tensors | arguments, random(*q.shape[:3], dv), random(*q.shape[:3]))


def check(case: Case, results: dict[str, Tensor]) -> None:
    """Compare with the oracle, on the first rank alone."""
    if dist.get_rank() == 0:
        expected = solve(case)
        worst = compare(results, case, {name: expected[name] for name in results})[0]
        assert worst.ok, f"{case.description}: {worst}"


@contextmanager
def without_objects() -> Iterator[None]:
    """Refuse the exchange of objects, which waits for a device."""

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("objects are exchanged without check=True")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_gather_object", refuse)
        yield


def run_local(
    case: Case,
    mesh: DeviceMesh,
    layout: str | Layout,
    call: Callable[..., Any],
    *,
    context: Any = None,
) -> dict[str, Tensor]:
    """Results and gradients of `call(**arguments)`, which has this rank's rows, gathered. Backward runs outside of
    `context`. A call without lse has no gradient of it.
    """
    place: dict[str, Any] = {"mesh": mesh, "layout": layout}
    lengths = {name: case.arguments[name].shape[2] for name in ("q", "k", "v")}
    local = {n: shard(case.arguments[n], dim=2, length=s, **place).requires_grad_() for n, s in lengths.items()}
    whole = {n: x.detach().requires_grad_() for n, x in case.differentiable().items() if n not in local}
    with context or nullcontext():
        results = call(**case.arguments | local | whole)
    results = dict(zip(("out", "lse"), results, strict=False)) if isinstance(results, tuple) else {"out": results}
    incoming = [shard(x, dim=2, length=lengths["q"], **place) for x in (case.dout, case.dlse) if x is not None]
    inputs = local | whole
    gradients = torch.autograd.grad([*results.values()], [*inputs.values()], incoming)
    found = {f"d{name}": dx for name, dx in zip(inputs, gradients, strict=True)}
    for name in whole:
        for n in range(mesh.ndim):
            dist.all_reduce(found[f"d{name}"], group=mesh.get_group(n))
    for x, names in ((results, results), (found, [f"d{name}" for name in local])):
        for name in names:
            rows = lengths.get(name.removeprefix("d"), lengths["q"])
            x[name] = unshard(x[name].detach(), dim=2, length=rows, **place)
    return results | found
