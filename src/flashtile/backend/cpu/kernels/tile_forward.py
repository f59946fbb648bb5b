"""The forward kernel whose products are those of bfloat16 matrix tiles. Probabilities are rounded to bfloat16 for the
product with V, as on GPUs; their sums are not. All between the products is inherited from `forward`.

Scores and outputs have lanes of rows here too: `k q^T` and `v^T p` are products of tiles of keys or features by rows.
"""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager

from ..variant import Variant
from ..workspace import BLOCK_N, TILE_DEPTH, TILE_ROWS, round_up, tile_layout
from .codegen import Code
from .forward import ForwardKernel
from .keys import KeyBlock, key_offsets
from .matrix_tiles import TILE_BYTES, matrix_tiles, tile_product
from .operands import ADDRESS, BYTE, INT, LONG, SHORT, Pointer, Value
from .packing import copy_row, pack_keys, pack_rows, pack_values, packed_pair
from .products import Panel, tiled_loop
from .tiles import rows_in_use

SIZES = (2, 1)  # tiles of a microkernel on each side: four accumulators leave a load for each product


def emit_products(code: Code, panel: Panel) -> None:
    """`tile_scores_M_N(k, q, chunks, s)`: the scores `s [16 M, 16 N]`, by `chunks` parts of 32 features.

    `tile_values_M_N(v, v_next, p, chunks, product, o, count, alpha)`: `o [count, 16 N] = alpha o + v^T p`, at most 16 M
    features, by `chunks` parts of 32 keys, that are `v_next` bytes apart.
    """
    pitch = code.index(panel.rows * 4)
    tile = code.index(TILE_BYTES)
    for m, n in itertools.product(SIZES, SIZES):
        with code.function(f"tile_scores_{m}_{n}", ADDRESS, ADDRESS, LONG, ADDRESS) as (k, q, chunks, s):
            steps = [chunks * TILE_BYTES, tile] * 2
            tile_product(code, (m, n), code.pointer(k), code.pointer(q), steps, chunks, code.pointer(s), pitch)
        kinds = (ADDRESS, LONG, ADDRESS, LONG, ADDRESS, ADDRESS, LONG, ADDRESS)
        with code.function(f"tile_values_{m}_{n}", *kinds) as args:
            v, p, product, o, alpha = (code.pointer(args[i]) for i in (0, 2, 4, 5, 7))
            v_next, chunks, count = args[1], args[3], args[6]
            steps = [tile, v_next, code.index(BLOCK_N // TILE_DEPTH * TILE_BYTES), tile]
            tile_product(code, (m, n), v, p, steps, chunks, product, code.index(n * TILE_ROWS * 4))
            lanes = range(0, n * TILE_ROWS, code.lanes)
            scale = [alpha.vector(i) for i in lanes]
            with code.loop(0, count) as d:
                for i, factor in zip(lanes, scale, strict=True):
                    o_d, x = o + d * panel.rows + i, product + d * (n * TILE_ROWS) + i
                    o_d.store(code.multiply_add(o_d.vector(), factor, x.vector()))


class TileKernel(ForwardKernel):
    """Emits the code of one task."""

    layout = staticmethod(tile_layout)

    @staticmethod
    def emit_products(code: Code, panel: Panel, variant: Variant) -> None:
        emit_products(code, panel)

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

    def score_product(self, p: Value, k: KeyBlock, count: Value) -> None:
        """Multiply tiles, then scale the scores and compute their maximum."""
        code, w, panel, factor = self.code, self.w, self.panel, self.a.real("factor")
        q, chunks, n = self.queries(p), self.depth // TILE_DEPTH, min(panel.vectors, 2)

        def keys(tile: Value, m: int) -> None:
            j = tile * TILE_ROWS
            of_keys, s = k.first + j * k.stride, w.scores + j * panel.rows
            for r in range(0, panel.vectors * TILE_ROWS, n * TILE_ROWS):
                code.call(f"tile_scores_{m}_{n}", of_keys, q + self.depth * r, chunks, s + r)

        tiled_loop(code, (count + (TILE_ROWS - 1)) // TILE_ROWS, keys, SIZES)
        largest = [code.variable(x) for x in panel.load(w.new_m)]
        with code.loop(0, count) as j:
            scaled = [x * factor for x in panel.load(w.scores, j)]
            panel.store(scaled, w.scores, j)
            for x, top in zip(scaled, largest, strict=True):
                top.set(code.maximum(x, top.get()))
        panel.store([x.get() for x in largest], w.new_m)

    def value_product(self, p: Value, v: KeyBlock, count: Value) -> None:
        code, w, panel = self.code, self.w, self.panel
        self.pack_probabilities(count)
        width, n = self.a.integer("head_dim_v"), min(panel.vectors, 2)
        out, v_next = w.out + self.output_place(p)[0], self.width * (TILE_DEPTH * 2)
        chunks = (count + (TILE_DEPTH - 1)) // TILE_DEPTH

        def features(tile: Value, m: int) -> None:
            d = tile * TILE_ROWS
            for r in range(0, panel.vectors, n):
                of_rows = w.p.cast(BYTE) + BLOCK_N // TILE_DEPTH * TILE_BYTES * r
                o, left = out + d * panel.rows + TILE_ROWS * r, code.minimum(width - d, TILE_ROWS * m)
                args = (v.first + d * TILE_DEPTH, v_next, of_rows, chunks, w.product, o, left, w.alpha + TILE_ROWS * r)
                code.call(f"tile_values_{m}_{n}", *args)

        tiled_loop(code, (width + (TILE_ROWS - 1)) // TILE_ROWS, features, SIZES)

    def pack_probabilities(self, count: Value) -> None:
        """Pack the block's probabilities, and 0 for keys that fill the last tile."""
        code, w, panel = self.code, self.w, self.panel
        pairs, lanes, step = count // 2, code.lanes, BLOCK_N * code.lanes // 2
        zeros = [code.full()] * panel.vectors

        def pack(j: Value, x: list[Value], y: list[Value]) -> None:
            for n, pair in enumerate(zip(x, y, strict=True)):
                w.p.store(packed_pair(code, *pair), j * lanes + n * step)

        with code.loop(0, pairs) as j:
            pack(j, panel.load(w.scores, j * 2), panel.load(w.scores, j * 2 + 1))
        with code.if_then(pairs * 2 < count):
            pack(pairs, panel.load(w.scores, count - 1), zeros)
        with code.loop((count + 1) // 2, round_up(count, TILE_DEPTH) // 2) as j:
            pack(j, zeros, zeros)
