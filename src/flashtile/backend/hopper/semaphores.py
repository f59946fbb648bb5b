"""The semaphore from which persistent programs take their tiles."""

import torch
from torch import Tensor

from ...persistent import persistent_zeros
from ...private_torch import current_device, current_raw_stream, is_capturing
from ...remember import remember

MAX_SEMAPHORES = 256

semaphores: dict[tuple[int, int], Tensor] = {}  # by device and stream


def tile_count_semaphore(device: torch.device, packed: bool) -> Tensor:
    """A zero-initialized semaphore.

    Dense launches reset it on exit and share one for each stream. Packed launches, which do not reset it, and captured
    graphs, which may run at the same time as other launches, get their own.
    """
    if packed or device.type != "cuda" or is_capturing():
        return torch.zeros(1, dtype=torch.int32, device=device)
    index = current_device()
    key = (index, current_raw_stream(index))
    if (cached := semaphores.get(key)) is not None:
        return cached
    return remember(semaphores, key, persistent_zeros(device, 1), MAX_SEMAPHORES)
