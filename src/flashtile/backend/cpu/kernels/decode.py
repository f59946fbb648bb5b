"""The decode variant of the forward kernel, for few query rows: it takes as long as reading K and V once.

Lanes run over features, since the rows would fill only a few of them. Queries are not transposed, keys and values are
converted from their own dtype in registers, and each vector that is read serves all rows. Where nothing changes the
scores of up to four rows, they are packed for the softmax; else all between the two products is inherited from
`forward`.
"""

import math
from collections.abc import Callable

from ..variant import Variant
from ..workspace import BLOCK_N, CACHE_LINE
from .codegen import Code
from .formats import ITEM_SIZES, STORAGE_TYPES, load_vector, sum_lanes
from .forward import BlockKind
from .keys import KeyBlock, load_keys
from .operands import ADDRESS, INT, LONG, Pointer, Value
from .products import Panel, tiled_loop
from .row_values import RowValuesKernel, declare_row_values, row_value_product
from .softmax import exponentiate
from .tiles import copy_rows, num_valid_rows

ROW_GROUPS = (4, 2, 1)  # query rows that share each vector of K or V
# K and V are fetched into the second-level cache: into the first one they arrive at two thirds of the rate.
KEYS_AHEAD = 32
# int8 takes few instructions to convert, so it is read fastest: 5 to 12% less time than with 32 (EPYC, no groups).
INT8_AHEAD = 128


def row_group_sizes(code: Code) -> tuple[int, ...]:
    return tuple(n for n in ROW_GROUPS if n <= code.lanes)


def keys_ahead(dtype: str) -> int:
    return INT8_AHEAD if dtype == "int8" else KEYS_AHEAD


def over_keys(code: Code, x: Value, rows: int, combine: Callable[[Value, Value], Value]) -> Value:
    """Combine the lanes of each row, n and `n + rows` and so on; all of them have the result."""
    distance = rows
    while distance < code.lanes:
        x = combine(x, code.shuffle(x, x, [lane ^ distance for lane in range(code.lanes)]))
        distance *= 2
    return x


def emit_scores(code: Code, dtype: str) -> None:
    """`decode_scores_R(k, stride, count, q, depth, s, pitch)`: `s[j, r] = sum_d k[j, d] q[r, d]` for R rows, as many
    keys at a time as fill a vector of scores. Past the end it repeats the last key. `pitch`, the distance between keys
    in `s`, is a panel's, or R: packed scores are stored as whole vectors.
    """
    for rows in row_group_sizes(code):
        for args in code.part_function(f"decode_scores_{rows}", ADDRESS, LONG, LONG, ADDRESS, LONG, ADDRESS, LONG):
            k, q, s = code.pointer(args[0], STORAGE_TYPES[dtype]), code.pointer(args[3]), code.pointer(args[5])
            stride, count, depth, pitch = args[1], args[2], args[4], args[6]
            keys_per_vector = code.lanes // rows
            with code.loop(0, count, keys_per_vector) as j:
                keys = [k + stride * code.minimum(j + n, count - 1) for n in range(keys_per_vector)]
                total = [code.variable(code.full()) for _ in range(code.lanes)]
                whole_lines = ITEM_SIZES[dtype] * code.lanes * 2 < CACHE_LINE  # a vector is a small part of one
                with code.loop(0, depth if whole_lines else 0, CACHE_LINE) as d:
                    for key in keys:
                        code.prefetch(key + stride * keys_ahead(dtype) + d, level=2)
                with code.loop(0, depth, code.lanes) as d:
                    q_d = [(q + depth * r).vector(d) for r in range(rows)]
                    for n, key in enumerate(keys):
                        if not whole_lines:
                            code.prefetch(key + stride * keys_ahead(dtype) + d, level=2)
                        k_d = load_vector(code, key, d, dtype)
                        for r in range(rows):
                            x = total[n * rows + r]
                            x.set(code.multiply_add(q_d[r], k_d, x.get()))
                sums = sum_lanes(code, [x.get() for x in total])
                with code.if_else(pitch.equals(rows)) as (packed, apart):
                    with packed:
                        s.store(sums, j * rows)
                    with apart:
                        for n in range(keys_per_vector):
                            part = code.shuffle(sums, sums, range(n * rows, (n + 1) * rows))
                            s.store(part, (j + n) * pitch)


class DecodeKernel(RowValuesKernel):
    """Emits the code of one task: a single panel, whose head dimensions are whole vectors."""

    @classmethod
    def declare_products(cls, code: Code, panel: Panel, variant: Variant) -> None:
        dtype = variant.key_dtype
        code.part(f"decode_scores_{dtype}", lambda code: emit_scores(code, dtype))
        declare_row_values(code, dtype, row_group_sizes(code), keys_ahead(dtype))

    def row_loop(self, p: Value) -> Callable[[Callable[[Value, int, Value], None]], None]:
        code, num_valid = self.code, self.num_valid(p)
        return lambda group: tiled_loop(
            code, num_valid, lambda r, rows: group(r, rows, code.index(rows - 1)), row_group_sizes(code)
        )

    def load_queries(self, p: Value) -> None:
        code, a, w, depth, rows = self.code, self.a, self.w, self.a.integer("head_dim"), self.num_valid(p)
        copy_rows(code, a.pointer("q"), w.q_offsets, rows, depth, self.variant.dtype, w.q, depth)
        factor = self.query_factor()
        with code.loop(0, depth * rows, code.lanes) as n:
            w.q.store(w.q.vector(n) * factor, n)

    def load_keys(self, side: str, first: Value, last: Value) -> KeyBlock:
        dtype = self.variant.key_dtype
        return load_keys(self.code, self.a, self.variant, self.task, side, first, last, getattr(self.w, side), dtype)

    def process_block(self, p: Value, first: Value, count: Value, kind: BlockKind, k: KeyBlock, v: KeyBlock) -> None:
        """Process a block. Scores of a few rows are packed where nothing changes them: one row fills all lanes, which
        makes its softmax as many times shorter.
        """
        code, variant = self.code, self.variant
        if variant.has_features or variant.dropout:
            super().process_block(p, first, count, kind, k, v)
            return
        num_valid = num_valid_rows(code, self.panel, self.task, p)
        with code.if_else(kind.edge | (num_valid > max(row_group_sizes(code)))) as (apart, packed):
            with apart:
                super().process_block(p, first, count, kind, k, v)
            with packed:
                for rows in row_group_sizes(code):
                    with code.if_then((num_valid <= rows) & (num_valid > rows // 2)):
                        self.call("process_packed", p, first, count, *k, *v, rows=rows)

    def process_packed(
        self,
        p: Value,
        first: Value,
        count: Value,
        k: Pointer,
        k_stride: Value,
        v: Pointer,
        v_stride: Value,
        rows: int,
    ) -> None:
        """Process a block with scores `[count, rows]`. Lane n belongs to row `n % rows`, in `m` and `alpha` too."""
        code, w, panel = self.code, self.w, self.panel
        m, l = w.m + p * panel.rows, w.l + p * panel.rows  # noqa: E741
        self.scores_of_rows(rows, code.index(0), count, KeyBlock(k, k_stride), code.index(rows))
        num_vectors = (count * rows + (code.lanes - 1)) // code.lanes
        if self.variant.k_scales == "key":
            self.scale_packed(w.k_scales + first % BLOCK_N, num_vectors, rows)
        last = (num_vectors - 1) * code.lanes
        valid = code.lane_indices() < code.convert(count * rows - last, INT)
        w.scores.store(code.select(valid, w.scores.vector(last), -math.inf), last)
        largest = code.variable(w.scores.vector(0))
        with code.loop(1, num_vectors) as n:
            largest.set(code.maximum(w.scores.vector(n * code.lanes), largest.get()))
        largest.set(over_keys(code, largest.get(), rows, code.maximum))
        old, old_l = (code.shuffle(x, x, [n % rows for n in range(code.lanes)]) for x in (m.vector(0), l.vector(0)))
        m.store(old)
        w.new_m.store(code.maximum(largest.get(), old))
        total = exponentiate(code, self.variant, w.scores, code.lanes, num_vectors, m, w.new_m, w.alpha)
        total = over_keys(code, total, rows, lambda x, y: x + y)
        l.store(code.multiply_add(old_l, w.alpha.vector(0), total))
        if self.variant.v_scales == "key":
            self.scale_packed(w.v_scales + first % BLOCK_N, num_vectors, rows)
        values, width = KeyBlock(v, v_stride), self.a.integer("head_dim_v")

        def all_rows(group: Callable[[Value, int, Value], None]) -> None:
            group(code.index(0), rows, code.index(rows - 1))

        row_value_product(code, all_rows, w.scores, rows, values, count, w.out, width, w.alpha)

    def scale_packed(self, scales: Pointer, num_vectors: Value, rows: int) -> None:
        """Multiply packed scores or probabilities by the scales of their keys."""
        code, w = self.code, self.w
        with code.loop(0, num_vectors) as n:
            at, of_keys = w.scores + n * code.lanes, scales.vector(n * (code.lanes // rows))
            at.store(at.vector() * code.shuffle(of_keys, of_keys, [lane // rows for lane in range(code.lanes)]))

    def scores_of_rows(self, rows: int, first: Value, count: Value, k: KeyBlock, pitch: Value) -> None:
        """The scores of `rows` rows, a size of `row_group_sizes`, from `first` on."""
        w, depth = self.w, self.a.integer("head_dim")
        q, s = w.q + first * depth, w.scores + first
        self.code.call(f"decode_scores_{rows}", k.first, k.stride, count, q, depth, s, pitch)

    def score_product(self, p: Value, k: KeyBlock, count: Value) -> None:
        code, w, panel = self.code, self.w, self.panel
        pitch = code.index(panel.rows)
        num_valid = num_valid_rows(code, panel, self.task, p)
        tiled_loop(
            code, num_valid, lambda r, rows: self.scores_of_rows(rows, r, count, k, pitch), row_group_sizes(code)
        )
        largest = code.variable(w.new_m.vector())
        with code.loop(0, count) as j:
            largest.set(code.maximum(w.scores.vector(j * panel.rows), largest.get()))
        w.new_m.store(largest.get())
