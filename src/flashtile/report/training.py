"""Real inputs: a byte-level GPT is trained with this library's attention, and its tensors are captured.

Steps, seed and text are fixed, and nothing depends on the time: a busy machine gives the same curve and the same inputs
as an idle one.
"""

from collections.abc import Callable, Iterator
from itertools import islice

import torch
from torch import Tensor

from ..bench import captured
from ..bench.byte_gpt import Attend, ByteGPT, flashtile_attention, new_model, sdpa_attention, train
from ..bench.results import three_digits
from .section import Plot, Section, Series, Table
from .settings import Settings

BATCH, SEQLEN = 8, 128
COMPARED_STEPS = 3  # steps that are also trained with PyTorch's attention


def trained(settings: Settings, advance: Callable[[], None]) -> Section:
    """Train the model that the other sections capture inputs from."""
    model, losses = new_model(), []
    for loss in losses_of(model, flashtile_attention, settings.steps):
        losses.append(loss)
        advance()
    captured.use(model)
    others = list(islice(losses_of(new_model(), sdpa_attention, settings.steps), COMPARED_STEPS))
    apart = max(abs(a - b) for a, b in zip(losses, others, strict=False))
    tensors: dict[str, Tensor] = dict(zip("qkv", captured.captured(1, 512), strict=True))
    tensors["normal numbers"] = torch.randn(tensors["q"].shape, generator=torch.Generator().manual_seed(0))
    rows = [(name, *outliers(x)) for name, x in tensors.items()]
    steps = [float(n) for n in range(1, len(losses) + 1)]
    return Section(
        name="training",
        title="Real input",
        summary=f"A byte-level GPT with {sum(x.numel() for x in model.parameters()) / 1e6:.1f} million parameters, "
        f"trained for {len(losses)} steps of {BATCH * SEQLEN:,} bytes of Python's own help text. Steps and seed are "
        "fixed: the curve does not depend on how busy the machine is. The model's attention is flashtile's; its "
        "queries, keys and values are the captured inputs of this report. With PyTorch's attention the losses of the "
        f"first {len(others)} steps differ by at most {apart:.1e}.",
        plots=[Plot("training", "Loss in training, nats for a byte", [Series("flashtile", steps, losses)], "step")],
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


def losses_of(model: ByteGPT, attend: Attend, steps: int) -> Iterator[float]:
    return train(model, attend, steps, batch=BATCH, seqlen=SEQLEN)


def outliers(x: Tensor) -> tuple[str, str]:
    """The largest element and the largest channel's root mean square, in units of a head's; x [B, H, S, D]."""
    heads = x.transpose(0, 1).flatten(1, 2)  # [H, B * S, D]
    scale = heads.square().mean((1, 2)).sqrt()
    largest = heads.abs().amax((1, 2)) / scale
    channel = heads.square().mean(1).sqrt().amax(1) / scale
    return three_digits(float(largest.max())), three_digits(float(channel.max()))
