"""The tables `intensity` and `layers` of `flashtile-ladder`, from the model alone."""

from typing import Any

import torch

from .. import iomodel
from ..iomodel import Shape, Work, roofline
from .dtypes import DATA_SHEETS
from .library import tile
from .measure import Measurement, Table
from .rates import machine

INTENSITY_PUBLISHED = {1024: {"standard": 15.4, "fused": 261.0}, 4096: {"standard": 16.1, "fused": 1044.0}}


def intensity(device: torch.device) -> Measurement:
    yield "the rates of this machine"
    rates = machine(device, torch.float32)
    table = Table(
        "intensity",
        "Arithmetic intensity from the model: float32, d = 64, operations for each byte of HBM",
        notes=[
            f"Here float32 arithmetic reaches {rates.flops_per_second / 1e9:.4g} GFLOP/s and memory "
            f"{rates.bytes_per_second / 1e9:.4g} GB/s: the ridge is at {rates.ridge:.3g} operations for each byte."
        ],
    )
    table.see = (
        "Standard attention does as few operations for a byte at any N; with each matrix moved once, more as N grows."
    )
    for n, published in INTENSITY_PUBLISHED.items():
        for name, work in algorithms(n, device).items():
            bound = roofline(work.flops, work.moved, rates)
            row = {"n": n, "algorithm": name, "mb_moved": work.moved / 1e6, "intensity": work.intensity}
            row["published"] = published.get({"standard": "standard", "each matrix once": "fused"}.get(name, ""))
            table.rows.append(row | {"limit": bound.limit, "bound_ms": bound.seconds * 1e3})
    return table


def algorithms(n: int, device: torch.device) -> dict[str, Work]:
    shape = Shape.square(n, 64)
    q = torch.empty((1, 1, n, 64), device=device)
    found = {"standard": iomodel.standard_forward(shape)}
    found["FlashAttention-1, 192 KB"] = iomodel.flash1_forward(shape, iomodel.ON_CHIP_BYTES["A100"])
    found["FlashAttention-2, 128 x 128"] = iomodel.flash2_forward(shape, 128, 128)
    if (sizes := tile(q, q, q)) is not None:
        found[f"tiled, {sizes[0]} x {sizes[1]}"] = iomodel.tiled_forward(shape, *sizes)
    found["each matrix once"] = iomodel.flash2_forward(shape, n, n)
    return found


# Attention in a transformer -------------------------------------------------------------------------------------------

MODELS = {"BERT-base, GPT-2 small": (768, 12), "BERT-large, GPT-2 medium": (1024, 16)}  # width, heads
LAYER_LENGTHS = (128, 512, 2048, 8192)
HALF = 2  # bytes of float16 and bfloat16


def layers(device: torch.device) -> Measurement:
    """One layer's forward pass on one sequence: projections, attention, feed-forward, in 16-bit numbers."""
    table = Table("layers", "A transformer's layer from the model: one sequence, 16-bit numbers")
    table.see = (
        "Attention's share grows with N. The layer's intensity rises while weights are shared by more tokens, and "
        "falls once S and P outweigh all else; fused attention has no such fall."
    )
    yield "from the model"
    for name, (width, heads) in MODELS.items():
        for n in LAYER_LENGTHS:
            table.rows.append({"model": name, "n": n} | layer(n, width, heads))
    rates = machine(device, torch.float32)
    table.notes.append(
        "Decoding multiplies each weight once for each sequence: 2 operations for 2 bytes, an intensity equal to the "
        "batch. It is balanced at a batch equal to the ridge, peak over bandwidth: "
        f"{DATA_SHEETS['NVIDIA H200'].ridge():.0f} by an H200's data sheet; for float32 on this machine, with 4 bytes "
        f"for 2 operations, {2 * rates.ridge:.0f}. Caches of keys are not shared by sequences: their intensity does "
        "not grow with the batch."
    )
    return table


def layer(n: int, width: int, heads: int) -> dict[str, Any]:
    """Operations in GFLOP and operations for each byte. Projections are width x width, feed-forward is 4 times as wide.

    The products of h heads of d = width / h numbers cost 4 N² width operations, whatever h is.
    """
    shape = Shape(n, n, width // heads, width // heads, num_heads_q=heads, num_heads_kv=heads, itemsize=HALF)
    projections = Work(8 * n * width**2, 0, 4 * (n * width + width**2) * HALF, 4 * n * width * HALF)
    feed_forward = Work(16 * n * width**2, 0, (5 * n * width + 8 * width**2) * HALF, 5 * n * width * HALF)
    standard, fused = iomodel.standard_forward(shape), iomodel.flash2_forward(shape, n, n)
    total = projections.flops + feed_forward.flops + standard.flops

    def intensity_with(attention: Work) -> float:
        parts = (projections, feed_forward, attention)
        return sum(x.flops + x.softmax for x in parts) / sum(x.moved for x in parts)

    return {
        "projections_gflop": projections.flops / 1e9,
        "attention_gflop": standard.flops / 1e9,
        "feed_forward_gflop": feed_forward.flops / 1e9,
        "attention_percent": 100 * standard.flops / total,
        "feed_forward_intensity": feed_forward.intensity,
        "standard_intensity": standard.intensity,
        "layer_standard": intensity_with(standard),
        "layer_fused": intensity_with(fused),
    }
