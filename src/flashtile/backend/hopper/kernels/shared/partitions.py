"""Warp specialization: partitions of a kernel, which run side by side. A partition is a function and its arguments."""

from typing import Any

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language import _core


@_core.builtin
def numbered(function: Any, count: Any, arguments: Any, _semantic: Any = None) -> Any:
    """`count` partitions of a function, whose first argument is their number, a constant."""
    numbers = range(_core._unwrap_if_constexpr(count))
    return _core.tuple([_core.tuple([function, _core.tuple([gl.constexpr(n), *arguments])]) for n in numbers])


@_core.builtin
def run_partitions(CONFIG: Any, warpgroups: Any, *warps: Any, _semantic: Any = None, _generator: Any = None) -> None:
    """Run partitions of a warpgroup each, of which the first one takes the warps that the kernel started with, and
    lists of partitions of one warp each.
    """
    config, others = _core._unwrap_if_constexpr(CONFIG), [x for partitions in warps for x in partitions]
    more = len(warpgroups) - 1
    gl.warp_specialize(
        [*warpgroups, *others],
        [4] * more + [1] * len(others),
        [config.consumer_registers] * more + [config.producer_registers] * len(others),
        _semantic=_semantic,
        _generator=_generator,
    )
