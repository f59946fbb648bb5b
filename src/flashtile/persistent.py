"""Tensors that outlive the call that allocates them."""

import threading
from collections.abc import Callable

import torch
from torch import Tensor


def persistent(device: torch.device, make: Callable[[], Tensor]) -> Tensor:
    """A new tensor for a cache: filled in the order of the current stream, outside of the memory pools of graphs.

    `torch.compile` with CUDA graphs runs a function once before it captures it, and sends that thread's allocations to
    the graph's pool, in which nothing may stay but results. Another thread allocates elsewhere.
    """
    if device.type != "cuda":
        return make()
    stream = torch.cuda.current_stream(device)
    made: list[Tensor] = []
    failures: list[BaseException] = []

    def allocate() -> None:
        try:
            with torch.cuda.stream(stream):
                made.append(make())
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=allocate)
    thread.start()
    thread.join()
    if failures:
        raise failures[0]
    return made[0]


def persistent_zeros(device: torch.device, count: int) -> Tensor:
    """int32 zeros."""
    return persistent(device, lambda: torch.zeros(count, dtype=torch.int32, device=device))
