"""FlashAttention-2's forward pass (Dao, "FlashAttention-2", 2023, algorithm 1), for CPUs.

A task has a few panels of query rows and loops over the key blocks. Each panel that sees any key of a block computes
its scores, updates the online softmax and adds the values, while the block is in the first-level cache.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

from ....expression.blocks import HIDDEN
from ..targets import Target
from ..variant import FORWARD, Arguments, Variant
from ..workspace import BLOCK_N, Workspace, forward_layout
from .blocks import narrow_bounds, panels_see, visible_keys
from .codegen import Code
from .combine import combine_splits
from .kernel import Kernel, store_rows, task_loop, thread_workspace
from .keys import KeyBlock, load_keys
from .masking import in_mask, in_window, mask_fill
from .operands import ADDRESS, Pointer, Value
from .products import Panel, emit_scores, emit_values, score_product, value_product
from .rng import apply_dropout
from .scores import final_score
from .softmax import finalize, initialize, normalize, rescale, update
from .sums import carry, carry_due, needs_totals
from .tiles import fill_row_tables, find_task, load_transposed, num_valid_rows, rows_in_use, store_transposed


class BlockKind(NamedTuple):
    """Whether a block needs the test of the window, and its state by the masks."""

    edge: Value
    state: Value


class ForwardKernel(Kernel):
    """Emits the code of one task."""

    layout = staticmethod(forward_layout)

    @staticmethod
    def emit_products(code: Code, panel: Panel, variant: Variant) -> None:
        emit_scores(code, panel)
        emit_values(code, panel)

    @staticmethod
    def thread_state(code: Code) -> AbstractContextManager[None]:
        """Emit code before and after a thread's tasks."""
        return nullcontext()

    def run(self) -> None:
        code, w, rows = self.code, self.w, self.panel.rows
        num_left = (self.task.num_rows - self.task.first_row + (rows - 1)) // rows
        panels = code.minimum(self.a.integer("panels"), num_left)
        lo, hi = code.variable(code.index(2**40)), code.variable(code.index(0))
        with code.loop(0, panels) as p:
            self.prologue(p)
            lo.set(code.minimum(lo.get(), w.bounds[p * 4]))
            hi.set(code.maximum(hi.get(), w.bounds[p * 4 + 3]))
        many_keys = needs_totals(lo.get(), hi.get())
        with code.if_then(many_keys), code.loop(0, panels) as p:
            self.clear_totals(p)
        with code.loop(lo.get() // BLOCK_N * BLOCK_N, hi.get(), BLOCK_N) as block:
            first, last = code.maximum(block, lo.get()), code.minimum(block + BLOCK_N, hi.get())
            with code.if_then(first < last), code.if_then(panels_see(self, panels, first)):
                k, v = (self.load_keys(side, first, last) for side in ("k", "v"))
                with code.loop(0, panels) as p:
                    self.visit_block(p, first, last, k, v)
            with code.if_then(many_keys & carry_due(block)), code.loop(0, panels) as p:
                self.carry(p, last=False)
        with code.if_then(many_keys), code.loop(0, panels) as p:
            self.carry(p, last=True)
        with code.loop(0, panels) as p:
            self.epilogue(p)
        with code.if_then(self.a.integer("splits") > 1):
            combine_splits(self, panels)

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
        code, w, panel = self.code, self.w, self.panel
        rows = p * panel.rows
        panel.store(panel.load(w.m + rows), w.total_m + rows)
        panel.store([code.full()] * panel.vectors, w.total_l + rows)
        start, size = self.output_place(p)
        with code.loop(0, size, code.lanes) as n:
            (w.total_out + start).store(code.full(), n)

    def carry(self, p: Value, last: bool) -> None:
        """Carry recent sums to totals, rescaled to the current maximum; at the end, add totals to the recent sums."""
        code, w, panel = self.code, self.w, self.panel
        rows = p * panel.rows
        m, total_m = panel.load(w.m + rows), panel.load(w.total_m + rows)
        panel.store([rescale(code, x, y, self.variant.to_exp2) for x, y in zip(total_m, m, strict=True)], w.alpha)
        panel.store(m, w.total_m + rows)
        for n in range(0, panel.rows, code.lanes):
            carry(code, w.l + rows, w.total_l + rows, code.index(n), last, w.alpha.vector(n))
        self.carry_output(p, last)

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
            self.code, self.panel, a.pointer("q"), w.q_offsets + rows, in_use, depth, one, dtype, q, a.real("factor")
        )

    def load_keys(self, side: str, first: Value, last: Value) -> KeyBlock:
        return load_keys(self.code, self.a, self.variant, self.task, side, first, last, getattr(self.w, side))

    def first_key(self, lowest: Value) -> Value:
        """The first key to process in a block whose visible ones begin at `lowest`: those before it are masked."""
        return lowest

    def score_product(self, p: Value, k: KeyBlock, count: Value) -> None:
        """Compute the block's scores, and their maximum in `new_m`."""
        w, depth = self.w, self.a.integer("head_dim")
        q = w.q + p * depth * self.panel.rows
        score_product(self.code, self.panel, k.first, k.stride, count, q, depth, w.scores, w.new_m)

    def value_product(self, p: Value, v: KeyBlock, count: Value) -> None:
        """Scale the accumulators by `alpha`, and add the block's probabilities times its values."""
        w, width = self.w, self.a.integer("head_dim_v")
        out = w.out + self.output_place(p)[0]
        value_product(self.code, self.panel, w.scores, v.first, v.stride, count, out, width, w.alpha)

    def carry_output(self, p: Value, last: bool) -> None:
        code, w, panel, width = self.code, self.w, self.panel, self.a.integer("head_dim_v")
        first = self.output_place(p)[0]
        with code.loop(0, width) as d:
            for n in range(0, panel.rows, code.lanes):
                at = d * panel.rows + n
                carry(code, w.out + first, w.total_out + first, at, last, w.alpha.vector(n))

    def store_output(self, p: Value, dtype: str, to: Pointer, row_offsets: Pointer) -> None:
        code, w, panel, width = self.code, self.w, self.panel, self.a.integer("head_dim_v")
        out, lse = w.out + self.output_place(p)[0], panel.load(w.l + p * panel.rows)
        inverse = panel.load(w.alpha)
        with code.loop(0, width) as d:
            terms = zip(panel.load(out, d), inverse, lse, strict=True)
            panel.store([normalize(code, *x) for x in terms], out, d)
        store_transposed(code, panel, out, width, dtype, to, row_offsets, num_valid_rows(code, panel, self.task, p))

    # Shared with the decode variant -----------------------------------------------------------------------------------

    def visit_block(self, p: Value, block_first: Value, block_last: Value, k: KeyBlock, v: KeyBlock) -> None:
        """Process the keys of a block that any row of a panel sees."""
        code, w = self.code, self.w
        lo, full_lo, full_hi, hi = (w.bounds[p * 4 + n] for n in range(4))
        visible = visible_keys(self, p, block_first, block_last)
        lowest, last = code.maximum(visible.first, lo), code.minimum(visible.last, hi)
        first = self.first_key(lowest)
        count, skipped = last - first, first - block_first
        with code.if_then((lowest < last) & (visible.state > HIDDEN)):
            state = self.load_mask_and_bias(p, first, count, visible.state)
            with code.if_then(state > HIDDEN):
                k = k._replace(first=k.first + k.stride * skipped)
                v = v._replace(first=v.first + v.stride * skipped)
                edge = (first < full_lo) | (last > full_hi)
                kind = BlockKind(edge, state)
                self.with_narrow_panels(p, lambda kernel: kernel.process_block(p, first, count, kind, k, v))

    def process_block(self, p: Value, first: Value, count: Value, kind: BlockKind, k: KeyBlock, v: KeyBlock) -> None:
        code, a, w, panel, variant = self.code, self.a, self.w, self.panel, self.variant
        m, l = w.m + p * panel.rows, w.l + p * panel.rows  # noqa: E741
        panel.store(panel.load(m), w.new_m)
        self.score_product(p, k, count)
        self.with_and_without_mask(kind.state, lambda kernel: kernel.finish_scores(p, first, count, m, kind.edge))
        update(code, variant, panel, w.scores, count, w, m, l)
        if variant.dropout:
            rows = p * panel.rows
            apply_dropout(code, a, panel, w.scores, first, count, w.position + rows, w.sequence_head + rows)
        self.value_product(p, v, count)

    def finish_scores(self, p: Value, first: Value, count: Value, m: Pointer, edge: Value) -> None:
        if self.variant.modifies_scores:
            self.with_and_without_window(edge, lambda edge: self.modify_scores(p, first, count, m, edge))
        else:
            with self.code.if_then(edge):
                self.modify_scores(p, first, count, m, edge=True)

    def modify_scores(self, p: Value, first: Value, count: Value, m: Pointer, edge: bool) -> None:
        """Apply the score features and masks to a block's scores, in place, and recompute their maximum."""
        code, a, w, panel, variant = self.code, self.a, self.w, self.panel, self.variant
        rows = p * panel.rows
        tables = self.score_tables(p)
        low, high = w.low + rows, w.high + rows
        largest = [code.variable(x) for x in panel.load(m)]
        with code.loop(0, count) as j:
            if tables.functions is not None:
                tables.functions.at_key(self.key_position(first + j))
            final = []
            for n, (s, top) in enumerate(zip(panel.load(w.scores, j), largest, strict=True)):
                row = n * code.lanes
                s, _, _, visible = final_score(code, a, variant, tables, panel, s, row, first + j, j)
                if visible is not None:
                    s = mask_fill(code, s, visible)
                if edge:
                    s = mask_fill(code, s, in_window(code, low, high, row, first + j))
                if variant.mask:
                    s = mask_fill(code, s, in_mask(w.mask + j * panel.rows, row))
                top.set(code.maximum(s, top.get()))
                final.append(s)
            panel.store(final, w.scores, j)
        panel.store([x.get() for x in largest], w.new_m)

    def epilogue(self, p: Value) -> None:
        """Normalize and store a panel's output and log-sum-exp. A split stores its own to the partial results."""
        code, a, w, panel, task = self.code, self.a, self.w, self.panel, self.task
        rows = p * panel.rows
        l, lse_offsets, out_offsets = w.l + rows, w.lse_offsets + rows, w.out_offsets + rows  # noqa: E741
        num_valid = num_valid_rows(code, panel, task, p)
        residual = w.m + rows  # once the row is finished
        finalize(code, self.variant, panel, w.m + rows, l, w.alpha)
        with code.if_else(a.integer("splits") > 1) as (split, single):
            with split:
                before, partial_offsets = task.split * a.integer("seqlen_total"), w.q_offsets + rows  # free by now
                with code.loop(0, num_valid) as r:
                    at = before + lse_offsets[r]
                    a.pointer("partial_lse")[at] = l[r]
                    if self.variant.natural_units:
                        a.pointer("partial_lse")[at + a.integer("splits") * a.integer("seqlen_total")] = residual[r]
                    partial_offsets[r] = at * a.integer("head_dim_v")
                self.store_output(p, self.variant.real_dtype, a.pointer("partial_out"), partial_offsets)
            with single:
                self.store_output(p, self.variant.dtype, a.pointer("out"), out_offsets)
                store_rows(code, l, a.pointer("lse"), lse_offsets, num_valid)
                if self.variant.natural_units:
                    store_rows(code, residual, a.pointer("lse") + a.integer("residual"), lse_offsets, num_valid)


def source(variant: Variant, target: Target, kernel_class: type[ForwardKernel] = ForwardKernel) -> str:
    """The LLVM module of a forward kernel, `forward(block)`; any number of threads may run it at once."""
    code = Code(target, variant.real_type)
    panel = Panel(code, variant.vectors)
    kernel_class.emit_products(code, panel, variant)
    with code.function(FORWARD, ADDRESS, public=True) as (block,):
        a = Arguments(code, block)
        sizes = (a.integer(name) for name in ("panels", "head_dim", "head_dim_v"))
        w = Workspace(thread_workspace(code, a), kernel_class.layout(code.real_type, panel.rows, *sizes))
        with kernel_class.thread_state(code), task_loop(code, a) as task_index:
            kernel_class(code, a, variant, panel, w, find_task(code, a, panel, task_index)).run()
    return str(code.module)
