"""One-step generation with a flow model whose loss needs the forward-mode derivative of attention.

MeanFlow (Geng et al., "Mean flows for one-step generative modeling", 2025) learns the average velocity `u(z, r, t)`
over the times from r to t of a flow that carries data x, at time 0, to noise e, at time 1, along z = (1 - t) x + t e.
The average velocity satisfies

    u = v - (t - r) du/dt,    v = e - x,    du/dt = the derivative of u along (v, 0, 1) in (z, r, t)

and du/dt is one `torch.func.jvp` of the network. Here every point attends to learned tokens with `flashtile.attention`,
which has a forward mode; the step from noise to data is then x = e - u(e, 0, 1). Most of the loss is the variance of v,
which no network can predict, so watch the distance to the data. At the end it prints the time and the peak memory of a
step with as many tokens as points, by flashtile's attention and by a dense one.

    python examples/meanflow_toy.py            # under a minute on two cores; draws meanflow.png
    python examples/meanflow_toy.py --steps 3000 --seed 1 --out long.png

The picture needs matplotlib: pip install 'flashtile[plot]'. Without it, or with --out '', nothing is drawn.
"""

import importlib.util
import math
import statistics
import time
from collections.abc import Callable

import click
import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, nn
from torch.func import jvp

import flashtile
from flashtile.bench.allocation import live_and_peak_bytes

WIDTH, HEADS, TOKENS, FREQUENCIES = 128, 2, 32, 4
POINTS = 512  # in one step of training
SAMPLES = 2000  # to compare with the data


class Block(nn.Module):
    """Every point attends to learned tokens, then passes through a small network of its own."""

    attention: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None  # to compare with flashtile's

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self.query = nn.Linear(WIDTH, WIDTH)
        self.keys = nn.Parameter(torch.randn(1, HEADS, tokens, WIDTH // HEADS))
        self.values = nn.Parameter(torch.randn(1, HEADS, tokens, WIDTH // HEADS))
        self.output = nn.Linear(WIDTH, WIDTH)
        self.own = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, h: Tensor) -> Tensor:  # [N, WIDTH]
        q = self.query(h).unflatten(-1, (HEADS, -1)).transpose(0, 1)[None]  # [1, H, N, D]
        attention: Callable[..., Tensor] = self.attention or flashtile.attention  # type: ignore[assignment]
        seen = attention(q, self.keys, self.values)  # the points are queries of one sequence
        h = h + self.output(seen[0].transpose(0, 1).flatten(1))
        return h + self.own(h)


class MeanVelocity(nn.Module):
    """`u(z, r, t)` for points z [N, 2] and times r, t [N]."""

    def __init__(self, tokens: int = TOKENS) -> None:
        super().__init__()
        self.embed = nn.Linear(2 + 4 * FREQUENCIES + 4, WIDTH)
        self.block = Block(tokens)
        self.velocity = nn.Linear(WIDTH, 2)

    def forward(self, z: Tensor, r: Tensor, t: Tensor) -> Tensor:
        waves = (z[:, :, None] * torch.linspace(0.5, 4, FREQUENCIES)).flatten(1)  # [N, 2 FREQUENCIES]
        times = torch.stack((t, t - r), dim=1)  # [N, 2]
        features = (z, waves.sin(), waves.cos(), times, (math.pi * times).sin())
        return self.velocity(self.block(self.embed(torch.cat(features, dim=1))))


def two_moons(count: int) -> Tensor:
    """Points on two half circles, with a little noise; about as wide as the unit Gaussian that they are made from."""
    angle = math.pi * torch.rand(count)
    upper = torch.stack((angle.cos() - 0.5, angle.sin() - 0.25), dim=1)
    moons = torch.where(torch.rand(count, 1) < 0.5, upper, -upper)
    return 1.5 * (moons + 0.05 * torch.randn(count, 2))


def loss_of(network: nn.Module, x: Tensor) -> Tensor:
    """The mean squared violation of the identity above; the derivative inside it is a constant."""
    count = x.shape[0]
    times = torch.rand(count, 2).sort(dim=1).values
    t = times[:, 1]
    r = torch.where(torch.rand(count) < 0.5, t, times[:, 0])  # half of them learn the velocity at one time
    e = torch.randn_like(x)
    z, v = (1 - t)[:, None] * x + t[:, None] * e, e - x
    u, dudt = jvp(network, (z, r, t), (v, torch.zeros_like(r), torch.ones_like(t)))
    target = (v - (t - r)[:, None] * dudt).detach()
    error = (u - target).square().sum(dim=1)
    return (error / (error.detach() + 0.01).sqrt()).mean()  # large errors count less: section 4.3 of the paper


def dense_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT * q.shape[-1] ** -0.5).softmax(dim=-1) @ v


def cost_of_a_step(network: nn.Module, points: int) -> tuple[float, float]:
    """Milliseconds, the median of three, and peak MiB of the loss and its gradient."""

    def step() -> None:
        network.zero_grad()
        loss_of(network, two_moons(points)).backward()

    step()  # plans, and compiles kernels
    times = []
    for _ in range(3):
        start = time.perf_counter()
        step()
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times), live_and_peak_bytes(step)[1] / 2**20


def compare(size: int) -> None:
    """Print the cost of a step by each attention, of so many points and tokens."""
    for name, attention in (("flashtile", None), ("dense attention", dense_attention)):
        network = MeanVelocity(size)
        network.block.attention = attention
        milliseconds, peak = cost_of_a_step(network, size)
        click.echo(f"a step of {size} points and tokens, {name}: {milliseconds:.0f} ms, peak memory {peak:.0f} MiB")


@torch.no_grad()
def generate(network: nn.Module, e: Tensor) -> Tensor:
    """From noise `e` to data in one step."""
    count = e.shape[0]
    return e - network(e, torch.zeros(count), torch.ones(count))


def distance(x: Tensor, y: Tensor) -> float:
    """Between two sets of as many points: the mean over directions of the distance between their sorted projections."""
    angle = torch.linspace(0, math.pi, 65)[:-1]
    directions = torch.stack((angle.cos(), angle.sin()))
    return ((x @ directions).sort(dim=0).values - (y @ directions).sort(dim=0).values).abs().mean().item()


def train(network: nn.Module, steps: int, report: Callable[[float], None]) -> None:
    optimizer = torch.optim.Adam(network.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=6e-3, total_steps=steps + 1, pct_start=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = loss_of(network, two_moons(POINTS))
        loss.backward()
        optimizer.step()
        schedule.step()
        report(loss.item())


def draw(panels: dict[str, Tensor], data: Tensor, noise: Tensor, path: str) -> None:
    """One panel for each set of points, over the data in grey. A point has the color of the direction in which the
    noise that it was made from lies.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    direction = torch.atan2(noise[:, 1], noise[:, 0])
    figure, axes = pyplot.subplots(1, len(panels), figsize=(4 * len(panels), 4.3), sharex=True, sharey=True)
    for axis, (title, points) in zip(axes, panels.items(), strict=True):
        axis.scatter(*data.T.numpy(), s=5, color="0.85", linewidths=0)
        axis.scatter(*points.T.numpy(), s=5, c=direction.numpy(), cmap="hsv", alpha=0.7, linewidths=0)
        axis.set(title=title, aspect="equal", xlim=(-3.2, 3.2), ylim=(-3.2, 3.2), xticks=(-2, 0, 2), yticks=(-2, 0, 2))
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


@click.command()
@click.option("--steps", default=1000, show_default=True, type=click.IntRange(1), help="Steps of training.")
@click.option("--seed", default=0, show_default=True, help="Of everything random.")
@click.option("--compare", "size", default=512, show_default=True, help="Points and tokens of a timed step; 0: none.")
@click.option("--out", default="meanflow.png", show_default=True, help="The picture; '' draws none.")
def main(steps: int, seed: int, out: str, size: int) -> None:
    """Train a MeanFlow on two moons, and draw what it makes of noise in one step."""
    torch.manual_seed(seed)
    network = MeanVelocity()
    data, noise = two_moons(SAMPLES), torch.randn(SAMPLES, 2)
    untrained = generate(network, noise)
    losses = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns) as progress:
        task = progress.add_task("training", total=steps)

        def report(loss: float) -> None:
            losses.append(loss)
            progress.update(task, advance=1)

        train(network, steps, report)
    trained = generate(network, noise)
    few = min(steps, 20)
    start, end = sum(losses[:few]) / few, sum(losses[-few:]) / few
    click.echo(f"loss: {start:.3f} at the start, {end:.3f} at the end")
    before, after, floor = (distance(x, data) for x in (untrained, trained, two_moons(SAMPLES)))
    click.echo(f"distance to the data: {before:.3f} before training, {after:.3f} after it, {floor:.3f} for other data")
    if size > 0:
        compare(size)
    if not out:
        return
    if importlib.util.find_spec("matplotlib") is None:
        click.echo("no picture: matplotlib is not installed; pip install 'flashtile[plot]'")
        return
    panels = {"noise": noise, "one step, before training": untrained, "one step, after training": trained}
    draw(panels, data, noise, out)
    click.echo(f"picture: {out}")


if __name__ == "__main__":
    main()
