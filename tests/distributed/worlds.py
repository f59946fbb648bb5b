"""One process of a gloo world: sharded calls over meshes of its first ranks, compared with one device."""

import datetime
import sys
import traceback

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import flashtile
from flashtile.distributed import attention, shard, unshard

WORLD = 4
B, HQ, D, DV = 2, 4, 16, 24
# Arguments, rows, keys and key heads. Lengths give uneven, and empty, shards.
CASES = [
    ({}, 61, 61, 4),
    ({"causal": True}, 67, 67, 2),
    ({"causal": True}, 30, 53, 1),
    ({"causal": "top_left"}, 45, 29, 2),
    ({"window": (9, 4)}, 71, 71, 2),
    ({"window": (20, 0), "causal": True, "softcap": 3.0}, 71, 71, 2),
    ({"attention_chunk": 13, "causal": True}, 50, 58, 4),
    ({"causal": True, "dropout_p": 0.3, "dropout_seed": 5}, 40, 47, 2),
    ({"alibi_slopes": torch.tensor([0.5, 0.25, 0.1, 0.0]), "causal": True}, 33, 41, 2),
    ({"score_mod": lambda s, b, h, i, j: s + 0.01 * (i - 2 * j) * (h + 1)}, 37, 43, 2),
    ({"mask": lambda b, h, i, j: (i * 3 + j + b) % 4 != 0}, 37, 43, 2),
    ({"causal": True}, 3, 2, 2),
    ({}, 5, 0, 2),
]


def compare(mesh: DeviceMesh, case: int, layout: str, dtype: torch.dtype) -> None:
    """One case, forward and backward, with gradients of out and of lse."""
    arguments, num_rows, num_keys, heads = CASES[case]
    torch.manual_seed(case)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=dtype)

    whole = [random(B, HQ, num_rows, D), random(B, heads, num_keys, D), random(B, heads, num_keys, DV)]
    dout, dlse = random(B, HQ, num_rows, DV), random(B, HQ, num_rows)
    whole = [x.requires_grad_() for x in whole]
    out, lse = flashtile.attention(*whole, return_lse=True, **arguments)
    expected = [out, lse, *torch.autograd.grad((out, lse), whole, (dout, dlse))]

    local = [shard(x.detach(), mesh, 2, layout=layout).requires_grad_() for x in whole]
    out, lse = attention(*local, mesh=mesh, layout=layout, return_lse=True, **arguments)
    incoming = [shard(x, mesh, 2, layout=layout) for x in (dout, dlse)]
    results = [out, lse, *torch.autograd.grad((out, lse), local, incoming)]
    tolerance = 1e-11 if dtype == torch.float64 else 2e-5
    for name, x, reference in zip(("out", "lse", "dq", "dk", "dv"), results, expected, strict=True):
        gathered = unshard(x.detach(), mesh, 2, layout=layout)
        torch.testing.assert_close(
            gathered, reference.detach(), atol=tolerance, rtol=tolerance, msg=lambda m, name=name: f"{name}: {m}"
        )


def differentiate_layouts(mesh: DeviceMesh, layout: str) -> None:
    """The gradient through shard and unshard is that of the whole tensor."""
    x = torch.arange(22.0).reshape(2, 11).requires_grad_()
    weights = torch.arange(22.0).reshape(2, 11).cos()
    again = unshard(shard(x, mesh, 1, layout=layout) ** 2, mesh, 1, layout=layout)
    assert torch.equal(again, x**2)
    (again * weights).sum().backward()
    torch.testing.assert_close(x.grad, 2 * weights * x.detach())


def refused(mesh: DeviceMesh, rank: int) -> None:
    """Calls that differ between ranks are refused on all of them, by the name of what differs."""
    q = torch.randn(1, 2, 8, 16)
    wrong: list[tuple[dict, str]] = [
        ({"scale": 0.5 if rank == 1 else 0.25}, "on rank 1"),
        ({"causal": 7 if rank == 1 else True}, "causal"),
        ({"scheme": "tree"}, "scheme"),
        ({"mask": torch.ones(1, 1, 8, 8, dtype=torch.bool)}, "mask"),
        ({"dropout_p": 0.5}, "dropout_seed"),
    ]
    for arguments, words in wrong:
        with pytest.raises(flashtile.AttentionError, match=words):
            attention(q, q, q, mesh=mesh, **arguments)
    rows = torch.randn(1, 2, 8 + 2 * (rank == 1), 16)
    with pytest.raises(flashtile.ArgumentError, match="shard"):
        attention(rows, rows, rows, mesh=mesh)


def main(rank: int, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD, timeout=datetime.timedelta(seconds=30)
    )
    for size in (4, 3, 2):
        mesh = DeviceMesh("cpu", list(range(size)))
        if rank < size:
            refused(mesh, rank)
            for layout in ("contiguous", "zigzag"):
                differentiate_layouts(mesh, layout)
                for case in range(len(CASES)):
                    dtype = torch.float64 if (case + size) % 2 else torch.float32
                    try:
                        compare(mesh, case, layout, dtype)
                    except Exception as error:
                        raise AssertionError(f"{CASES[case]} {layout} {dtype} on {size} ranks") from error
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    try:
        main(int(sys.argv[1]), sys.argv[2])
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        raise
