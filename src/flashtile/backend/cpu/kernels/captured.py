"""Elements of the tensors that a formula reads. Addresses, sizes and strides are in a table of the call, so that the
code serves tensors of any size.

Outside of a tensor a real is NaN and an integer 0, and nothing is read: lanes that are outside read the tensor's first
element, or the table itself if the tensor has none.
"""

import math
from typing import NamedTuple

from llvmlite import ir as llvm

from ....expression.program import TensorType
from ..tables import STORED_DTYPES, stored_dtype
from .codegen import Code
from .formats import widen
from .operands import ADDRESS, BIT, BYTE, DOUBLE, FLOAT, INT, LONG, SHORT, SIZES, Pointer, Value, element_type

STORAGE: dict[str, llvm.Type] = dict(
    zip(STORED_DTYPES, (FLOAT, DOUBLE, SHORT, SHORT, BYTE, BYTE, BYTE, SHORT, SHORT, INT, INT, LONG), strict=True)
)


def table_offsets(tensors: tuple[TensorType, ...]) -> list[int]:
    """First entry of each tensor in the table: its address, sizes and strides, in elements."""
    return [sum(1 + 2 * x.ndim for x in tensors[:n]) for n in range(len(tensors))]


class Position(NamedTuple):
    """An index of one dimension: how many elements it is from the tensor's first one, and whether it is inside."""

    offset: Value  # 64 bits if a scalar
    inside: Value
    size: Value

    @property
    def is_vector(self) -> bool:
        return isinstance(self.offset.ir.type, llvm.VectorType)


class Base(NamedTuple):
    """The first of the elements that lanes may read, with the positions that lanes share; readable in any case."""

    address: Pointer
    inside: Value  # whether there is such an element
    positions: list[Position]  # positions of vectors


class Captured:
    """The captured tensors of a formula in generated code. `wide` is whether offsets of elements need 64 bits."""

    def __init__(self, code: Code, tensors: tuple[TensorType, ...], table: Pointer, wide: bool):
        self.code, self.tensors, self.table, self.wide = code, tensors, table, wide
        self.offsets = table_offsets(tensors)

    def size(self, tensor: int, dimension: int) -> Value:
        return self.table[self.offsets[tensor] + 1 + dimension]

    def stride(self, tensor: int, dimension: int) -> Value:
        return self.table[self.offsets[tensor] + 1 + self.tensors[tensor].ndim + dimension]

    def address(self, tensor: int) -> Pointer:
        at = (self.table + self.offsets[tensor]).ir
        kind = STORAGE[stored_dtype(self.tensors[tensor].dtype)]
        return self.code.pointer(Value(self.code, self.code.ir.load(at, typ=ADDRESS)), kind)

    def position(self, tensor: int, dimension: int, index: Value) -> Position:
        code, size, stride = self.code, self.size(tensor, dimension), self.stride(tensor, dimension)
        kind = LONG
        if isinstance(index.ir.type, llvm.VectorType):
            inside = below(index, code.convert(size, element_type(index.ir.type)))
            kind = LONG if self.wide else INT
            index = code.convert(index, kind)
        else:
            index = code.convert(index, LONG)
            inside = below(index, size)
        return Position(index * code.convert(stride, kind), inside, size)

    def base(self, tensor: int, positions: list[Position], others: tuple[int, ...]) -> Base:
        """The base of a load, from its scalar positions; `others` are the dimensions of its other positions."""
        code = self.code
        scalars = [x for x in positions if not x.is_vector]
        vectors = [x for x in positions if x.is_vector]
        readable = code.constant(1, BIT)
        for inside in (*(x.inside for x in scalars), *(x.size > 0 for x in vectors)):
            readable = readable & inside
        for dimension in others:
            readable = readable & (self.size(tensor, dimension) > 0)
        offset = code.index(0)
        for x in scalars:
            offset = offset + x.offset
        address = Value(code, (self.address(tensor) + code.select(readable, offset, 0)).ir)
        address = Value(code, code.ir.select(readable.ir, address.ir, self.table.ir))
        return Base(code.pointer(address, self.address(tensor).kind), readable, vectors)

    def load(self, tensor: int, base: Base, positions: list[Position]) -> Value:
        """The element at these positions, in the kind that programs have for its dtype."""
        code, inside = self.code, base.inside
        offset: Value | None = None
        for x in (*base.positions, *positions):
            inside = inside & x.inside
            offset = x.offset if offset is None else offset + x.offset
        if offset is None:
            return self.filled(tensor, base.address[0], inside)
        if not isinstance(offset.ir.type, llvm.VectorType):
            return self.filled(tensor, base.address[offset], inside)
        inside = code.splat(inside)
        return self.filled(tensor, self.gather(base.address, code.select(inside, offset, 0)), inside)

    def gather(self, base: Pointer, offset: Value) -> Value:
        """The elements at a vector of readable offsets. One that all lanes share is loaded once, and neighbors as a
        vector.
        """
        code, kind = self.code, llvm.VectorType(base.kind, self.code.lanes)
        first, same, neighbors = pattern(offset)
        result = code.variable(Value(code, llvm.Constant(kind, llvm.Undefined)))
        with code.if_else(same) as (one, several):
            with one:
                result.set(code.splat(base[first]))
            with several, code.if_else(neighbors) as (contiguous, scattered):
                with contiguous:
                    result.set(base.vector(first))
                with scattered:
                    addresses = code.ir.gep(base.ir, [offset.ir], source_etype=base.kind)
                    addresses.type = llvm.VectorType(ADDRESS, code.lanes)
                    result.set(code.masked_gather(Value(code, addresses), base.kind))
        return result.get()

    def filled(self, tensor: int, x: Value, inside: Value) -> Value:
        dtype = self.tensors[tensor].dtype
        if dtype == "bool":
            return x.differs(0) & inside
        if "float" in dtype:
            x, outside = widen(self.code, x, stored_dtype(dtype)), math.nan
        else:
            narrow = SIZES[element_type(x.ir.type)] < 4
            x = self.code.convert(x, INT, signed=dtype.startswith("int")) if narrow else x
            x = self.code.convert(x, LONG, signed=False) if dtype == "uint32" else x
            outside = 0
        return self.code.select(inside, x, outside)


def pattern(offset: Value) -> tuple[Value, Value, Value]:
    """The offset of the first lane, whether all lanes have the same one, and whether each has the next one."""
    code = offset.code
    first = Value(code, code.ir.extract_element(offset.ir, llvm.Constant(INT, 0)))
    lanes = Value(code, llvm.Constant(offset.ir.type, list(range(code.lanes))))
    same, neighbors = offset.equals(first), offset.equals(lanes + first)
    return code.convert(first, LONG), code.reduce("and", same), code.reduce("and", neighbors)


def below(index: Value, size: Value) -> Value:
    """Whether an index is in `[0, size)`: compared as unsigned numbers, those below 0 are the largest."""
    x, y = index.code.broadcast(index, size)
    return Value(index.code, index.code.ir.icmp_unsigned("<", x, y))
