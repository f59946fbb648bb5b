"""Zero-initialized semaphores. Kernels reset them on exit, so that no launch has to clear them.

Launches that may run at the same time never share a semaphore. Launches of one stream run one after another: they do. A
captured graph may run at any time and owns its slice for good.
"""

import torch
from torch import Tensor

from ....call.problem import power_of_two
from ....persistent import persistent_zeros
from ....private_torch import is_capturing
from ....remember import remember
from ...gpu.streams import MAX_STREAMS, StreamKey, current_stream_key

ALIGNMENT = 4  # semaphores in 16 bytes, the alignment that a kernel may be compiled for
RESERVED = 2**16  # for graphs; a layer's step takes at most as many as half the chip's cores

_of_streams: dict[StreamKey, Tensor] = {}
_for_graphs: dict[torch.device, list[Tensor]] = {}  # reserved memory; the last entry is the free rest


def new_semaphores(device: torch.device, count: int) -> Tensor:
    """At least `count` semaphores, int32."""
    if device.type != "cuda":
        return zeros(device, count)
    if is_capturing():
        return of_a_graph(device, count)
    key = current_stream_key()
    known = _of_streams.get(key)
    if known is None or len(known) < count:
        reserve(device)
        known = remember(_of_streams, key, persistent_zeros(device, power_of_two(count)), MAX_STREAMS)
    return known


def of_a_graph(device: torch.device, count: int) -> Tensor:
    """A slice of the reserved memory. Zeros that a graph allocates itself cost one more launch in each replay."""
    reserved = _for_graphs.get(device)
    if not reserved or len(reserved[-1]) < count:
        return zeros(device, count)
    end = -(-count // ALIGNMENT) * ALIGNMENT
    found, reserved[-1] = reserved[-1][:count], reserved[-1][end:]
    return found


def reserve(device: torch.device) -> None:
    """Reserve memory for captures that begin after this call."""
    reserved = _for_graphs.setdefault(device, [])
    if not reserved or len(reserved[-1]) < RESERVED // 2:
        reserved.append(persistent_zeros(device, RESERVED))
        torch.cuda.current_stream(device).synchronize()  # a graph may run on any stream


def zeros(device: torch.device, count: int) -> Tensor:
    return torch.zeros(count, dtype=torch.int32, device=device)
