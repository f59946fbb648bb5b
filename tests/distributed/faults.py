"""Ranks that end, or do not come in time: the others raise an error that says so, and do not hang."""

import datetime
import os
import time
import traceback

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import flashtile
from flashtile.distributed import ExchangeError

RANKS, SECONDS = 2, 5.0  # of the process group's timeout; other worlds keep the processors busy


def fork(store: str) -> dict[int, str]:
    """A world for each fault: all of their processes, by their ids."""
    children = {}
    for fault in (raised_in_backward, too_late):
        for rank in range(RANKS):
            if (pid := os.fork()) == 0:
                code = 1
                try:
                    join(rank, f"{store}-{fault.__name__}")
                    fault(rank)
                    code = 0
                except BaseException:
                    print(f"{fault.__name__}, rank {rank}:\n{traceback.format_exc()}", flush=True)
                finally:
                    os._exit(code)
            children[pid] = f"{fault.__name__}, rank {rank}"
    return children


def join(rank: int, store: str) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS, timeout=datetime.timedelta(seconds=SECONDS)
    )


def call(scheme: str) -> torch.Tensor:
    mesh = DeviceMesh("cpu", torch.arange(RANKS))
    q, k, v = (torch.randn(1, 2, 8, 16, requires_grad=True) for _ in range(3))
    out = flashtile.distributed.attention(q, k, v, mesh=mesh, scheme=scheme, backend="tiled")
    assert isinstance(out, torch.Tensor)
    return out


def raised_in_backward(rank: int) -> None:
    out = call("ring")
    if rank == 1:
        out.register_hook(raise_error)
        with pytest.raises(ValueError, match="on purpose"):
            out.sum().backward()
        return  # and the process ends
    with pytest.raises(ExchangeError, match=r"rank 0 of 2 .* waiting for keys, rows or their gradients"):
        out.sum().backward()


def raise_error(gradient: torch.Tensor) -> None:
    raise ValueError("on purpose")


def too_late(rank: int) -> None:
    call("gather")
    if rank == 1:
        time.sleep(2 * SECONDS)
        return
    start = time.monotonic()
    with pytest.raises(ExchangeError, match=r"rank 0 of 2 .* keys, rows or their gradients"):
        call("gather")
    assert time.monotonic() - start < 2 * SECONDS
