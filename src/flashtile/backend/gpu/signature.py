"""The key of a compiled kernel: all of its arguments that its machine code depends on.

Triton compiles a kernel for constants by their values, and for other arguments by their types. Arguments that are not
excepted are also specialized: pointers by whether 16 bytes divide them, integers by whether they are 1 (then they are
constants) or multiples of 16. The tests compare this with Triton.
"""

import hashlib
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from torch import Tensor

from .pointers import TmaDescriptor

CONSTANT, SPECIALIZED, PLAIN = "constant", "specialized", "plain"  # kinds of parameters
DIVISOR = 16

Parameters = Sequence[tuple[str, str]]  # names and kinds, in the order of the kernel


def key_of(parameters: Parameters, arguments: Mapping[str, Any], options: Mapping[str, Any]) -> str:
    """A digest of what a kernel is compiled for: arguments by `parameters`, and Triton's options such as num_warps."""
    parts = [argument_key(kind, arguments[name]) for name, kind in parameters]
    parts += [f"{name}={options[name]!r}" for name in sorted(options)]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


class QuickKeys:
    """Keys of one kernel's launches for a table of one process: as fine as `key_of`, in a third of its time."""

    def __init__(self, parameters: Parameters):
        self.names = frozenset(name for name, _ in parameters)
        self.plain, self.constants, self.specialized = (
            [name for name, kind in parameters if kind == wanted] for wanted in (PLAIN, CONSTANT, SPECIALIZED)
        )

    def key(self, arguments: Mapping[str, Any], options: Mapping[str, Any]) -> Hashable:
        plain = [arguments[name] for name in self.plain]
        return (
            *[x.__class__ if x is None or -(2**31) <= x < 2**31 else type_of(x) for x in plain],
            *[(x.__class__, x) for x in [arguments[name] for name in self.constants]],
            *[argument_key(SPECIALIZED, arguments[name]) for name in self.specialized],
            *options.items(),
        )


def argument_key(kind: str, x: Any) -> str:
    """The part of a kernel's signature for one argument; `str(None)` for one that is compiled away."""
    if x is None or kind == CONSTANT:
        return repr(x)
    if isinstance(x, Tensor):
        return f"*{x.dtype}{aligned(kind, x.data_ptr())}"
    if isinstance(x, TmaDescriptor):
        return f"tma {x.base.dtype} {x.block_shape}{' swizzled' * x.swizzled}"
    if kind == SPECIALIZED and type(x) is int and x == 1:
        return "=1"
    return type_of(x) + (aligned(kind, x) if type(x) is int else "")


def aligned(kind: str, number: int) -> str:
    return " aligned" if kind == SPECIALIZED and number % DIVISOR == 0 else ""


def type_of(x: Any) -> str:
    """Triton's type of a number."""
    if isinstance(x, bool):
        return "u1"
    if isinstance(x, float):
        return "fp32"
    return "i32" if -(2**31) <= x < 2**31 else "i64" if x < 2**63 else "u64"
