"""A force field: a network learns an energy from forces alone, so that its loss contains a gradient of attention.

Atoms attend to each other, and the sum of what they make of that is the energy of a configuration. The forces are minus
its gradient by the positions, and the loss compares them with known ones, here of a trap in which atoms repel each
other. So training differentiates a gradient: the backward pass of a backward pass, for which flashtile needs O(N)
memory, and has kernels on a GPU. At the end it prints the time and the peak memory of a step with more atoms, beside
dense attention.

    python examples/force_field.py                # half a minute on two cores
    python examples/force_field.py --device cuda --compare 4096
"""

import statistics
import time
from collections.abc import Callable

import click
import torch
from torch import Tensor, nn

import flashtile
from flashtile.bench.allocation import live_and_peak_bytes

WIDTH, HEADS, ATOMS, CONFIGURATIONS = 64, 2, 8, 16
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def dense_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT * q.shape[-1] ** -0.5).softmax(dim=-1) @ v


class Energy(nn.Module):
    """The energies `[B]` of configurations `[B, N, 2]`."""

    attention: Attention = flashtile.attention  # type: ignore[assignment]

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Sequential(nn.Linear(2, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH))
        self.projections = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in "qkv")
        self.head = nn.Sequential(nn.Linear(2 * WIDTH, WIDTH), nn.SiLU(), nn.Linear(WIDTH, 1))

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)  # [B, N, WIDTH]
        q, k, v = (p(h).unflatten(-1, (HEADS, -1)).transpose(1, 2) for p in self.projections)  # [B, H, N, D]
        seen = type(self).attention(q, k, v).transpose(1, 2).flatten(2)
        return self.head(torch.cat((h, seen), dim=-1)).sum(dim=(1, 2))


def forces_of(energy: Callable[[Tensor], Tensor], x: Tensor, *, create_graph: bool) -> Tensor:
    """Minus the gradient of the energies by the positions."""
    x = x.detach().requires_grad_()
    return -torch.autograd.grad(energy(x).sum(), x, create_graph=create_graph)[0]


def true_energy(x: Tensor) -> Tensor:
    """A trap, and atoms that repel each other."""
    pairs = (x[:, :, None] - x[:, None]).square().sum(dim=-1)
    return x.square().sum(dim=(1, 2)) / 2 + (-pairs).exp().sum(dim=(1, 2)) / 2


def loss_of(network: nn.Module, x: Tensor) -> Tensor:
    right = forces_of(true_energy, x, create_graph=False)
    return (forces_of(network, x, create_graph=True) - right).square().mean()


def cost_of_a_step(network: nn.Module, x: Tensor) -> tuple[float, float]:
    """Milliseconds, the median of three, and peak MiB of a loss and its gradient."""

    def step() -> None:
        network.zero_grad()
        loss_of(network, x).backward()
        if x.is_cuda:
            torch.cuda.synchronize()

    step()  # plans, and compiles kernels
    times = []
    for _ in range(3):
        start = time.perf_counter()
        step()
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times), live_and_peak_bytes(step, x.device)[1] / 2**20


@click.command()
@click.option("--steps", default=300, show_default=True, type=click.IntRange(1), help="Steps of training.")
@click.option("--compare", "size", default=512, show_default=True, help="Atoms of a timed step; 0: none.")
@click.option("--device", default="cpu", show_default=True)
def main(steps: int, size: int, device: str) -> None:
    """Learn an energy from forces, and compare what a step costs."""
    torch.manual_seed(0)
    network = Energy().to(device)
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = loss_of(network, torch.randn(CONFIGURATIONS, ATOMS, 2, device=device))
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    few = min(steps, 10)
    start, end = (statistics.fmean(x) ** 0.5 for x in (losses[:few], losses[-few:]))
    click.echo(f"error of the forces: {start:.3f} at the start, {end:.3f} at the end")
    if size > 0:
        x = torch.randn(1, size, 2, device=device)
        for name, attention in (("flashtile", flashtile.attention), ("dense attention", dense_attention)):
            Energy.attention = staticmethod(attention)  # type: ignore[assignment]
            milliseconds, peak = cost_of_a_step(network, x)
            click.echo(f"a step of {size} atoms, {name}: {milliseconds:.0f} ms, peak memory {peak:.0f} MiB")


if __name__ == "__main__":
    main()
