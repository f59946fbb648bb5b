"""How the judge runs step 10: a choice of lines by the features that it has, a deterministic backward by its bits."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .. import step10_variants

D = 4
FEATURES: dict[str, tuple[int, dict[str, Any]]] = {  # N and the keywords of a call, by its name
    "no feature": (128, {}),
    "causal": (128, {"causal": True}),
    "an odd size": (70, {}),
    "a softcap": (64, {"softcap": 2.0}),
    "a window": (192, {"window": (70, 3)}),
    "slopes, causal, an odd size": (130, {"alibi_slope": 0.25, "causal": True}),
}
LENGTH, WORKERS = 428, 3  # seven blocks of keys, and three of them for the first worker: two could change places
ARRIVALS = ((1, 0, 2, 4, 3, 5, 6), (6, 1, 2, 0, 4, 5, 3))  # the first leaves each worker its order
EQUAL = tuple(f"equal bits of dq, blocks arriving as {' '.join(map(str, x))}" for x in ARRIVALS)


def inputs(n: int, count: int) -> list[Tensor]:
    """`[n, D]` each, float64."""
    return list(torch.randn(count, n, D, generator=torch.Generator().manual_seed(3), dtype=torch.float64))


def chosen(choice: Callable[..., str], name: str) -> dict[str, Tensor]:
    """`out` of the text that a learner's `source` picks for the features of a call."""
    n, keywords = FEATURES[name]
    q, k, v = inputs(n, 3)
    keywords = {"causal": False, "scale": None} | keywords
    features, values = step10_variants.requested(q, k, v, **keywords)
    names: dict[str, Any] = dict(vars(step10_variants))
    exec(compile(choice(features), f"<variant for {name}>", "exec"), names)
    return {"out": names["variant"](q, k, v, values)[0]}


def defined(name: str) -> dict[str, Tensor]:
    """The same by its definition, `[n, D]`."""
    n, x = FEATURES[name]
    q, k, v = inputs(n, 3)
    i, j = torch.arange(n)[:, None], torch.arange(n)
    s = q @ k.mT / math.sqrt(D)
    s = x["softcap"] * torch.tanh(s / x["softcap"]) if "softcap" in x else s
    s = s - x.get("alibi_slope", 0.0) * (i - j).abs()
    left, right = x.get("window", (n, n))
    hidden = (j < i - left) | (j > i + right) | (x.get("causal", False) & (j > i))
    return {"out": torch.softmax(s.masked_fill(hidden, -math.inf), dim=1) @ v}


def ordered(backward: Callable[..., Any]) -> dict[str, Tensor]:
    """Gradients of a learner's deterministic backward, and whether dq has the same bits for each order of arrival."""
    q, k, v, dout = inputs(LENGTH, 4)
    out, lse = step10_variants.attention(q, k, v)
    runs = [
        backward(q, k, v, out, lse, dout, deterministic=True, workers=WORKERS, arrival=arrival)
        for arrival in (range(7), *ARRIVALS)
    ]
    bits = [torch.tensor(float(run[0].equal(runs[0][0]))) for run in runs[1:]]
    return dict(zip(("dq", "dk", "dv", *EQUAL), (*runs[0], *bits), strict=True))


def wanted() -> dict[str, Tensor]:
    """Gradients by PyTorch's derivative of the definition, and equal bits."""
    *qkv, dout = inputs(LENGTH, 4)
    q, k, v = (x.requires_grad_() for x in qkv)
    out = torch.softmax(q @ k.mT / math.sqrt(D), dim=1) @ v
    gradients = torch.autograd.grad(out, (q, k, v), dout)
    return dict(zip(("dq", "dk", "dv", *EQUAL), (*gradients, torch.tensor(1.0), torch.tensor(1.0)), strict=True))
