"""FlashAttention-2's backward pass (Dao, "FlashAttention-2", 2023, algorithm 2), for CPUs.

A task has one split of the keys of one key head and loops over all query rows of that head's group, so no other task
adds to the gradients of its keys, and results do not depend on the number of threads. For each panel of query rows it
loops over the key blocks and recomputes the probabilities from the scores and the log-sum-exp. Each split has a dq of
its own; the host adds them.

Where sequences or heads share elements of a bias, one task loops over all of them, so that dbias has one owner too.
"""

import math
from collections.abc import Iterator

from ....expression.blocks import HIDDEN
from ..targets import Target
from ..variant import BACKWARD, Arguments, Variant
from ..workspace import BLOCK_N, Workspace, backward_layout, round_up
from .blocks import narrow_bounds, visible_keys
from .codegen import Code
from .dbias import accumulate_dbias
from .dcaptured import ElementGradients
from .dkdv import Touched, accumulate_key_gradient, carry_key_gradients, clear_key_gradients
from .dq import accumulate_dq, emit_dq, store_dq
from .elementary import exp2
from .formats import load, load_vector, sum_lanes
from .kernel import Kernel, task_loop, thread_workspace
from .keys import KeyBlock, load_keys
from .masking import in_mask, in_window
from .operands import ADDRESS, BIT, Pointer, Value
from .products import (
    Panel,
    emit_accumulate,
    emit_scores,
    score_product,
)
from .rng import apply_dropout
from .scores import distance, final_score, product_gradient
from .sums import ROWS_PER_CARRY, carry, carry_due, needs_totals
from .tiles import copy_rows, fill_row_tables, load_transposed, make_task, num_valid_rows, panel_rows, rows_in_use


def source(variant: Variant, target: Target) -> str:
    """The LLVM module of a backward kernel, `backward(block)`; any number of threads may run it at once."""
    code = Code(target, variant.real_type)
    panel = Panel(code, variant.vectors)
    emit_scores(code, panel)
    emit_dq(code, panel, variant)
    emit_accumulate(code, panel)
    with code.function(BACKWARD, ADDRESS, public=True) as (block,):
        a = Arguments(code, block)
        sizes = (a.integer(name) for name in ("head_dim", "head_dim_v", "total_keys"))
        w = Workspace(thread_workspace(code, a), backward_layout(code.real_type, panel.rows, code.lanes, *sizes))
        zero, one = code.index(0), code.index(1)
        with task_loop(code, a) as task_index:
            splits, batch, heads = (a.integer(name) for name in ("splits", "batch", "num_heads_kv"))
            share_b, share_h = (a.integer(name).differs(0) for name in ("share_b", "share_h"))
            split, pair = task_index % splits, task_index // splits
            num_h = code.select(share_h, one, heads)
            first_b, first_h = pair // num_h, pair % num_h
            last_b, last_h = code.select(share_b, batch, first_b + 1), code.select(share_h, heads, first_h + 1)
            with code.loop(first_b, last_b) as b, code.loop(first_h, last_h) as h:
                keys = make_task(code, a, b, h, split, zero)
                many_rows = keys.num_rows > ROWS_PER_CARRY
                clear_key_gradients(code, a, keys, w, many_rows)
                touched = Touched(code, keys)
                with code.loop(0, keys.num_rows, panel.rows) as first_row:
                    task = make_task(code, a, b, h, split, first_row)
                    BackwardKernel(code, a, variant, panel, w, task).run(touched)
                    with code.if_then(many_rows & (first_row % ROWS_PER_CARRY).equals(ROWS_PER_CARRY - panel.rows)):
                        carry_key_gradients(code, a, keys, w, False, touched)
                with code.if_then(many_rows):
                    carry_key_gradients(code, a, keys, w, last=True)
    return str(code.module)


class BackwardKernel(Kernel):
    """Emits the code of one panel of query rows against all keys of the task."""

    def run(self, touched: Touched) -> None:
        code, a, w = self.code, self.a, self.w
        fill_row_tables(code, a, self.variant, self.panel, self.task, w, code.index(0))
        narrow_bounds(self, code.index(0))
        lo, hi = w.bounds[0], w.bounds[3]
        many_keys = needs_totals(lo, hi)
        self.prologue(many_keys)
        with code.loop(lo // BLOCK_N * BLOCK_N, hi, BLOCK_N) as block:
            first, last = code.maximum(block, lo), code.minimum(block + BLOCK_N, hi)
            state, first, last = visible_keys(self, code.index(0), first, last)
            with code.if_then((first < last) & (state > HIDDEN)):
                state = self.load_mask_and_bias(code.index(0), first, last - first, state)
                with code.if_then(state > HIDDEN):
                    k, v = (
                        load_keys(code, a, self.variant, self.task, side, first, last, scratch)
                        for side, scratch in (("k", w.k), ("v", w.v))
                    )
                    block_of_keys = (first, last - first, state, k, v)
                    self.with_narrow_panels(code.index(0), lambda kernel: kernel.process_block(*block_of_keys))
                    touched.add(first, last)
            with code.if_then(many_keys & carry_due(block)):
                self.carry(last=False)
        with code.if_then(many_keys):
            self.carry(last=True)
        self.epilogue()

    def prologue(self, many_keys: Value) -> None:
        """Zero the sums, and load the rows if they see any key. The first split always loads them: it stores delta."""
        code, w, panel = self.code, self.w, self.panel
        with code.if_then((w.bounds[0] < w.bounds[3]) | self.task.split.equals(0)):
            self.load_rows()
            self.compute_delta()
            self.load_row_stats()
        for recent, _, n in self.row_sums():
            recent.store(code.full(), n)
        with code.if_then(many_keys):
            for _, total, n in self.row_sums():
                total.store(code.full(), n)
        panel.store([code.full(1.0)] * panel.vectors, w.alpha)
        self.fill_row_offsets("dq", w.dq_offsets)

    @property
    def num_valid(self) -> Value:
        return num_valid_rows(self.code, self.panel, self.task, self.code.index(0))

    @property
    def in_use(self) -> Value:
        return rows_in_use(self.code, self.panel, self.task, self.code.index(0))

    def row_sums(self) -> Iterator[tuple[Pointer, Pointer, Value]]:
        """Loop over the vectors of dq and of the rows' parts of dslopes: recent sums, totals, and the index."""
        code, w, rows = self.code, self.w, self.panel.rows
        rows_of_dq = self.num_valid if self.variant.row_values else code.index(rows)
        with code.loop(0, self.a.integer("head_dim") * rows_of_dq, code.lanes) as n:
            yield w.dq, w.total_dq, n
        if self.variant.slope_gradient:
            with code.loop(0, rows, code.lanes) as n:
                yield w.dslope, w.total_dslope, n

    def carry(self, last: bool) -> None:
        for recent, total, n in self.row_sums():
            carry(self.code, recent, total, n, last)

    def load_rows(self) -> None:
        """Load q and dout twice: transposed for products over features, and by rows for products over query rows."""
        code, a, w, panel, dtype = self.code, self.a, self.w, self.panel, self.variant.dtype
        depth, width, one = a.integer("head_dim"), a.integer("head_dim_v"), code.index(1)
        in_use, num_valid = self.in_use, self.num_valid
        q, dout = a.pointer("q"), a.pointer("dout")
        dout_offsets = w.dq_offsets  # free until dq's offsets are filled in
        self.fill_row_offsets("dout", dout_offsets)
        load_transposed(code, panel, q, w.q_offsets, in_use, depth, one, dtype, w.q, a.real("factor"))
        load_transposed(code, panel, dout, dout_offsets, in_use, width, one, dtype, w.dout, code.real(1))
        copy_rows(code, q, w.q_offsets, num_valid, depth, dtype, w.q_rows, round_up(depth, code.lanes))
        copy_rows(code, dout, dout_offsets, num_valid, width, dtype, w.dout_rows, round_up(width, code.lanes))

    def compute_delta(self) -> None:
        """`delta = sum_d out * dout`: lanes run over features, for as many rows at a time as fill a vector of sums."""
        code, a, w, dtype = self.code, self.a, self.w, self.variant.dtype
        width, out = a.integer("head_dim_v"), a.pointer("out")
        padded, full = round_up(width, code.lanes), width // code.lanes * code.lanes
        with code.loop(0, self.in_use, code.lanes) as first:
            rows = [first + n for n in range(code.lanes)]
            total = [code.variable(code.full()) for _ in rows]
            with code.loop(0, full, code.lanes) as d:
                for r, x in zip(rows, total, strict=True):
                    out_d = load_vector(code, out, w.out_offsets[r] + d, dtype)
                    x.set(code.multiply_add(out_d, (w.dout_rows + r * padded).vector(d), x.get()))
            (w.delta + first).store(sum_lanes(code, [x.get() for x in total]))
        with code.loop(full, width) as d, code.loop(0, self.num_valid) as r:
            w.delta[r] = w.delta[r] + load(code, out, w.out_offsets[r] + d, dtype) * w.dout_rows[r * padded + d]

    def fill_row_offsets(self, name: str, to: Pointer) -> None:
        """Fill `to` with the offsets of the panel's rows in the tensor `name`."""
        code, a, task = self.code, self.a, self.task
        split = task.split * a.integer("dq_split") if name == "dq" else code.index(0)
        with panel_rows(code, a, self.panel, task, code.index(0), self.in_use) as (r, i, h):
            within = h * a.integer(f"{name}_h") + (task.q_first + i) * a.integer(f"{name}_s")
            to[r] = split + task.b * a.integer(f"{name}_b") + within

    def load_row_stats(self) -> None:
        """Load `lse`, converted to score units, and complete `delta`. For rows that see no key, and for padding rows,
        `lse = inf` makes all probabilities `exp(s - inf) = 0`; their dout is cleared, since `0 * NaN` would be NaN, but
        for padding rows only where a bias's gradient adds them up.
        """
        code, a, w = self.code, self.a, self.w
        num_valid, infinity = self.num_valid, code.real(math.inf)
        lse, dlse, delta = (a.pointer(name) for name in ("lse", "dlse", "delta"))
        cleared = code.constant(int(self.variant.bias_gradient), BIT)
        with code.loop(0, self.in_use) as r:
            at = w.lse_offsets[r]
            row_lse = lse[at]
            w.lse[r] = row_lse * self.variant.score_unit
            if self.variant.natural_units:
                residual = a.integer("residual")
                w.residual[r] = code.select(residual.differs(0), lse[at + residual], 0.0)
            with code.if_then(dlse.is_null().equals(0)):
                w.delta[r] = w.delta[r] - dlse[at]
            with code.if_then((r >= num_valid) | row_lse.equals(-math.inf)):
                w.lse[r], w.delta[r] = infinity, code.real(0)
                if self.variant.natural_units:
                    w.residual[r] = code.real(0)
                with code.if_then(cleared | row_lse.equals(-math.inf)):
                    self.clear_row(r)
            with code.if_then((r < num_valid) & self.task.split.equals(0)):
                delta[at] = w.delta[r]

    def clear_row(self, r: Value) -> None:
        code, a, w, panel = self.code, self.a, self.w, self.panel
        width = a.integer("head_dim_v")
        padded = round_up(width, code.lanes)
        with code.loop(0, padded) as d:
            w.dout_rows[r * padded + d] = code.real(0)
        with code.loop(0, width) as d:
            w.dout[d * panel.rows + r] = code.real(0)

    def process_block(self, first: Value, count: Value, state: Value, k: KeyBlock, v: KeyBlock) -> None:
        """One block of keys: the five matrix products, and between them the gradient of the softmax."""
        code, a, w, panel = self.code, self.a, self.w, self.panel
        depth, width = a.integer("head_dim"), a.integer("head_dim_v")
        score_product(code, panel, k.first, k.stride, count, w.q, depth, w.scores, w.new_m)
        score_product(code, panel, v.first, v.stride, count, w.dout, width, w.dscores, w.new_m)
        if self.variant.dropout:
            with code.loop(0, count * panel.rows, code.lanes) as n:
                w.keep.store(code.full(1.0), n)
            apply_dropout(code, a, panel, w.keep, first, count, w.position, w.sequence_head)
        full_lo, full_hi = w.bounds[1], w.bounds[2]
        edge = (first < full_lo) | (first + count > full_hi)
        self.with_and_without_mask(state, lambda kernel: kernel.softmax_of_block(first, count, edge))
        if self.variant.bias_gradient:
            accumulate_dbias(self, first, count)
        accumulate_key_gradient(self, "dv", first, count, w.scores, w.dout_rows, width)
        accumulate_key_gradient(self, "dk", first, count, w.dscores, w.q_rows, depth)
        with code.if_then(a.pointer("dq").is_null().equals(0)):
            accumulate_dq(self, k, count)

    def softmax_of_block(self, first: Value, count: Value, edge: Value) -> None:
        self.with_and_without_window(edge, lambda edge: self.softmax_backward(first, count, edge))

    def softmax_backward(self, first: Value, count: Value, edge: bool) -> None:
        """Turn `scores = q k` into `p * keep`, for dv, and `dscores = dout v` into the gradient of the scaled product,
        for dq and dk.
        """
        code, a, w, panel, variant = self.code, self.a, self.w, self.panel, self.variant
        tables = self.score_tables(code.index(0))
        elements = ElementGradients(self) if variant.loads else None
        slopes = [code.variable(code.full()) for _ in range(panel.vectors)] if variant.slope_gradient else []
        with code.loop(0, count) as j:
            key, at = first + j, j * panel.rows
            if tables.functions is not None:
                tables.functions.at_key(self.key_position(key))
            for n in range(panel.vectors):
                row = n * code.lanes
                final = final_score(code, a, variant, tables, panel, w.scores.vector(at + row), row, key, j)
                difference = final.score - w.lse.vector(row)
                if variant.natural_units:
                    difference = difference - w.residual.vector(row)
                p = exp2(code, difference * variant.to_exp2 if variant.natural_units else difference)
                visible = final.visible
                if edge:
                    window_visible = in_window(code, w.low, w.high, row, key)
                    visible = window_visible if visible is None else visible & window_visible
                if variant.mask:
                    mask_visible = in_mask(w.mask + at, row)
                    visible = mask_visible if visible is None else visible & mask_visible
                if variant.formula is not None:  # whose derivative may be NaN or infinite where p is 0
                    counted = w.lse.vector(row).differs(math.inf)
                    visible = counted if visible is None else visible & counted
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
                    ds = code.select(visible, ds, 0.0)  # where delta is NaN, p * (dp - delta) = 0 * NaN
                if variant.formula is not None and visible is not None:
                    if elements is not None:
                        elements.add(n, final.formula, ds, visible)
                    ds = code.select(visible, ds * final.formula[1], 0.0)
                if variant.bias_gradient:
                    w.dbias.store(ds, at + row)
                if variant.slope_gradient:
                    slopes[n].set(slopes[n].get() - ds * distance(code, w.diagonal_key, row, key))
                ds = product_gradient(final, ds)
                w.dscores.store(ds * a.real("scale"), at + row)
        if variant.slope_gradient:
            panel.store([x + y.get() for x, y in zip(panel.load(w.dslope), slopes, strict=True)], w.dslope)
        if elements is not None:
            elements.flush()

    def epilogue(self) -> None:
        """Store the panel's dq and its rows' parts of dslopes."""
        code, a, w, task, num_valid = self.code, self.a, self.w, self.task, self.num_valid
        dq = a.pointer("dq")
        with code.if_then(dq.is_null().equals(0)):
            store_dq(self, num_valid)
        if self.variant.slope_gradient:
            dslopes = a.pointer("dslopes") + task.split * a.integer("seqlen_total")
            with code.loop(0, num_valid) as r:
                dslopes[w.lse_offsets[r]] = w.dslope[r]
