"""Sharded calls in half precision: their errors against float64 are those of one device, up to a small factor."""

from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import flashtile
from flashtile.distributed import attention, attention_with_kvcache, shard, unshard

DTYPES = torch.bfloat16, torch.float16
ROWS = 24  # of a rank
# Mean errors over that of one device, for results of one part, and for those whose parts are rounded before they are
# merged: all of the ring, and gradients of keys, which rows or heads of several ranks add to.
ONE_PART, ROUNDED_PARTS = 1.02, 2.5
LARGEST = 1.5  # times that, of largest errors


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def check(factor: float, result: Tensor, one: Tensor, expected: Tensor, name: Any) -> None:
    """Compare a sharded result with that of one device by their errors."""
    assert result.dtype == one.dtype
    error, of_one = ((x.double() - expected).abs() for x in (result, one))
    assert error.mean() <= factor * of_one.mean(), (name, error.mean() / of_one.mean())
    assert error.max() <= LARGEST * factor * of_one.max(), (name, error.max() / of_one.max())


def calls(mesh: DeviceMesh) -> None:
    """Results and gradients of each scheme."""
    length, num_heads = mesh.size() * ROWS - 1, 2 * mesh.size()
    for dtype in DTYPES:
        whole = [random(1, heads, length, 16, seed=n).to(dtype) for n, heads in enumerate((num_heads, 2, 2))]
        dout = random(1, num_heads, length, 16, seed=3).to(dtype)
        expected = results(
            lambda *x: flashtile.attention(*x, backend="tiled"), [x.double() for x in whole], dout.double()
        )
        one = results(lambda *x: flashtile.attention(*x, backend="tiled"), whole, dout)
        local = [shard(x, mesh, 2, length=length) for x in (*whole, dout)]
        for scheme in ("ring", "gather", "ulysses"):
            given: dict[str, Any] = {"mesh": mesh, "length": length, "scheme": scheme, "backend": "tiled"}
            found = results(lambda *x, given=given: attention(*x, **given), local[:3], local[3])
            again = results(lambda *x, given=given: attention(*x, **given), local[:3], local[3])
            assert all(map(torch.equal, found, again)), scheme
            for name, x, of_one, reference in zip(("out", "dq", "dk", "dv"), found, one, expected, strict=True):
                factor = ROUNDED_PARTS if scheme == "ring" or name in ("dk", "dv") else ONE_PART
                check(factor, unshard(x, mesh, 2, length=length), of_one, reference, (scheme, name, dtype))


def results(call: Any, tensors: list[Tensor], dout: Tensor) -> list[Tensor]:
    """The result of a call, and the gradients of its tensors."""
    tensors = [x.detach().requires_grad_() for x in tensors]
    out = call(*tensors)
    return [out.detach(), *torch.autograd.grad(out, tensors, dout)]


def steps(mesh: DeviceMesh) -> None:
    """Decoding in each backend of a CPU."""
    backends = [x.name for x in flashtile.backends() if x.usable and x.name in ("cpu", "tiled", "reference")]
    room = mesh.size() * ROWS - 1
    lengths = torch.tensor([room, room // 2])
    for dtype in DTYPES:
        q, k, v = (random(2, h, s, 16, seed=s).to(dtype) for h, s in ((4, 2), (2, room), (2, room)))
        v = v.flip(2)
        # Products of slopes and distances need more digits than these dtypes have.
        slopes, bias = random(4, seed=5).abs().mul(0.3).to(dtype), random(1, 4, 1, room, seed=6).to(dtype)
        for features in ({}, {"alibi_slopes": slopes, "bias": bias}):
            given: dict[str, Any] = {"cache_seqlens": lengths, "causal": True}
            expected = flashtile.attention_with_kvcache(
                *(x.double() for x in (q, k, v)),
                **given,
                **{n: x.double() for n, x in features.items()},
                backend="tiled",
            )
            local = [shard(x, mesh, 2, length=room) for x in (k, v)]
            for backend in backends:
                given |= {"backend": backend} | features
                one = flashtile.attention_with_kvcache(q, k, v, **given)
                out = attention_with_kvcache(q, *local, mesh=mesh, length=room, **given)
                assert isinstance(out, Tensor)
                check(ONE_PART, out, one, expected, (dtype, backend, [*features]))
