"""Train the byte-level GPT of `train_bytes.py` on sequences whose rows are shared by several processes:

    torchrun --nproc-per-node 2 examples/train_long.py                                      # CPUs, over gloo
    torchrun --nproc-per-node 8 examples/train_long.py --device cuda --seqlen 262144 --batch 1    # GPUs, over NCCL
    python examples/train_long.py                                # one process, the same losses within rounding

Each process has the rows that `flashtile.distributed.shard` gives it: of tokens, of the tokens to predict, of rotary
tables. `flashtile.distributed.attention` is all that processes do together in a forward and backward pass. Then they
add up the gradients of the weights, which all have.
"""

import os
import time

import click
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from flashtile.bench.byte_gpt import OneProcess, new_model, train
from flashtile.distributed import attention, shard

ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
LAYOUT = "zigzag"  # all processes have as many visible pairs under a causal mask


class Processes(OneProcess):
    """The processes of a mesh."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh

    def rows(self, x: Tensor, dim: int) -> Tensor:
        return shard(x, self.mesh, dim, layout=LAYOUT)

    def add_up(self, tensors: list[Tensor]) -> None:
        for x in tensors:
            dist.all_reduce(x, group=self.mesh.get_group())

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, mesh=self.mesh, layout=LAYOUT, causal=True)  # type: ignore[return-value]


def losses(mesh: DeviceMesh, steps: int, batch: int, seqlen: int, dtype: torch.dtype = torch.float32) -> list[float]:
    """The loss of each step, the same on all processes."""
    device = mesh.device_type if mesh.device_type == "cpu" else f"cuda:{torch.cuda.current_device()}"
    model, processes = new_model(0, device, dtype), Processes(mesh)
    return list(train(model, processes.attend, steps, batch=batch, seqlen=seqlen, processes=processes))


@click.command(context_settings={"show_default": True})
@click.option("--device", type=click.Choice(("cpu", "cuda")), default="cpu")
@click.option("--steps", type=click.IntRange(1), default=50)
@click.option("--batch", type=click.IntRange(1), default=2)
@click.option("--seqlen", type=click.IntRange(2), default=1024, help="A multiple of twice the number of processes.")
@click.option("--dtype", type=click.Choice(("float32", "float64", "bfloat16")), default="float32")
def main(device: str, steps: int, batch: int, seqlen: int, dtype: str) -> None:
    """Train, and print losses, speed, and on GPUs the largest memory of one."""
    if "WORLD_SIZE" not in os.environ:  # without torchrun
        os.environ.update(ALONE)
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    mesh = init_device_mesh(device, (int(os.environ["WORLD_SIZE"]),))
    start = time.perf_counter()
    found = losses(mesh, steps, batch, seqlen, getattr(torch, dtype))
    seconds = time.perf_counter() - start
    if mesh.get_rank() == 0:
        for step in sorted({0, *range(steps // 10 - 1, steps, steps // 10 or steps), steps - 1} - {-1}):
            click.echo(f"step {step + 1:5}   loss {found[step]:.6f}")
        click.echo(f"{mesh.size()} processes: {steps * batch * seqlen / seconds:,.0f} tokens/s")
        if device == "cuda":
            click.echo(f"{torch.cuda.max_memory_allocated() / 1e9:.2f} GB of memory at most")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
