"""Permitted distance of a result from the oracle, element by element: docs/contract.md, section "Numbers".

    |x - ref| <= 4 * eps(dtype) * (|ref| + R) + eps(acc) * (n + a * A) * C + tiny         out and gradients
    |x - ref| <= eps(acc) * (m + a * A) * max(1, |ref|)                                    lse
    |x - ref| <= eps(acc) * (m + a * A) * C + tiny                                         tangent of lse

with a = max(4, sqrt(head_dim)), and for fp64, where the oracle's own rounding is as large as the result's, 2 eps(acc).
n is 32 and m is 8, and more for long sums of 16-bit inputs on a GPU (`Expected.sum_error`).

`dtype` is the input dtype (q's) or, for a gradient in a coarser dtype of its own (a bf16 table of a score_mod
on fp32 queries), that one: the first term stands for the roundings to it on the way and at the end. A gradient
in a finer dtype (fp32 slopes of bf16 queries) has the roundings of out and dS to bf16 behind it, so q's dtype
counts. `acc` is fp32, fp64 for fp64 inputs. With queries of 8 bits, a GPU's products are of 16 bits, which count where
they are coarser than the result (`Expected.products`); kernels that round P to 8 bits, or scale it and round it to
float16 over latent rows of 8 bits, have a bound of their own (`Expected.rounded`).

`tiny` covers absolute errors. P and dS live in `acc`, where some units flush subnormals to zero,
and are cast to `dtype` for the matrix products, where the smallest step is its smallest subnormal. So each term
may lose

    floor = max(smallest subnormal of dtype, smallest normal of acc / eps(acc))

times its other factor (|v| for out, |dout| for dv, |k| for dq, ...) and what delta loses that way; `Expected.loss` is
the sum. The floor is 6e-8 for fp16, 1e-31 for fp32 and bf16, 1e-292 for fp64: dividing by eps leaves room for what a
flushed p would have been multiplied by. One more floor is for the result itself.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .case import Case
from .oracle import Expected, solve
from .oracle.sums import all_finite

UNMATCHED = math.inf


@dataclass(frozen=True)
class Deviation:
    """The element of one result with the largest error in units of its bound; `ratio` <= 1 is within the bound."""

    name: str
    ratio: float
    index: tuple[int, ...] = ()
    got: float = math.nan
    want: float = math.nan
    bound: float = math.nan
    reason: str = ""

    @property
    def ok(self) -> bool:
        return self.ratio <= 1

    def __str__(self) -> str:
        where = f"{self.name}{list(self.index)}"
        told = f": {self.reason}" if self.reason else ""
        values = f"{self.got:.9g}, should be {self.want:.9g} within {self.bound:.3g}"
        return f"{where} is {values} (ratio {self.ratio:.3g}){told}"


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def bound(expected: Expected, dtype: torch.dtype) -> Tensor:
    """Largest permitted |x - ref| for each element, float64; `dtype` is q's."""
    if expected.exact is not None and expected.exact.all():  # the dtype may be one of integers
        return torch.zeros_like(expected.reference)
    limit = rounding_bound(expected, dtype)
    limit = limit if expected.slack is None else limit + expected.slack
    return limit if expected.exact is None else limit.where(~expected.exact, 0.0)


def rounding_bound(expected: Expected, dtype: torch.dtype) -> Tensor:
    """The bound by the formulas above, without slack."""
    acc = torch.finfo(accumulation_dtype(dtype))
    acc_eps = acc.eps * (2 if dtype == torch.float64 else 1)
    if expected.R is None or expected.C is None or expected.loss is None:
        size = expected.reference.abs().clamp(min=1) if expected.C is None else expected.C
        unrounded = acc_eps * (max(8, expected.sum_error) + expected.score_error * expected.A) * size
        return unrounded if expected.loss is None else unrounded + acc.smallest_normal / acc.eps * (1 + expected.loss)
    products = torch.finfo(expected.products or dtype)
    stored = max(products, torch.finfo(dtype), torch.finfo(expected.dtype), key=lambda info: info.eps)
    floor = max(products.smallest_normal * products.eps, acc.smallest_normal / acc.eps)
    result_floor = max(torch.finfo(expected.dtype).smallest_normal * torch.finfo(expected.dtype).eps, floor)
    tiny = floor * expected.loss + result_floor * (expected.loss > 0).double()
    rounding = 4 * stored.eps * (expected.reference.abs() + expected.R)
    return rounding + acc_eps * (max(32, expected.sum_error) + expected.score_error * expected.A) * expected.C + tiny


def worst(actual: Tensor, expected: Expected, dtype: torch.dtype, name: str = "") -> Deviation:
    """The worst element of `actual`, a result for queries of `dtype`.

    The ratio is inf where NaN or infinities differ, where a bound is not finite, and if shape or dtype differ.
    """
    want = expected.reference
    if actual.shape != want.shape:
        return Deviation(name, UNMATCHED, reason=f"shape {list(actual.shape)}, should be {list(want.shape)}")
    if actual.dtype != expected.dtype:
        return Deviation(name, UNMATCHED, reason=f"dtype {actual.dtype}, should be {expected.dtype}")
    if want.numel() == 0:
        return Deviation(name, 0.0)
    got = actual.detach().cpu().double()
    limit = bound(expected, dtype)
    error = (got - want).abs()
    ratio = torch.where(error == 0, 0.0, error / limit).nan_to_num(nan=UNMATCHED, posinf=UNMATCHED)

    if not all(map(all_finite, (got, want, limit))):
        ratio = with_special_values(ratio, got, limit, expected, name)
    flat = int(ratio.argmax())
    index = tuple(int(n) for n in torch.unravel_index(torch.tensor(flat), want.shape))
    return Deviation(name, float(ratio[index]), index, float(got[index]), float(want[index]), float(limit[index]))


def with_special_values(ratio: Tensor, got: Tensor, limit: Tensor, expected: Expected, name: str) -> Tensor:
    """The ratios of `got` where it, the reference or the bound has NaN or infinities."""
    want = expected.reference
    # Where the reference is finite the bound has to be, also if the result happens to be right.
    ratio = torch.where(want.isfinite() & ~limit.isfinite(), UNMATCHED, ratio)
    # A finite reference beyond the result's range may come out as that infinity.
    largest = torch.finfo(expected.dtype).max if expected.dtype.is_floating_point else math.inf
    beyond = limit.isfinite() & (want.abs() + limit >= largest)
    ratio = torch.where(beyond & got.isinf() & (got.sign() == want.sign()), 0.0, ratio)
    same_special = (got.isnan() & want.isnan()) | (want.isinf() & (got == want))
    if expected.loose is not None:
        same_special |= expected.loose & ~got.isfinite()
        if name not in ("out", "lse"):  # whether a NaN reaches a gradient may depend on how tiles fall
            same_special |= expected.loose & ~want.isfinite()
    ratio = torch.where(want.isfinite() | same_special, ratio, UNMATCHED)
    return torch.where(same_special, 0.0, ratio)


def compare(
    actual: dict[str, Tensor],
    case: Case,
    expected: dict[str, Expected] | None = None,
    *,
    rounds_to_eight_bits: bool = False,
) -> list[Deviation]:
    """The deviation of each result, worst first. A missing or unexpected result has an infinite ratio.
    `rounds_to_eight_bits`: kernels that round P have computed them, under queries or over latent rows of 8 bits.
    """
    expected = solve(case) if expected is None else expected
    if rounds_to_eight_bits:
        expected = {name: x.rounded or x for name, x in expected.items()}
    deviations = [worst(actual[name], expected[name], case.dtype, name) for name in expected if name in actual]
    deviations += [Deviation(name, UNMATCHED, reason="missing") for name in expected.keys() - actual.keys()]
    deviations += [Deviation(name, UNMATCHED, reason="not expected") for name in actual.keys() - expected.keys()]
    return sorted(deviations, key=lambda deviation: (-deviation.ratio, deviation.name))
