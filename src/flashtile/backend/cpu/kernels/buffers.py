"""A thread's workspace in generated code."""

from llvmlite import ir

from .. import workspace
from ..workspace import CACHE_LINE, MOST_BUFFERS, Layout, round_up
from .codegen import Code
from .operands import ADDRESS, BYTE, INT, LONG, SIZES, Pointer


def kinds_of(code: Code) -> dict[str, ir.Type]:
    """The types of a layout's kinds."""
    return {workspace.LONG: LONG, workspace.INT: INT, workspace.REAL: code.real_type}


class Workspace:
    """A thread's workspace; attributes are pointers to its buffers, loaded at a function's start. It
    begins with their addresses (`write_addresses`), so that its own address is all that a function needs.
    """

    def __init__(self, base: Pointer, layout: Layout):
        self._base = base.cast(LONG)
        kinds = kinds_of(base.code)
        self._kinds = {name: kinds[kind] for name, _, kind in layout}
        self._numbers = {name: n for n, name in enumerate(self._kinds)}
        self._buffers: dict[str, Pointer] = {}

    def __getattr__(self, name: str) -> Pointer:
        if name not in self._buffers:
            code = self._base.code
            with code.function_start():
                address = (self._base + self._numbers[name]).load(ADDRESS)
            self._buffers[name] = code.pointer(address, self._kinds[name])
        return self._buffers[name]


def write_addresses(base: Pointer, layout: Layout) -> None:
    """Write the addresses of a workspace's buffers to its beginning, once in each thread."""
    code, at, kinds = base.code, base.cast(BYTE), kinds_of(base.code)
    for n, (_, count, kind) in enumerate(layout):
        assert n < MOST_BUFFERS
        code.ir.store(at.ir, (base.cast(LONG) + n).ir, align=SIZES[LONG])
        at = at + round_up(count * SIZES[kinds[kind]], CACHE_LINE)
