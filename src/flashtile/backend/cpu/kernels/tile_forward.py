"""The forward kernel with products of bfloat16 matrix tiles. Probabilities are rounded to bfloat16 for the
product with V, as on GPUs; their sums are not. All between the products is inherited from `forward`.

Scores and outputs have lanes of rows here too: `k q^T` and `v^T p` are products of tiles of keys or features by rows.
"""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ..variant import Variant
from ..workspace import BLOCK_N, TILE_DEPTH, TILE_ROWS, Layout, round_up, tile_layout
from .codegen import Code
from .forward import ForwardKernel
from .keys import KeyBlock, key_offsets
from .matrix_tiles import TILE_BYTES, matrix_tiles, tile_product
from .operands import ADDRESS, BYTE, INT, LONG, SHORT, Pointer, Value
from .packing import copy_row, pack_keys, pack_rows, pack_values, packed_pair
from .products import Panel, tiled_loop
from .tiles import num_valid_rows, rows_in_use

SIZES = (2, 1)  # tiles of a microkernel on each side: four accumulators leave a load for each product


def emit_products(code: Code, panel_rows: int) -> None:
    """`tile_scores_M_N(k, q, chunks, s)`: the scores `s [16 M, 16 N]`, by `chunks` parts of 32 features.

    `tile_values_M_N(v, v_next, p, chunks, product, o, count, alpha)`: `o [count, 16 N] = alpha o + v^T p`, at most 16 M
    features, by `chunks` parts of 32 keys, that are `v_next` bytes apart.
    """
    pitch = code.index(panel_rows * 4)
    tile = code.index(TILE_BYTES)
    for m, n in itertools.product(SIZES, SIZES):
        for k, q, chunks, s in code.part_function(f"tile_scores_{m}_{n}", ADDRESS, ADDRESS, LONG, ADDRESS):
            steps = [chunks * TILE_BYTES, tile] * 2
            tile_product(code, (m, n), code.pointer(k), code.pointer(q), steps, chunks, code.pointer(s), pitch)
        kinds = (ADDRESS, LONG, ADDRESS, LONG, ADDRESS, ADDRESS, LONG, ADDRESS)
        for args in code.part_function(f"tile_values_{m}_{n}", *kinds):
            v, p, product, o, alpha = (code.pointer(args[i]) for i in (0, 2, 4, 5, 7))
            v_next, chunks, count = args[1], args[3], args[6]
            steps = [tile, v_next, code.index(BLOCK_N // TILE_DEPTH * TILE_BYTES), tile]
            tile_product(code, (m, n), v, p, steps, chunks, product, code.index(n * TILE_ROWS * 4))
            lanes = range(0, n * TILE_ROWS, code.lanes)
            scale = [alpha.vector(i) for i in lanes]
            with code.loop(0, count) as d:
                for i, factor in zip(lanes, scale, strict=True):
                    o_d, x = o + d * panel_rows + i, product + d * (n * TILE_ROWS) + i
                    o_d.store(code.multiply_add(o_d.vector(), factor, x.vector()))


class TileKernel(ForwardKernel):
    """Emits the code of one task."""

    def buffers(self, *sizes: Any) -> Layout:
        return tile_layout(self.panel.rows, *sizes)

    @classmethod
    def declare_products(cls, code: Code, panel: Panel, variant: Variant) -> None:
        code.part(f"matrix_tiles_{panel.rows}", lambda code: emit_products(code, panel.rows))

    @staticmethod
    @contextmanager
    def thread_state(code: Code) -> Iterator[None]:
        tiles = matrix_tiles(code)
        tiles.configure()
        yield
        tiles.release()

    @property
    def depth(self) -> Value:
        return round_up(self.a.integer("head_dim"), TILE_DEPTH)  # type: ignore[no-any-return]

    @property
    def width(self) -> Value:
        return round_up(self.a.integer("head_dim_v"), TILE_DEPTH)  # type: ignore[no-any-return]

    def queries(self, p: Value) -> Pointer:
        return self.w.q.cast(SHORT) + p * self.depth * self.panel.rows

    def load_queries(self, p: Value) -> None:
        code, a, w = self.code, self.a, self.w
        rows = round_up(rows_in_use(code, self.panel, self.task, p), TILE_ROWS)
        source, offsets = a.pointer("q", SHORT), w.q_offsets + p * self.panel.rows
        pack_rows(code, source, offsets, rows, a.integer("head_dim"), w.copied, self.queries(p))

    def output_place(self, p: Value) -> tuple[Value, Value]:
        size = self.width * self.panel.rows
        return p * size, size

    def first_key(self, lowest: Value) -> Value:
        """The first key of a tile of probabilities."""
        return lowest // TILE_DEPTH * TILE_DEPTH

    def load_keys(self, side: str, first: Value, last: Value) -> KeyBlock:
        """Pack the keys of a block. Strides are such that the first key of a tile is where its tile is."""
        width, rows = (self.depth, TILE_ROWS) if side == "k" else (self.width, TILE_DEPTH)
        packed = getattr(self.w, side).cast(SHORT)
        with self.code.loop(first // rows * rows, last, rows) as j:
            to = packed + j % BLOCK_N * width
            self.pack(side, j, first, last, width, rows, to)
        return KeyBlock(packed + first % BLOCK_N * width, width)

    def pack(self, side: str, j: Value, first: Value, last: Value, width: Value, rows: int, to: Pointer) -> None:
        """Pack one tile of keys from `j` on. A tile of pages, or with other keys than `first` to `last`, is copied
        first, and so are values that do not fill vectors.
        """
        code, a = self.code, self.a
        count = a.integer("head_dim" if side == "k" else "head_dim_v")
        source, offset = a.pointer(side, SHORT), key_offsets(code, a, self.task, side)
        complete = (j >= first) & (j + rows <= last) & a.pointer("page_table").is_null()
        if side == "v":
            complete = complete & width.equals(count)
        with code.if_else(complete) as (then, otherwise):
            with then:
                self.pack_tile(side, source + offset(j), a.integer(f"{side}_s"), count, to)
            with otherwise:
                copied = self.w.copied.cast(SHORT)
                with code.loop(0, width * rows, TILE_DEPTH) as n:
                    (copied + n).cast(INT).store(code.bitcast(code.full(), INT))
                with code.loop(code.maximum(j, first), code.minimum(j + rows, last)) as key:
                    copy_row(code, source, offset(key), count, copied + (key - j) * width, TILE_DEPTH)
                self.pack_tile(side, copied, width, width, to)

    def pack_tile(self, side: str, source: Pointer, stride: Value, count: Value, to: Pointer) -> None:
        (pack_keys if side == "k" else pack_values)(self.code, source, stride, count, to)

    def vectors_in_use(self, p: Value) -> Value:
        return (num_valid_rows(self.code, self.panel, self.task, p) + (TILE_ROWS - 1)) // TILE_ROWS  # type: ignore[no-any-return]

    def score_product(self, p: Value, k: KeyBlock, count: Value) -> None:
        """Multiply tiles, then scale the scores and compute their maximum."""
        code, w, pitch, factor = self.code, self.w, self.panel.rows, self.a.real("factor")
        q, chunks, vectors = self.queries(p), self.depth // TILE_DEPTH, self.vectors_in_use(p)

        def keys(tile: Value, m: int) -> None:
            j = tile * TILE_ROWS
            of_keys, s = k.first + j * k.stride, w.scores + j * pitch

            def rows(vector: Value, n: int) -> None:
                r = vector * TILE_ROWS
                code.call(f"tile_scores_{m}_{n}", of_keys, q + self.depth * r, chunks, s + r)

            tiled_loop(code, vectors, rows, SIZES)

        tiled_loop(code, (count + (TILE_ROWS - 1)) // TILE_ROWS, keys, SIZES)
        with self.columns(p) as column:
            largest = code.variable(w.new_m.vector(column))
            with code.loop(0, count) as j:
                at = w.scores + j * pitch + column
                scaled = at.vector() * factor
                at.store(scaled)
                largest.set(code.maximum(scaled, largest.get()))
            w.new_m.store(largest.get(), column)

    def value_product(self, p: Value, v: KeyBlock, count: Value) -> None:
        code, w, pitch = self.code, self.w, self.panel.rows
        self.call("pack_probabilities", p, count)
        width, vectors = self.a.integer("head_dim_v"), self.vectors_in_use(p)
        out, v_next = w.out + self.output_place(p)[0], self.width * (TILE_DEPTH * 2)
        chunks = (count + (TILE_DEPTH - 1)) // TILE_DEPTH

        def features(tile: Value, m: int) -> None:
            d = tile * TILE_ROWS
            of_features, o, left = v.first + d * TILE_DEPTH, out + d * pitch, code.minimum(width - d, TILE_ROWS * m)

            def rows(vector: Value, n: int) -> None:
                r = vector * TILE_ROWS
                of_rows = w.p.cast(BYTE) + vector * (BLOCK_N // TILE_DEPTH * TILE_BYTES)
                args = (of_features, v_next, of_rows, chunks, w.product, o + r, left, w.alpha + r)
                code.call(f"tile_values_{m}_{n}", *args)

            tiled_loop(code, vectors, rows, SIZES)

        tiled_loop(code, (width + (TILE_ROWS - 1)) // TILE_ROWS, features, SIZES)

    def pack_probabilities(self, p: Value, count: Value) -> None:
        """Pack the block's probabilities, and 0 for keys that fill the last tile."""
        code, w, pitch = self.code, self.w, self.panel.rows
        pairs, zero = count // 2, code.full()

        def pack(to: Pointer, j: Value, x: Value, y: Value) -> None:
            to.store(packed_pair(code, x, y), j * code.lanes)

        with self.columns(p) as column:
            to, of_rows = w.p + column * (BLOCK_N // 2), w.scores + column
            with code.loop(0, pairs) as j:
                pack(to, j, *((of_rows + j * (2 * pitch) + n * pitch).vector() for n in (0, 1)))
            with code.if_then(pairs * 2 < count):
                pack(to, pairs, of_rows.vector((count - 1) * pitch), zero)
            with code.loop((count + 1) // 2, round_up(count, TILE_DEPTH) // 2) as j:
                pack(to, j, zero, zero)
