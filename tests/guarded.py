"""Tensors that lie against a page which may be neither read nor written: one step outside ends the process.

Run as a program it does random calls of the CPU backend with every tensor guarded, results and scratch memory too.
"""

import ctypes
import mmap
import random
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

PAGE = mmap.PAGESIZE
LIBC = ctypes.CDLL(None, use_errno=True)
ALLOCATORS = (
    (torch, "empty"),
    (torch, "empty_strided"),
    (Tensor, "new_empty"),
    (Tensor, "new_empty_strided"),
)
KEPT: list[mmap.mmap] = []  # mappings live as long as the process: tensors point into them


def guarded(x: Tensor, in_front: bool) -> Tensor:
    """A copy with the same strides that begins right behind a protected page, or ends right before one."""
    x = x.detach()
    extent = 1 + sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True)) if x.numel() else 0
    size = extent * x.element_size()
    room = -(-size // PAGE) * PAGE
    mapping = mmap.mmap(-1, room + 2 * PAGE)
    KEPT.append(mapping)
    base = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
    for page in (base, base + PAGE + room):
        if LIBC.mprotect(ctypes.c_void_p(page), PAGE, 0) != 0:
            raise OSError(ctypes.get_errno(), "mprotect")
    if size == 0:
        return x
    memory = (ctypes.c_char * size).from_address(base + PAGE + (0 if in_front else room - size))
    found = torch.frombuffer(memory, dtype=x.dtype).as_strided(x.shape, x.stride())
    each = tuple(slice(0, 1) if stride == 0 else slice(None) for stride in x.stride())
    found[each] = x[each]
    return found


@contextmanager
def guarded_allocation(in_front: bool) -> Iterator[None]:
    """What Python code allocates for results and scratch is guarded inside this block."""

    def guard(allocate: Any) -> Any:
        return lambda *args, **kwargs: guarded(allocate(*args, **kwargs), in_front)

    with ExitStack() as patches:
        for owner, name in ALLOCATORS:
            patches.enter_context(mock.patch.object(owner, name, guard(getattr(owner, name))))
        yield


def main(first: int, last: int) -> None:
    from flashtile.errors import BackendError
    from flashtile.testing.generate import random_case

    for seed in range(first, last):
        function = random.Random(seed).choice(("attention", "attention_varlen", "attention_with_kvcache"))
        case = random_case(seed, function=function)
        in_front = seed % 2 == 0
        for name, x in case.arguments.items():
            if isinstance(x, Tensor):
                case.arguments[name] = guarded(x, in_front)
        for name in ("dout", "dlse"):
            x = getattr(case, name)
            setattr(case, name, None if x is None else guarded(x, in_front))
        print(seed, case.description, flush=True)
        with guarded_allocation(in_front):
            try:
                case.run("cpu")
            except BackendError as error:
                print(error.reasons)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
