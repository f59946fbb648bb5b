"""The planner's choices for typical calls on this machine, their limits and their times."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .. import attention, explain
from ..api.explain import Explanation
from ..bench.clocks import clock_of
from ..bench.results import three_digits
from ..dispatch.status import backends
from .section import Section, Table
from .settings import Settings

# Shapes of q and of k and v, [B, H, S, D], and the other arguments.
CALLS: dict[str, tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = {
    "training step, causal": ((1, 8, 2048, 64), (1, 8, 2048, 64), {"causal": True}),
    "long sequence": ((1, 1, 16384, 64), (1, 1, 16384, 64), {"causal": True}),
    "sliding window, grouped heads": ((1, 8, 8192, 128), (1, 2, 8192, 128), {"window": (1023, 0)}),
    "softcap and dropout": ((2, 8, 1024, 64), (2, 8, 1024, 64), {"softcap": 30.0, "dropout_p": 0.1}),
    "decoding step": ((2, 32, 1, 128), (2, 8, 8192, 128), {}),
    "wide heads": ((1, 4, 1024, 256), (1, 4, 1024, 256), {"causal": True}),
}
RUNS = 2  # after one that compiles; the faster one counts


def planner(settings: Settings, advance: Callable[[], None]) -> Section:
    dtype = getattr(torch, settings.dtype)
    explained: dict[str, tuple[Explanation, float]] = {}
    for name, (q_shape, k_shape, arguments) in CALLS.items():
        q, k, v = (values(shape, dtype, settings.device) for shape in (q_shape, k_shape, k_shape))
        explained[name] = explain(q, k, v, **arguments), fastest(settings, q, k, v, arguments)
        advance()
    return section_of(settings, explained)


def values(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Normal values, the same in every head: drawing all of them would take longer than the calls."""
    one = torch.randn(shape[-2:], generator=torch.Generator().manual_seed(0))
    return one.to(device, dtype).expand(shape).contiguous()


def fastest(settings: Settings, q: Tensor, k: Tensor, v: Tensor, arguments: dict[str, Any]) -> float:
    """Seconds of a forward pass."""
    clock = clock_of(settings.device)
    clock.seconds(lambda: attention(q, k, v, **arguments), 1)
    return min(clock.seconds(lambda: attention(q, k, v, **arguments), 1) for _ in range(RUNS))


def section_of(settings: Settings, explained: dict[str, tuple[Explanation, float]]) -> Section:
    rows = [
        (
            name,
            x.backend,
            x.tile,
            three_digits(x.flops_forward / 1e9),
            three_digits(x.intensity),
            x.limit,
            three_digits(x.seconds_at_limit * 1e3),
            three_digits(seconds * 1e3),
            f"{x.seconds_at_limit / seconds:.0%}",
        )
        for name, (x, seconds) in explained.items()
    ]
    columns = (
        "call",
        "backend",
        "tiles",
        "GFLOP",
        "FLOP per byte",
        "limited by",
        "limit, ms",
        "measured, ms",
        "limit / measured",
    )
    usable = [(s.name, "yes" if s.usable else "no", s.reason or s.summary) for s in backends()]
    some = next(iter(explained.values()))[0]
    return Section(
        name="planner",
        title="What the planner chose, and why",
        summary=f"Forward of typical calls in {settings.dtype} on {some.device}, where arithmetic reaches "
        f"{three_digits(some.flops_per_second / 1e9)} GFLOP/s and memory {three_digits(some.bytes_per_second / 1e9)} "
        "GB/s. The limit is the least time that a call's operations, or its bytes from memory, take at these rates; "
        f"measured is the faster of {RUNS} runs.",
        tables=[
            Table(columns, rows, frozenset({3, 4, 6, 7, 8})),
            Table(("backend", "usable", "what it is, or why not"), usable, caption="Backends, fastest first."),
        ],
        notes=reasons({name: x for name, (x, _) in explained.items()}),
        records=[{"call": name} | x.as_dict() | {"seconds": seconds} for name, (x, seconds) in explained.items()],
    )


def reasons(explained: dict[str, Explanation]) -> list[str]:
    """Reasons why backends declined or are slower, each once, with its calls."""
    calls: dict[tuple[str, str], list[str]] = {}
    for name, x in explained.items():
        for backend, why in x.why_not.items():
            calls.setdefault((backend, why), []).append(name)
    lines = []
    for (backend, why), names in calls.items():
        where = "" if len(names) == len(explained) else f" for {', '.join(names)}"
        lines.append(f"Not {backend}{where}: {why}.")
    return lines or ["Nothing was declined: the first backend takes each call."]
