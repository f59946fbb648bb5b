"""Forward mode: the forward pass with the tangents of its results, for tangents of its inputs.

With p the probabilities and ds the tangents of the scores,

    dlse = sum p ds                          kept as `dl = sum exp(s - m) ds`, a sum of its row as l is
    dout = sum p (dv + ds v) - dlse out      its sum in accumulators of their own, next to out's

so each block has up to four products more than forward's two: `k dq + dk q` is added up before the softmax,
`(p ds) v + p dv` after it. An input without a tangent has none. Dropout drops terms of dout's sum, but not of dlse; a
sink has a term of dlse alone. All else is inherited from `forward`.
"""

import math
from typing import Any

from ..targets import Target
from ..variant import TANGENTS, Variant
from ..workspace import Layout, tangent_layout
from .codegen import Code, Source
from .forward import BlockKind, ForwardKernel
from .kernel import kernel_source, store_rows
from .keys import KeyBlock, key_blocks
from .operands import Value
from .products import Panel, add_score_product, declare_added_scores
from .rng import apply_dropout
from .row_values import RowValuesKernel
from .scores import FinalScore, ScoreTables, ScoreTangents, final_score
from .softmax import scaled
from .sums import carry
from .tiles import load_transposed, num_valid_rows, panel_rows, rows_in_use


class TangentKernel(ForwardKernel):
    """Emits the code of one task, with a second accumulator for each of forward's."""

    @property
    def sides(self) -> tuple[str, ...]:
        return ("k", "v", *(f"d{side}" for side in ("k", "v") if side in self.variant.tangents))

    def buffers(self, *sizes: Any) -> Layout:
        return tangent_layout(self.panel.rows, *sizes)

    @classmethod
    def declare_products(cls, code: Code, panel: Panel, variant: Variant) -> None:
        super().declare_products(code, panel, variant)
        declare_added_scores(code, panel)

    # Rows -------------------------------------------------------------------------------------------------------------

    def prologue(self, p: Value) -> None:
        super().prologue(p)
        code, a, w, panel, tangents = self.code, self.a, self.w, self.panel, self.variant.tangents
        rows, in_use = p * panel.rows, rows_in_use(code, panel, self.task, p)
        panel.store([code.full(1.0)] * panel.vectors, w.ones)
        panel.store([code.full()] * panel.vectors, w.dl, p)
        start, size = self.output_place(p)
        with code.loop(0, size, code.lanes) as n:
            (w.dout + start).store(code.full(), n)
        self.fill_tangent_tables(p, in_use)
        if "q" in tangents:
            depth, one, to = a.integer("head_dim"), code.index(1), w.dq + rows * a.integer("head_dim")
            offsets, dtype, factor = w.dq_offsets + rows, self.variant.dtype, a.real("factor")
            load_transposed(code, panel, a.pointer("dq"), offsets, in_use, depth, one, dtype, to, factor)

    def fill_tangent_tables(self, p: Value, count: Value) -> None:
        """As `tiles.fill_row_tables`, for the tangents of what rows read."""
        code, a, w, task, tangents = self.code, self.a, self.w, self.task, self.variant.tangents
        with panel_rows(code, a, self.panel, task, p, count) as (r, i, h):
            at = p * self.panel.rows + r
            if "q" in tangents:
                row = h * a.integer("dq_h") + (task.q_first + i) * a.integer("dq_s")
                w.dq_offsets[at] = task.b * a.integer("dq_b") + row
            if "bias" in tangents:
                row = h * a.integer("dbias_h") + i * a.integer("dbias_i")
                w.dbias_offsets[at] = task.b * a.integer("dbias_b") + row
            for symbol in self.variant.head_terms:
                if symbol in tangents:
                    x = a.pointer(f"d{symbol}")[task.b * a.integer(f"d{symbol}_b") + h]
                    getattr(w, f"d{symbol}")[at] = x * self.variant.score_unit
            if "sinks" in tangents:
                w.dl[at] = a.pointer("dsinks")[h]

    # Blocks of keys ---------------------------------------------------------------------------------------------------

    def process_block(
        self, p: Value, first: Value, count: Value, kind: BlockKind, k: KeyBlock, v: KeyBlock, *tangents: KeyBlock
    ) -> None:
        w, panel, of_keys = self.w, self.panel, dict(zip(self.sides[2:], tangents, strict=True))
        panel.store(panel.load(w.m, p), w.new_m)
        self.score_product(p, k, count)
        if self.variant.score_tangents:
            self.call("tangent_product", p, count, *k, *of_keys.get("dk", ()))
        self.with_and_without_mask(kind.state, lambda kernel: kernel.finish_scores(p, first, count, kind.edge))
        self.call("softmax", p, count)
        if self.variant.dropout:
            self.call("dropout", p, first, count)
        self.value_product(p, v, count)
        self.call("add_tangents", p, count, *v, *of_keys.get("dv", ()))

    def tangent_product(self, p: Value, count: Value, *keys: Any) -> None:
        """The tangents of the block's products, in their units; `keys` are the fields of k, and of dk if it has one."""
        code, w, depth = self.code, self.w, self.a.integer("head_dim")
        with code.loop(0, count * self.panel.rows, code.lanes) as n:
            w.dscores.store(code.full(), n)
        (k, *dk), queries = key_blocks(keys), p * depth * self.panel.rows
        products = [*([(k, w.dq)] if "q" in self.variant.tangents else []), *((x, w.q) for x in dk)]

        def emit(panel: Panel) -> None:
            for x, q in products:
                add_score_product(code, panel, *x, count, q + queries, depth, w.dscores)

        self.with_narrow_panels(p, emit)

    def add_tangents(self, p: Value, count: Value, *keys: Any) -> None:
        """Add the block's terms to the accumulators of dout; `keys` are the fields of v, and of dv if it has one."""
        (v, *dv), w, alpha = key_blocks(keys), self.w, self.w.alpha
        if self.variant.score_tangents:
            self.add_values(p, w.dscores, v, count, w.dout, alpha)
            alpha = w.ones
        for x in dv:
            self.add_values(p, w.scores, x, count, w.dout, alpha)

    def final_score(self, tables: ScoreTables, row: Value, at: Value, key: Value, scale: Value | None) -> FinalScore:
        code, a, w, variant = self.code, self.a, self.w, self.variant
        if not variant.score_tangents:
            return super().final_score(tables, row, at, key, scale)
        tangents = ScoreTangents(
            w.dscores.vector(at),
            w.dbias.vector(at) if "bias" in variant.tangents else None,
            w.dslopes.vector(row) if "slopes" in variant.tangents else None,
        )
        return final_score(code, a, variant, tables, w.scores.vector(at), w.bias + at, key, tangents)

    def store_score(self, at: Value, final: FinalScore, visible: list[Value]) -> Value:
        ds = final.tangent
        if ds is not None:
            for shown in visible:  # the derivative of a formula may be NaN or infinite in a hidden pair
                ds = self.code.select(shown, ds, 0.0)
            self.w.dscores.store(ds, at)
        return super().store_score(at, final, visible)

    def softmax(self, p: Value, count: Value) -> None:
        """As in forward; and replace the scores' tangents by `exp(s - m) ds`, in natural units, and update `dl`."""
        super().softmax(p, count)
        code, w, pitch = self.code, self.w, self.panel.rows
        with self.columns(p) as column:
            dl, total = w.dl + (p * pitch + column), code.variable(code.full())
            if self.variant.score_tangents:
                with code.loop(0, count) as j:
                    at = j * pitch + column
                    p, ds = w.scores.vector(at), w.dscores.vector(at)
                    x = scaled(p * ds, 1 / self.variant.score_unit)
                    if self.variant.natural_units:  # the derivative of a score of -inf may be NaN or infinite
                        x = code.select(p.differs(0), x, 0.0)
                    total.set(total.get() + x)
                    w.dscores.store(x, at)
            dl.store(code.multiply_add(dl.vector(), w.alpha.vector(column), total.get()))

    def dropout(self, p: Value, first: Value, count: Value) -> None:
        w = self.w
        apply_dropout(self, p, (w.scores, w.dscores) if self.variant.score_tangents else (w.scores,), first, count)

    # Sums -------------------------------------------------------------------------------------------------------------

    def clear_totals(self, p: Value) -> None:
        super().clear_totals(p)
        code, w, panel = self.code, self.w, self.panel
        panel.store([code.full()] * panel.vectors, w.total_dl, p)
        start, size = self.output_place(p)
        with code.loop(0, size, code.lanes) as n:
            (w.total_dout + start).store(code.full(), n)

    def carry(self, p: Value, last: bool) -> None:
        super().carry(p, last)
        code, w = self.code, self.w
        with self.columns(p) as column:
            carry(code, w.dl, w.total_dl, p * self.panel.rows + column, last, w.alpha.vector(column))
        self.carry_output(p, w.dout, w.total_dout, last)

    def finish_rows(self, p: Value) -> None:
        """As in forward; from now on `dl` is the log-sum-exp's tangent, `dout` an accumulator of `out`'s."""
        super().finish_rows(p)
        code, w = self.code, self.w
        with self.columns(p) as column:
            row = p * self.panel.rows + column
            dlse = w.dl.vector(row) * w.alpha.vector(column)
            w.dl.store(code.select(w.l.vector(row).differs(-math.inf), dlse, 0.0), row)
        of_panel = w.dl + p * self.panel.rows
        with self.accumulators(p) as (at, of_rows):
            w.dout.store(w.dout.vector(at) - of_rows(of_panel) * w.out.vector(at), at)

    def store_results(self, p: Value) -> None:
        super().store_results(p)
        code, a, w, rows = self.code, self.a, self.w, p * self.panel.rows
        self.store_output(p, w.dout, self.variant.dtype, a.pointer("dout"), w.out_offsets + rows)
        num_valid = num_valid_rows(code, self.panel, self.task, p)
        store_rows(code, w.dl + rows, a.pointer("dlse"), w.lse_offsets + rows, num_valid)


class RowTangentKernel(TangentKernel, RowValuesKernel):
    """The same with accumulators `[rows, Dv]`."""


def source(variant: Variant, target: Target) -> Source:
    """The LLVM module of a forward-mode kernel, `tangents(block)`."""
    return kernel_source(RowTangentKernel if variant.row_values else TangentKernel, TANGENTS, variant, target)
