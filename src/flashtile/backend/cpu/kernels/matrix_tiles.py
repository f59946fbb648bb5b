"""Matrix tiles of bfloat16: eight registers of 16 rows of 64 bytes, and `c += a b` of three of them (Intel AMX).

    a   [16, 32] bfloat16
    b   [16, 16, 2]: pairs of rows, of 16 columns
    c   [16, 16] float32: a sum over even and one over odd terms, then both added to c

In memory a tile of `a` or `b` is contiguous. Emulated tiles are memory, so that any processor can run the same kernel.
"""

import itertools
from typing import Any

from llvmlite import ir as llvm

from ..workspace import CACHE_LINE, TILE_ROWS
from .codegen import Code
from .operands import ADDRESS, BYTE, FLOAT, INT, LONG, VOID, Pointer, Value

TILE_BYTES = TILE_ROWS * CACHE_LINE
REGISTERS = 8


class HardwareTiles:
    """AMX's registers, by number."""

    def __init__(self, code: Code):
        self.code = code

    def instruction(self, name: str, *operands: Any) -> None:
        kinds = [x.type for x in operands]
        function = self.code.module.declare_intrinsic(f"llvm.x86.{name}", (), llvm.FunctionType(VOID, kinds))
        self.code.ir.call(function, operands)

    def configure(self) -> None:
        """Give this thread its registers, all of them with full rows."""
        shape = [1, *[0] * 15, *[CACHE_LINE, 0] * REGISTERS, *[0] * 16, *[TILE_ROWS] * REGISTERS, *[0] * 8]
        kind = llvm.VectorType(BYTE, len(shape))
        with self.code.ir.goto_entry_block():
            shapes = self.code.ir.alloca(kind)
        self.code.ir.store(llvm.Constant(kind, shape), shapes)
        self.instruction("ldtilecfg", self.code.ir.bitcast(shapes, ADDRESS))

    def release(self) -> None:
        """Let the system forget the registers when it switches threads."""
        self.instruction("tilerelease")

    def zero(self, n: int) -> None:
        self.instruction("tilezero", llvm.Constant(BYTE, n))

    def load(self, n: int, source: Pointer) -> None:
        self.instruction("tileloadd64", llvm.Constant(BYTE, n), source.ir, llvm.Constant(LONG, CACHE_LINE))

    def store(self, n: int, to: Pointer, pitch: Value) -> None:
        """Store rows that are `pitch` bytes apart."""
        self.instruction("tilestored64", llvm.Constant(BYTE, n), to.ir, pitch.ir)

    def multiply_add(self, c: int, a: int, b: int) -> None:
        self.instruction("tdpbf16ps", *(llvm.Constant(BYTE, n) for n in (c, a, b)))


class EmulatedTiles:
    """The same registers in memory, for one function."""

    def __init__(self, code: Code):
        self.code = code
        self.slots: dict[int, Pointer] = {}

    def configure(self) -> None:
        pass

    def release(self) -> None:
        pass

    def register(self, n: int) -> Pointer:
        if n not in self.slots:
            with self.code.ir.goto_entry_block():
                slot = self.code.ir.alloca(llvm.ArrayType(FLOAT, TILE_BYTES // 4))
            self.slots[n] = Pointer(self.code, self.code.ir.bitcast(slot, ADDRESS), FLOAT)
        return self.slots[n]

    def zero(self, n: int) -> None:
        with self.code.loop(0, TILE_BYTES // 4, self.code.lanes) as i:
            self.register(n).store(self.code.full(), i)

    def load(self, n: int, source: Pointer) -> None:
        with self.code.loop(0, TILE_BYTES // 4, self.code.lanes) as i:
            self.register(n).store(source.cast(FLOAT).vector(i), i)

    def store(self, n: int, to: Pointer, pitch: Value) -> None:
        with self.code.loop(0, TILE_ROWS) as r:
            (to.cast(BYTE) + r * pitch).cast(FLOAT).store(self.register(n).vector(r * TILE_ROWS))

    def multiply_add(self, c: int, a: int, b: int) -> None:
        code = self.code
        with code.shared_function("tile_multiply_add", ADDRESS, ADDRESS, ADDRESS) as args:
            if args:
                c_, a_, b_ = (code.pointer(x, kind) for x, kind in zip(args, (FLOAT, INT, INT), strict=True))
                with code.loop(0, TILE_ROWS) as m:
                    even, odd = code.variable(code.full()), code.variable(code.full())
                    with code.loop(0, TILE_ROWS) as k:
                        x, y = code.splat(a_[m * TILE_ROWS + k]), b_.vector(k * TILE_ROWS)
                        for total, (x_k, y_k) in ((even, (x << 16, y << 16)), (odd, (upper(x), upper(y)))):
                            factors = code.bitcast(x_k, FLOAT), code.bitcast(y_k, FLOAT)
                            total.set(code.multiply_add(*factors, total.get()))
                    c_.store(c_.vector(m * TILE_ROWS) + (even.get() + odd.get()), m * TILE_ROWS)
        code.call("tile_multiply_add", *(self.register(n) for n in (c, a, b)))


def upper(pair: Value) -> Value:
    """The second one of two bfloat16 numbers, as bits of a float32."""
    return pair & -(2**16)


def matrix_tiles(code: Code) -> HardwareTiles | EmulatedTiles:
    """The registers of the target, in the function that is being emitted."""
    return HardwareTiles(code) if code.target.tiles == "amx" else EmulatedTiles(code)


def tile_product(
    code: Code,
    sizes: tuple[int, int],
    a: Pointer,
    b: Pointer,
    steps: list[Value],
    count: Value,
    to: Pointer,
    pitch: Value,
) -> None:
    """`to [16 m, 16 n] = sum of a[i, k] b[k, j]` over `count` tiles `k`, for `m` by `n` tiles. The steps are bytes from
    one tile of `a` to the tiles of the next rows and of the next `k`, then from one tile of `b`.
    """
    m, n = sizes
    tiles, places = matrix_tiles(code), list(itertools.product(range(m), range(n)))
    a_row, a_next, b_column, b_next = steps
    of_a, of_b = [m * n + i for i in range(m)], [m * n + m + j for j in range(n)]
    for place in range(m * n):
        tiles.zero(place)
    with code.loop(0, count) as k:
        for i, register in enumerate(of_a):
            tiles.load(register, a.cast(BYTE) + k * a_next + a_row * i)
        for j, register in enumerate(of_b):
            tiles.load(register, b.cast(BYTE) + k * b_next + b_column * j)
        for place, (i, j) in enumerate(places):
            tiles.multiply_add(place, of_a[i], of_b[j])
    for place, (i, j) in enumerate(places):
        tiles.store(place, to.cast(BYTE) + pitch * (TILE_ROWS * i) + CACHE_LINE * j, pitch)
