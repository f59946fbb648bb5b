"""The bound of kernels that round P to 8 bits."""

import math
from dataclasses import replace

import torch
from torch import Tensor

from flashtile.testing.case import Case
from flashtile.testing.oracle import solve
from flashtile.testing.tolerance import compare


def rounded_to_eight_bits(case: Case) -> dict[str, Tensor]:
    """A call with queries of 8 bits, whose P is rounded to 8 bits in blocks of 128 keys."""
    q, k, v = (case.arguments[name].float() for name in "qkv")
    s = q @ k.mT * q.shape[-1] ** -0.5
    lse, out = s.logsumexp(-1), 0.0
    for x, values in zip(s.split(128, -1), v.split(128, -2), strict=True):
        largest = x.amax(-1, keepdim=True)
        p = ((x - largest).exp() * 2**8).to(torch.float8_e4m3fn).float()
        out = out + p @ values * (largest - lse[..., None] - math.log(2**8)).exp()
    return {"out": out, "lse": lse}


def test_kernels_that_round_to_eight_bits_have_a_bound_of_their_own():
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, n, 64, generator=generator).to(torch.float8_e4m3fn) for n in (40, 300, 300))
    case = Case("attention", {"q": q, "k": k, "v": v, "out_dtype": torch.float32})
    results, expected = rounded_to_eight_bits(case), solve(case)
    assert not compare(results, case, expected)[0].ok
    assert 0.05 < compare(results, case, expected, rounds_to_eight_bits=True)[0].ratio < 1
    on_gpu = expected | {"out": replace(expected["out"], products=torch.float16)}
    assert compare(results, case, on_gpu)[0].ratio > 10
