"""What the planner chooses for typical calls on this machine, and why nothing else."""

from collections.abc import Callable
from typing import Any

import torch

from .. import explain
from ..bench.results import three_digits
from ..explain import Explanation
from ..plan import backends
from .section import Section, Table
from .settings import Settings

# Shapes of q and of k and v, [B, H, S, D], and the other arguments.
CALLS: dict[str, tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = {
    "training step, causal": ((1, 8, 2048, 64), (1, 8, 2048, 64), {"causal": True}),
    "long sequence": ((1, 8, 16384, 64), (1, 8, 16384, 64), {"causal": True}),
    "sliding window, grouped heads": ((1, 8, 8192, 128), (1, 2, 8192, 128), {"window": (1023, 0)}),
    "softcap and dropout": ((2, 8, 1024, 64), (2, 8, 1024, 64), {"softcap": 30.0, "dropout_p": 0.1}),
    "decoding step": ((8, 32, 1, 128), (8, 8, 8192, 128), {}),
    "wide heads": ((1, 4, 1024, 256), (1, 4, 1024, 256), {"causal": True}),
}


def planner(settings: Settings, advance: Callable[[], None]) -> Section:
    dtype = getattr(torch, settings.dtype)
    found: dict[str, Explanation] = {}
    for name, (q_shape, k_shape, arguments) in CALLS.items():
        q, k, v = (torch.empty(shape, dtype=dtype, device=settings.device) for shape in (q_shape, k_shape, k_shape))
        found[name] = explain(q, k, v, **arguments)
        advance()
    rows = [
        (
            name,
            x.backend,
            x.tile,
            three_digits(x.flops_forward / 1e9),
            three_digits(x.intensity),
            x.limit,
            three_digits(x.seconds_at_limit * 1e3),
        )
        for name, x in found.items()
    ]
    columns = ("call", "backend", "tiles", "GFLOP", "FLOP per byte", "limited by", "at the limit, ms")
    usable = [(s.name, "yes" if s.usable else "no", s.reason or s.summary) for s in backends()]
    some = next(iter(found.values()))
    reasons = {f"Not {backend}, for “{name}”: {why}" for name, x in found.items() for backend, why in x.why_not.items()}
    return Section(
        name="planner",
        title="What the planner chose, and why",
        summary=f"For typical calls in {settings.dtype} on {some.device}, where a matrix product reaches "
        f"{three_digits(some.matmul_flops / 1e9)} GFLOP/s and a copy {three_digits(some.copy_bytes / 1e9)} GB/s. The "
        "limit is what forward takes at least at these rates.",
        tables=[
            Table(columns, rows, frozenset({3, 4, 6})),
            Table(("backend", "usable", "what it is, or why not"), usable, caption="Backends, fastest first."),
        ],
        notes=sorted(reasons) or ["Nothing was declined: each call runs in the first backend that was asked."],
        records=[{"call": name} | x.as_dict() for name, x in found.items()],
    )
