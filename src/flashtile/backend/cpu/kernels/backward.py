"""FlashAttention-2's backward pass (Dao, "FlashAttention-2", 2023, algorithm 2), for CPUs.

A task has one split of the keys of one key head and loops over all query rows of that head's group, so no other task
adds to the gradients of its keys, and results do not depend on the number of threads. For each panel of query rows it
loops over the key blocks and recomputes the probabilities from the scores and the log-sum-exp. Each split has a dq of
its own; the host adds them.

Where sequences or heads share elements of a bias, one task loops over all of them, so that dbias has one owner too.
"""

import itertools
import math
from collections.abc import Iterator
from typing import Any

from ....expression.blocks import HIDDEN
from ..targets import Target
from ..variant import BACKWARD, Variant
from ..workspace import BLOCK_N, ROWS_PER_CARRY, Layout, backward_layout, round_up
from .blocks import narrow_bounds, visible_keys
from .codegen import Code, Source
from .dbias import accumulate_dbias
from .dcaptured import ElementGradients
from .dkdv import Touched, accumulate_key_gradient, carry_key_gradients, clear_key_gradients
from .dq import accumulate_dq, declare_dq, store_dq
from .elementary import exp2
from .formats import load, load_vector, sum_lanes
from .kernel import Kernel, kernel_source
from .keys import KeyBlock, load_keys
from .masking import Window, in_mask
from .operands import BIT, Pointer, Value
from .products import Panel, declare_scores, score_product
from .rng import apply_dropout
from .scores import distance, final_score, product_gradient
from .sums import carry, carry_due, needs_totals
from .tiles import copy_rows, fill_row_tables, load_transposed, make_task, num_valid_rows, panel_rows, rows_in_use


def source(variant: Variant, target: Target) -> Source:
    """The LLVM module of a backward kernel, `backward(block)`."""
    return kernel_source(BackwardKernel, BACKWARD, variant, target)


class BackwardKernel(Kernel):
    """Emits the code of one task."""

    SIZES = ("head_dim", "head_dim_v", "total_keys")
    SHARED = ("clear_keys", "carry_keys", "load_rows", "compute_delta", "add_key_gradient")

    @property
    def sides(self) -> tuple[str, ...]:
        """The fields of the tensors that blocks of keys are loaded from."""
        return "k", "v"

    def buffers(self, *sizes: Any) -> Layout:
        return backward_layout(self.panel.rows, self.code.lanes, *sizes)

    @classmethod
    def declare_products(cls, code: Code, panel: Panel, variant: Variant) -> None:
        declare_scores(code, panel)
        declare_dq(code, panel, variant)

    def run(self, task_index: Value) -> None:
        """Loop over the sequences and key heads of a task."""
        code, a = self.code, self.a
        splits, batch, heads = (a.integer(name) for name in ("splits", "batch", "num_heads_kv"))
        share_b, share_h = (a.integer(name).differs(0) for name in ("share_b", "share_h"))
        split, pair = task_index % splits, task_index // splits
        num_h = code.select(share_h, code.index(1), heads)
        first_b, first_h = pair // num_h, pair % num_h
        last_b, last_h = code.select(share_b, batch, first_b + 1), code.select(share_h, heads, first_h + 1)
        with code.loop(first_b, last_b) as b, code.loop(first_h, last_h) as h:
            self.task.store(make_task(code, a, b, h, split, code.index(0)))
            self.call("visit_rows")

    def visit_rows(self) -> None:
        """Loop over the panels of query rows of a sequence and key head."""
        code, rows = self.code, self.panel.rows
        many_rows = self.task.num_rows > ROWS_PER_CARRY
        self.call("clear_keys")
        with code.loop(0, self.task.num_rows, rows) as first_row:
            self.task.set("first_row", first_row)
            self.call("visit_panel")
            with code.if_then(many_rows & (first_row % ROWS_PER_CARRY).equals(ROWS_PER_CARRY - rows)):
                self.call("carry_keys", last=False)
        with code.if_then(many_rows):
            self.call("carry_keys", last=True)

    def clear_keys(self) -> None:
        clear_key_gradients(self.code, self.a, self.task, self.w, self.task.num_rows > ROWS_PER_CARRY)
        Touched(self).clear()

    def carry_keys(self, last: bool) -> None:
        carry_key_gradients(self.code, self.a, self.task, self.w, last, None if last else Touched(self))

    def visit_panel(self) -> None:
        """One panel of query rows against all keys of the task."""
        code, a, w = self.code, self.a, self.w
        self.call("fill_tables")
        lo, hi = w.bounds[0], w.bounds[3]
        many_keys = needs_totals(lo, hi)
        self.call("prologue", many_keys)
        with code.loop(lo // BLOCK_N * BLOCK_N, hi, BLOCK_N) as block:
            first, last = code.maximum(block, lo), code.minimum(block + BLOCK_N, hi)
            state, first, last = visible_keys(self, code.index(0), first, last)
            with code.if_then((first < last) & (state > HIDDEN)):
                state = self.load_mask_and_bias(code.index(0), first, last - first, state)
                with code.if_then(state > HIDDEN):
                    keys = (
                        load_keys(code, a, self.variant, self.task, side, first, last, getattr(w, side))
                        for side in self.sides
                    )
                    self.call("process_block", first, last - first, state, *itertools.chain(*keys))
                    Touched(self).add(first, last)
            with code.if_then(many_keys & carry_due(block)):
                self.call("carry", last=False)
        with code.if_then(many_keys):
            self.call("carry", last=True)
        with code.if_then(a.pointer("dq").is_null().equals(0)):
            store_dq(self, self.num_valid)
        if self.variant.slope_gradient:
            dslopes = a.pointer("dslopes") + self.task.split * a.integer("seqlen_total")
            with code.loop(0, self.num_valid) as r:
                dslopes[w.lse_offsets[r]] = w.dslope[r]

    def fill_tables(self) -> None:
        fill_row_tables(self.code, self.a, self.variant, self.panel, self.task, self.w, self.code.index(0))
        narrow_bounds(self, self.code.index(0))

    def prologue(self, many_keys: Value) -> None:
        """Zero the sums, and load the rows if they see any key. The first split always loads them: it stores delta."""
        code, w, panel = self.code, self.w, self.panel
        with code.if_then((w.bounds[0] < w.bounds[3]) | self.task.split.equals(0)):
            for step in ("load_rows", "compute_delta", "load_row_stats"):
                self.call(step)
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

    def process_block(
        self, first: Value, count: Value, state: Value, k: Pointer, k_stride: Value, v: Pointer, v_stride: Value
    ) -> None:
        """One block of keys: the five matrix products, and between them the gradient of the softmax."""
        code, a, w = self.code, self.a, self.w
        depth, width, no_panel = a.integer("head_dim"), a.integer("head_dim_v"), code.index(0)

        def products(panel: Panel) -> None:
            score_product(code, panel, k, k_stride, count, w.q, depth, w.scores, w.new_m)
            score_product(code, panel, v, v_stride, count, w.dout, width, w.dscores, w.new_m)

        self.with_narrow_panels(no_panel, products)
        if self.variant.dropout:
            self.call("dropout", first, count)
        full_lo, full_hi = w.bounds[1], w.bounds[2]
        edge = (first < full_lo) | (first + count > full_hi)
        self.with_and_without_mask(state, lambda kernel: kernel.softmax_of_block(first, count, edge))
        if self.variant.bias_gradient:
            self.call("add_dbias", first, count)
        self.call("add_key_gradient", first, count, w.scores, w.dout_rows, width, name="dv")
        self.call("add_key_gradient", first, count, w.dscores, w.q_rows, depth, name="dk")
        with code.if_then(a.pointer("dq").is_null().equals(0)):
            accumulate_dq(self, KeyBlock(k, k_stride), count, w.dscores)

    def add_dbias(self, first: Value, count: Value) -> None:
        accumulate_dbias(self, first, count)

    def add_key_gradient(self, first: Value, count: Value, p: Pointer, x: Pointer, width: Value, name: str) -> None:
        accumulate_key_gradient(self, name, first, count, p, x, width)

    def dropout(self, first: Value, count: Value) -> None:
        """Fill `keep` with the factors of the block's probabilities."""
        code, w = self.code, self.w
        with code.loop(0, count * self.panel.rows, code.lanes) as n:
            w.keep.store(code.full(1.0), n)
        apply_dropout(self, code.index(0), (w.keep,), first, count)

    def softmax_of_block(self, first: Value, count: Value, edge: Value) -> None:
        self.with_and_without_window(edge, lambda edge: self.call("softmax_backward", first, count, edge=edge))

    def softmax_backward(self, first: Value, count: Value, edge: bool) -> None:
        """Turn `scores = q k` into `p * keep`, for dv, and `dscores = dout v` into the gradient of the scaled product,
        for dq and dk.
        """
        with self.columns(self.code.index(0)) as row:
            self.softmax_of_rows(row, first, count, edge)

    def softmax_of_rows(self, row: Value, first: Value, count: Value, edge: bool) -> None:
        """The same for a vector of rows."""
        code, a, w, variant = self.code, self.a, self.w, self.variant
        tables, window = self.score_tables(row), Window.of_rows(w, row) if edge else None
        elements = ElementGradients(self) if variant.loads else None
        slope = code.variable(code.full())
        lse, delta, scale = w.lse.vector(row), w.delta.vector(row), a.real("scale")
        with code.loop(0, count) as j:
            key, at = first + j, j * self.panel.rows + row
            final = final_score(code, a, variant, tables, w.scores.vector(at), w.bias + at, key)
            difference = final.score - lse
            if variant.natural_units:
                difference = difference - w.residual.vector(row)
            p = exp2(code, difference * variant.to_exp2 if variant.natural_units else difference)
            visible = final.visible
            if window is not None:
                visible = window.has(key) if visible is None else visible & window.has(key)
            if variant.mask:
                mask_visible = in_mask(w.mask, at)
                visible = mask_visible if visible is None else visible & mask_visible
            if variant.formula is not None:  # whose derivative may be NaN or infinite where p is 0
                counted = lse.differs(math.inf)
                visible = counted if visible is None else visible & counted
            if visible is not None:
                p = code.select(visible, p, 0.0)
            dp = w.dscores.vector(at)
            kept = p
            if variant.dropout:
                keep = w.keep.vector(at)
                kept, dp = p * keep, dp * keep
            w.scores.store(kept, at)
            ds = p * (dp - delta)
            if visible is not None:
                ds = code.select(visible, ds, 0.0)  # where delta is NaN, p * (dp - delta) = 0 * NaN
            if variant.formula is not None and visible is not None:
                if elements is not None:
                    elements.add(final.formula, ds, visible)
                ds = code.select(visible, ds * final.formula[1], 0.0)
            if variant.bias_gradient:
                w.dbias.store(ds, at)
            if variant.slope_gradient:
                slope.set(slope.get() - ds * distance(code, tables, key))
            w.dscores.store(product_gradient(final, ds) * scale, at)
        if variant.slope_gradient:
            w.dslope.store(w.dslope.vector(row) + slope.get(), row)
        if elements is not None:
            elements.flush()
