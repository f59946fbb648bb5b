"""Warp specialization with more warps, which transpose values."""

from typing import Any

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language import _core


@_core.builtin
def run_partitions(
    CONFIG: Any,
    consumer: Any,
    arguments: Any,
    transpose: Any,
    warps: Any,
    _semantic: Any = None,
    _generator: Any = None,
) -> None:
    """Run `consumer` in each of CONFIG's warpgroups, whose first argument is its number, beside the partition
    `transpose` and `warps` of one warp each.
    """
    config = _core._unwrap_if_constexpr(CONFIG)
    more = config.num_warpgroups - 1
    numbers = range(config.num_warpgroups)
    consumers = [_core.tuple([consumer, _core.tuple([gl.constexpr(n), *arguments])]) for n in numbers]
    gl.warp_specialize(
        [*consumers, transpose, *warps],
        [4] * more + [config.transpose_warps] + [1] * len(warps),
        [config.consumer_registers] * more + [config.transpose_registers] + [config.producer_registers] * len(warps),
        _semantic=_semantic,
        _generator=_generator,
    )
