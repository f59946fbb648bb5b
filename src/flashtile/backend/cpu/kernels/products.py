"""Matrix products, as microkernels whose accumulators stay in registers.

Lanes run over query rows; a panel is a few vectors of them. Each step multiplies the panel's vectors by up to six
elements of the other matrix, each broadcast to all lanes: keys in the product with K, features in the product with V.
"""

import itertools
from collections.abc import Callable

from ..workspace import CACHE_LINE
from .codegen import Code
from .operands import ADDRESS, BIT, LONG, SIZES, Pointer, Value

# Terms that a score's sum adds one by one. Where all terms are alike, the roundings of a longer sum point one way, and
# those of forward and backward, whose orders differ, do not cancel.
FEATURES_OF_A_SUM = 96
# Heights of the microkernels. The lower one does one row twice where it is alone.
ACCUMULATOR_ROWS = (6, 2)


class Panel:
    """A group of query rows as `vectors` vectors: one lane for each row. The first vectors of a panel are a narrower
    one, with as many `rows` in memory.
    """

    def __init__(self, code: Code, vectors: int, rows: int | None = None):
        self.code, self.vectors, self.rows = code, vectors, vectors * code.lanes if rows is None else rows

    def widths(self) -> "list[Panel]":
        """The panels that kernels have code for, narrowest first."""
        return [Panel(self.code, n, self.rows) for n in (1, 2) if n < self.vectors] + [self]

    def load(self, p: Pointer, i: Value | int = 0) -> list[Value]:
        """Load the vectors of panel `i` of an array of panels."""
        at = p + self.code.index(i) * self.rows
        return [at.vector(n * self.code.lanes) for n in range(self.vectors)]

    def store(self, x: list[Value], p: Pointer, i: Value | int = 0) -> None:
        at = p + self.code.index(i) * self.rows
        for n, vector in enumerate(x):
            at.store(vector, n * self.code.lanes)


def accumulator_loop(code: Code, count: Value, body: Callable[[Value, int, Value], None]) -> None:
    """Emit `body(start, rows, last)` for microkernels that have `count` rows together. The last row of each is number
    `last`, smaller than `rows - 1` where the lower one does a row twice.
    """
    high, low = ACCUMULATOR_ROWS
    full = count // high * high
    with code.loop(0, full, high) as start:
        body(start, high, code.index(high - 1))
    with code.loop(full, count, low) as start:
        body(start, low, code.minimum(count - start, low) - 1)


def row_numbers(code: Code, rows: int, last: Value) -> list[Value]:
    """The rows of a microkernel, which loads the sums of all of them before it stores any."""
    return [code.index(n) for n in range(rows - 1)] + [last if rows in ACCUMULATOR_ROWS[1:] else code.index(rows - 1)]


def declare_scores(code: Code, panel: Panel) -> None:
    code.part(f"scores_{panel.vectors}", lambda code: emit_scores(code, Panel(code, panel.vectors)))


def declare_added_scores(code: Code, panel: Panel) -> None:
    code.part(f"added_scores_{panel.vectors}", lambda code: emit_scores(code, Panel(code, panel.vectors), adds=True))


def emit_scores(code: Code, widest: Panel, adds: bool = False) -> None:
    """`scores_R_V(k, stride, q, s, depth, m, last)`: `s[j] = sum_d k[j, d] q[d]` for R keys and V vectors of rows, and
    `m` grows to their maximum. `added_scores_R_V` adds to `s` instead; its `m` is not used.
    """
    for panel, rows in itertools.product(widest.widths(), ACCUMULATOR_ROWS):
        name = f"{'added_' if adds else ''}scores_{rows}_{panel.vectors}"
        for args in code.part_function(name, ADDRESS, LONG, ADDRESS, ADDRESS, LONG, ADDRESS, LONG):
            k, q, s, m = (code.pointer(args[n]) for n in (0, 2, 3, 5))
            stride, depth = args[1], args[4]
            numbers = row_numbers(code, rows, args[6])
            keys, scores = [k + stride * n for n in numbers], [s + n * panel.rows for n in numbers]
            total = [[code.variable(code.full()) for _ in range(panel.vectors)] for _ in range(rows)]
            with code.loop(0, depth, CACHE_LINE // SIZES[code.real_type]) as d:
                for key in keys:  # the next call's
                    code.prefetch(key + stride * rows + d)
            several = code.constant(1, BIT) if adds else depth > FEATURES_OF_A_SUM
            if not adds:
                with code.if_then(several):
                    for s_j in scores:
                        panel.store([code.full()] * panel.vectors, s_j)
            first = code.variable(code.index(0))
            with code.loop_forever() as done:
                last = code.minimum(first.get() + FEATURES_OF_A_SUM, depth)
                with code.loop(first.get(), last) as d:
                    q_d = panel.load(q, d)
                    for key, sums in zip(keys, total, strict=True):
                        k_d = code.splat(key[d])
                        for x, y in zip(q_d, sums, strict=True):
                            y.set(code.multiply_add(x, k_d, y.get()))
                with code.if_then(several):
                    for s_j, sums in zip(scores, total, strict=True):
                        for x, y in zip(panel.load(s_j), sums, strict=True):
                            y.set(x + y.get())
                code.break_if(last >= depth, done)
                first.set(last)
                for s_j, sums in zip(scores, total, strict=True):
                    panel.store([y.get() for y in sums], s_j)
                    for y in sums:
                        y.set(code.full())
            largest = panel.load(m)
            for s_j, sums in zip(scores, total, strict=True):
                final = [y.get() for y in sums]
                panel.store(final, s_j)
                largest = [code.maximum(x, y) for x, y in zip(final, largest, strict=True)]
            if not adds:
                panel.store(largest, m)


def declare_values(code: Code, panel: Panel) -> None:
    code.part(f"values_{panel.vectors}", lambda code: emit_values(code, Panel(code, panel.vectors)))


def emit_values(code: Code, widest: Panel) -> None:
    """`values_R_V(p, v, stride, count, o, alpha, last)`: `o[d] = alpha o[d] + sum_j p[j] v[j, d]` for R features and V
    vectors of rows.
    """
    for panel, rows in itertools.product(widest.widths(), ACCUMULATOR_ROWS):
        name = f"values_{rows}_{panel.vectors}"
        for args in code.part_function(name, ADDRESS, ADDRESS, LONG, LONG, ADDRESS, ADDRESS, LONG):
            p, v, o, alpha = (code.pointer(args[n]) for n in (0, 1, 4, 5))
            stride, count = args[2], args[3]
            numbers = row_numbers(code, rows, args[6])
            total = [[code.variable(code.full()) for _ in range(panel.vectors)] for _ in range(rows)]
            with code.loop(0, count) as j:
                p_j = panel.load(p, j)
                v_j = v + stride * j
                for d, sums in zip(numbers, total, strict=True):
                    v_jd = code.splat(v_j[d])
                    for x, y in zip(p_j, sums, strict=True):
                        y.set(code.multiply_add(x, v_jd, y.get()))
            scale = panel.load(alpha)
            results = [
                [code.multiply_add(x, a, y.get()) for x, a, y in zip(panel.load(o, d), scale, sums, strict=True)]
                for d, sums in zip(numbers, total, strict=True)
            ]
            for d, x in zip(numbers, results, strict=True):
                panel.store(x, o, d)


def strip_sizes(code: Code) -> tuple[int, ...]:
    """Widths of microkernels whose lanes are features, in vectors, as registers allow."""
    return tuple(n for n in (4, 2, 1) if n <= code.target.vectors)


def emit_accumulate(code: Code, panel: Panel) -> None:
    """`accumulate_R_N(p, x, x_stride, y, y_stride, first, last, last_key)`: `y[j] += sum_r p[j, r] x[r]` over the
    panel's rows from `first` to `last`, exclusive, for R keys and N vectors of features. Here lanes run over features;
    rows of `x [panel, ...]` and `y` are padded to whole vectors.
    """
    for rows, strip in itertools.product(ACCUMULATOR_ROWS, strip_sizes(code)):
        kinds = (ADDRESS, ADDRESS, LONG, ADDRESS, LONG, LONG, LONG, LONG)
        for args in code.part_function(f"accumulate_{rows}_{strip}", *kinds):
            p, x, y = (code.pointer(args[n]) for n in (0, 1, 3))
            x_stride, y_stride, first, last = args[2], args[4], args[5], args[6]
            numbers = row_numbers(code, rows, args[7])
            lanes = [n * code.lanes for n in range(strip)]
            total = [[code.variable(code.full()) for _ in lanes] for _ in range(rows)]
            p_rows = [p + j * panel.rows for j in numbers]
            with code.loop(first, last) as r:
                x_r = x + x_stride * r
                vectors = [x_r.vector(n) for n in lanes]
                for p_j, sums in zip(p_rows, total, strict=True):
                    p_jr = code.splat(p_j[r])
                    for vector, z in zip(vectors, sums, strict=True):
                        z.set(code.multiply_add(vector, p_jr, z.get()))
            y_rows = [y + y_stride * j for j in numbers]
            results = [
                [y_j.vector(n) + z.get() for n, z in zip(lanes, sums, strict=True)]
                for y_j, sums in zip(y_rows, total, strict=True)
            ]
            for y_j, sums in zip(y_rows, results, strict=True):
                for n, z in zip(lanes, sums, strict=True):
                    y_j.store(z, n)


def accumulate(
    code: Code,
    panel: Panel,
    p: Pointer,
    count: Value,
    x: Pointer,
    width: Value,
    y: Pointer,
    y_stride: Value,
    first_row: Callable[[Value], Value],
    num_rows: Value,
) -> None:
    """`y [count, width] += p [count, panel] @ x [panel, width]` over `num_rows` rows, with `width` a multiple of the
    lanes. Rows before `first_row(j)` have p = 0 for the keys from `j` on, and are skipped.
    """
    code.part(f"accumulate_{panel.vectors}", lambda code: emit_accumulate(code, Panel(code, panel.vectors)))

    def keys(j: Value, rows: int, last_key: Value) -> None:
        first = first_row(j)

        def features(n: Value, strip: int) -> None:
            d = n * code.lanes
            args = (p + j * panel.rows, x + d, width, y + y_stride * j + d, y_stride, first, num_rows, last_key)
            code.call(f"accumulate_{rows}_{strip}", *args)

        tiled_loop(code, width // code.lanes, features, strip_sizes(code))

    accumulator_loop(code, count, keys)


def score_product(
    code: Code, panel: Panel, k: Pointer, stride: Value, count: Value, q: Pointer, depth: Value, s: Pointer, m: Pointer
) -> None:
    """The scores `s [count, panel]` of `count` keys, and their maximum `m`."""

    def body(j: Value, rows: int, last: Value) -> None:
        code.call(f"scores_{rows}_{panel.vectors}", k + stride * j, stride, q, s + j * panel.rows, depth, m, last)

    accumulator_loop(code, count, body)


def add_score_product(
    code: Code, panel: Panel, k: Pointer, stride: Value, count: Value, q: Pointer, depth: Value, s: Pointer
) -> None:
    """Add the products of `count` keys to `s [count, panel]`."""

    def body(j: Value, rows: int, last: Value) -> None:
        args = (k + stride * j, stride, q, s + j * panel.rows, depth, s, last)
        code.call(f"added_scores_{rows}_{panel.vectors}", *args)

    accumulator_loop(code, count, body)


def value_product(
    code: Code,
    panel: Panel,
    p: Pointer,
    v: Pointer,
    stride: Value,
    count: Value,
    o: Pointer,
    width: Value,
    alpha: Pointer,
) -> None:
    """`o [width, panel] = alpha o + sum_j p[j] v[j]` over `count` keys."""

    def body(d: Value, rows: int, last: Value) -> None:
        code.call(f"values_{rows}_{panel.vectors}", p, v + d, stride, count, o + d * panel.rows, alpha, last)

    accumulator_loop(code, width, body)


def tiled_loop(code: Code, count: Value, body: Callable[[Value, int], None], sizes: tuple[int, ...]) -> None:
    """Emit `body(start, size)` over `count`: a loop of the largest size, then the smaller ones for the remainder."""
    largest, *smaller = sizes
    full = count // largest * largest
    with code.loop(0, full, largest) as start:
        body(start, largest)
    done = code.variable(full)
    for size in smaller:
        with code.if_then(count - done.get() >= size):
            body(done.get(), size)
            done.set(done.get() + size)
