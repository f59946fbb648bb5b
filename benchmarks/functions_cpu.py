"""Time features of a call as arguments and as functions, on one thread of a CPU: `python benchmarks/functions_cpu.py`.

8 heads of 64 features, float32. Calls alternate; each figure is the median of the rounds in units of the call without a
feature.
"""

import statistics
import time
from typing import Any

import click
import torch

import flashtile
from flashtile import MaskMod, ScoreMod, mask_mods, score_mods

HEADS, HEAD_DIM = 8, 64


def calls(seqlen: int) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """For each feature the keywords of the argument, and of the function."""
    slopes, bias, mask = (
        torch.rand(HEADS),
        torch.randn(1, HEADS, seqlen, seqlen),
        torch.rand(1, 1, seqlen, seqlen) < 0.9,
    )
    ids = torch.arange(seqlen) * 8 // seqlen
    documents = (ids[:, None] == ids)[None, None]
    as_bias = ScoreMod(lambda score, b, h, q_idx, k_idx, x: score + x[b, h, q_idx, k_idx], (bias,))
    as_mask = MaskMod(lambda b, h, q_idx, k_idx, x: x[b, 0, q_idx, k_idx], (mask,))
    return {
        "none": ({}, {}),
        "softcap": ({"softcap": 20.0}, {"score_mod": score_mods.softcap(20.0)}),
        "ALiBi": ({"alibi_slopes": slopes}, {"score_mod": score_mods.alibi(slopes)}),
        "bias": ({"bias": bias}, {"score_mod": as_bias}),
        "mask": ({"mask": mask}, {"mask": as_mask}),
        "causal": ({"causal": True}, {"mask": mask_mods.causal()}),
        "window of 256": ({"window": (255, 0)}, {"mask": mask_mods.window(255, 0)}),
        "8 documents": ({"mask": documents}, {"mask": mask_mods.document(ids)}),
    }


@click.command()
@click.option("--seqlen", default=2048)
@click.option("--rounds", default=7)
def main(seqlen: int, rounds: int) -> None:
    """Print a line for each feature: forward and backward as an argument, then as a function."""
    torch.set_num_threads(1)
    q, k, v = (torch.randn(1, HEADS, seqlen, HEAD_DIM, requires_grad=True) for _ in range(3))
    made = {(name, n): keywords for name, both in calls(seqlen).items() for n, keywords in enumerate(both)}
    times: dict[tuple[str, int], list[tuple[float, float]]] = {key: [] for key in made}
    for n in range(rounds + 1):
        for key, keywords in made.items():
            start = time.perf_counter()
            out = flashtile.attention(q, k, v, backend="cpu", **keywords)
            between = time.perf_counter()
            torch.autograd.grad(out, (q, k, v), out.detach())
            times[key] += [(between - start, time.perf_counter() - between)] if n > 0 else []
    medians = {key: [statistics.median(x) for x in zip(*found, strict=True)] for key, found in times.items()}
    for name, n in medians:
        if n == 0:
            words = (f"{x / y:.2f}" for m in (0, 1) for x, y in zip(medians[name, m], medians["none", 0], strict=True))
            click.echo("{}: forward {}, backward {}; as a function {}, {}".format(name, *words))


if __name__ == "__main__":
    main()
