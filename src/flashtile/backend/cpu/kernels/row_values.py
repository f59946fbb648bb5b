"""The product with V with lanes that run over features, where rows of results are whole vectors: padding rows of a
panel cost nothing then, and rows are stored as they are.
"""

import itertools
from collections.abc import Callable

from ..variant import Variant
from .codegen import Code
from .formats import STORAGE_TYPES, load_vector, store_vector
from .forward import ForwardKernel
from .keys import KeyBlock
from .operands import ADDRESS, LONG, Pointer, Value
from .products import ACCUMULATOR_ROWS, Panel, emit_scores, strip_sizes, tiled_loop
from .softmax import normalize
from .sums import carry
from .tiles import num_valid_rows


def emit_row_values(code: Code, dtype: str, group_sizes: tuple[int, ...], keys_ahead: int = 0) -> None:
    """`row_values_R_N(p, pitch, v, stride, count, out, width, alpha)`: `out[r] = alpha[r] out[r] + sum_j p[j, r] v[j]`
    for R rows and N vectors of features. `pitch` is the distance between keys in `p`. Values are prefetched
    `keys_ahead` keys ahead, or not at all.
    """
    for rows, strip in itertools.product(group_sizes, strip_sizes(code)):
        kinds = (ADDRESS, LONG, ADDRESS, LONG, LONG, ADDRESS, LONG, ADDRESS)
        with code.function(f"row_values_{rows}_{strip}", *kinds) as args:
            p, out, alpha = (code.pointer(args[n]) for n in (0, 5, 7))
            v, pitch, stride, count, width = (
                code.pointer(args[2], STORAGE_TYPES[dtype]),
                *(args[n] for n in (1, 3, 4, 6)),
            )
            lanes = [n * code.lanes for n in range(strip)]
            total = [[code.variable(code.full()) for _ in lanes] for _ in range(rows)]
            with code.loop(0, count) as j:
                v_j = v + stride * j
                for n in lanes if keys_ahead else ():
                    code.prefetch(v_j + stride * keys_ahead + n, level=2)
                vectors = [load_vector(code, v_j, n, dtype) for n in lanes]
                for r in range(rows):
                    p_jr = code.splat(p[j * pitch + r])
                    for x, sum_of_row in zip(vectors, total[r], strict=True):
                        sum_of_row.set(code.multiply_add(x, p_jr, sum_of_row.get()))
            for r in range(rows):
                out_r = out + width * r
                for n, sum_of_row in zip(lanes, total[r], strict=True):
                    out_r.store(code.multiply_add(out_r.vector(n), alpha[r], sum_of_row.get()), n)


def row_value_product(
    code: Code,
    group_sizes: tuple[int, ...],
    num_rows: Value | int,
    p: Pointer,
    pitch: Value | int,
    v: KeyBlock,
    count: Value,
    out: Pointer,
    width: Value,
    alpha: Pointer,
) -> None:
    """`out [num_rows, width] = alpha out + sum_j p[j] v[j]`."""

    def features(n: Value, strip: int) -> None:
        d = n * code.lanes

        def group(r: Value, rows: int) -> None:
            args = (p + r, code.index(pitch), v.first + d, v.stride, count, out + r * width + d, width, alpha + r)
            code.call(f"row_values_{rows}_{strip}", *args)

        tiled_loop(code, code.index(num_rows), group, group_sizes)

    tiled_loop(code, width // code.lanes, features, strip_sizes(code))


def store_row_vectors(
    code: Code,
    num_rows: Value,
    source: Pointer,
    width: Value,
    dtype: str,
    to: Pointer,
    row_offsets: Pointer,
    change: Callable[[Value, Value], Value] = lambda r, x: x,
) -> None:
    """`to[row_offsets[r] + d] = change(r, source[r, d])`."""
    with code.loop(0, num_rows) as r:
        row, at = source + r * width, row_offsets[r]
        with code.loop(0, width, code.lanes) as d:
            store_vector(code, change(r, row.vector(d)), to, at + d, dtype)


class RowValuesKernel(ForwardKernel):
    """Emits the code of one task, whose accumulators are `[rows, Dv]`."""

    group_sizes = ACCUMULATOR_ROWS

    @staticmethod
    def emit_products(code: Code, panel: Panel, variant: Variant) -> None:
        emit_scores(code, panel)
        emit_row_values(code, variant.real_dtype, ACCUMULATOR_ROWS)

    def output_place(self, p: Value) -> tuple[Value, Value]:
        width = self.a.integer("head_dim_v")
        return p * self.panel.rows * width, self.num_valid(p) * width

    def accumulators(self, p: Value) -> Pointer:
        return self.w.out + self.output_place(p)[0]

    def num_valid(self, p: Value) -> Value:
        return num_valid_rows(self.code, self.panel, self.task, p)

    def value_product(self, p: Value, v: KeyBlock, count: Value) -> None:
        w, out, width = self.w, self.accumulators(p), self.a.integer("head_dim_v")
        args = (w.scores, self.panel.rows, v, count, out, width, w.alpha)
        row_value_product(self.code, self.group_sizes, self.num_valid(p), *args)

    def carry_output(self, p: Value, last: bool) -> None:
        code, w, width = self.code, self.w, self.a.integer("head_dim_v")
        first = p * self.panel.rows * width
        with code.loop(0, self.num_valid(p)) as r:
            factor = w.alpha[r]
            with code.loop(0, width, code.lanes) as d:
                carry(code, w.out + first, w.total_out + first, r * width + d, last, factor)

    def store_output(self, p: Value, dtype: str, to: Pointer, row_offsets: Pointer) -> None:
        code, w, lse = self.code, self.w, self.w.l + p * self.panel.rows
        store_row_vectors(
            code,
            self.num_valid(p),
            self.accumulators(p),
            self.a.integer("head_dim_v"),
            dtype,
            to,
            row_offsets,
            lambda r, x: normalize(code, x, w.alpha[r], lse[r]),
        )
