"""Step 2, first half. Attention on numbers that remember: scalar automatic differentiation in plain Python.

The change. Step 1 has no derivative. Here every number is a `Value` that keeps the values it was made from and the
derivative with respect to each; forward builds that graph, and `backward` walks it from the end, adding up

    dL/dx = sum over the values y made from x of  dL/dy * dy/dx                                        (chain rule)

Why it helps. No derivative of attention has to be worked out. The price is an object for each of the 2 N² d
multiplications and as many additions, all kept until backward has run: the memory that FlashAttention later does
without.
"""

import math
from collections.abc import Sequence

from ._host.shapes import one_shape


class Value:
    """A number in a graph: what it is, what it was made from, and dL/d(itself) after backward."""

    __slots__ = ("data", "grad", "local", "parents")

    def __init__(self, data: float, parents: tuple["Value", ...] = (), local: tuple[float, ...] = ()):
        self.data = data
        self.grad = 0.0
        self.parents = parents
        self.local = local  # d(self)/d(parent), one for each parent

    def __add__(self, other: "Value") -> "Value":
        return Value(self.data + other.data, (self, other), (1.0, 1.0))

    def __sub__(self, other: "Value") -> "Value":
        return Value(self.data - other.data, (self, other), (1.0, -1.0))

    def __mul__(self, other: "Value") -> "Value":
        return Value(self.data * other.data, (self, other), (other.data, self.data))

    def __truediv__(self, other: "Value") -> "Value":
        quotient = self.data / other.data
        return Value(quotient, (self, other), (1.0 / other.data, -quotient / other.data))

    def times(self, factor: float) -> "Value":
        """A product with a constant, which needs no derivative."""
        return Value(self.data * factor, (self,), (factor,))

    def minus(self, constant: float) -> "Value":
        return Value(self.data - constant, (self,), (1.0,))

    def exp(self) -> "Value":
        e = math.exp(self.data)
        return Value(e, (self,), (e,))

    def log(self) -> "Value":
        return Value(math.log(self.data), (self,), (1.0 / self.data,))


Row = Sequence[Value]


def values(rows: Sequence[Sequence[float]]) -> list[list[Value]]:
    """Leaves of a graph: `[N][d]` numbers as `[N][d]` values."""
    return [[Value(float(x)) for x in row] for row in rows]


def total(terms: Sequence[Value]) -> Value:
    """The sum of some values, one addition after the other."""
    result = terms[0]
    for term in terms[1:]:
        result = result + term
    return result


def attention(
    q: Sequence[Row], k: Sequence[Row], v: Sequence[Row], causal: bool = False, scale: float | None = None
) -> tuple[list[list[Value]], list[Value]]:
    """`[N][d]` values (see `values`) to out `[N][d]` and lse `[N]`, which remember where they came from.

        s_ij = scale sum_c q_ic k_jc        p_ij = exp(s_ij - m_i) / l_i        o_ic = sum_j p_ij v_jc

    The maximum m is a plain number: it cancels out of every result, so no derivative flows through it.
    """
    n, d = one_shape(q, k, v)
    scale = 1 / math.sqrt(d) if scale is None else scale
    out, lse = [], []
    for i in range(n):
        visible = range(i + 1 if causal else n)
        s = [total([q[i][c] * k[j][c] for c in range(d)]).times(scale) for j in visible]  # [visible]
        m = max(x.data for x in s)
        e = [x.minus(m).exp() for x in s]  # [visible]
        l = total(e)
        p = [x / l for x in e]  # [visible]
        out.append([total([p[j] * v[j][c] for j in visible]) for c in range(d)])  # [d]
        lse.append(l.log().minus(-m))
    return out, lse


def backward(
    q: Sequence[Row], k: Sequence[Row], v: Sequence[Row], out: Sequence[Row], lse: Row, dout: Sequence[Sequence[float]],
    causal: bool = False, scale: float | None = None,
) -> tuple[list[list[float]], list[list[float]], list[list[float]]]:  # fmt: skip
    """dq, dk, dv `[N][d]` from dout `[N][d]`: the graph of `out` knows everything else, causal and scale too."""
    ends = [x for row in out for x in row]
    order = in_order(ends)
    for x in order:
        x.grad = 0.0
    for x, gradient in zip(ends, (g for row in dout for g in row), strict=True):
        x.grad = float(gradient)
    for x in reversed(order):  # a value's own gradient is complete before it is passed on
        for parent, local in zip(x.parents, x.local, strict=True):
            parent.grad += x.grad * local
    dq, dk, dv = ([[x.grad for x in row] for row in rows] for rows in (q, k, v))
    return dq, dk, dv


def in_order(ends: Sequence[Value]) -> list[Value]:
    """Every value that `ends` depend on, parents before children. Without recursion: graphs are deeper than Python's
    stack.
    """
    order, seen = [], set()
    stack = [(x, False) for x in ends]
    while stack:
        x, done = stack.pop()
        if done:
            order.append(x)
        elif x not in seen:
            seen.add(x)
            stack.append((x, True))
            stack.extend((parent, False) for parent in x.parents)
    return order
