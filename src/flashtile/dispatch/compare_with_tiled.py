"""The process of a self-check: one pass of a backend's kernels on a small problem, compared with `tiled`.

The bound is elementwise and loose, several times what rounding leaves: it finds kernels that are miscompiled, not those
that round badly. `flashtile verify` compares with the error bounds of the contract.
"""

import json
from typing import Any

import torch
from torch import Tensor

from ..backend.hopper.support import KernelClass
from ..call.call import Call, Needs, Settings, Tensors
from ..call.plan import Plan
from ..call.problem import Problem
from . import passes, planner

LENGTHS = 200, 333  # queries and keys
TOLERANCE = 2.0**-6  # parts of a row's largest element, or FLOOR times the largest of all
FLOOR = 2.0**-4
LSE_TOLERANCE = 2.0**-9


def main(backend: str, kernels: str) -> None:
    """Print the outcome as JSON: the failure or `None`, and whether a later check would say the same."""
    final, failure = False, None
    try:
        torch.zeros(1, device="cuda")
        final = True
        failure = examine(backend, KernelClass(*json.loads(kernels)), torch.device("cuda"))
    except torch.OutOfMemoryError as error:
        final, failure = False, f"out of memory: {error}"
    except Exception as error:
        failure = f"{type(error).__name__}: {error}"[-500:]
    print(json.dumps({"final": final, "failure": failure}))


def examine(backend: str, kernels: KernelClass, device: torch.device) -> str | None:
    """The results of a pass that are wrong, in words; `None` if all are right."""
    call = small_call(kernels, device)
    out, lse = passes.entry_of(backend).forward(plan_of(backend, call, None, kernels), call)
    expected, expected_lse = run("tiled", call)
    if not kernels.backward:
        return worst({"out": (out, expected)}, (lse, expected_lse))
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(device, out.dtype)
    rows = (expected, expected_lse, dout, None)
    pairs = zip(gradients(backend, call, rows), gradients("tiled", call, rows), strict=True)
    return worst(dict(zip(("dq", "dk", "dv"), pairs, strict=True)))


def small_call(kernels: KernelClass, device: torch.device) -> Call:
    """A call of these kernels: grouped heads, lengths that end inside tiles, a diagonal."""
    generator = torch.Generator().manual_seed(0)
    seqlen_q, seqlen_k = LENGTHS
    heads_q, heads_kv = 4, 2
    shapes = [(heads_q, seqlen_q, kernels.head_dim), (heads_kv, seqlen_k, kernels.head_dim)]
    shapes.append((heads_kv, seqlen_k, kernels.head_dim_v))
    dtype = torch.float32 if kernels.float32 else torch.bfloat16
    q, k, v = (torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes)
    settings = Settings(kernels.head_dim**-0.5, window_right=0)
    if not kernels.packed:
        return Call(Tensors(q[None], k[None], v[None]), settings)
    tokens = [x.transpose(0, 1).contiguous() for x in (q, k, v)]
    bounds = ((0, seqlen_q // 2, seqlen_q // 2, seqlen_q), (0, seqlen_k // 3, seqlen_k // 2, seqlen_k))
    offsets = [torch.tensor(x, dtype=torch.int32, device=device) for x in bounds]  # the second one for keys only
    settings = settings._replace(max_seqlen_q=seqlen_q, max_seqlen_k=seqlen_k)
    return Call(Tensors(*tokens, cu_seqlens_q=offsets[0], cu_seqlens_k=offsets[1]), settings)


def run(backend: str, call: Call) -> tuple[Tensor, Tensor]:
    return passes.entry_of(backend).forward(plan_of(backend, call), call)


def gradients(backend: str, call: Call, rows: tuple[Tensor, Tensor, Tensor, None]) -> tuple[Tensor, ...]:
    needs = Needs(True, True, True)
    return passes.entry_of(backend).backward(plan_of(backend, call, needs), call, needs, *rows)[:3]


def plan_of(backend: str, call: Call, needs: Needs | None = None, kernels: KernelClass | None = None) -> Plan:
    """A plan without the questions that the planner asks: one of them would start this check again."""
    problem, device = Problem.describe(call), planner.describe_device(call.tensors.q.device)
    support = planner.SUPPORT[backend]
    found = support.candidates(problem, device, needs)
    way = found[0] if kernels is None else support.of_class(kernels, found)
    return Plan(backend, way.tile, way.num_splits, ())


def worst(pairs: dict[str, tuple[Any, Any]], lse: tuple[Tensor, Tensor] | None = None) -> str | None:
    """The results that exceed their bound, in words."""
    wrong = []
    for name, (x, expected) in pairs.items():
        y = expected.float()
        row = y.abs().amax(-1, keepdim=True)
        ratio = (x.float() - y).abs() / (TOLERANCE * (row + FLOOR * row.max()))
        wrong += exceeding(name, ratio)
    if lse is not None:
        x, y = lse
        same = x == y  # infinite for a row without keys
        wrong += exceeding("lse", torch.where(same, 0.0, (x - y).abs() / (LSE_TOLERANCE * (1 + y.abs()))))
    return "; ".join(wrong) or None


def exceeding(name: str, ratio: Tensor) -> list[str]:
    """`ratio` is an error in units of its bound, perhaps NaN."""
    bad = ~(ratio <= 1)
    if not bad.any():
        return []
    return [f"{name} is wrong in {int(bad.sum())} of {bad.numel()} elements, by up to {ratio.max().item():.3g} bounds"]
