"""Rounding in step 9: three things that no formula mentions and that move the last digits. On the CPU, in float32.

- Fused multiply-add. `a * b + c` as one instruction rounds once, as two it rounds twice. Compilers for GPUs fuse unless
  told otherwise (`--fmad=false`), those for CPUs often do not.
- The order of a sum. Floating-point addition is not associative: one after the other, backwards, in tiles or in pairs,
  each rounds at other places. A tile size is an order. A compensated sum (Kahan, 1965) keeps what each addition
  lost and gives it to the next one.
- exp(x) or 2^(x log2 e). GPUs have an instruction for 2^x, and log2 e is folded into the scale: but log2 e is rounded,
  and so is its product with x, by up to half a unit of the last place of x log2 e, which exp2 turns into a relative
  error of |x| 2^-24 and more.

`attention` has each as a keyword, and every loop over numbers to be added written out. `table` says how far the results
move. None of them is wrong: a test that wants equality to 1e-7 is.
"""

from typing import Any

import numpy as np

LOG2_E = np.float32(1.4426950408889634)
ORDERS = ("forward", "backward", "pairs", "kahan")
Array = Any


def multiply_add(a: Array, b: Array, c: Array, fused: bool) -> Array:
    """float32 `a * b + c`. In float64 the product of two float32 numbers is exact: fused, only the end is rounded."""
    if fused:
        return (a.astype(np.float64) * b.astype(np.float64) + c.astype(np.float64)).astype(np.float32)
    return a * b + c


def product(a: Array, b: Array, fused: bool, order: str) -> Array:
    """`a [M, K] @ b [K, N]` in float32, one multiply-add after the other; in pairs, of two halves added at the end.

    "kahan" is forward with a compensation: `lost` is what the last addition rounded off, and the next term makes up for
    it. A compiler that may reorder floating-point additions (`-ffast-math`) removes it.
    """
    inner = a.shape[1]
    if order == "pairs" and inner > 1:
        half = inner // 2
        return product(a[:, :half], b[:half], fused, order) + product(a[:, half:], b[half:], fused, order)
    total = np.zeros((len(a), b.shape[1]), np.float32)  # [M, N]
    if order == "kahan":
        lost = np.zeros_like(total)
        for i in range(inner):
            term = multiply_add(a[:, i, None], b[None, i], -lost, fused)
            new = total + term
            lost = (new - total) - term
            total = new
        return total
    for i in range(inner) if order != "backward" else reversed(range(inner)):
        total = multiply_add(a[:, i, None], b[None, i], total, fused)
    return total


def attention(
    q: Array, k: Array, v: Array, scale: float, *, fused: bool = True, order: str = "forward", base2: bool = False
) -> tuple[Array, Array]:
    """float32 `[N, d]` to out `[N, d]` and lse `[N]`, as standard attention."""
    s = product(q * np.float32(scale), k.T, fused, order)  # [N, N]
    if base2:
        s = s * LOG2_E
    x = s - s.max(axis=1, keepdims=True)
    p = np.exp2(x) if base2 else np.exp(x)  # [N, N]
    l = product(p, np.ones((len(k), 1), np.float32), fused, order)  # [N, 1]
    lse = s.max(axis=1) / (LOG2_E if base2 else np.float32(1)) + np.log(l[:, 0])
    return product(p, v, fused, order) / l, lse


def truncated_to_tf32(x: Array) -> Array:
    """float32 with the 10 bits after the leading one that a tensor core reads for TF32; the 13 below are dropped."""
    return (np.ascontiguousarray(x, np.float32).view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)


def attention_in_tf32(q: Array, k: Array, v: Array, scale: float) -> Array:
    """float32 `[N, d]` to out `[N, d]`: both products of TF32 factors, sums and exp in float32, as a fused kernel."""
    s = np.float32(scale) * (truncated_to_tf32(q) @ truncated_to_tf32(k).T)  # [N, N]
    p = np.exp(s - s.max(axis=1, keepdims=True))  # [N, N]
    return truncated_to_tf32(p) @ truncated_to_tf32(v) / p.sum(axis=1, keepdims=True)


CHANGES: dict[str, dict[str, Any]] = {
    "two roundings in place of a fused multiply-add": {"fused": False},
    "sums backwards": {"order": "backward"},
    "sums in pairs": {"order": "pairs"},
    "compensated sums (Kahan)": {"order": "kahan"},
    "2^(x log2 e) in place of exp": {"base2": True},
}


def table(n: int = 256, d: int = 64, seed: int = 0) -> list[dict[str, Any]]:
    """Largest differences of out and lse that each change makes to fused, one after the other, exp; and their errors.

    With the scale of attention, and with none, where scores are sqrt(d) times as large.
    """
    random = np.random.default_rng(seed)
    q, k, v = (random.standard_normal((n, d), np.float32) for _ in range(3))
    rows = []
    for scale in (d**-0.5, 1.0):
        exact = attention_in_float64(q, k, v, scale)
        plain = attention(q, k, v, scale)
        for change, keywords in ({"none": {}} | CHANGES).items():
            found = attention(q, k, v, scale, **keywords)
            moved = [largest(x - y) for x, y in zip(found, plain, strict=True)]
            errors = [largest(x - y) for x, y in zip(found, exact, strict=True)]
            row = {"scale": scale, "change": change, "out_moves_by": moved[0], "lse_moves_by": moved[1]}
            rows.append(row | {"out_error": errors[0], "lse_error": errors[1]})
    return rows


def attention_in_float64(q: Array, k: Array, v: Array, scale: float) -> tuple[Array, Array]:
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    s = np.float64(np.float32(scale)) * q @ k.T
    m = s.max(axis=1, keepdims=True)
    p = np.exp(s - m)
    l = p.sum(axis=1, keepdims=True)
    return p @ v / l, (m + np.log(l))[:, 0]


def largest(x: Array) -> float:
    return float(np.abs(x).max())


def main() -> None:
    for line in table():
        print(", ".join(f"{name} {x:.2g}" if isinstance(x, float) else x for name, x in line.items()))
