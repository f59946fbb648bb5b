"""Tensors next to protected pages, so that one access out of bounds ends the process.

As a program, `guarded.py FIRST LAST DTYPE...` runs calls of the CPU backend with every tensor guarded, results and
workspaces included: the random calls of these seeds, and calls of every size modulo vectors and blocks in the named
dtypes, whose inputs are surrounded by NaN.
"""

import ctypes
import mmap
import random
import sys
from collections.abc import Iterator, Sequence
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
KEPT: list[mmap.mmap] = []  # never unmapped, since tensors point into them


def guarded(x: Tensor, in_front: bool) -> Tensor:
    """A copy with the same strides that begins right after a protected page, or ends right before one."""
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
    copy = torch.frombuffer(memory, dtype=x.dtype).as_strided(x.shape, x.stride())
    each = tuple(slice(0, 1) if stride == 0 else slice(None) for stride in x.stride())
    copy[each] = x[each]
    return copy


@contextmanager
def guarded_allocation(in_front: bool) -> Iterator[None]:
    """Guard all tensors that Python code allocates in this block."""

    def guard(allocate: Any) -> Any:
        return lambda *args, **kwargs: guarded(allocate(*args, **kwargs), in_front)

    with ExitStack() as patches:
        for owner, name in ALLOCATORS:
            patches.enter_context(mock.patch.object(owner, name, guard(getattr(owner, name))))
        yield


def guard(case: Any, in_front: bool) -> None:
    """Guard a case's tensors."""
    for name, x in case.arguments.items():
        if isinstance(x, Tensor):
            case.arguments[name] = guarded(x, in_front)
    for name in ("dout", "dlse"):
        x = getattr(case, name)
        setattr(case, name, None if x is None else guarded(x, in_front))
    case.tangents = {name: guarded(x, in_front) for name, x in case.tangents.items()}


def residues(dtypes: Sequence[torch.dtype]) -> None:
    """Run every number of rows, keys and features modulo the kernels' block sizes, forward and backward, and some in
    forward mode. Inputs are part of larger tensors of NaN, so that a read past the end of any row, head or sequence
    shows in results; allocated memory holds NaN until it is written.
    """
    from checking import dense_case

    from flashtile.testing.poison import in_larger_buffer, poisoned_allocation

    for case in cases_of_every_residue(dense_case, dtypes):
        expected = case.run("cpu")
        for tensors in (case.arguments, case.tangents):
            for name in tensors.keys() & {*"qkv"}:
                tensors[name] = in_larger_buffer(tensors[name], ((1, 0), (0, 1), (1, 1), (2, 3)))
        if case.dout is not None:
            case.dout = in_larger_buffer(case.dout, ((0, 1), (1, 0), (1, 1), (3, 2)))
        in_front = bool(case.seed % 2)
        guard(case, in_front)
        print(case.description, flush=True)
        with poisoned_allocation(), guarded_allocation(in_front):
            results = case.run("cpu")
        wrong = [name for name, x in results.items() if not torch.equal(x, expected[name])]
        if wrong:
            raise SystemExit(f"{wrong} changed with what lies around inputs: {case.description}")


def cases_of_every_residue(dense_case: Any, dtypes: Sequence[torch.dtype]) -> Iterator[Any]:
    """All four sizes change from call to call, by coprime steps. Other dtypes than float32 differ only in lanes and in
    how features are read, so a third of the calls is enough for them. Where matrix tiles multiply, only the calls that
    use them: the other kernels are those of vectors.
    """
    from flashtile.backend.cpu import targets
    from flashtile.backend.cpu.workspace import BLOCK_N
    from flashtile.testing.moving import moving

    tiles = targets.host().tiles is not None
    sizes = ((dtype, range(0, BLOCK_N, 1 if dtype is torch.float32 else 3)) for dtype in dtypes)
    for dtype, n in ((dtype, n) for dtype, some in sizes for n in some):
        keys = 1 + 5 * n % BLOCK_N + n % 2 * BLOCK_N
        shape = {"seqlen_q": 1 + n, "seqlen_k": keys, "head_dim": 1 + 7 * n % 32, "head_dim_v": 1 + (11 * n + 4) % 32}
        causal = (False, True, "top_left")[n % 3]
        case = dense_case(batch=1, **shape, dtype=dtype, causal=causal, seed=n, forward_only=tiles)
        yield case
        if tiles:
            continue
        if n % 9 == 0:
            yield moving(case)
        # The decode kernel, for few rows and features that fill vectors; some calls with split keys.
        keys += 1600 * (n % 16 == 0)
        few = {"seqlen_q": 1 + n % 3, "seqlen_k": keys, "head_dim": 32, "head_dim_v": 64 - n % 2 * 32}
        yield dense_case(batch=1, **few, dtype=dtype, causal=causal, seed=n, forward_only=True)
    # So many rows that sums of dk and dv are carried to totals, and keys in ten splits, the last of them empty.
    if not tiles:
        yield dense_case(batch=1, seqlen_q=1040, seqlen_k=2560, head_dim=8, dtype=dtypes[0])


def random_calls(first: int, last: int) -> None:
    from flashtile.errors import BackendError
    from flashtile.testing.generate import random_case

    for seed in range(first, last):
        function = random.Random(seed).choice(("attention", "attention_varlen", "attention_with_kvcache"))
        case = random_case(seed, function=function)
        in_front = seed % 2 == 0
        guard(case, in_front)
        print(seed, case.description, flush=True)
        with guarded_allocation(in_front):
            try:
                case.run("cpu")
            except BackendError as error:
                print(error.reasons)


if __name__ == "__main__":
    random_calls(int(sys.argv[1]), int(sys.argv[2]))
    residues([getattr(torch, name) for name in sys.argv[3:]])
