"""Forward for few query rows, as in decoding: K and V are read once, and that is what it costs.

Lanes run over features: rows would fill a few of them only. Queries stay rows, keys and values are read in their own
dtype, and the rows of a group share each vector that is read. Everything between the two products is forward's.
"""

import itertools

from ..variant import Variant
from .codegen import Code
from .formats import STORED, lanes_summed, load_vector, store_vector
from .forward import Forward
from .operands import ADDRESS, LONG, Pointer, Value
from .products import Panel, in_parts, strips
from .softmax import normalized
from .sums import carry
from .tiles import Keys, copy_rows, read_keys, rows_left

ROWS = (4, 2, 1)  # query rows that share what is read


def groups_of_rows(code: Code) -> tuple[int, ...]:
    return tuple(n for n in ROWS if n <= code.lanes)


def emit_scores(code: Code, panel: Panel, dtype: str) -> None:
    """`few_scores_R(k, stride, count, q, depth, s)`: `s[j, r] = sum_d k[j, d] q[r, d]` for R rows, as many keys at a
    time as make a vector of scores. Past the last key it is that key again, in rows of `s` that nobody reads.
    """
    for rows in groups_of_rows(code):
        with code.function(f"few_scores_{rows}", ADDRESS, LONG, LONG, ADDRESS, LONG, ADDRESS) as given:
            k, q, s = code.pointer(given[0], STORED[dtype]), code.pointer(given[3]), code.pointer(given[5])
            stride, count, depth = given[1], given[2], given[4]
            together = code.lanes // rows
            with code.loop(0, count, together) as j:
                keys = [k + stride * code.minimum(j + n, count - 1) for n in range(together)]
                total = [code.variable(code.reals()) for _ in range(code.lanes)]
                with code.loop(0, depth, code.lanes) as d:
                    q_d = [(q + depth * r).vector(d) for r in range(rows)]
                    for n, key in enumerate(keys):
                        k_d = load_vector(code, key, d, dtype)
                        for r in range(rows):
                            x = total[n * rows + r]
                            x.set(code.multiply_add(q_d[r], k_d, x.get()))
                found = lanes_summed(code, [x.get() for x in total])
                for n in range(together):
                    part = code.shuffle(found, found, range(n * rows, (n + 1) * rows))
                    s.store(part, (j + n) * panel.rows)


def emit_values(code: Code, panel: Panel, dtype: str) -> None:
    """`few_values_R_N(p, v, stride, count, out, width, alpha)`: `out[r] = alpha[r] out[r] + sum_j p[j, r] v[j]` for R
    rows and N vectors of features.
    """
    for rows, strip in itertools.product(groups_of_rows(code), strips(code)):
        kinds = (ADDRESS, ADDRESS, LONG, LONG, ADDRESS, LONG, ADDRESS)
        with code.function(f"few_values_{rows}_{strip}", *kinds) as given:
            p, out, alpha = (code.pointer(given[n]) for n in (0, 4, 6))
            v, stride, count, width = code.pointer(given[1], STORED[dtype]), given[2], given[3], given[5]
            lanes = [n * code.lanes for n in range(strip)]
            total = [[code.variable(code.reals()) for _ in lanes] for _ in range(rows)]
            with code.loop(0, count) as j:
                v_j = v + stride * j
                vectors = [load_vector(code, v_j, n, dtype) for n in lanes]
                for r in range(rows):
                    p_jr = code.repeated(p[j * panel.rows + r])
                    for x, sum_of_row in zip(vectors, total[r], strict=True):
                        sum_of_row.set(code.multiply_add(x, p_jr, sum_of_row.get()))
            for r in range(rows):
                out_r = out + width * r
                for n, sum_of_row in zip(lanes, total[r], strict=True):
                    out_r.store(code.multiply_add(out_r.vector(n), alpha[r], sum_of_row.get()), n)


class Decode(Forward):
    """The emission of one task: a single panel, of head dimensions that are whole vectors."""

    @staticmethod
    def emit_products(code: Code, panel: Panel, variant: Variant) -> None:
        emit_scores(code, panel, variant.dtype)
        emit_values(code, panel, variant.dtype)

    def load_queries(self, p: Value) -> None:
        code, a, w, depth, rows = self.code, self.a, self.w, self.a.number("head_dim"), self.panel.rows
        copy_rows(code, self.panel, a.pointer("q"), w.q_at, depth, self.variant.dtype, w.q, depth)
        with code.loop(0, depth * rows, code.lanes) as n:
            w.q.store(w.q.vector(n) * a.real("factor"), n)

    def read(self, side: str, first: Value, last: Value) -> Keys:
        dtype = self.variant.dtype
        return read_keys(self.code, self.a, self.variant, self.task, side, first, last, getattr(self.w, side), dtype)

    def score_product(self, p: Value, k: Keys, count: Value) -> None:
        code, w, panel, depth = self.code, self.w, self.panel, self.a.number("head_dim")

        def part(r: Value, rows: int) -> None:
            code.call(f"few_scores_{rows}", k.first, k.stride, count, w.q + r * depth, depth, w.scores + r)

        in_parts(code, rows_left(code, panel, self.task, p), part, groups_of_rows(code))
        largest = [code.variable(x) for x in panel.load(w.new_m)]
        with code.loop(0, count) as j:
            for s, top in zip(panel.load(w.scores, j), largest, strict=True):
                top.set(code.maximum(s, top.get()))
        panel.store([x.get() for x in largest], w.new_m)

    def value_product(self, p: Value, v: Keys, count: Value) -> None:
        code, w, width = self.code, self.w, self.a.number("head_dim_v")

        def part(r: Value, rows: int) -> None:
            def features(n: Value, strip: int) -> None:
                d, out = n * code.lanes, w.out + r * width
                given = (w.scores + r, v.first + d, v.stride, count, out + d, width, w.alpha + r)
                code.call(f"few_values_{rows}_{strip}", *given)

            in_parts(code, width // code.lanes, features, strips(code))

        in_parts(code, rows_left(code, self.panel, self.task, p), part, groups_of_rows(code))

    def carry_output(self, p: Value, last: bool) -> None:
        code, w, width = self.code, self.w, self.a.number("head_dim_v")
        with code.loop(0, rows_left(code, self.panel, self.task, p)) as r:
            factor = w.alpha[r]
            with code.loop(0, width, code.lanes) as d:
                carry(code, w.out, w.total_out, r * width + d, last, factor)

    def store_output(self, p: Value, dtype: str, to: Pointer, rows_at: Pointer) -> None:
        code, w, width = self.code, self.w, self.a.number("head_dim_v")
        with code.loop(0, rows_left(code, self.panel, self.task, p)) as r:
            out = w.out + r * width
            with code.loop(0, width, code.lanes) as d:
                x = normalized(code, out.vector(d), w.alpha[r], w.l[r])
                store_vector(code, x, to, rows_at[r] + d, dtype)
