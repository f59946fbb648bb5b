"""Online softmax: a row's stale maximum `m` and its denominator `l` relative to `m`.

A sink is a key without a value, so it is the initial state of its rows. A row that has seen no key has `m = -inf` and
`l = 0`; its output is 0 and its log-sum-exp `-inf`.
"""

import math

from ..variant import Arguments, Variant
from ..workspace import Workspace
from .codegen import Code
from .elementary import LN2, exp2, log2
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


def update(
    code: Code,
    variant: Variant,
    panel: Panel,
    s: Pointer,
    count: Value,
    w: Workspace,
    m: Pointer,
    l: Pointer,  # noqa: E741
) -> None:
    """Replace scores `s [count, panel]` by `exp(s - m)`, and update `m`, `l` and the rescaling factor `alpha`."""
    total = exponentiate(code, variant, panel, s, count, w, m)
    terms = zip(panel.load(l), panel.load(w.alpha), total, strict=True)
    panel.store([code.multiply_add(x, a, y) for x, a, y in terms], l)


def exponentiate(
    code: Code, variant: Variant, panel: Panel, s: Pointer, count: Value, w: Workspace, m: Pointer
) -> list[Value]:
    """Replace scores `s [count, panel]` by `exp(s - m)`, update `m` and `alpha`, and return the sums over keys. `m` is
    raised to the maximum `new_m` only if that is larger by more than 1: else slowly rising scores would round the
    earlier sums once in every block.
    """
    to_exp2 = variant.to_exp2
    old, highest = panel.load(m), panel.load(w.new_m)
    new = [code.select(y > x + 1.0, y, x) for x, y in zip(old, highest, strict=True)]
    infinite = new[0].equals(math.inf)
    for x in new[1:]:
        infinite = infinite | x.equals(math.inf)
    with code.if_then(code.any(infinite)):
        resolve_infinities(code, panel, s, count, w.new_m, to_exp2)
    # Subtract 0 in place of an infinite maximum: exp(-inf - 0) is 0, exp(-inf + inf) would be NaN.
    base = [code.select(code.intrinsic("llvm.fabs", x).equals(math.inf), 0.0, x) for x in new]
    panel.store(new, m)
    panel.store([rescale(code, x, y, to_exp2) for x, y in zip(old, new, strict=True)], w.alpha)
    total = [code.variable(code.full()) for _ in new]
    with code.loop(0, count) as j:
        p_j = []
        for x, y, sum_of_row in zip(panel.load(s, j), base, total, strict=True):
            p_j.append(exp2(code, scaled(x - y, to_exp2)))
            sum_of_row.set(sum_of_row.get() + p_j[-1])
        panel.store(p_j, s, j)
    return [x.get() for x in total]


def scaled(x: Value, factor: float) -> Value:
    return x if factor == 1 else x * factor


def rescale(code: Code, old: Value, new: Value, to_exp2: float) -> Value:
    """The factor `exp(old - new)` between two maxima; 1 also for `inf - inf`."""
    return code.select(old.equals(new), code.full(1.0), exp2(code, scaled(old - new, to_exp2)))


def resolve_infinities(code: Code, panel: Panel, s: Pointer, count: Value, new_m: Pointer, to_exp2: float) -> None:
    """Prepare rows whose maximum is `inf`: scores of `inf` become the smallest score whose exp2 is infinite, finite
    ones `-inf`, and NaN stays. Other rows are unchanged.
    """
    infinite, nothing = 128 / to_exp2, -math.inf
    if code.lanes * 8 == code.target.vector_bytes:  # float64
        infinite = 1024 / to_exp2
    with code.loop(0, count) as j:
        resolved = []
        for x, m in zip(panel.load(s, j), panel.load(new_m), strict=True):
            finite = code.select(x < math.inf, nothing, x)
            one = code.select(x.equals(math.inf), infinite, finite)
            resolved.append(code.select(m.equals(math.inf), one, x))
        panel.store(resolved, s, j)


def finalize(code: Code, variant: Variant, panel: Panel, m: Pointer, l: Pointer, inverse: Pointer) -> None:  # noqa: E741
    """Compute `inverse = 1 / l`, and replace `l` by the log-sum-exp and, in natural units, `m` by its residual."""
    lse, inverses, residuals = [], [], []
    for x, y in zip(panel.load(m), panel.load(l), strict=True):
        row_lse = x + log2(code, y) * LN2 if variant.natural_units else (x + log2(code, y)) * LN2
        lse.append(code.select(y.differs(0), row_lse, -math.inf))
        inverses.append(1.0 / y)
        residuals.append(residual(code, x, y, lse[-1]))
    panel.store(inverses, inverse)
    panel.store(lse, l)
    if variant.natural_units:
        panel.store(residuals, m)


def residual(code: Code, m: Value, l: Value, lse: Value) -> Value:  # noqa: E741
    """What rounding has taken from `lse = m + log(l)`; 0 where that is infinite."""
    infinite = code.intrinsic("llvm.fabs", lse).equals(math.inf)
    return code.select(infinite, 0.0, (m - lse) + log2(code, l) * LN2)


def normalize(code: Code, x: Value, inverse: Value, lse: Value) -> Value:
    """The output of an accumulator; 0 for a row that has seen no key."""
    return code.select(lse.differs(-math.inf), x * inverse, 0.0)
