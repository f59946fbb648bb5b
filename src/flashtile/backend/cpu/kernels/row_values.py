"""The product with V with lanes that run over features, where rows of results are whole vectors: padding rows of a
panel cost nothing then, and rows are stored as they are.
"""

import functools
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ..variant import Variant
from ..workspace import CACHE_LINE
from .codegen import Code
from .formats import ITEM_SIZES, STORAGE_TYPES, load_vector, store_vector
from .forward import ForwardKernel
from .keys import KeyBlock
from .operands import ADDRESS, LONG, Pointer, Value
from .products import ACCUMULATOR_ROWS, Panel, accumulator_loop, declare_scores, row_numbers, strip_sizes, tiled_loop
from .softmax import normalize
from .tiles import num_valid_rows


def declare_row_values(code: Code, dtype: str, heights: tuple[int, ...], keys_ahead: int = 0) -> None:
    name = f"row_values_{dtype}_{heights}_{keys_ahead}"
    code.part(name, lambda code: emit_row_values(code, dtype, heights, keys_ahead))


def emit_row_values(code: Code, dtype: str, heights: tuple[int, ...], keys_ahead: int = 0) -> None:
    """`row_values_R_N(p, pitch, v, stride, count, out, width, alpha, last)`: `out[r] = alpha[r] out[r] + sum_j p[j, r]
    v[j]` for R rows and N vectors of features. `pitch` is the distance between keys in `p`. Values are prefetched
    `keys_ahead` keys ahead, or not at all.
    """
    for rows, strip in itertools.product(heights, strip_sizes(code)):
        kinds = (ADDRESS, LONG, ADDRESS, LONG, LONG, ADDRESS, LONG, ADDRESS, LONG)
        for args in code.part_function(f"row_values_{rows}_{strip}", *kinds):
            p, out, alpha = (code.pointer(args[n]) for n in (0, 5, 7))
            v, pitch, stride, count, width = (
                code.pointer(args[2], STORAGE_TYPES[dtype]),
                *(args[n] for n in (1, 3, 4, 6)),
            )
            numbers = row_numbers(code, rows, args[8])
            lanes = [n * code.lanes for n in range(strip)]
            total = [[code.variable(code.full()) for _ in lanes] for _ in range(rows)]
            p_rows = [p + r for r in numbers]
            with code.loop(0, count) as j:
                v_j, at = v + stride * j, j * pitch
                line = CACHE_LINE // ITEM_SIZES[dtype]
                for n in [n for n in lanes if code.lanes * 2 >= line or n % line == 0] if keys_ahead else ():
                    code.prefetch(v_j + stride * keys_ahead + n, level=2)
                vectors = [load_vector(code, v_j, n, dtype) for n in lanes]
                for p_r, sums in zip(p_rows, total, strict=True):
                    p_jr = code.splat(p_r[at])
                    for x, y in zip(vectors, sums, strict=True):
                        y.set(code.multiply_add(x, p_jr, y.get()))
            out_rows = [out + width * r for r in numbers]
            results = [
                [code.multiply_add(out_r.vector(n), alpha[r], y.get()) for n, y in zip(lanes, sums, strict=True)]
                for r, out_r, sums in zip(numbers, out_rows, total, strict=True)
            ]
            for out_r, sums in zip(out_rows, results, strict=True):
                for n, y in zip(lanes, sums, strict=True):
                    out_r.store(y, n)


def row_value_product(
    code: Code,
    loop: Callable[[Callable[[Value, int, Value], None]], None],
    p: Pointer,
    pitch: Value | int,
    v: KeyBlock,
    count: Value,
    out: Pointer,
    width: Value,
    alpha: Pointer,
) -> None:
    """`out [rows, width] = alpha out + sum_j p[j] v[j]`; `loop` is that over the microkernels of all rows."""

    def features(n: Value, strip: int) -> None:
        d = n * code.lanes

        def group(r: Value, rows: int, last: Value) -> None:
            args = (p + r, code.index(pitch), v.first + d, v.stride, count, out + r * width + d, width, alpha + r, last)
            code.call(f"row_values_{rows}_{strip}", *args)

        loop(group)

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

    @classmethod
    def declare_products(cls, code: Code, panel: Panel, variant: Variant) -> None:
        declare_scores(code, panel)
        declare_row_values(code, variant.real_dtype, ACCUMULATOR_ROWS)

    def output_place(self, p: Value) -> tuple[Value, Value]:
        width = self.a.integer("head_dim_v")
        return p * self.panel.rows * width, self.num_valid(p) * width

    def num_valid(self, p: Value) -> Value:
        return num_valid_rows(self.code, self.panel, self.task, p)

    def add_values(self, p: Value, weights: Pointer, v: KeyBlock, count: Value, sums: Pointer, alpha: Pointer) -> None:
        out, width = sums + self.output_place(p)[0], self.a.integer("head_dim_v")
        row_value_product(self.code, self.row_loop(p), weights, self.panel.rows, v, count, out, width, alpha)

    def row_loop(self, p: Value) -> Callable[[Callable[[Value, int, Value], None]], None]:
        """The loop over the microkernels of a panel's rows."""
        return functools.partial(accumulator_loop, self.code, self.num_valid(p))

    @contextmanager
    def accumulators(self, p: Value) -> Iterator[tuple[Value, Callable[[Pointer], Value]]]:
        first, width = self.output_place(p)[0], self.a.integer("head_dim_v")
        with self.code.loop(0, self.num_valid(p)) as r, self.code.loop(0, width, self.code.lanes) as d:
            yield first + r * width + d, lambda table: table[r]

    def store_output(self, p: Value, sums: Pointer, dtype: str, to: Pointer, row_offsets: Pointer) -> None:
        code, w, lse = self.code, self.w, self.w.l + p * self.panel.rows
        store_row_vectors(
            code,
            self.num_valid(p),
            sums + self.output_place(p)[0],
            self.a.integer("head_dim_v"),
            dtype,
            to,
            row_offsets,
            lambda r, x: normalize(code, x, w.alpha[r], lse[r]),
        )
