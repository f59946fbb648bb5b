"""Time calls with a bias or a mask tensor, and SDPA's kernels for them: `python benchmarks/bias_and_masks.py FILE.csv`.

Forward and backward in milliseconds, medians of three rounds in alternation; a provider that fails has no time.
"""

import csv
import statistics
from collections.abc import Callable
from pathlib import Path

import click
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import flashtile

ROUNDS = 3
SAMPLE_MS = 10
Shape = tuple[int, int, int, int]
CALLS: tuple[tuple[str, Shape, Shape, str], ...] = tuple(
    call
    for dim in (64, 128)
    for call in (
        (f"bias [1, 16, 4096, 4096] with gradient, {dim}", (2, 16, 4096, dim), (1, 16, 4096, 4096), "gradient"),
        (f"bias [1, 16, 4096, 4096], {dim}", (2, 16, 4096, dim), (1, 16, 4096, 4096), "bias"),
        (f"mask [1, 1, 4096, 4096], {dim}", (2, 16, 4096, dim), (1, 1, 4096, 4096), "mask"),
        (f"mask [2, 1, 1, 4096], {dim}", (2, 16, 4096, dim), (2, 1, 1, 4096), "mask"),
        (
            f"bias [1, 16, 1024, 1024] with gradient, batch 8, {dim}",
            (8, 16, 1024, dim),
            (1, 16, 1024, 1024),
            "gradient",
        ),
    )
)


def milliseconds(function: Callable[[], object], repeats: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(repeats):
        function()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / repeats


def providers(q: Tensor, k: Tensor, v: Tensor, pairs: Tensor) -> dict[str, Callable[[], Tensor]]:
    """The call, by name."""
    named = {"mask" if pairs.dtype is torch.bool else "bias": pairs}

    def sdpa(backend: SDPBackend) -> Tensor:
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(q, k, v, attn_mask=pairs)

    return {
        "flashtile": lambda: flashtile.attention(q, k, v, **named),
        "triton": lambda: flashtile.attention(q, k, v, backend="triton", **named),
        "efficient": lambda: sdpa(SDPBackend.EFFICIENT_ATTENTION),
        "cudnn": lambda: sdpa(SDPBackend.CUDNN_ATTENTION),
    }


def measured(shape: Shape, of_pairs: Shape, kind: str) -> dict[str, str]:
    """The times of all providers."""
    q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16).requires_grad_() for _ in range(3))
    pairs = torch.randn(of_pairs, device="cuda", dtype=torch.bfloat16)
    pairs = pairs > -1 if kind == "mask" else pairs.requires_grad_(kind == "gradient")
    leaves = [x for x in (q, k, v, pairs) if x.requires_grad]
    passes: dict[str, Callable[[], object]] = {}
    for name, call in providers(q, k, v, pairs).items():
        try:
            out = call()
            dout = torch.randn_like(out)
            torch.autograd.grad(out, leaves, dout, retain_graph=True)
        except RuntimeError:
            continue
        passes[f"{name} forward"] = call
        passes[f"{name} backward"] = lambda out=out, dout=dout: torch.autograd.grad(  # type: ignore[misc]
            out, leaves, dout, retain_graph=True
        )
    times: dict[str, list[float]] = {name: [] for name in passes}
    for _ in range(ROUNDS):
        for name, function in passes.items():
            repeats = max(2, round(SAMPLE_MS / milliseconds(function, 2)))
            times[name].append(milliseconds(function, repeats))
    return {name: f"{statistics.median(x):.3f}" for name, x in times.items()}


@click.command()
@click.argument("out", type=click.Path(dir_okay=False, path_type=Path))
def main(out: Path) -> None:
    """Write the table OUT."""
    names = [f"{name} {x}" for name in ("flashtile", "triton", "efficient", "cudnn") for x in ("forward", "backward")]
    with out.open("w", newline="") as file:
        writer = csv.DictWriter(file, ["call", *names], restval="")
        writer.writeheader()
        for call, shape, of_pairs, kind in CALLS:
            row = {"call": call, **measured(shape, of_pairs, kind)}
            writer.writerow(row)
            click.echo(" ".join(row.values()))


if __name__ == "__main__":
    main()
