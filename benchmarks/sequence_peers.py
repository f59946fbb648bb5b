"""Other schemes for one sequence over a mesh, to compare with: forward and backward of a rank's rows."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from flashtile.call.call import Call, Settings, Tensors, differentiable_positions
from flashtile.dispatch.operators import operators_of


class ZigzagRing(torch.autograd.Function):
    """Causal attention in the zigzag layout, as ring-flash-attention's `zigzag_ring_flash_attn_func`, over our kernels.

    A rank's rows are an early and a late piece. Over keys of ranks before it, all of its rows see their early piece;
    over those of ranks behind, its late rows see both. Keys and their gradients travel around the ring.
    """

    @staticmethod
    def forward(ctx: Any, mesh: DeviceMesh, q: Tensor, k: Tensor, v: Tensor) -> Tensor:  # type: ignore[override]
        ring, half = Ring(mesh), q.shape[2] // 2
        out, lse = block_forward(q, k, v, causal=True)
        out = out.float()
        kv = [k, v]
        arriving = ring.pass_on(kv)
        for step in range(1, ring.size):
            kv = ring.wait(arriving)
            if step + 1 < ring.size:
                arriving = ring.pass_on(kv)
            rows = slice(None) if step <= ring.rank else slice(half, None)
            keys = slice(half) if step <= ring.rank else slice(None)
            block, block_lse = block_forward(q[:, :, rows], *(x[:, :, keys] for x in kv), causal=False)
            weight = torch.sigmoid(block_lse - lse[:, :, rows])[..., None]
            out[:, :, rows] += weight * (block - out[:, :, rows])
            lse[:, :, rows] = torch.logaddexp(lse[:, :, rows], block_lse)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.mesh = mesh
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        q, k, v, out, lse = ctx.saved_tensors
        ring, half, kv = Ring(ctx.mesh), q.shape[2] // 2, [k, v]
        arriving, returning = ring.pass_on(kv), None
        dq, *dkv = (x.float() for x in block_backward(q, k, v, out, lse, dout, causal=True))
        for step in range(1, ring.size):
            kv = ring.wait(arriving)
            if step + 1 < ring.size:
                arriving = ring.pass_on(kv)
            returning = ring.pass_on(dkv)
            rows = slice(None) if step <= ring.rank else slice(half, None)
            keys = slice(half) if step <= ring.rank else slice(None)
            of_rows = (x[:, :, rows] for x in (out, lse, dout))
            found = block_backward(q[:, :, rows], *(x[:, :, keys] for x in kv), *of_rows, causal=False)
            dq[:, :, rows] += found[0]
            dkv = ring.wait(returning)
            for total, x in zip(dkv, found[1:], strict=True):
                total[:, :, keys] += x
        dk, dv = ring.wait(ring.pass_on(dkv))  # home
        return None, dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


class Ring:
    """A ring over the ranks of a mesh with one dimension."""

    def __init__(self, mesh: DeviceMesh):
        self.group, self.size, self.rank = mesh.get_group(), mesh.size(), mesh.get_local_rank()

    def pass_on(self, tensors: list[Tensor]) -> tuple[list[Tensor], list[Any], list[Tensor]]:
        sent, received = [x.contiguous() for x in tensors], [torch.empty_like(x).contiguous() for x in tensors]
        ahead, behind = (dist.get_global_rank(self.group, (self.rank + n) % self.size) for n in (1, -1))
        ops = [dist.P2POp(dist.isend, x, ahead, self.group) for x in sent]
        ops += [dist.P2POp(dist.irecv, x, behind, self.group) for x in received]
        return received, dist.batch_isend_irecv(ops), sent

    def wait(self, arriving: tuple[list[Tensor], list[Any], list[Tensor]]) -> list[Tensor]:
        for work in arriving[1]:
            work.wait()
        return arriving[0]


def block_call(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Call:
    return Call(Tensors(q, k, v), Settings(q.shape[3] ** -0.5, window_right=0 if causal else None))


def block_forward(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> tuple[Tensor, Tensor]:
    call = block_call(q, k, v, causal=causal)
    return operators_of(call).attend(call)


def block_backward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dout: Tensor, *, causal: bool
) -> list[Tensor]:
    call = block_call(q, k, v, causal=causal)
    needs = [n < 3 for n, _ in enumerate(differentiable_positions(len(call.tensors.flat())))]
    return operators_of(call).differentiate(needs, out, lse, dout, None, call)[:3]  # type: ignore[return-value]


def zigzag_ring(mesh: DeviceMesh) -> Callable[..., Tensor]:
    return lambda q, k, v: ZigzagRing.apply(mesh, q, k, v)  # type: ignore[no-any-return]


@contextmanager
def torch_context_parallel(mesh: DeviceMesh, *, causal: bool) -> Iterator[Callable[..., Tensor]]:
    """PyTorch's ring over its fastest kernels, cuDNN's on a GPU, for forward and backward inside of the context. Keys
    have as many heads as queries.
    """
    from torch.distributed.tensor.experimental import _attention, context_parallel

    options = getattr(_attention, "_cp_options")  # noqa: B009 - private
    before = options.enable_load_balance
    options.enable_load_balance = causal
    kernels = SDPBackend.CUDNN_ATTENTION if mesh.device_type == "cuda" else SDPBackend.FLASH_ATTENTION
    try:
        rows = torch.zeros(4 * mesh.size(), device=mesh.device_type)  # it wants something to shard
        with sdpa_kernel([kernels]), context_parallel(mesh, buffers=[rows], buffer_seq_dims=[0]):
            yield lambda q, k, v: functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
    finally:
        options.enable_load_balance = before
