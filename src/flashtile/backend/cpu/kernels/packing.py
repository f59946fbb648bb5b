"""Operands of products of matrix tiles (`matrix_tiles`), packed into the workspace. Numbers are kept as 32-bit words of
two bfloat16, of neighboring features or keys.

    q   [rows / 16, D / 32][16 pairs of features, 16 rows]
    k   [keys / 16, D / 32][16 keys, 32 features]
    v   [keys / 32, Dv / 16][16 features, 32 keys]
    p   [rows / 16, keys / 32][16 pairs of keys, 16 rows]

Features past the last one are 0 in q and k, and so are keys past the last one in v and p.
"""

from ..workspace import TILE_DEPTH, TILE_ROWS
from .codegen import Code
from .formats import transpose
from .operands import ADDRESS, INT, LONG, SHORT, Pointer, Value, vector_type

TILE_WORDS = TILE_ROWS * TILE_ROWS


def load_words(code: Code, source: Pointer, i: Value | int) -> Value:
    """Words from element `i` on, which need not be aligned to words."""
    kind = vector_type(SHORT, 2 * code.lanes)
    pairs = code.ir.load((source + i).ir, typ=kind, align=2)
    return Value(code, code.ir.bitcast(pairs, vector_type(INT, code.lanes)))


def joined(code: Code, low: Value, high: Value) -> Value:
    """Words of the upper half of one and the lower half of another. AVX-512 has an instruction for this; LLVM makes a
    permutation of masks and shifts, which costs three times as much.
    """
    return code.intrinsic("llvm.fshl", high, low, code.constant(16, low.ir.type))


def copy_row(code: Code, source: Pointer, at: Value, count: Value, to: Pointer, step: Value | int) -> None:
    """Copy a row of `count` elements to parts of 32, `step` elements apart; the last one is filled with 0."""
    full = count // TILE_DEPTH * TILE_DEPTH
    with code.loop(0, full, TILE_DEPTH) as d:
        (to + d // TILE_DEPTH * step).cast(INT).store(load_words(code, source, at + d))
    with code.if_then(full < count):
        part = to + full // TILE_DEPTH * step
        part.cast(INT).store(code.constant(0, vector_type(INT, code.lanes)))
        with code.loop(full, count) as d:
            part[d - full] = source[at + d]


def pack_rows(
    code: Code, source: Pointer, offsets: Pointer, rows: Value, count: Value, scratch: Pointer, to: Pointer
) -> None:
    """Pack `rows` rows of q, a multiple of 16, with `count` features, that begin at `offsets`."""
    code.part("packing", emit_packing)
    code.call("pack_rows", source, offsets, rows, count, scratch, to)


def pack_keys(code: Code, source: Pointer, stride: Value, count: Value, to: Pointer) -> None:
    """Pack 16 keys of `count` features."""
    code.part("packing", emit_packing)
    code.call("pack_keys", source, stride, count, to)


def pack_values(code: Code, source: Pointer, stride: Value, count: Value, to: Pointer) -> None:
    """Pack 32 keys of `count` features, a multiple of 32."""
    code.part("packing", emit_packing)
    code.call("pack_values", source, stride, count, to)


def emit_packing(code: Code) -> None:
    emit_pack_rows(code)
    emit_pack_keys(code)
    emit_pack_values(code)


def emit_pack_rows(code: Code) -> None:
    for args in code.part_function("pack_rows", ADDRESS, ADDRESS, LONG, LONG, ADDRESS, ADDRESS):
        source, scratch = code.pointer(args[0], SHORT), code.pointer(args[4], SHORT)
        offsets, to = code.pointer(args[1], LONG), code.pointer(args[5], INT)
        rows, count = args[2], args[3]
        full, chunks = count // TILE_DEPTH, (count + (TILE_DEPTH - 1)) // TILE_DEPTH
        with code.loop(0, rows, TILE_ROWS) as r, code.loop(0, chunks) as n:
            partial = n.equals(full)  # the last chunk, which is copied first and has its rows one after another
            with code.if_then(partial), code.loop(0, TILE_ROWS) as i:
                at, left = offsets[r + i] + full * TILE_DEPTH, count - full * TILE_DEPTH
                copy_row(code, source, at, left, scratch + i * TILE_DEPTH, 0)
            begins = [offsets[r + i] + n * TILE_DEPTH for i in range(TILE_ROWS)]
            begins = [code.select(partial, code.index(i * TILE_DEPTH), x) for i, x in enumerate(begins)]
            first = Pointer(code, code.ir.select(partial.ir, scratch.ir, source.ir), SHORT)
            words = [load_words(code, first, x) for x in begins]
            store_tile(code, transpose(code, words), to + (r // TILE_ROWS * chunks + n) * TILE_WORDS)


def emit_pack_keys(code: Code) -> None:
    for args in code.part_function("pack_keys", ADDRESS, LONG, LONG, ADDRESS):
        source, to = code.pointer(args[0], SHORT), code.pointer(args[3], SHORT)
        stride, count = args[1], args[2]
        full = count // TILE_DEPTH * TILE_DEPTH
        with code.loop(0, full, TILE_DEPTH) as d:
            tile = to + d * TILE_ROWS
            for i in range(TILE_ROWS):
                (tile + i * TILE_DEPTH).cast(INT).store(load_words(code, source, stride * i + d))
        with code.if_then(full < count), code.loop(0, TILE_ROWS) as i:
            copy_row(code, source, stride * i + full, count - full, to + full * TILE_ROWS + i * TILE_DEPTH, 0)


def emit_pack_values(code: Code) -> None:
    """Words of two features become words of two keys, of even features and of odd ones, and these are transposed."""
    for args in code.part_function("pack_values", ADDRESS, LONG, LONG, ADDRESS):
        source, to = code.pointer(args[0], SHORT), code.pointer(args[3], INT)
        stride, count = args[1], args[2]
        with code.loop(0, count, TILE_DEPTH) as d:
            for n in (0, 1):  # each half loads all rows, since its words fill half of the registers
                words = []
                for i in range(0, TILE_DEPTH, 2):
                    x, y = (load_words(code, source, stride * (i + key) + d) for key in (0, 1))
                    words.append(joined(code, x, y >> 16) if n else joined(code, x << 16, y))
                store_tile(code, transpose(code, words), to + d * TILE_ROWS + n * TILE_ROWS, step=2)


def store_tile(code: Code, rows: list[Value], to: Pointer, step: int = 1) -> None:
    for i, row in enumerate(rows):
        to.store(row, i * step * TILE_ROWS)


def packed_pair(code: Code, x: Value, y: Value) -> Value:
    """Words of two vectors of nonnegative numbers, rounded to the nearest, ties up."""
    low, high = (code.bitcast(z, INT) + 0x8000 for z in (x, y))
    return joined(code, low, high >> 16)
