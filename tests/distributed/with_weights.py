"""Weights that are sharded while a context shards the sequence: by FSDP2, and by tensor parallelism."""

import copy

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

import flashtile.nn
from flashtile.distributed import context_parallel, shard

WIDTH, BATCH, ROWS = 32, 4, 16


class Block(nn.Module):
    """Attention and two more layers."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = flashtile.nn.Attention(WIDTH, 4, num_kv_heads=2, causal=True)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x)
        return x + self.down(torch.relu(self.up(x)))


def gradients(mesh: DeviceMesh) -> None:
    """The gradients of one process. The sequence is sharded over one dimension of a mesh, and by FSDP2 the weights too;
    over the other one the batch, which replicates weights, or heads.
    """
    torch.manual_seed(0)
    one = nn.Sequential(Block(), Block()).double()
    x = torch.randn(BATCH, ROWS, WIDTH, dtype=torch.float64)
    (one(x) ** 2).sum().backward()
    for over_heads in (False, True):
        other, sequence = mesh["other"], mesh["sequence"]
        model, of_batch = copy.deepcopy(one), 1 if over_heads else other.size()
        model.zero_grad()
        for block in model:
            if over_heads:
                apart = ColwiseParallel(use_local_output=False)
                plan: dict[str, ParallelStyle] = {f"attention.{name}_proj": apart for name in "qkv"}
                plan |= {"attention.out_proj": RowwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}
                parallelize_module(block, other, plan)
            fully_shard(block, mesh=sequence if over_heads else mesh)
        each = BATCH // of_batch
        own = x if over_heads else x[each * other.get_local_rank() :][:each]
        with context_parallel(sequence, layout="zigzag"):
            (model(shard(own, sequence, 1, layout="zigzag")) ** 2).sum().backward()
        for p, expected in zip(model.parameters(), one.parameters(), strict=True):
            assert isinstance(p.grad, DTensor)
            found = p.grad.full_tensor() * sequence.size() * of_batch  # means of ranks
            torch.testing.assert_close(found, expected.grad)
