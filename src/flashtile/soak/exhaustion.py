"""GPU memory that runs out in a call, at each of its allocations: the next call has to be right."""

import gc

import torch
from torch import Tensor

import flashtile

MIB = 2**20
ROOM = (0, 2, 4, 8, 16, 24, 32, 40, 48, 64, 80, 96, 128, 192, 256, 512)  # MiB beyond the inputs
BATCH, HEADS, SEQLEN, HEAD_DIM = 4, 16, 2048, 64  # q, k, v and out of 16 MiB each


def exhaust(device: torch.device, turn: int) -> tuple[int, list[str]]:
    """Run forward and backward with more and more free memory; return how often it ran out, and all failures.

    Each `turn` has a length of its own, so that the setup of a first call is interrupted too.
    """
    wrong: list[str] = []
    inputs = problem(SEQLEN - 16 * (turn % 64), device)
    gradients(problem(SEQLEN - 8, device))  # setup for calls of all lengths stays allocated
    before, failures = settled(device), 0
    for room in ROOM:
        limit = (torch.cuda.memory_reserved(device) + room * MIB) / torch.cuda.get_device_properties(
            device
        ).total_memory
        torch.cuda.set_per_process_memory_fraction(min(limit, 1.0), device)
        try:
            gradients(inputs)
        except torch.OutOfMemoryError:
            failures += 1
        except Exception as error:
            wrong.append(f"{room} MiB of room: {type(error).__name__}, should be an OutOfMemoryError: {error}")
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0, device)
        if (left := settled(device)) != before:
            wrong.append(f"{room} MiB of room: {left - before} bytes stay allocated")
            before = left
    if failures == 0:
        wrong.append("memory never ran out")
    first, second = gradients(inputs), gradients(inputs)
    expected = of_pytorch(inputs)
    for name, x, y, z in zip(("out", "dq", "dk", "dv"), first, second, expected, strict=True):
        if not torch.equal(x, y):
            wrong.append(f"{name} of two equal calls differ, after memory ran out")
        if not torch.allclose(x.float(), z.float(), rtol=0.05, atol=0.02):
            wrong.append(f"{name} is wrong by {float((x - z).abs().max()):.3g}, after memory ran out")
    return failures, wrong


def problem(seqlen: int, device: torch.device) -> tuple[Tensor, ...]:
    """q, k, v with gradients, and dout."""
    generator = torch.Generator().manual_seed(seqlen)
    values = torch.randn((4, BATCH, HEADS, seqlen, HEAD_DIM), generator=generator).to(device, torch.bfloat16)
    return (*(x.clone().requires_grad_() for x in values[:3]), values[3].clone())


def settled(device: torch.device) -> int:
    """Allocated bytes, after freeing caches and garbage."""
    gc.collect()
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated(device)


def gradients(inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    q, k, v, dout = inputs
    out = flashtile.attention(q, k, v, causal=True, deterministic=True)
    assert isinstance(out, Tensor)
    return (out.detach(), *torch.autograd.grad(out, (q, k, v), dout))


def of_pytorch(inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    q, k, v, dout = inputs
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    return (out.detach(), *torch.autograd.grad(out, (q, k, v), dout))
