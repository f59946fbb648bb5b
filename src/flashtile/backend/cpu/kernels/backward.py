"""FlashAttention-2's backward pass (Dao, "FlashAttention-2", 2023, algorithm 2), for CPUs.

A task is a part of the keys of one key head, with all query rows of the heads that share it: nobody else adds to the
gradients of its keys, whatever the number of threads. Panels of query rows pass by; each makes its probabilities again
from the scores and the log-sum-exp, for one block of keys after another. Gradients of queries are kept for each part of
the keys and added up in the end.

A bias that is shared by sequences or heads has its gradient in one task too, which then goes through all of them.
"""

import math
from collections.abc import Iterator

from ..targets import Target
from ..variant import BACKWARD, Arguments, Variant
from ..workspace import BLOCK, Workspace, backward_pieces, whole
from .codegen import Code
from .elementary import exp2
from .formats import lanes_summed, load, load_vector
from .masking import in_mask, in_window
from .operands import ADDRESS, LONG, Pointer, Value
from .passes import Pass, own_memory, tasks
from .products import Panel, accumulate, emit_accumulate, emit_scores, emit_values, scores, values
from .rng import drop
from .scores import distance, gradient_of_product, modified
from .sums import ROWS, carried, carry, many_blocks, time_to_carry
from .tiles import (
    Keys,
    Task,
    copy_rows,
    fill_rows,
    packed_row,
    position_and_head,
    read_keys,
    rows_left,
    task_of,
    turn_in,
    turn_out,
)


def source(variant: Variant, target: Target) -> str:
    """The kernel's module. `differentiate(block)` works on tasks until none is left, as `forward.source` says."""
    code = Code(target, variant.real)
    panel = Panel(code, variant.vectors)
    emit_scores(code, panel)
    emit_values(code, panel)
    emit_accumulate(code, panel)
    with code.function(BACKWARD, ADDRESS, public=True) as (block,):
        a = Arguments(code, block)
        sizes = (a.number(name) for name in ("head_dim", "head_dim_v", "total_keys"))
        w = Workspace(own_memory(code, a), backward_pieces(code.real, panel.rows, code.lanes, *sizes))
        zero, one = code.whole(0), code.whole(1)
        with tasks(code, a) as number:
            splits, batch, heads = (a.number(name) for name in ("splits", "batch", "num_heads_kv"))
            share_b, share_h = (a.number(name).differs(0) for name in ("share_b", "share_h"))
            split, owner = number % splits, number // splits
            owners_h = code.select(share_h, one, heads)
            own_b, own_h = owner // owners_h, owner % owners_h
            last_b, last_h = code.select(share_b, batch, own_b + 1), code.select(share_h, heads, own_h + 1)
            with code.loop(own_b, last_b) as b, code.loop(own_h, last_h) as h:
                keys = task_of(code, a, b, h, split, zero)
                long = keys.num_rows > ROWS
                clear_key_gradients(code, a, keys, w, long)
                with code.loop(0, keys.num_rows, panel.rows) as first_row:
                    task = task_of(code, a, b, h, split, first_row)
                    Backward(code, a, variant, panel, w, task).run()
                    with code.when(long & (first_row % ROWS).equals(ROWS - panel.rows)):
                        carry_key_gradients(code, a, keys, w, last=False)
                with code.when(long):
                    carry_key_gradients(code, a, keys, w, last=True)
    return str(code.module)


def gradient_of_keys(a: Arguments, task: Task, name: str, first: Value) -> Pointer:
    """The row of dk or dv that belongs to a task's key `first`."""
    step, head = a.number(f"{name}_s"), task.b * a.number(f"{name}_b") + task.kv_head * a.number(f"{name}_h")
    return a.pointer(name) + (head + (task.k_first + first) * step)


KeyVectors = Iterator[tuple[Pointer, Pointer, Value]]


def key_gradient_vectors(code: Code, a: Arguments, task: Task, w: Workspace) -> KeyVectors:
    """For dk and for dv, if wanted, a loop over the vectors of a task's keys: where a row's sums are, where its totals,
    and the feature.
    """
    for name, width in (("dk", "head_dim"), ("dv", "head_dim_v")):
        step, padded = a.number(f"{name}_s"), whole(a.number(width), code.lanes)
        with code.when(a.pointer(name).absent().equals(0)):
            recent, total = gradient_of_keys(a, task, name, task.first_key), getattr(w, f"total_{name}")
            with code.loop(0, task.last_key + 1 - task.first_key) as j, code.loop(0, padded, code.lanes) as d:
                yield recent + j * step, total + j * padded, d


def clear_key_gradients(code: Code, a: Arguments, task: Task, w: Workspace, long: Value) -> None:
    """Begin with 0, right before anything is added."""
    for recent, total, d in key_gradient_vectors(code, a, task, w):
        recent.store(code.reals(), d)
        with code.when(long):
            total.store(code.reals(), d)


def carry_key_gradients(code: Code, a: Arguments, task: Task, w: Workspace, last: bool) -> None:
    for recent, total, d in key_gradient_vectors(code, a, task, w):
        carry(code, recent, total, d, last)


class Backward(Pass):
    """The emission of one panel of rows."""

    def run(self) -> None:
        code, a, w = self.code, self.a, self.w
        fill_rows(code, a, self.variant, self.panel, self.task, w, code.whole(0))
        lo, hi = w.bounds[0], w.bounds[3]
        self.begin()
        long = many_blocks(lo, hi)
        with code.loop(lo // BLOCK * BLOCK, hi, BLOCK) as block:
            first, last = code.maximum(block, lo), code.minimum(block + BLOCK, hi)
            with code.when(first < last), code.when(self.load_pairs(code.whole(0), first, last - first)):
                k, v = (
                    read_keys(code, a, self.variant, self.task, side, first, last, scratch)
                    for side, scratch in (("k", w.k), ("v", w.v))
                )
                self.block(first, last - first, k, v)
            with code.when(long & time_to_carry(block)):
                self.carry(last=False)
        with code.when(long):
            self.carry(last=True)
        self.end()

    def begin(self) -> None:
        """Empty sums; and if any key is seen, or `delta` is to be stored, the panel's numbers, queries and output
        gradients.
        """
        code, w, panel = self.code, self.w, self.panel
        with code.when((w.bounds[0] < w.bounds[3]) | self.task.split.equals(0)):
            self.load_rows()
            self.sum_deltas()
            self.row_numbers()
        for recent, total, n in self.sums_of_rows():
            recent.store(code.reals(), n)
            total.store(code.reals(), n)
        panel.store([code.reals(1.0)] * panel.vectors, w.alpha)
        self.rows_of("dq", w.dq_at)

    def sums_of_rows(self) -> Iterator[tuple[Pointer, Pointer, Value]]:
        """A loop over the vectors of dq and of what rows add to their slopes: recent sums, totals, and the place."""
        code, w, rows = self.code, self.w, self.panel.rows
        with code.loop(0, self.a.number("head_dim") * rows, code.lanes) as n:
            yield w.dq, w.total_dq, n
        if self.variant.slope_gradient:
            with code.loop(0, rows, code.lanes) as n:
                yield w.dslope, w.total_dslope, n

    def carry(self, last: bool) -> None:
        for recent, total, n in self.sums_of_rows():
            carry(self.code, recent, total, n, last)

    def load_rows(self) -> None:
        """Queries and output gradients, as lanes and as rows."""
        code, a, w, panel, dtype = self.code, self.a, self.w, self.panel, self.variant.dtype
        depth, width, one = a.number("head_dim"), a.number("head_dim_v"), code.whole(1)
        q, dout = a.pointer("q"), a.pointer("dout")
        dout_at = w.dq_at  # before it is needed for dq
        self.rows_of("dout", dout_at)
        turn_in(code, panel, q, w.q_at, depth, one, dtype, w.q, a.real("factor"))
        turn_in(code, panel, dout, dout_at, width, one, dtype, w.dout, code.number(1))
        copy_rows(code, panel, q, w.q_at, depth, dtype, w.q_rows, whole(depth, code.lanes))
        copy_rows(code, panel, dout, dout_at, width, dtype, w.dout_rows, whole(width, code.lanes))

    def sum_deltas(self) -> None:
        """`delta`, the sum of a row's output times its gradient: lanes over features, as many rows as fill a vector."""
        code, a, w, panel, dtype = self.code, self.a, self.w, self.panel, self.variant.dtype
        width, out = a.number("head_dim_v"), a.pointer("out")
        padded, full = whole(width, code.lanes), width // code.lanes * code.lanes
        with code.loop(0, panel.rows, code.lanes) as first:
            rows = [first + n for n in range(code.lanes)]
            total = [code.variable(code.reals()) for _ in rows]
            with code.loop(0, full, code.lanes) as d:
                for r, x in zip(rows, total, strict=True):
                    out_d = load_vector(code, out, w.out_at[r] + d, dtype)
                    x.set(code.multiply_add(out_d, (w.dout_rows + r * padded).vector(d), x.get()))
            (w.delta + first).store(lanes_summed(code, [x.get() for x in total]))
        with code.loop(full, width) as d, code.loop(0, panel.rows) as r:
            w.delta[r] = w.delta[r] + load(code, out, w.out_at[r] + d, dtype) * w.dout_rows[r * padded + d]

    def rows_of(self, name: str, to: Pointer) -> None:
        """Where the panel's rows are in a tensor with strides of its own."""
        code, a, task = self.code, self.a, self.task
        split = task.split * a.number("dq_split") if name == "dq" else code.whole(0)
        with code.loop(0, self.panel.rows) as r:
            i, h = position_and_head(a, task, packed_row(code, self.panel, task, code.whole(0), r))
            within = h * a.number(f"{name}_h") + (task.q_first + i) * a.number(f"{name}_s")
            to[r] = split + task.b * a.number(f"{name}_b") + within

    def row_numbers(self) -> None:
        """`lse` in exp2's units and `delta`. Rows that see nothing, and copies, have no probabilities: exp(s - inf) is
        0. Nothing flows through them, whatever their gradient holds.
        """
        code, a, w, panel = self.code, self.a, self.w, self.panel
        there, infinity = rows_left(code, panel, self.task, code.whole(0)), code.number(math.inf)
        lse, dlse, delta = (a.pointer(name) for name in ("lse", "dlse", "delta"))
        with code.loop(0, panel.rows) as r:
            at = w.lse_at[r]
            row_lse = lse[at]
            w.lse[r] = row_lse * self.variant.unit
            with code.when(dlse.absent().equals(0)):
                w.delta[r] = w.delta[r] - dlse[at]
            with code.when((r >= there) | row_lse.equals(-math.inf)):
                w.lse[r], w.delta[r] = infinity, code.number(0)
                self.clear_row(r)
            with code.when((r < there) & self.task.split.equals(0)):
                delta[at] = w.delta[r]

    def clear_row(self, r: Value) -> None:
        code, a, w, panel = self.code, self.a, self.w, self.panel
        width = a.number("head_dim_v")
        padded = whole(width, code.lanes)
        with code.loop(0, padded) as d:
            w.dout_rows[r * padded + d] = code.number(0)
        with code.loop(0, width) as d:
            w.dout[d * panel.rows + r] = code.number(0)

    def block(self, first: Value, count: Value, k: Keys, v: Keys) -> None:
        """One block of keys: the five products, and between them the gradient of the softmax."""
        code, a, w, panel = self.code, self.a, self.w, self.panel
        depth, width = a.number("head_dim"), a.number("head_dim_v")
        scores(code, panel, k.first, k.stride, count, w.q, depth, w.scores, w.new_m)
        scores(code, panel, v.first, v.stride, count, w.dout, width, w.dscores, w.new_m)
        if self.variant.dropout:
            with code.loop(0, count * panel.rows, code.lanes) as n:
                w.keep.store(code.reals(1.0), n)
            drop(code, a, panel, w.keep, first, count, w.position, w.sequence_head)
        full_lo, full_hi = w.bounds[1], w.bounds[2]
        with code.either((first < full_lo) | (first + count > full_hi)) as (then, otherwise):
            with then:
                self.softmax(first, count, edge=True)
            with otherwise:
                self.softmax(first, count, edge=False)
        if self.variant.bias_gradient:
            self.add_to_bias(first, count)
        self.key_gradient("dv", first, count, w.scores, w.dout_rows, width)
        self.key_gradient("dk", first, count, w.dscores, w.q_rows, depth)
        with code.when(a.pointer("dq").absent().equals(0)):
            values(code, panel, w.dscores, k.first, k.stride, count, w.dq, depth, w.alpha)

    def softmax(self, first: Value, count: Value, edge: bool) -> None:
        """Products `scores` to what dv is made of, `p * keep`, and `dscores = dout v` to the products' gradient."""
        code, a, w, panel, variant = self.code, self.a, self.w, self.panel, self.variant
        tables = self.score_tables(code.whole(0))
        slopes = [code.variable(code.reals()) for _ in range(panel.vectors)] if variant.slope_gradient else []
        with code.loop(0, count) as j:
            key, at = first + j, j * panel.rows
            for n in range(panel.vectors):
                row = n * code.lanes
                final = modified(code, a, variant, tables, panel, w.scores.vector(at + row), row, key, j)
                difference = final.score - w.lse.vector(row)
                p = exp2(code, difference * variant.to_exp2 if variant.natural else difference)
                visible = None
                if edge:
                    visible = in_window(code, w.low, w.high, row, key)
                if variant.mask:
                    shown = in_mask(w.mask + at, row)
                    visible = shown if visible is None else visible & shown
                if visible is not None:
                    p = code.select(visible, p, 0.0)
                dp = w.dscores.vector(at + row)
                kept = p
                if variant.dropout:
                    keep = w.keep.vector(at + row)
                    kept, dp = p * keep, dp * keep
                w.scores.store(kept, at + row)
                ds = p * (dp - w.delta.vector(row))
                if visible is not None:
                    ds = code.select(visible, ds, 0.0)  # not 0 * NaN, where a row's delta is NaN
                if variant.bias_gradient:
                    w.dbias.store(ds, at + row)
                if variant.slope_gradient:
                    slopes[n].set(slopes[n].get() - ds * distance(code, w.place, row, key))
                ds = gradient_of_product(final, ds)
                w.dscores.store(ds * a.real("scale"), at + row)
        if variant.slope_gradient:
            panel.store([x + y.get() for x, y in zip(panel.load(w.dslope), slopes, strict=True)], w.dslope)

    def key_gradient(self, name: str, first: Value, count: Value, p: Pointer, x: Pointer, width: Value) -> None:
        """Add a block's part of dk or dv, `p @ x`, to the keys' rows, which are whole vectors."""
        code, a = self.code, self.a
        with code.when(a.pointer(name).absent().equals(0)):
            at, step = gradient_of_keys(a, self.task, name, first), a.number(f"{name}_s")
            from_row = code.variable(code.whole(0))

            def first_row(j: Value) -> Value:
                """The first that sees key `j`: later rows see as far at least."""
                with code.forever() as found:
                    row = from_row.get()
                    sees = code.convert(self.w.high[row], LONG) >= first + j
                    code.leave_if(sees | row.equals(self.panel.rows - 1), found)
                    from_row.set(row + 1)
                return from_row.get()

            accumulate(code, self.panel, p, count, x, whole(width, code.lanes), at, step, first_row)

    def add_to_bias(self, first: Value, count: Value) -> None:
        """One number after another: rows, keys and heads may share an element. All keys of a block that share one are
        summed before, and so are all rows.
        """
        code, a, w, task, panel_rows = self.code, self.a, self.w, self.task, self.panel.rows
        share_j, share_i, share_h = (a.number(f"dbias_{dim}").equals(0) for dim in "jih")
        share_rows = share_i & (share_h | a.number("groups").equals(1))
        with code.when(share_j):
            self.sum_bias_over_keys(count)
        count = code.select(share_j, code.whole(1), count)
        with code.when(share_rows):
            self.sum_bias_over_rows(count)
        there = code.select(share_rows, code.whole(1), rows_left(code, self.panel, task, code.whole(0)))
        step = code.select(share_rows, code.whole(1), panel_rows)
        dbias, lost = a.pointer("dbias"), a.pointer("dbias_lost")
        with code.loop(0, there) as r:
            i, h = position_and_head(a, task, packed_row(code, self.panel, task, code.whole(0), r))
            row = task.b * a.number("dbias_b") + h * a.number("dbias_h") + i * a.number("dbias_i")
            with code.loop(0, count) as j:
                at, x = row + (first + j) * a.number("dbias_j"), w.dbias[j * step + r]
                with code.either(lost.absent()) as (few, many):
                    with few:
                        dbias[at] = dbias[at] + x
                    with many:
                        lost[at], dbias[at] = carried(code, lost[at] + x, dbias[at])

    def sum_bias_over_keys(self, count: Value) -> None:
        """To the place of the first key."""
        code, w, panel = self.code, self.w, self.panel
        total = [code.variable(code.reals()) for _ in range(panel.vectors)]
        with code.loop(0, count) as j:
            for x, sum_of_row in zip(panel.load(w.dbias, j), total, strict=True):
                sum_of_row.set(sum_of_row.get() + x)
        panel.store([x.get() for x in total], w.dbias)

    def sum_bias_over_rows(self, count: Value) -> None:
        """To one number for each key, one behind another, as many keys at a time as make a vector. Copies of rows have
        a gradient of 0.
        """
        code, w, panel = self.code, self.w, self.panel
        with code.loop(0, count, code.lanes) as j:
            keys = [sum(rest, start=x) for x, *rest in (panel.load(w.dbias, j + n) for n in range(code.lanes))]
            w.dbias.store(lanes_summed(code, keys), j)

    def end(self) -> None:
        """The panel's dq, and what its rows add to their slopes."""
        code, a, w, panel, task = self.code, self.a, self.w, self.panel, self.task
        there = rows_left(code, panel, task, code.whole(0))
        dq = a.pointer("dq")
        with code.when(dq.absent().equals(0)):
            turn_out(code, panel, w.dq, a.number("head_dim"), self.variant.real_name, dq, w.dq_at, there)
        if self.variant.slope_gradient:
            dslopes = a.pointer("dslopes") + task.split * a.number("seqlen_total")
            with code.loop(0, there) as r:
                dslopes[w.lse_at[r]] = w.dslope[r]
