"""Step 2, second half. The same on raw floats, with the derivative written by hand.

The change. No graph: numbers are floats, and backward is a formula. With P = softmax(S), O = P V and dO given,

    dV = Pᵀ dO        dP = dO Vᵀ        dS_ij = P_ij (dP_ij - delta_i)        dQ = scale dS K        dK = scale dSᵀ Q

where delta_i = sum_j P_ij dP_ij. It is also sum_c dO_ic O_ic, for dP_ij = dO_i . v_j and sum_j P_ij v_j = O_i: so delta
needs one row of O and dO, not a row of P and dP (Dao et al., "FlashAttention", 2022, appendix B.2). Every later
backward rests on this line.

Why it is faster and leaner. No object for each multiplication, and a row's weights are all that is ever held: backward
makes them again from the row's log-sum-exp, p_ij = exp(s_ij - lse_i), instead of remembering them.
"""

import math
from collections.abc import Sequence

from ._host.shapes import one_shape

Rows = Sequence[Sequence[float]]


def dot(a: Sequence[float], b: Sequence[float]) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True))


def attention(
    q: Rows, k: Rows, v: Rows, causal: bool = False, scale: float | None = None
) -> tuple[list[list[float]], list[float]]:
    """`[N][d]` numbers to out `[N][d]` and lse `[N]`, row by row with the safe softmax of step 1."""
    n, d = one_shape(q, k, v)
    scale = 1 / math.sqrt(d) if scale is None else scale
    out, lse = [], []
    for i in range(n):
        visible = i + 1 if causal else n
        s = [scale * dot(q[i], k[j]) for j in range(visible)]  # [visible]
        m = max(s)
        e = [math.exp(x - m) for x in s]  # [visible]
        l = sum(e)
        row = [0.0] * d
        for j in range(visible):
            p = e[j] / l
            for c in range(d):
                row[c] += p * v[j][c]
        out.append(row)
        lse.append(m + math.log(l))
    return out, lse


def backward(
    q: Rows, k: Rows, v: Rows, out: Rows, lse: Sequence[float], dout: Rows, causal: bool = False,
    scale: float | None = None,
) -> tuple[list[list[float]], list[list[float]], list[list[float]]]:  # fmt: skip
    """dq, dk, dv `[N][d]`: the five formulas above, one pair (i, j) at a time."""
    n, d = one_shape(q, k, v)
    scale = 1 / math.sqrt(d) if scale is None else scale
    dq, dk, dv = ([[0.0] * d for _ in range(n)] for _ in range(3))
    for i in range(n):
        delta = dot(dout[i], out[i])
        for j in range(i + 1 if causal else n):
            p = math.exp(scale * dot(q[i], k[j]) - lse[i])  # made again, not remembered
            dp = dot(dout[i], v[j])
            ds = scale * p * (dp - delta)
            for c in range(d):
                dv[j][c] += p * dout[i][c]
                dq[i][c] += ds * k[j][c]
                dk[j][c] += ds * q[i][c]
    return dq, dk, dv
