"""The counters that persistent programs take their work from."""

import torch
from torch import Tensor

from ...remember import remember
from ..gpu.launch import current_stream

MAX_SEMAPHORES = 256

semaphores: dict[tuple[torch.device, int], Tensor] = {}


def tile_count_semaphore(device: torch.device, packed: bool) -> Tensor:
    """A zero that a launch counts with. One of dense sequences leaves it at zero: launches on a stream share it.
    A captured one may run beside others, and has its own.
    """
    if packed or device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return torch.zeros(1, dtype=torch.int32, device=device)
    key = (device, current_stream())
    if (cached := semaphores.get(key)) is not None:
        return cached
    return remember(semaphores, key, torch.zeros(1, dtype=torch.int32, device=device), MAX_SEMAPHORES)
