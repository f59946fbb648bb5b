"""FlashAttention-2's forward pass (Dao, "FlashAttention-2", 2023, algorithm 1), for CPUs.

A task has a few panels of query rows and loops over the key blocks. Each panel that sees any key of a block computes
its scores, updates the online softmax and adds the values, while the block is in the first-level cache.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from ....expression.blocks import HIDDEN
from ..targets import Target
from ..variant import FORWARD, Variant
from ..workspace import BLOCK_N, Layout, forward_layout
from .blocks import narrow_bounds, panels_see, visible_keys
from .codegen import Code, Source
from .combine import combine_splits
from .kernel import Kernel, kernel_source, store_rows
from .keys import KeyBlock, head_scale, key_blocks, load_keys, load_scales
from .masking import Window, in_mask, mask_fill
from .operands import Pointer, Value
from .products import Panel, declare_scores, declare_values, score_product, value_product
from .rng import apply_dropout
from .scores import FinalScore, ScoreTables, final_score
from .softmax import exponentiate, finalize, initialize, normalize, rescale
from .sums import carry, carry_due, needs_totals
from .tiles import fill_row_tables, find_task, load_transposed, num_valid_rows, rows_in_use, store_transposed


class BlockKind(NamedTuple):
    """Whether a block needs the test of the window, and its state by the masks."""

    edge: Value
    state: Value


class ForwardKernel(Kernel):
    """Emits the code of one task."""

    SIZES = ("panels", "head_dim", "head_dim_v")
    SHARED = ("clear_totals", "carry", "softmax", "epilogue", "combine")

    @property
    def sides(self) -> tuple[str, ...]:
        """The tensors of keys that a block loads."""
        return ("k", "v")

    def buffers(self, *sizes: Any) -> Layout:
        return forward_layout(self.panel.rows, *sizes)

    @classmethod
    def declare_products(cls, code: Code, panel: Panel, variant: Variant) -> None:
        declare_scores(code, panel)
        declare_values(code, panel)

    def run(self, task_index: Value) -> None:
        self.task.store(find_task(self.code, self.a, self.panel, task_index))
        self.call("visit_keys")
        with self.code.if_then(self.a.integer("splits") > 1):
            self.call("combine")

    @property
    def panels_in_use(self) -> Value:
        rows = self.panel.rows
        num_left = (self.task.num_rows - self.task.first_row + (rows - 1)) // rows
        return self.code.minimum(self.a.integer("panels"), num_left)

    def visit_keys(self) -> None:
        """Loop over the blocks of keys that a task's panels see."""
        code, w, panels = self.code, self.w, self.panels_in_use
        lo, hi = code.variable(code.index(2**40)), code.variable(code.index(0))
        with code.loop(0, panels) as p:
            self.call("prologue", p)
            lo.set(code.minimum(lo.get(), w.bounds[p * 4]))
            hi.set(code.maximum(hi.get(), w.bounds[p * 4 + 3]))
        # A sink belongs to no recent sum: to which one it would depends on the first key of the task's other rows.
        many_keys = needs_totals(lo.get(), hi.get()) | self.a.pointer("sinks").is_null().equals(0)
        with code.if_then(many_keys), code.loop(0, panels) as p:
            self.call("clear_totals", p)
        with code.loop(lo.get() // BLOCK_N * BLOCK_N, hi.get(), BLOCK_N) as block:
            first, last = code.maximum(block, lo.get()), code.minimum(block + BLOCK_N, hi.get())
            with code.if_then(first < last), code.if_then(panels_see(self, panels, first)):
                keys = [x for side in self.sides for x in self.load_keys(side, first, last)]
                self.load_scales(block, first, last)
                with code.loop(0, panels) as p:
                    self.call("visit_block", p, first, last, *keys)
            with code.if_then(many_keys & carry_due(block)), code.loop(0, panels) as p:
                self.call("carry", p, last=False)
        with code.loop(0, panels) as p:
            with code.if_then(many_keys):
                self.call("carry", p, last=True)
            self.call("epilogue", p)

    def combine(self) -> None:
        combine_splits(self, self.panels_in_use)

    def prologue(self, p: Value) -> None:
        """Fill a panel's tables, load its queries, and initialize its softmax state."""
        code, a, w, panel = self.code, self.a, self.w, self.panel
        fill_row_tables(code, a, self.variant, panel, self.task, w, p)
        narrow_bounds(self, p)
        initialize(code, a, self.variant, panel, self.task, w, p)
        start, size = self.output_place(p)
        with code.loop(0, size, code.lanes) as n:
            (w.out + start).store(code.full(), n)
        self.load_queries(p)

    def clear_totals(self, p: Value) -> None:
        """Begin with totals that have the sinks."""
        code, w, panel = self.code, self.w, self.panel
        rows = p * panel.rows
        panel.store(panel.load(w.m + rows), w.total_m + rows)
        panel.store(panel.load(w.l + rows), w.total_l + rows)
        panel.store([code.full()] * panel.vectors, w.l + rows)
        start, size = self.output_place(p)
        with code.loop(0, size, code.lanes) as n:
            (w.total_out + start).store(code.full(), n)

    def carry(self, p: Value, last: bool) -> None:
        """Carry recent sums to totals, rescaled to the current maximum; at the end, add totals to the recent sums."""
        code, w, first = self.code, self.w, p * self.panel.rows
        with self.columns(p) as column:
            row = first + column
            m, total_m, alpha = w.m + row, w.total_m + row, w.alpha + column
            alpha.store(rescale(code, total_m.vector(), m.vector(), self.variant.to_exp2))
            total_m.store(m.vector())
            carry(code, w.l, w.total_l, row, last, alpha.vector())
        self.carry_output(p, w.out, w.total_out, last)

    def carry_output(self, p: Value, recent: Pointer, total: Pointer, last: bool) -> None:
        with self.accumulators(p) as (at, of_rows):
            carry(self.code, recent, total, at, last, of_rows(self.w.alpha))

    # Overridden by other accumulators and by decoding -----------------------------------------------------------------

    def output_place(self, p: Value) -> tuple[Value, Value]:
        """The place of a panel's accumulators, and the number of those in use."""
        size = self.a.integer("head_dim_v") * self.panel.rows
        return p * size, size

    def load_queries(self, p: Value) -> None:
        a, w, depth, rows = self.a, self.w, self.a.integer("head_dim"), p * self.panel.rows
        q, one = w.q + rows * depth, self.code.index(1)
        dtype, in_use = self.variant.dtype, rows_in_use(self.code, self.panel, self.task, p)
        load_transposed(
            self.code, self.panel, a.pointer("q"), w.q_offsets + rows, in_use, depth, one, dtype, q, self.query_factor()
        )

    def query_factor(self) -> Value:
        """The factor of queries, with the scale of a head of keys."""
        factor = self.a.real("factor")
        return factor * head_scale(self.code, self.a, self.task, "k") if self.variant.k_scales == "head" else factor

    def load_scales(self, block: Value, first: Value, last: Value) -> None:
        """Load the scales of a block's keys and values of 8 bits."""
        for side, kind in (("k", self.variant.k_scales), ("v", self.variant.v_scales)):
            if kind == "key":
                to = getattr(self.w, f"{side}_scales") + (first - block)
                load_scales(self.code, self.a, self.task, side, first, last, to)

    def load_keys(self, side: str, first: Value, last: Value) -> KeyBlock:
        return load_keys(self.code, self.a, self.variant, self.task, side, first, last, getattr(self.w, side))

    def first_key(self, lowest: Value) -> Value:
        """The first key to process in a block whose visible ones begin at `lowest`: those before it are masked."""
        return lowest

    def score_product(self, p: Value, k: KeyBlock, count: Value) -> None:
        """Compute the block's scores, and their maximum in `new_m`."""
        w, depth = self.w, self.a.integer("head_dim")
        q = w.q + p * depth * self.panel.rows
        args = (k.first, k.stride, count, q, depth, w.scores, w.new_m)
        self.with_narrow_panels(p, lambda panel: score_product(self.code, panel, *args))

    def value_product(self, p: Value, v: KeyBlock, count: Value) -> None:
        """Scale the accumulators by `alpha`, and add the block's probabilities times its values."""
        self.add_values(p, self.w.scores, v, count, self.w.out, self.w.alpha)

    def add_values(self, p: Value, weights: Pointer, v: KeyBlock, count: Value, sums: Pointer, alpha: Pointer) -> None:
        """Scale the accumulators `sums` by `alpha`, and add the weights `[count, panel]` times a block's values."""
        out, width = sums + self.output_place(p)[0], self.a.integer("head_dim_v")
        args = (weights, v.first, v.stride, count, out, width, alpha)
        self.with_narrow_panels(p, lambda panel: value_product(self.code, panel, *args))

    @contextmanager
    def accumulators(self, p: Value) -> Iterator[tuple[Value, Callable[[Pointer], Value]]]:
        """Loop over the vectors of a panel's accumulators: the place of each, and a function that loads the values of
        its rows from a table of the panel.
        """
        first = self.output_place(p)[0]
        with self.columns(p) as column, self.code.loop(0, self.a.integer("head_dim_v")) as d:
            yield first + d * self.panel.rows + column, lambda table: table.vector(column)

    def store_output(self, p: Value, sums: Pointer, dtype: str, to: Pointer, row_offsets: Pointer) -> None:
        code, w, panel, width = self.code, self.w, self.panel, self.a.integer("head_dim_v")
        out = sums + self.output_place(p)[0]
        with self.columns(p) as column:
            lse, inverse = w.l.vector(p * panel.rows + column), w.alpha.vector(column)
            with code.loop(0, width) as d:
                at = out + d * panel.rows + column
                at.store(normalize(code, at.vector(), inverse, lse))
        store_transposed(code, panel, out, width, dtype, to, row_offsets, num_valid_rows(code, panel, self.task, p))

    # Shared with the decode variant -----------------------------------------------------------------------------------

    def visit_block(self, p: Value, block_first: Value, block_last: Value, *keys: Any) -> None:
        """Process the keys of a block that any row of a panel sees; `keys` are the fields of a `KeyBlock` a side."""
        code, w = self.code, self.w
        lo, full_lo, full_hi, hi = (w.bounds[p * 4 + n] for n in range(4))
        visible = visible_keys(self, p, block_first, block_last)
        lowest, last = code.maximum(visible.first, lo), code.minimum(visible.last, hi)
        first = self.first_key(lowest)
        count, skipped = last - first, first - block_first
        with code.if_then((lowest < last) & (visible.state > HIDDEN)):
            state = self.load_mask_and_bias(p, first, count, visible.state)
            with code.if_then(state > HIDDEN):
                edge = (first < full_lo) | (last > full_hi)
                seen = [KeyBlock(x.first + x.stride * skipped, x.stride) for x in key_blocks(keys)]
                self.process_block(p, first, count, BlockKind(edge, state), *seen)

    def process_block(self, p: Value, first: Value, count: Value, kind: BlockKind, k: KeyBlock, v: KeyBlock) -> None:
        w, panel = self.w, self.panel
        panel.store(panel.load(w.m, p), w.new_m)
        self.score_product(p, k, count)
        self.with_and_without_mask(kind.state, lambda kernel: kernel.finish_scores(p, first, count, kind.edge))
        self.call("softmax", p, count)
        if self.variant.dropout:
            self.call("dropout", p, first, count)
        if self.variant.v_scales == "key":
            self.call("scale_probabilities", p, first, count)
        self.value_product(p, v, count)

    def scale_probabilities(self, p: Value, first: Value, count: Value) -> None:
        """Multiply the probabilities of keys by the scales of their values."""
        code, w, pitch = self.code, self.w, self.panel.rows
        scales = w.v_scales + first % BLOCK_N
        with self.columns(p) as column, code.loop(0, count) as j:
            at = w.scores + j * pitch + column
            at.store(at.vector() * scales[j])

    def softmax(self, p: Value, count: Value) -> None:
        """Replace scores by `exp(s - m)`, and update `m`, `l` and `alpha`."""
        code, w, pitch = self.code, self.w, self.panel.rows
        with self.columns(p) as column:
            row = p * pitch + column
            l, alpha = w.l + row, w.alpha + column  # noqa: E741
            total = exponentiate(
                code, self.variant, w.scores + column, pitch, count, w.m + row, w.new_m + column, alpha
            )
            l.store(code.multiply_add(l.vector(), alpha.vector(), total))

    def dropout(self, p: Value, first: Value, count: Value) -> None:
        apply_dropout(self, p, (self.w.scores,), first, count)

    def finish_scores(self, p: Value, first: Value, count: Value, edge: Value) -> None:
        if self.variant.modifies_scores:
            self.with_and_without_window(edge, lambda edge: self.call("modify_scores", p, first, count, edge=edge))
        else:
            with self.code.if_then(edge):
                self.call("modify_scores", p, first, count, edge=True)

    def modify_scores(self, p: Value, first: Value, count: Value, edge: bool) -> None:
        """Apply the score features and masks to a block's scores, in place, and recompute their maximum."""
        code, w, pitch, variant = self.code, self.w, self.panel.rows, self.variant
        with self.columns(p) as column:
            row = p * pitch + column
            tables, window = self.score_tables(row), Window.of_rows(w, row) if edge else None
            largest, scales = code.variable(w.m.vector(row)), w.k_scales + first % BLOCK_N
            with code.loop(0, count) as j:
                key, at = first + j, j * pitch + column
                final = self.final_score(tables, row, at, key, scales[j] if variant.k_scales == "key" else None)
                visible = [] if final.visible is None else [final.visible]
                if window is not None:
                    visible.append(window.has(key))
                if variant.mask:
                    visible.append(in_mask(w.mask, at))
                largest.set(code.maximum(self.store_score(at, final, visible), largest.get()))
            w.new_m.store(largest.get(), column)

    def final_score(self, tables: ScoreTables, row: Value, at: Value, key: Value, scale: Value | None) -> FinalScore:
        """The final scores of a vector of rows from `row` on with a key, whose products are at `at`, and its scale."""
        w = self.w
        product = w.scores.vector(at) if scale is None else w.scores.vector(at) * scale
        return final_score(self.code, self.a, self.variant, tables, product, w.bias + at, key)

    def store_score(self, at: Value, final: FinalScore, visible: list[Value]) -> Value:
        """Store and return scores, -inf where any of the conditions is false."""
        s = final.score
        for shown in visible:
            s = mask_fill(self.code, s, shown)
        self.w.scores.store(s, at)
        return s

    def epilogue(self, p: Value) -> None:
        """Normalize and store a panel's output and log-sum-exp. A split stores its own to the partial results."""
        self.finish_rows(p)
        with self.code.if_else(self.a.integer("splits") > 1) as (split, single):
            with split:
                self.store_partial_results(p)
            with single:
                self.store_results(p)

    def finish_rows(self, p: Value) -> None:
        """From now on `l` is the log-sum-exp, `m` its residual, and `alpha` the inverse of the denominator."""
        w = self.w
        with self.columns(p) as column:
            row = p * self.panel.rows + column
            finalize(self.code, self.variant, w.m + row, w.l + row, w.alpha + column)
            if self.variant.v_scales == "head":
                inverse = w.alpha + column
                inverse.store(inverse.vector() * head_scale(self.code, self.a, self.task, "v"))

    def store_partial_results(self, p: Value) -> None:
        code, a, w, rows = self.code, self.a, self.w, p * self.panel.rows
        before, partial_offsets = self.task.split * a.integer("seqlen_total"), w.q_offsets + rows  # free by now
        with code.loop(0, num_valid_rows(code, self.panel, self.task, p)) as r:
            at = before + w.lse_offsets[rows + r]
            a.pointer("partial_lse")[at] = w.l[rows + r]
            if self.variant.natural_units:
                a.pointer("partial_lse")[at + a.integer("splits") * a.integer("seqlen_total")] = w.m[rows + r]
            partial_offsets[r] = at * a.integer("head_dim_v")
        self.store_output(p, w.out, self.variant.real_dtype, a.pointer("partial_out"), partial_offsets)

    def store_results(self, p: Value) -> None:
        code, a, w, rows = self.code, self.a, self.w, p * self.panel.rows
        self.store_output(p, w.out, self.variant.dtype, a.pointer("out"), w.out_offsets + rows)
        num_valid = num_valid_rows(code, self.panel, self.task, p)
        store_rows(code, w.l + rows, a.pointer("lse"), w.lse_offsets + rows, num_valid)
        if self.variant.natural_units:
            residual = a.pointer("lse") + a.integer("residual")
            store_rows(code, w.m + rows, residual, w.lse_offsets + rows, num_valid)


def source(variant: Variant, target: Target, kernel_class: type[ForwardKernel] = ForwardKernel) -> Source:
    """The LLVM module of a forward kernel, `forward(block)`."""
    return kernel_source(kernel_class, FORWARD, variant, target)
