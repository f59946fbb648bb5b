"""Split-KV combine: the last split of a tile to finish merges the partial results of all, weighted by `exp(lse)`.
Splits are added in order, so results do not depend on which one is the last.
"""

from ..variant import LOG2E
from .codegen import Code
from .elementary import LN2, exp2, log2
from .fields import Arguments
from .formats import store, store_vector
from .kernel import COUNTERS, Kernel
from .operands import BYTE, LONG, Pointer, Value
from .softmax import residual
from .tiles import num_valid_rows


def combine_splits(kernel: Kernel, panels: Value) -> None:
    """Count a split whose partial results are stored, and merge the results of all splits if it is the last."""
    code, a, tile = kernel.code, kernel.a, kernel.task.tile
    counters = (a.pointer("counter", BYTE) + COUNTERS).cast(LONG)
    num_before = code.fetch_add(counters + tile, "acq_rel")
    is_last = num_before.equals(a.integer("splits") - 1)
    with code.if_then(is_last), code.loop(0, panels) as p:
        num_valid = num_valid_rows(code, kernel.panel, kernel.task, p)
        with code.loop(p * kernel.panel.rows, p * kernel.panel.rows + num_valid) as row:
            combine_row(kernel, row)


def combine_row(kernel: Kernel, row: Value) -> None:
    """Merge one row. A split with the largest lse has weight 1 even if that is infinite: `exp(inf - inf)` is NaN."""
    code, a, w = kernel.code, kernel.a, kernel.w
    width, splits, total_rows = (a.integer(name) for name in ("head_dim_v", "splits", "seqlen_total"))
    at, outputs, lses, out = w.lse_offsets[row], a.pointer("partial_out"), a.pointer("partial_lse"), w.out
    full = width // code.lanes * code.lanes
    m = code.variable(lses[at])
    with code.loop(1, splits) as n:
        m.set(code.maximum(lses[n * total_rows + at], m.get()))
    with code.loop(0, width, code.lanes) as d:
        out.store(code.full(), d)
    total = code.variable(code.full())
    with code.loop(0, splits) as n:
        part = n * total_rows + at
        x = code.splat(lses[part])
        difference = code.select(x.equals(m.get()), code.full(), x - m.get())
        if kernel.variant.natural_units:
            difference = difference + lses[splits * total_rows + part]
        weight = exp2(code, difference * LOG2E)
        total.set(total.get() + weight)
        source = outputs + part * width
        with code.loop(0, full, code.lanes) as d:
            out.store(code.multiply_add(source.vector(d), weight, out.vector(d)), d)
        w.alpha.store(weight)
        with code.loop(full, width) as d:
            out[d] = out[d] + source[d] * w.alpha[0]
    w.alpha.store(total.get())
    with code.loop(0, full, code.lanes) as d:
        out.store(out.vector(d) / total.get(), d)
    with code.loop(full, width) as d:
        out[d] = out[d] / w.alpha[0]
    w.alpha.store(log2(code, total.get()) * LN2 + m.get())
    a.pointer("lse")[at] = w.alpha[0]
    if kernel.variant.natural_units:
        w.alpha.store(residual(code, code.splat(m.get()), total.get(), w.alpha.vector(0)))
        a.pointer("lse")[at + a.integer("residual")] = w.alpha[0]
    with code.if_else(a.integer("out_is_real").differs(0)) as (real, rounded):
        with real:
            store_row(code, a, out, kernel.variant.real_dtype, w.out_offsets[row], full)
        with rounded:
            store_row(code, a, out, kernel.variant.dtype, w.out_offsets[row], full)


def store_row(code: Code, a: Arguments, source: Pointer, dtype: str, at: Value, full: Value) -> None:
    to = a.pointer("out")
    with code.loop(0, full, code.lanes) as d:
        store_vector(code, source.vector(d), to, at + d, dtype)
    with code.loop(full, a.integer("head_dim_v")) as d:
        store(code, source[d], to, at + d, dtype)
