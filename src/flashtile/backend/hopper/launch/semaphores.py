"""Zero-initialized semaphores, which kernels reset on exit."""

import torch
from torch import Tensor

from ....persistent import persistent_zeros
from ....private_torch import is_capturing
from ....remember import remember
from ...gpu.streams import MAX_STREAMS, StreamKey, current_stream_key

tile_counts: dict[StreamKey, Tensor] = {}
entry_queues: dict[StreamKey, Tensor] = {}  # those that no call uses


def tile_count_semaphore(device: torch.device, packed: bool) -> Tensor:
    """The semaphore from which persistent programs take their tiles.

    Dense launches reset it on exit and share one for each stream. Packed launches, which do not reset it, and captured
    graphs, which may run at the same time as other launches, get their own.
    """
    if packed or not is_shared(device):
        return torch.zeros(1, dtype=torch.int32, device=device)
    key = current_stream_key()
    if (cached := tile_counts.get(key)) is not None:
        return cached
    return remember(tile_counts, key, persistent_zeros(device, 1), MAX_STREAMS)


def take_entry_queue_semaphore(device: torch.device) -> Tensor:
    """The numbers of entries in a queue and of programs that are done with it (`kernels.pair_bits`).

    One kernel fills a queue and another one empties it. Between their launches another thread may launch kernels on the
    same stream, and an error may end the call. So a call has the semaphore alone until it returns it.
    """
    if not is_shared(device):
        return torch.zeros(2, dtype=torch.int32, device=device)
    cached = entry_queues.pop(current_stream_key(), None)
    return persistent_zeros(device, 2) if cached is None else cached


def return_entry_queue_semaphore(semaphore: Tensor) -> None:
    """Let later calls on the stream use the semaphore, after the launch that resets it."""
    if is_shared(semaphore.device):
        remember(entry_queues, current_stream_key(), semaphore, MAX_STREAMS)


def is_shared(device: torch.device) -> bool:
    """Whether launches of one stream may share semaphores."""
    return device.type == "cuda" and not is_capturing()
