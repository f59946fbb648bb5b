"""Zero-initialized semaphores, which kernels reset on exit."""

import torch
from torch import Tensor

from ...persistent import persistent_zeros
from ...private_torch import current_device, current_raw_stream, is_capturing
from ...remember import remember

MAX_SEMAPHORES = 256

semaphores: dict[tuple[int, int, int], Tensor] = {}  # by device, stream and size


def tile_count_semaphore(device: torch.device, packed: bool) -> Tensor:
    """The semaphore from which persistent programs take their tiles.

    Dense launches reset it on exit and share one for each stream. Packed launches, which do not reset it, and captured
    graphs, which may run at the same time as other launches, get their own.
    """
    return zeros(device, 1, own=packed)


def entry_queue_semaphore(device: torch.device) -> Tensor:
    """The number of entries in a queue, and that of programs which are done with it (`kernels.pair_bits`)."""
    return zeros(device, 2)


def zeros(device: torch.device, count: int, *, own: bool = False) -> Tensor:
    """Zeros of the current stream, which only kernels that reset them share."""
    if own or device.type != "cuda" or is_capturing():
        return torch.zeros(count, dtype=torch.int32, device=device)
    index = current_device()
    key = (index, current_raw_stream(index), count)
    if (cached := semaphores.get(key)) is not None:
        return cached
    return remember(semaphores, key, persistent_zeros(device, count), MAX_SEMAPHORES)
