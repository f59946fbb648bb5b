"""The problems that the Triton backend accepts, the reasons for which it declines others, and the ways to run them."""

import functools
import importlib.util
import math
import os

import torch

from ...call import problem as shared
from ...call.call import Call, Needs
from ...call.device import Device
from ...call.eight_bit import PACKED
from ...call.plan import Candidate, Plan
from ...call.problem import Problem, too_long
from ...expression import Formula
from ..gpu.chips import memory_of
from ..gpu.formula import unsupported
from ..gpu.installed import triton_version
from .constants import MAX_HEAD_DIM, MAX_LATENT_DIM
from .words import reads_words

SUMMARY = "Triton kernels: any GPU that Triton serves, every feature"
MAX_SEQUENCES = 2**16  # packed; each program searches all of them
LEAST_KEYS = 16  # a tile in a second derivative has so many


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, on tensors of a CPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@functools.cache
def unusable() -> str | None:
    """The reason why this backend cannot run on this machine, or `None`."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed (PyTorch's GPU builds bring it)"
    if not torch.cuda.is_available() and not interpreted():
        return "no GPU that PyTorch can use"
    return None


def declines(problem: Problem, device: Device) -> str | None:
    """The reason why this backend declines the problem, or `None`."""
    if device.type != "cuda" and not interpreted():
        return f"its kernels run on GPUs, not on {device.type}"
    if device.arch.startswith("sm_") and int(device.arch[3:]) < 80:
        return f"it needs an NVIDIA GPU of compute capability 8.0 or newer; this one is {device.arch}"
    if problem.eight_bit == PACKED and not reads_words(problem):
        return "it reads latent rows of 656 bytes under 16-bit queries, from addresses that 16 divides"
    if problem.dtype is torch.float64:
        return "it computes in float32; reference and tiled compute in float64"
    if (reason := problem.untraced) is not None:
        return reason
    for formula in (problem.score_mod, problem.mask_mod):
        if isinstance(formula, Formula) and (reason := unsupported(formula)) is not None:
            return reason
    most = MAX_LATENT_DIM if problem.latent and problem.head_dim_v == MAX_HEAD_DIM else MAX_HEAD_DIM
    if max(problem.head_dim, problem.head_dim_v) > most:
        return f"head dimensions go up to {MAX_HEAD_DIM}, and to {MAX_LATENT_DIM} where v_dim is {MAX_HEAD_DIM}"
    if (reason := too_long(problem)) is not None:
        return reason
    if problem.layout != "dense" and problem.batch > MAX_SEQUENCES:
        return f"a packed batch has at most {MAX_SEQUENCES} sequences"
    return None


def declines_backward(problem: Problem, device: Device, needs: Needs) -> str | None:
    """The reason why this backend has no backward pass for a problem that its forward pass takes, or `None`."""
    if problem.head_dim > MAX_HEAD_DIM:
        return f"its gradients have head dimensions up to {MAX_HEAD_DIM}"
    version = triton_version()
    if device.arch == "gfx950" and problem.features.mask is not None and version is not None and version >= (3, 9):
        return "Triton 3.9 cannot compile its gradients under a mask for gfx950"
    if device.arch.startswith("sm_") and problem.dtype is torch.float32:
        from .plan.cost import least_exact_bytes

        kibibytes, memory = -(-least_exact_bytes(problem) // 1024), memory_of(device)
        if kibibytes > memory:
            return (
                f"its float32 gradients of such heads take {kibibytes} KiB of shared memory, of {memory} that there are"
            )
    return None


def candidates(problem: Problem, device: Device, needs: Needs | None) -> list[Candidate]:
    """The ways to run a pass, the fastest first."""
    from ..gpu.cost import ranked  # not needed by `import flashtile`
    from ..gpu.rates import rates_of
    from .eight_bit import problem_of_kernels
    from .plan import candidates, cost

    problem = problem_of_kernels(problem)
    if needs is None:
        ways = [(tile, n, cost.forward(problem, device, tile, n)) for tile, n in candidates.forward(problem, device)]
    else:
        tiles = (x for x in candidates.backward(problem, device) if x.one_loop is None or not needs.alibi_slopes)
        ways = [(tile, 1, cost.backward(problem, device, tile)) for tile in tiles]
    found = ranked(ways, rates_of(device))
    return [x._replace(microseconds=math.inf) for x in found] if interpreted() else found


def declines_tangents(problem: Problem, device: Device, moves: Needs) -> str | None:
    """The reason why this backend has no forward pass with tangents for a problem that its forward pass takes."""
    return f"with tangents, head dimensions go up to {MAX_HEAD_DIM}" if problem.head_dim > MAX_HEAD_DIM else None


def tangent_candidates(problem: Problem, device: Device, moves: Needs) -> list[Candidate]:
    """The ways to run a forward pass with tangents, the fastest first."""
    from ..gpu.cost import ranked  # not needed by `import flashtile`
    from ..gpu.rates import rates_of
    from .plan import candidates, cost

    ways = [
        (tile, n, cost.tangents(problem, device, tile, moves, n)) for tile, n in candidates.tangents(problem, device)
    ]
    return ranked(ways, rates_of(device))


def declines_second(problem: Problem, device: Device, moves: Needs, needs: Needs) -> str | None:
    """The reason why this backend has no second derivative of a problem, or `None`."""
    from .plan.candidates import blocked_second

    reason = shared.declines_second(problem, device, moves, needs)
    if reason is None and device.arch.startswith("sm_") and blocked_second(problem, device) is None:
        # Triton lays out eight operands of the smallest tile of keys, and one more of them for exact products.
        operands = 9 if problem.dtype is torch.float32 else 8
        size = operands * LEAST_KEYS * max(problem.head_dim, problem.head_dim_v) * problem.dtype.itemsize
        kibibytes, memory = -(-size // 1024), memory_of(device)
        if kibibytes > memory:
            return f"its second derivatives of such heads take {kibibytes} KiB of shared memory, of {memory}"
    return reason


def second_candidates(problem: Problem, device: Device, moves: Needs, needs: Needs) -> list[Candidate]:
    """The ways to compute a second derivative, the fastest first; times include the backend's own pass before it."""
    from ..gpu.cost import ranked  # not needed by `import flashtile`
    from ..gpu.rates import rates_of
    from .plan import candidates, cost

    ways = [(tile, n, cost.second(problem, device, tile, moves, n)) for tile, n in candidates.second(problem, device)]
    return ranked(ways, rates_of(device))


def unsplit(plan: Plan, call: Call) -> str | None:
    """Why forward does not split keys into as many parts as the caller asks for, or `None`."""
    return None if plan.tile.products is None else "PyTorch multiplies, by whole rows"
