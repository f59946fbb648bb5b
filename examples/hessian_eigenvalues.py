"""The largest eigenvalues of the Hessian of a small GPT's loss, by Lanczos' method.

How sharp a minimum is decides which learning rates are stable. The Hessian of all parameters is far too large to form;
its product with a direction is one backward pass of a backward pass, which flashtile computes with memory that grows as
the length does, on a GPU by kernels. Lanczos' method takes some ten of them (Golub and Van Loan, "Matrix Computations",
4th edition, section 10.1). At the end it prints the time and the peak memory of a product, beside dense attention.

    python examples/hessian_eigenvalues.py                # half a minute on two cores
    python examples/hessian_eigenvalues.py --device cuda --tokens 4096
"""

import time
from collections.abc import Callable
from pathlib import Path

import click
import torch
from torch import Tensor, nn
from torch.nn import functional

import flashtile
from flashtile.bench.allocation import live_and_peak_bytes

WIDTH, HEADS, LAYERS = 64, 2, 2
TRAINED = 128  # tokens of a sequence in training
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return flashtile.attention(q, k, v, causal=True)  # type: ignore[return-value]


def dense_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = q @ k.mT * q.shape[-1] ** -0.5
    return s.masked_fill(torch.ones_like(s, dtype=torch.bool).triu(1), -torch.inf).softmax(dim=-1) @ v


class Block(nn.Module):
    attention: Attention = staticmethod(causal)

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.qkv, self.output = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.own = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, h: Tensor) -> Tensor:  # [B, S, WIDTH]
        q, k, v = self.qkv(self.norms[0](h)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)  # [B, H, S, D]
        h = h + self.output(Block.attention(q, k, v).transpose(1, 2).flatten(2))
        return h + self.own(self.norms[1](h))


class GPT(nn.Module):
    def __init__(self, tokens: int) -> None:
        super().__init__()
        self.embed, self.positions = nn.Embedding(256, WIDTH), nn.Parameter(0.02 * torch.randn(tokens, WIDTH))
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, text: Tensor) -> Tensor:  # [B, S] bytes
        """The mean loss of the next bytes."""
        h = self.blocks(self.embed(text[:, :-1]) + self.positions[: text.shape[1] - 1])
        return functional.cross_entropy(self.head(h).flatten(0, 1), text[:, 1:].flatten())


def hessian_product(model: nn.Module, text: Tensor) -> Callable[[Tensor], Tensor]:
    """The function from a direction, flat, to its product with the Hessian of the loss."""
    parameters = [*model.parameters()]
    gradients = torch.autograd.grad(model(text), parameters, create_graph=True)
    flat = torch.cat([x.flatten() for x in gradients])

    def product(direction: Tensor) -> Tensor:
        found = torch.autograd.grad(flat @ direction, parameters, retain_graph=True)
        return torch.cat([x.flatten() for x in found])

    return product


def lanczos(product: Callable[[Tensor], Tensor], start: Tensor, steps: int) -> Tensor:
    """The eigenvalues of a symmetric operator on the space of `steps` products, ascending."""
    basis, diagonal, beside = [start / start.norm()], [], []
    for _ in range(steps):
        x = product(basis[-1])
        diagonal.append(x @ basis[-1])
        for y in basis:  # once more than exact numbers would need
            x = x - (x @ y) * y
        beside.append(x.norm())
        basis.append(x / beside[-1])
    off = torch.stack(beside[:-1])
    return torch.linalg.eigvalsh(torch.diag(torch.stack(diagonal)) + torch.diag(off, 1) + torch.diag(off, -1))


@click.command()
@click.option("--steps", default=12, show_default=True, type=click.IntRange(2), help="Products with the Hessian.")
@click.option("--train", default=60, show_default=True, help="Steps of training before.")
@click.option("--tokens", default=512, show_default=True)
@click.option("--device", default="cpu", show_default=True)
def main(steps: int, train: int, tokens: int, device: str) -> None:
    """Train a small GPT on this program's text, and print the largest eigenvalues of its Hessian."""
    torch.manual_seed(0)
    written = torch.tensor([*Path(__file__).read_bytes()], device=device)
    model = GPT(max(tokens, TRAINED)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(train):
        first = torch.randint(len(written) - TRAINED - 1, (8, 1), device=device)
        optimizer.zero_grad()
        model(written[first + torch.arange(TRAINED + 1, device=device)]).backward()
        optimizer.step()
    text = written.repeat(1 + tokens // len(written))[None, : tokens + 1]
    count = sum(x.numel() for x in model.parameters())
    for name, attention in (("flashtile", causal), ("dense attention", dense_attention)):
        Block.attention = staticmethod(attention)
        product = hessian_product(model, text)
        start = torch.randn(count, generator=torch.Generator().manual_seed(1)).to(device)
        found = lanczos(product, start, steps)
        begin = time.perf_counter()
        float(product(start)[0])
        milliseconds = 1e3 * (time.perf_counter() - begin)
        peak = live_and_peak_bytes(lambda: product(start), torch.device(device))[1] / 2**20  # noqa: B023
        values = ", ".join(f"{x:.2f}" for x in found.flip(0)[:3].tolist())
        click.echo(f"{name}: largest eigenvalues of {count} parameters {values}, least {found[0]:.2f}")
        click.echo(f"{name}: a product of {tokens} tokens {milliseconds:.0f} ms, peak memory {peak:.0f} MiB")


if __name__ == "__main__":
    main()
