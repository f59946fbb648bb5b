"""FlashAttention-2's forward pass (Dao, "FlashAttention-2", 2023, algorithm 1), for CPUs.

A task is a few panels of query rows. Blocks of keys stream by; for each, every panel that sees any of it makes its
scores, takes them into the rows' softmax and adds the values, while the block is in the nearest cache.
"""

from ..targets import Target
from ..variant import FORWARD, Arguments, Variant
from ..workspace import BLOCK, Workspace, forward_pieces
from .codegen import Code
from .masking import hidden, in_mask, in_window
from .operands import ADDRESS, Pointer, Value
from .passes import Pass, own_memory, store_rows, tasks
from .products import Panel, emit_scores, emit_values, scores, values
from .rng import drop
from .scores import modified
from .softmax import finish, normalized, probabilities, rescale, start
from .sums import carry, many_blocks, time_to_carry
from .tiles import Keys, fill_rows, locate, read_keys, rows_left, turn_in, turn_out


class Forward(Pass):
    """The emission of one task."""

    @staticmethod
    def emit_products(code: Code, panel: Panel, variant: Variant) -> None:
        emit_scores(code, panel)
        emit_values(code, panel)

    def run(self) -> None:
        code, w, rows = self.code, self.w, self.panel.rows
        left = (self.task.num_rows - self.task.first_row + (rows - 1)) // rows
        panels = code.minimum(self.a.number("panels"), left)
        lo, hi = code.variable(code.whole(2**40)), code.variable(code.whole(0))
        with code.loop(0, panels) as p:
            self.begin(p)
            lo.set(code.minimum(lo.get(), w.bounds[p * 4]))
            hi.set(code.maximum(hi.get(), w.bounds[p * 4 + 3]))
        long = many_blocks(lo.get(), hi.get())
        with code.when(long), code.loop(0, panels) as p:
            self.begin_totals(p)
        with code.loop(lo.get() // BLOCK * BLOCK, hi.get(), BLOCK) as block:
            first, last = code.maximum(block, lo.get()), code.minimum(block + BLOCK, hi.get())
            with code.when(first < last):
                k, v = (self.read(side, first, last) for side in ("k", "v"))
                with code.loop(0, panels) as p:
                    self.take(p, first, last, k, v)
            with code.when(long & time_to_carry(block)), code.loop(0, panels) as p:
                self.carry(p, last=False)
        with code.when(long), code.loop(0, panels) as p:
            self.carry(p, last=True)
        with code.loop(0, panels) as p:
            self.end(p)

    def begin(self, p: Value) -> None:
        """A panel's tables, its queries as lanes, and an empty state."""
        code, a, w, panel = self.code, self.a, self.w, self.panel
        fill_rows(code, a, self.variant, panel, self.task, w, p)
        start(code, a, self.variant, panel, self.task, w, p)
        width = a.number("head_dim_v")
        out = w.out + p * width * panel.rows
        with code.loop(0, width * panel.rows, code.lanes) as n:
            out.store(code.reals(), n)
        self.load_queries(p)

    def begin_totals(self, p: Value) -> None:
        code, w, panel = self.code, self.w, self.panel
        rows, width = p * panel.rows, self.a.number("head_dim_v")
        panel.store(panel.load(w.m + rows), w.total_m + rows)
        panel.store([code.reals()] * panel.vectors, w.total_l + rows)
        with code.loop(0, width * panel.rows, code.lanes) as n:
            (w.total_out + width * rows).store(code.reals(), n)

    def carry(self, p: Value, last: bool) -> None:
        """Recent sums to the totals, which follow the maximum; at the last, totals to the recent sums."""
        code, w, panel = self.code, self.w, self.panel
        rows = p * panel.rows
        m, total_m = panel.load(w.m + rows), panel.load(w.total_m + rows)
        panel.store([rescale(code, x, y, self.variant.to_exp2) for x, y in zip(total_m, m, strict=True)], w.alpha)
        panel.store(m, w.total_m + rows)
        for n in range(0, panel.rows, code.lanes):
            carry(code, w.l + rows, w.total_l + rows, code.whole(n), last, w.alpha.vector(n))
        self.carry_output(p, last)

    # What decoding does in another way: queries and outputs as lanes, keys and values as reals.

    def load_queries(self, p: Value) -> None:
        a, w, depth, rows = self.a, self.w, self.a.number("head_dim"), p * self.panel.rows
        q, one = w.q + rows * depth, self.code.whole(1)
        dtype = self.variant.dtype
        turn_in(self.code, self.panel, a.pointer("q"), w.q_at + rows, depth, one, dtype, q, a.real("factor"))

    def read(self, side: str, first: Value, last: Value) -> Keys:
        return read_keys(self.code, self.a, self.variant, self.task, side, first, last, getattr(self.w, side))

    def score_product(self, p: Value, k: Keys, count: Value) -> None:
        """The block's scores, and their maximum in `new_m`."""
        w, depth = self.w, self.a.number("head_dim")
        q = w.q + p * depth * self.panel.rows
        scores(self.code, self.panel, k.first, k.stride, count, q, depth, w.scores, w.new_m)

    def value_product(self, p: Value, v: Keys, count: Value) -> None:
        """The accumulators, scaled by `alpha`, and the block's probabilities times its values."""
        w, width = self.w, self.a.number("head_dim_v")
        out = w.out + p * width * self.panel.rows
        values(self.code, self.panel, w.scores, v.first, v.stride, count, out, width, w.alpha)

    def carry_output(self, p: Value, last: bool) -> None:
        code, w, panel, width = self.code, self.w, self.panel, self.a.number("head_dim_v")
        first = p * width * panel.rows
        with code.loop(0, width) as d:
            for n in range(0, panel.rows, code.lanes):
                at = d * panel.rows + n
                carry(code, w.out + first, w.total_out + first, at, last, w.alpha.vector(n))

    def store_output(self, p: Value, dtype: str, to: Pointer, rows_at: Pointer) -> None:
        code, w, panel, width = self.code, self.w, self.panel, self.a.number("head_dim_v")
        out, lse = w.out + p * width * panel.rows, panel.load(w.l + p * panel.rows)
        inverse = panel.load(w.alpha)
        with code.loop(0, width) as d:
            found = zip(panel.load(out, d), inverse, lse, strict=True)
            panel.store([normalized(code, *x) for x in found], out, d)
        turn_out(code, panel, out, width, dtype, to, rows_at, rows_left(code, panel, self.task, p))

    # What it does in the same way.

    def take(self, p: Value, block_first: Value, block_last: Value, k: Keys, v: Keys) -> None:
        """The keys of a block that a panel sees."""
        code, w = self.code, self.w
        lo, full_lo, full_hi, hi = (w.bounds[p * 4 + n] for n in range(4))
        first, last = code.maximum(block_first, lo), code.minimum(block_last, hi)
        count, skipped = last - first, first - block_first
        with code.when(count > 0):
            show = self.load_pairs(p, first, count)
            with code.when(show):
                k = k._replace(first=k.first + k.stride * skipped)
                v = v._replace(first=v.first + v.stride * skipped)
                self.attend(p, first, count, (first < full_lo) | (last > full_hi), k, v)

    def attend(self, p: Value, first: Value, count: Value, edge: Value, k: Keys, v: Keys) -> None:
        code, a, w, panel, variant = self.code, self.a, self.w, self.panel, self.variant
        m, l = w.m + p * panel.rows, w.l + p * panel.rows  # noqa: E741
        panel.store(panel.load(m), w.new_m)
        self.score_product(p, k, count)
        if variant.modifies:
            with code.either(edge) as (then, otherwise):
                with then:
                    self.modify(p, first, count, m, edge=True)
                with otherwise:
                    self.modify(p, first, count, m, edge=False)
        else:
            with code.when(edge):
                self.modify(p, first, count, m, edge=True)
        probabilities(code, variant, panel, w.scores, count, w, m, l)
        if variant.dropout:
            rows = p * panel.rows
            drop(code, a, panel, w.scores, first, count, w.position + rows, w.sequence_head + rows)
        self.value_product(p, v, count)

    def modify(self, p: Value, first: Value, count: Value, m: Pointer, edge: bool) -> None:
        """Products to final scores, in place, and their maximum."""
        code, a, w, panel, variant = self.code, self.a, self.w, self.panel, self.variant
        rows = p * panel.rows
        tables = self.score_tables(p)
        low, high = w.low + rows, w.high + rows
        largest = [code.variable(x) for x in panel.load(m)]
        with code.loop(0, count) as j:
            found = []
            for n, (s, top) in enumerate(zip(panel.load(w.scores, j), largest, strict=True)):
                row = n * code.lanes
                s = modified(code, a, variant, tables, panel, s, row, first + j, j).score
                if edge:
                    s = hidden(code, s, in_window(code, low, high, row, first + j))
                if variant.mask:
                    s = hidden(code, s, in_mask(w.mask + j * panel.rows, row))
                top.set(code.maximum(s, top.get()))
                found.append(s)
            panel.store(found, w.scores, j)
        panel.store([x.get() for x in largest], w.new_m)

    def end(self, p: Value) -> None:
        """A panel's output and log-sum-exp, turned back into rows."""
        code, a, w, panel, task = self.code, self.a, self.w, self.panel, self.task
        rows = p * panel.rows
        l, lse_at, out_at = w.l + rows, w.lse_at + rows, w.out_at + rows  # noqa: E741
        there = rows_left(code, panel, task, p)
        finish(code, self.variant, panel, w.m + rows, l, w.alpha)
        with code.either(a.number("splits") > 1) as (parts, whole):
            with parts:
                before = task.split * a.number("seqlen_total")
                with code.loop(0, there) as r:
                    lse_at[r] = before + lse_at[r]
                    out_at[r] = lse_at[r] * a.number("head_dim_v")
                self.store_output(p, self.variant.real_name, a.pointer("partial_out"), out_at)
                store_rows(code, l, a.pointer("partial_lse"), lse_at, there)
            with whole:
                self.store_output(p, self.variant.dtype, a.pointer("out"), out_at)
                store_rows(code, l, a.pointer("lse"), lse_at, there)


def source(variant: Variant, target: Target, emission: type[Forward] = Forward) -> str:
    """The kernel's module. `attend(block)` works on tasks until none is left; any number of threads may call it."""
    code = Code(target, variant.real)
    panel = Panel(code, variant.vectors)
    emission.emit_products(code, panel, variant)
    with code.function(FORWARD, ADDRESS, public=True) as (block,):
        a = Arguments(code, block)
        sizes = (a.number(name) for name in ("panels", "head_dim", "head_dim_v"))
        w = Workspace(own_memory(code, a), forward_pieces(code.real, panel.rows, *sizes))
        with tasks(code, a) as number:
            emission(code, a, variant, panel, w, locate(code, a, panel, number)).run()
    return str(code.module)
