"""The table `rounding` of `flashtile-ladder`: how far formulas that are equal in mathematics move the results."""

from typing import Any

import torch
from torch import Tensor

from .. import step04_standard
from .._host.cuda_steps import warps
from ..measure import rounding as pages
from .gpu import cuda_problem
from .measure import Measurement, Table, inputs

ROUNDING_SHAPE = 256, 64  # N, d
FLAGS = ("--fmad=false", "--use_fast_math")


def rounding(device: torch.device) -> Measurement:
    """On the CPU in float32, operation by operation; on a GPU also one kernel, compiled with other flags."""
    n, d = ROUNDING_SHAPE
    table = Table("rounding", f"Rounding: how far equal formulas move the results, float32, N = {n}, d = {d}")
    table.see = "Each of these is right: kernels agree to this and no further."
    yield "on the CPU"
    table.rows += [{"where": "CPU"} | row for row in pages.table(n, d)]
    if cuda_problem(device) is None:
        yield "on the GPU"
        table.rows += compiler_flags(n, d, device)
    table.notes.append(
        "Each against the same formula with fused multiply-adds, sums in order, and exp; error: from fp64."
    )
    return table


def compiler_flags(n: int, d: int, device: torch.device) -> list[dict[str, Any]]:
    """Rows of a table: step 9's second kernel, which adds up in one order whatever the flags."""
    q, k, v = inputs(n, d, device)
    attend = warps.attention
    rows = []
    for scale in (d**-0.5, 1.0):
        exact = step04_standard.attention(q.cpu().double(), k.cpu().double(), v.cpu().double(), scale=scale)
        plain = [x.cpu().double() for x in attend(q, k, v, scale=scale)]
        for flags in ((), *((flag,) for flag in FLAGS)):
            found = [x.cpu().double() for x in attend(q, k, v, scale=scale, flags=flags)]
            moved, errors = ([largest(x, y) for x, y in zip(found, z, strict=True)] for z in (plain, exact))
            row = {"where": "GPU", "scale": scale, "change": " ".join(flags) or "none"}
            row |= {"out_moves_by": moved[0], "lse_moves_by": moved[1]}
            rows.append(row | {"out_error": errors[0], "lse_error": errors[1]})
    return rows


def largest(x: Tensor, y: Tensor) -> float:
    return float((x - y).abs().max())
