"""Second derivatives: gradients of the tangents of results, for given cotangents.

With the names of docs/design/exactness.md, and for each row the tangent T of lse and `E = <dout, tout>`,

    r  = p ((dp - delta) (t - T) + u - E)        the gradient by the score
    ds = p (dp - delta)                          the gradient by its tangent
    dq = scale sum (r k + ds tk),   dk = scale sum (r q + ds tq),   dv = sum p (t - T) dout

It is a backward pass with more in each block: up to ten products, and two weights of a pair for dq and dk. Products of
directions that are absent are left out. It has the tasks, tables and sums of `backward`.
"""

import math
from typing import Any

from ..targets import Target
from ..variant import SECOND, Variant
from ..workspace import Layout, round_up, second_layout
from .backward import BackwardKernel
from .codegen import Code, Source
from .dq import accumulate_dq
from .elementary import exp2
from .kernel import kernel_source
from .keys import key_blocks
from .masking import Window, in_mask
from .operands import Value
from .products import Panel, add_score_product, declare_added_scores, score_product
from .scores import FinalScore, ScoreTangents, final_score
from .tiles import copy_rows, load_transposed


class SecondKernel(BackwardKernel):
    """Emits the code of one task."""

    SHARED = ("clear_keys", "carry_keys", "compute_delta", "add_key_gradient")

    @property
    def sides(self) -> tuple[str, ...]:
        return ("k", "v", *(f"t{side}" for side in ("k", "v") if side in self.variant.tangents))

    def buffers(self, *sizes: Any) -> Layout:
        return second_layout(self.panel.rows, self.code.lanes, *sizes)

    @classmethod
    def declare_products(cls, code: Code, panel: Panel, variant: Variant) -> None:
        super().declare_products(code, panel, variant)
        declare_added_scores(code, panel)

    def load_rows(self) -> None:
        super().load_rows()
        if "q" not in self.variant.tangents:
            return
        code, a, w, dtype, depth = self.code, self.a, self.w, self.variant.dtype, self.a.integer("head_dim")
        tq, offsets = a.pointer("tq"), w.dq_offsets  # free until dq's offsets are filled in
        self.fill_row_offsets("tq", offsets)
        load_transposed(code, self.panel, tq, offsets, self.in_use, depth, code.index(1), dtype, w.tq, a.real("factor"))
        copy_rows(code, tq, offsets, self.num_valid, depth, dtype, w.tq_rows, round_up(depth, code.lanes))

    def load_row_stats(self) -> None:
        """Load what backward does, and T and E of each row: 0 of rows without keys, since `0 * NaN` would be NaN."""
        super().load_row_stats()
        code, a, w = self.code, self.a, self.w
        with code.loop(0, self.in_use) as r:
            at, sees = w.lse_offsets[r], w.lse[r].differs(math.inf)
            w.tlse[r] = code.select(sees, a.pointer("tlse")[at], 0.0)
            w.product[r] = code.select(sees, a.pointer("product")[at], 0.0)

    def process_block(self, first: Value, count: Value, state: Value, *keys: Any) -> None:
        """One block of keys: the products of scores, the weights of its pairs, and their products."""
        code, a, w, tangents = self.code, self.a, self.w, self.variant.tangents
        depth, width, no_panel = a.integer("head_dim"), a.integer("head_dim_v"), code.index(0)
        of = dict(zip(self.sides, key_blocks(keys), strict=True))
        moving = [*([(of["k"], w.tq)] if "q" in tangents else []), *([(of["tk"], w.q)] if "k" in tangents else [])]

        def products(panel: Panel) -> None:
            score_product(code, panel, *of["k"], count, w.q, depth, w.scores, w.new_m)
            score_product(code, panel, *of["v"], count, w.dout, width, w.dscores, w.new_m)
            for n, (x, q) in enumerate(moving):
                if n == 0:
                    score_product(code, panel, *x, count, q, depth, w.tscores, w.new_m)
                else:
                    add_score_product(code, panel, *x, count, q, depth, w.tscores)
            if "v" in tangents:
                score_product(code, panel, *of["tv"], count, w.dout, width, w.uscores, w.new_m)

        self.with_narrow_panels(no_panel, products)
        if self.variant.dropout:
            self.call("dropout", first, count)
        edge = (first < w.bounds[1]) | (first + count > w.bounds[2])
        self.with_and_without_mask(state, lambda kernel: kernel.softmax_of_block(first, count, edge))
        self.call("add_key_gradient", first, count, w.scores, w.dout_rows, width, name="dv")
        self.call("add_key_gradient", first, count, w.dscores, w.q_rows, depth, name="dk")
        if "q" in tangents:
            self.call("add_key_gradient", first, count, w.tscores, w.tq_rows, depth, name="dk")
        with code.if_then(a.pointer("dq").is_null().equals(0)):
            accumulate_dq(self, of["k"], count, w.dscores)
            if "k" in tangents:
                accumulate_dq(self, of["tk"], count, w.tscores)

    def softmax_of_rows(self, row: Value, first: Value, count: Value, edge: bool) -> None:
        """Turn the products of a vector of rows into weights: `scores` for dv, `dscores` and `tscores` for dq and dk
        from r and ds.
        """
        code, a, w, variant = self.code, self.a, self.w, self.variant
        tables, window = self.score_tables(row), Window.of_rows(w, row) if edge else None
        lse, delta, scale = w.lse.vector(row), w.delta.vector(row), a.real("scale")
        tlse, product = w.tlse.vector(row), w.product.vector(row)
        moves, natural = "q" in variant.tangents or "k" in variant.tangents, 1 / variant.score_unit
        with code.loop(0, count) as j:
            key, at = first + j, j * self.panel.rows + row
            tangents = ScoreTangents(w.tscores.vector(at)) if moves else None
            final = final_score(code, a, variant, tables, w.scores.vector(at), w.bias + at, key, tangents)
            difference = final.score - lse
            if variant.natural_units:
                difference = difference - w.residual.vector(row)
            p = exp2(code, difference * variant.to_exp2 if variant.natural_units else difference)
            visible = final.visible
            for shown in (
                window.has(key) if window is not None else None,
                in_mask(w.mask, at) if variant.mask else None,
            ):
                if shown is not None:
                    visible = shown if visible is None else visible & shown
            dp, u = w.dscores.vector(at), w.uscores.vector(at) if "v" in variant.tangents else code.full()
            kept = p
            if variant.dropout:
                keep = w.keep.vector(at)
                kept, dp, u = p * keep, dp * keep, u * keep
            t = code.full() if final.tangent is None else final.tangent * natural
            moved, ds = t - tlse, p * (dp - delta)
            r = ds * moved + p * (u - product)
            r, ds = self.by_product(final, r, ds, t)
            weights = (kept * moved, r * scale, ds * scale)
            if visible is not None:  # not 0 * NaN, where a row's delta or a hidden key is NaN
                weights = tuple(code.select(visible, x, 0.0) for x in weights)
            for x, to in zip(weights, (w.scores, w.dscores, w.tscores), strict=True):
                to.store(x, at)

    def by_product(self, final: FinalScore, r: Value, ds: Value, t: Value) -> tuple[Value, Value]:
        """The gradients by the product and by its tangent, from those by the score and by its tangent `t`."""
        if final.tanh_s is None:
            return r, ds
        slope = 1.0 - final.tanh_s * final.tanh_s
        bend = final.tanh_s * (2 * self.variant.score_unit / self.a.real("softcap_scale"))
        return slope * r - bend * ds * t, slope * ds


def source(variant: Variant, target: Target) -> Source:
    """The LLVM module of a kernel of second derivatives, `second(block)`."""
    return kernel_source(SecondKernel, SECOND, variant, target)
