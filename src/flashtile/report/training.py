"""Real inputs: a byte-level GPT is trained for some seconds with this library's attention, and its tensors are kept."""

import time
from collections.abc import Callable

import torch
from torch import Tensor

from ..bench import captured
from ..bench.byte_gpt import flashtile_attention, new_model, train
from ..bench.results import three_digits
from .section import Plot, Section, Series, Table
from .settings import Settings

BATCH, SEQLEN = 8, 128
FEWEST_STEPS = 10


def trained(settings: Settings, advance: Callable[[], None]) -> Section:
    """Train the model from which the other sections capture their inputs."""
    model = new_model()
    losses, start = [], time.perf_counter()
    for loss in train(model, flashtile_attention, settings.steps, batch=BATCH, seqlen=SEQLEN):
        losses.append(loss)
        advance()
        if len(losses) >= FEWEST_STEPS and time.perf_counter() - start > settings.training_seconds:
            break
    seconds = time.perf_counter() - start
    captured.use(model)
    tokens = len(losses) * BATCH * SEQLEN
    tensors: dict[str, Tensor] = dict(zip("qkv", captured.captured(1, 512), strict=True))
    tensors["normal numbers"] = torch.randn(tensors["q"].shape, generator=torch.Generator().manual_seed(0))
    rows = [(name, *outliers(x)) for name, x in tensors.items()]
    steps = [float(n) for n in range(1, len(losses) + 1)]
    return Section(
        name="training",
        title="Real input",
        summary=f"A byte-level GPT with {sum(x.numel() for x in model.parameters()) / 1e6:.1f} million parameters read "
        f"{tokens:,} bytes of Python's own help text in {seconds:.0f} s. Its attention is flashtile's; its queries, "
        "keys and values are the captured inputs of this report.",
        plots=[
            Plot(
                "training",
                "Loss in training, nats for a byte",
                [Series("flashtile", steps, losses)],
                "step",
                caption="The same seed gives the same losses within rounding with PyTorch's attention; "
                "examples/train_bytes.py shows it.",
            )
        ],
        tables=[
            Table(
                ("tensor", "largest / root mean square", "largest channel / root mean square"),
                rows,
                frozenset({1, 2}),
                "Outliers in the captured tensors, the most of any head, and what as many normal numbers have.",
            )
        ],
        records=[{"step": n, "loss": loss} for n, loss in zip(steps, losses, strict=True)],
    )


def outliers(x: Tensor) -> tuple[str, str]:
    """The largest element and the largest channel's root mean square, in units of a head's; x [B, H, S, D]."""
    heads = x.transpose(0, 1).flatten(1, 2)  # [H, B * S, D]
    scale = heads.square().mean((1, 2)).sqrt()
    largest = heads.abs().amax((1, 2)) / scale
    channel = heads.square().mean(1).sqrt().amax(1) / scale
    return three_digits(float(largest.max())), three_digits(float(channel.max()))
