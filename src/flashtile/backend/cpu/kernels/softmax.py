"""Online softmax: a row's stale maximum `m` and its denominator `l` relative to `m`.

A sink is a key without a value, so it is the initial state of its rows. A row that has seen no key has `m = -inf` and
`l = 0`; its output is 0 and its log-sum-exp `-inf`.
"""

import math

from ..variant import Variant
from .buffers import Workspace
from .codegen import Code
from .elementary import LN2, exp2, log2
from .fields import Arguments
from .operands import Pointer, Value
from .products import Panel
from .tiles import Task, num_valid_rows, panel_rows


def initialize(code: Code, a: Arguments, variant: Variant, panel: Panel, task: Task, w: Workspace, p: Value) -> None:
    """Set `m` and `l` before the first key. Only the first split counts the sink."""
    sinks = a.pointer("sinks")
    panel.store([code.full(-math.inf)] * panel.vectors, w.m, p)
    panel.store([code.full()] * panel.vectors, w.l, p)
    with (
        code.if_then(sinks.is_null().equals(0) & task.split.equals(0)),
        panel_rows(code, a, panel, task, p, num_valid_rows(code, panel, task, p)) as (r, _, h),
    ):
        at, sink = p * panel.rows + r, sinks[h] * variant.score_unit
        w.m[at], w.l[at] = sink, code.select(sink.equals(-math.inf), code.real(0), 1)


def exponentiate(
    code: Code, variant: Variant, s: Pointer, pitch: int, count: Value, m: Pointer, new_m: Pointer, alpha: Pointer
) -> Value:
    """Replace the scores `s [count]` of a vector of rows, which are `pitch` apart, by `exp(s - m)`, update `m` and the
    rescaling factor `alpha`, and return the sums over keys. `m` is raised to the maximum `new_m` only if that is larger
    by more than 1: else slowly rising scores would round the earlier sums once in every block.
    """
    to_exp2 = variant.to_exp2
    old, highest = m.vector(), new_m.vector()
    new = code.select(highest > old + 1.0, highest, old)
    with code.if_then(code.any(new.equals(math.inf))):
        resolve_infinities(code, s, pitch, count, highest, to_exp2)
    # Subtract 0 in place of an infinite maximum: exp(-inf - 0) is 0, exp(-inf + inf) would be NaN.
    base = code.select(code.intrinsic("llvm.fabs", new).equals(math.inf), 0.0, new)
    m.store(new)
    alpha.store(rescale(code, old, new, to_exp2))
    total = code.variable(code.full())
    with code.loop(0, count) as j:
        at = s + j * pitch
        p = exp2(code, scaled(at.vector() - base, to_exp2))
        total.set(total.get() + p)
        at.store(p)
    return total.get()


def scaled(x: Value, factor: float) -> Value:
    return x if factor == 1 else x * factor


def rescale(code: Code, old: Value, new: Value, to_exp2: float) -> Value:
    """The factor `exp(old - new)` between two maxima; 1 also for `inf - inf`."""
    return code.select(old.equals(new), code.full(1.0), exp2(code, scaled(old - new, to_exp2)))


def resolve_infinities(code: Code, s: Pointer, pitch: int, count: Value, m: Value, to_exp2: float) -> None:
    """Prepare rows whose maximum is `inf`: scores of `inf` become the smallest score whose exp2 is infinite, finite
    ones `-inf`, and NaN stays. Other rows are unchanged.
    """
    infinite, nothing = 128 / to_exp2, -math.inf
    if code.lanes * 8 == code.target.vector_bytes:  # float64
        infinite = 1024 / to_exp2
    with code.loop(0, count) as j:
        at = s + j * pitch
        x = at.vector()
        finite = code.select(x < math.inf, nothing, x)
        one = code.select(x.equals(math.inf), infinite, finite)
        at.store(code.select(m.equals(math.inf), one, x))


def finalize(code: Code, variant: Variant, m: Pointer, l: Pointer, inverse: Pointer) -> None:  # noqa: E741
    """For a vector of rows, compute `inverse = 1 / l`, and replace `l` by the log-sum-exp and, in natural units, `m` by
    its residual.
    """
    x, y = m.vector(), l.vector()
    row_lse = x + log2(code, y) * LN2 if variant.natural_units else (x + log2(code, y)) * LN2
    lse = code.select(y.differs(0), row_lse, -math.inf)
    inverse.store(1.0 / y)
    l.store(lse)
    if variant.natural_units:
        m.store(residual(code, x, y, lse))


def residual(code: Code, m: Value, l: Value, lse: Value) -> Value:  # noqa: E741
    """What rounding has taken from `lse = m + log(l)`; 0 where that is infinite."""
    infinite = code.intrinsic("llvm.fabs", lse).equals(math.inf)
    return code.select(infinite, 0.0, (m - lse) + log2(code, l) * LN2)


def normalize(code: Code, x: Value, inverse: Value, lse: Value) -> Value:
    """The output of an accumulator; 0 for a row that has seen no key."""
    return code.select(lse.differs(-math.inf), x * inverse, 0.0)
