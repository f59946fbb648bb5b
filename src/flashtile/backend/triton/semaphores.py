"""Zeros that the programs of a launch count with; they leave them at zero, so that nothing has to clear them.

Two launches that may run at the same time never share one. Launches on a stream follow each other and share. A captured
one runs whenever its graph does: what it has, nothing else gets any more.
"""

import torch
from torch import Tensor

from ...call.problem import power_of_two
from ...remember import remember
from ..gpu.launch import current_stream

MAX_STREAMS = 256
ALIGNMENT = 4  # new_semaphores in 16 bytes: a kernel may be compiled for a pointer that is a multiple of them
RESERVED = 2**16  # new_semaphores for graphs; a layer's step takes at most as many as half the chip's cores

_of_streams: dict[tuple[torch.device, int], Tensor] = {}
_for_graphs: dict[torch.device, list[Tensor]] = {}  # what was reserved, and last what no graph has of it


def new_semaphores(device: torch.device, count: int) -> Tensor:
    """At least `count` zeros, int32."""
    if device.type != "cuda":
        return zeros(device, count)
    if torch.cuda.is_current_stream_capturing():
        return of_a_graph(device, count)
    key = (device, current_stream())
    known = _of_streams.get(key)
    if known is None or len(known) < count:
        reserve(device)
        known = remember(_of_streams, key, zeros(device, power_of_two(count)), MAX_STREAMS)
    return known


def of_a_graph(device: torch.device, count: int) -> Tensor:
    """From what was reserved: zeros of the graph's own are set with each replay, by one more launch."""
    reserved = _for_graphs.get(device)
    if not reserved or len(reserved[-1]) < count:
        return zeros(device, count)
    end = -(-count // ALIGNMENT) * ALIGNMENT
    found, reserved[-1] = reserved[-1][:count], reserved[-1][end:]
    return found


def reserve(device: torch.device) -> None:
    """See to it that a capture that begins after this call finds some."""
    reserved = _for_graphs.setdefault(device, [])
    if not reserved or len(reserved[-1]) < RESERVED // 2:
        reserved.append(zeros(device, RESERVED))
        torch.cuda.current_stream(device).synchronize()  # a graph may run on any stream


def zeros(device: torch.device, count: int) -> Tensor:
    return torch.zeros(count, dtype=torch.int32, device=device)
