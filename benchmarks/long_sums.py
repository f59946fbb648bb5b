"""Errors of sums over up to 2**20 keys or rows on a GPU, of this library and of others on the same inputs.

    python benchmarks/long_sums.py [--fa3-library PATH] [--out FILE.csv]

A few rows by many keys and many rows by a few keys, without a mask, on values that make errors of sums add up, as those
of `flashtile.testing.long`. For each result: the root mean square and the largest error, in units of those of the
result itself, which is computed in float64 by blocks. A result of 0 in exact arithmetic has figures of 1 and more.
"""

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import flashtile
from flashtile.bench.providers.flash_attn_3 import FlashAttention3

SHAPES = [(128, 2**17), (128, 2**20), (2**17, 128), (2**20, 128)]  # rows, keys
COLUMNS = ("dtype", "head_dim", "seqlen_q", "seqlen_k", "values", "provider", "result", "rms", "max")
KINDS = ("normal", "constant", "nearly", "ramp", "outlier")
HEADS = 2
PAIRS_AT_ONCE = 2**26
Results = dict[str, Tensor]


def inputs(kind: str, seqlen_q: int, seqlen_k: int, head_dim: int, generator: torch.Generator) -> list[Tensor]:
    """q, k, v and dout, float32."""
    lengths = (seqlen_q, seqlen_k, seqlen_k, seqlen_q)
    shapes = [(1, HEADS, n, head_dim) for n in lengths]
    q, k, v, dout = (torch.randn(x, device=generator.device, generator=generator) for x in shapes)
    third, scale = 1 / 3, head_dim**-0.5
    if kind == "normal":
        return [q, k, v + 1, dout + 1]
    if kind == "ramp":  # of scores, by 6 in all
        rise = torch.linspace(0, 1, seqlen_k, device=q.device)[:, None]
        return [torch.ones_like(q), (6 * scale * rise).expand_as(k), rise.expand_as(v), dout + 1]
    v, dout = torch.full_like(v, third), torch.full_like(dout, third)
    if kind == "outlier":
        k, at = torch.zeros_like(k), seqlen_k // 3
        k[:, :, at], v[:, :, at] = 5 * scale, 10
        return [torch.ones_like(q), k, v, dout]
    return [q * (0.01 if kind == "nearly" else 0), k, v, dout]


def exact(q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> Results:
    """Results and gradients in float64, a block of rows at a time."""
    q, k, v, dout = (x.double() for x in (q, k, v, dout))
    scale, step = q.shape[-1] ** -0.5, max(1, PAIRS_AT_ONCE // k.shape[2])
    dk, dv, parts = torch.zeros_like(k), torch.zeros_like(v), []
    for q_i, dout_i in zip(q.split(step, 2), dout.split(step, 2), strict=True):
        s = q_i @ k.mT * scale
        lse = s.logsumexp(-1, keepdim=True)
        p = (s - lse).exp()
        out = p @ v
        ds = p * (dout_i @ v.mT - (dout_i * out).sum(-1, keepdim=True)) * scale
        dk += ds.mT @ q_i
        dv += p.mT @ dout_i
        parts.append((out, ds @ k, lse[..., 0]))
    out, dq, lse = (torch.cat(x, 2) for x in zip(*parts, strict=True))
    return {"out": out, "dq": dq, "dk": dk, "dv": dv, "lse": lse}


def differentiated(function: Callable[..., Any], q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> Results:
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    found = function(*leaves)
    out, lse = found if isinstance(found, tuple) else (found, None)
    gradients = torch.autograd.grad(out, leaves, dout)
    results = dict(zip(("out", "dq", "dk", "dv"), (out.detach(), *gradients), strict=True))
    return results if lse is None else results | {"lse": lse.detach()}


def sdpa(backend: SDPBackend) -> Callable[..., Tensor]:
    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(q, k, v)

    return run


def flash_attention_3(operators: Any, *given: Tensor) -> Results:
    q, k, v, dout = (x.transpose(1, 2).contiguous() for x in given)
    scale = q.shape[-1] ** -0.5
    out, lse, *_ = operators.fwd(q, k, v, num_splits=1, softmax_scale=scale)
    gradients = [torch.empty_like(x) for x in (q, k, v)]
    operators.bwd(dout, q, k, v, out, lse, *gradients, softmax_scale=scale)
    named = dict(zip(("out", "dq", "dk", "dv"), (out, *gradients), strict=True))
    return {name: x.transpose(1, 2) for name, x in named.items()} | {"lse": lse}


def providers(dtype: torch.dtype, operators: Any) -> dict[str, Callable[..., Results]]:
    def own(backend: str) -> Callable[..., Results]:
        def attention(q: Tensor, k: Tensor, v: Tensor) -> Any:
            return flashtile.attention(q, k, v, return_lse=True, backend=backend)

        return lambda *given: differentiated(attention, *given)

    def of_pytorch(backend: SDPBackend) -> Callable[..., Results]:
        return lambda *given: differentiated(sdpa(backend), *given)

    if dtype == torch.float32:
        return {"flashtile": own("auto"), "sdpa:efficient": of_pytorch(SDPBackend.EFFICIENT_ATTENTION)}
    found = {"flashtile": own("auto"), "flashtile:triton": own("triton")}
    found["sdpa:cudnn"] = of_pytorch(SDPBackend.CUDNN_ATTENTION)
    if operators is not None:
        found["fa3"] = lambda *given: flash_attention_3(operators, *given)
    return found


def relative(x: Tensor, reference: Tensor) -> tuple[float, float]:
    error = x.double() - reference
    sizes = (reference.norm(), reference.abs().max())
    return tuple(float(e / s.clamp_min(1e-300)) for e, s in zip((error.norm(), error.abs().max()), sizes, strict=True))  # type: ignore[return-value]


@click.command()
@click.option("--fa3-library", type=click.Path(exists=True, path_type=Path))
@click.option("--out", type=click.Path(path_type=Path))
@click.option("--device", default="cuda")
@click.option("--longest", default=2**20, help="Tokens.")
@click.option("--dtype", "dtypes", multiple=True, default=("bfloat16", "float16", "float32"), help="May be repeated.")
def main(fa3_library: Path | None, out: Path | None, device: str, longest: int, dtypes: tuple[str, ...]) -> None:
    operators = None if fa3_library is None else FlashAttention3(fa3_library).operators()
    rows = []
    for dtype in (getattr(torch, name) for name in dtypes):
        for head_dim in (64, 128):
            for seqlen_q, seqlen_k in ((min(m, longest), min(n, longest)) for m, n in SHAPES):
                for kind in KINDS:
                    generator = torch.Generator(device).manual_seed(1)
                    drawn = inputs(kind, seqlen_q, seqlen_k, head_dim, generator)
                    given = [x.to(dtype).contiguous() for x in drawn]
                    expected = exact(*given)
                    for provider, run in providers(dtype, operators).items():
                        try:
                            results = run(*given)
                        except Exception as error:
                            click.echo(f"{provider}: {type(error).__name__}: {error}", err=True)
                            continue
                        for result, x in results.items():
                            rms, most = relative(x, expected[result])
                            about = (str(dtype).removeprefix("torch."), head_dim, seqlen_q, seqlen_k, kind)
                            rows.append((*about, provider, result, f"{rms:.3g}", f"{most:.3g}"))
                            click.echo(" ".join(map(str, rows[-1])))
    if out is not None:
        with out.open("w", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(COLUMNS)
            writer.writerows(rows)


if __name__ == "__main__":
    main()
