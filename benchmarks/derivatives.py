"""Forward mode and second derivatives beside dense attention: `python benchmarks/derivatives.py --device cuda`.

Milliseconds, medians of rounds in alternation. `forward` is attention itself, `jvp` is `torch.func.jvp` of it by q, k
and v. `double backward` is the backward pass of the three gradients, `hvp` all three passes of a Hessian-vector product.
Dense attention is `softmax(q @ k.T) @ v` in the inputs' dtype, and SDPA's math backend. With `--memory`, peak memory
instead: on a GPU, MiB that the derivative allocates beyond its inputs and results, over lengths; dense up to 4096.
"""

import csv
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any, TextIO

import click
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import flashtile
from flashtile.bench.allocation import live_and_peak_bytes

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
Inputs = tuple[Tensor, ...]
LENGTHS = (1024, 4096, 16384)  # of the memory table
LONGEST_DENSE = 4096


def providers(causal: bool) -> dict[str, Attention]:
    def dense(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        s = (q * q.shape[-1] ** -0.5) @ k.mT
        if causal:
            s = s.masked_fill(torch.ones(s.shape[-2:], dtype=torch.bool, device=s.device).triu(1), -torch.inf)
        return s.softmax(-1) @ v

    def sdpa_math(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return scaled_dot_product_attention(q, k, v, is_causal=causal)

    def flash(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flashtile.attention(q, k, v, causal=causal)  # type: ignore[return-value]

    return {"flashtile": flash, "dense": dense, "sdpa math": sdpa_math}


def derivatives(attention: Attention, inputs: Inputs, others: Inputs) -> dict[str, Callable[[], Any]]:
    """The timed functions, by name, with everything before them done."""
    leaves = [x.clone().requires_grad_() for x in inputs]

    def gradients() -> Inputs:
        return torch.autograd.grad(attention(*leaves), leaves, others[0], create_graph=True)

    first = gradients()
    return {
        "forward": lambda: attention(*inputs),
        "jvp": lambda: torch.func.jvp(attention, inputs, others),
        "double backward": lambda: torch.autograd.grad(first, leaves, others, retain_graph=True),
        "hvp": lambda: torch.autograd.grad(gradients(), leaves, others),
    }


def milliseconds(function: Callable[[], Any], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    function()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - start) * 1e3


def random_inputs(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> tuple[Inputs, Inputs]:
    """q, k and v, and three tangents or cotangents."""
    torch.manual_seed(0)
    tensors = tuple(torch.randn(shape, dtype=dtype, device=device) for _ in range(6))
    return tensors[:3], tensors[3:]


def times(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    causal: bool,
    rounds: int,
    wanted: tuple[str, ...] = (),
) -> dict[str, dict[str, float]]:
    """Medians by derivative and provider, of all or of the wanted derivatives."""
    inputs, others = random_inputs(shape, dtype, device)
    functions = {name: derivatives(attention, inputs, others) for name, attention in providers(causal).items()}
    samples: dict[str, dict[str, list[float]]] = {
        what: {name: [] for name in functions} for what in wanted or functions["flashtile"]
    }
    for n in range(rounds + 1):
        for what, of_providers in samples.items():
            for name, found in of_providers.items():
                sample = milliseconds(functions[name][what], device)
                if n > 0:  # the first round warms up
                    found.append(sample)
    return {what: {name: statistics.median(x) for name, x in found.items()} for what, found in samples.items()}


def peaks(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, causal: bool
) -> dict[str, dict[str, float | None]]:
    """MiB beyond inputs and results by derivative and provider; `None` where dense is not measured."""
    inputs, others = random_inputs(shape, dtype, device)
    result: dict[str, dict[str, float | None]] = {"jvp": {}, "double backward": {}}
    for name, attention in providers(causal).items():
        for what in result:
            result[what][name] = None
            if name != "flashtile" and shape[2] > LONGEST_DENSE:
                continue
            run = derivatives(attention, inputs, others)[what]
            left, peak = live_and_peak_bytes(run, device)
            result[what][name] = (peak - left) / 2**20
    return result


@click.command(help=__doc__)
@click.option("--device", default="cpu")
@click.option("--dtype", default="float32", help="One of torch's.")
@click.option("--shape", default="2,16,1024,64", help="Batch, heads, tokens, head dimension.")
@click.option("--causal", is_flag=True)
@click.option("--rounds", default=7)
@click.option("--only", multiple=True, help="A derivative, by its name in the table; any number of them.")
@click.option("--memory", is_flag=True, help="Peak memory at 1k, 4k and 16k tokens instead of times.")
@click.option("--out", type=click.File("a"), default=sys.stdout, help="CSV file to append to.")
def main(
    device: str, dtype: str, shape: str, causal: bool, rounds: int, only: tuple[str, ...], memory: bool, out: TextIO
) -> None:
    batch, heads, tokens, dim = (int(n) for n in shape.split(","))
    of, on = getattr(torch, dtype), torch.device(device)
    writer = csv.writer(out)
    writer.writerow(["unit", "device", "dtype", "shape", "causal", "derivative", *providers(causal)])
    for length in LENGTHS if memory else (tokens,):
        sizes = (batch, heads, length, dim)
        table = peaks(sizes, of, on, causal) if memory else times(sizes, of, on, causal, rounds, only)
        for what, row in table.items():
            figures = ["" if x is None else f"{x:.2f}" for x in row.values()]
            name = "x".join(str(n) for n in sizes)
            writer.writerow(["MiB" if memory else "ms", device, dtype, name, causal, what, *figures])
            out.flush()


if __name__ == "__main__":
    main()
