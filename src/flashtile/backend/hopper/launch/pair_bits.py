"""Bits of the pairs that a mask shows in partly visible blocks (`kernels.pair_bits`), made on the device."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ....call.call import Call
from ....call.device import describe_device
from ....call.formulas import mask_formula
from ...gpu.captured import needs_wide_offsets
from ...gpu.kernel import Kernel
from ...gpu.pointers import Described, Pointers
from ...gpu.replay import Recorder
from ..tile_config import MMA_M, Constexpr
from . import KERNELS
from .formulas import NO_INPUTS, launch_with, pair_function
from .semaphores import return_entry_queue_semaphore

WORDS = 4  # words of a line and a block
PROGRAMS_PER_CORE = 8
PAIR_BITS = Kernel(f"{KERNELS}.pair_bits", "pair_bits_kernel")
NO_STRIDES = dict.fromkeys(("stride_mask_b", "stride_mask_m", "stride_mask_n"))


@dataclass(frozen=True)
class PairBitsConfig(Constexpr):
    """Kernel for the bits of pairs in partly visible blocks: tiles of `lines` rows, and blocks of `columns` keys; or of
    keys and rows.
    """

    lines: int
    columns: int
    of_keys: bool
    score_mod: Any = None


class EntryQueue(NamedTuple):
    """Work queue of partly visible blocks: the kernels of lists fill it, the kernel of bits drains it."""

    queue: Tensor  # int64: the entry, times 2**32, and its place in lists
    queue_size: Tensor  # `semaphores.take_entry_queue_semaphore`


def pair_bits(recorder: Recorder, call: Call, lists: Tensor, queue: EntryQueue, config: PairBitsConfig) -> Tensor:
    """Launch the kernel for the bits of these lists `[1 | 2, B | 1, 1, tiles, entries]`."""
    _, batch, _, tiles, entries = lists.shape
    t, formula = call.tensors, mask_formula(call)
    bits = recorder.new(lists.new_empty((batch, tiles, entries, config.lines, WORDS)))
    cores = describe_device(t.q.device).cores
    grid = min(cores * PROGRAMS_PER_CORE, batch * tiles * (entries - 2) * (config.lines // MMA_M))
    scalars = {
        "stride_lists": entries,
        "num_tiles": tiles,
        "seqlen_q": t.q.shape[2],
        "seqlen_k": t.k.shape[2],
        "CONFIG": config,
        "num_warps": 4,
    }
    pointers: Pointers = {**queue._asdict(), "mask_bits": bits}
    if formula is None:
        assert t.mask is not None
        mask = Described(t.mask, Tensor.view, torch.uint8)
        b, _, m, n = broadcast_strides(t.mask)
        scalars |= {"stride_mask_b": b, "stride_mask_m": m, "stride_mask_n": n}
        recorder.launch(PAIR_BITS, pointers | {"mask": mask}, grid, scalars | NO_INPUTS)
    else:
        function = pair_function(formula, any(needs_wide_offsets(x) for x in t.score_mod_tensors))
        launch_with(recorder, call, PAIR_BITS, pointers | {"mask": None}, grid, scalars | NO_STRIDES, function)
    recorder.effect(return_entry_queue_semaphore, queue.queue_size)
    return bits


def broadcast_strides(x: Tensor) -> list[int]:
    """Strides in elements, 0 of broadcast dimensions."""
    return [0 if n == 1 else stride for n, stride in zip(x.shape, x.stride(), strict=True)]
