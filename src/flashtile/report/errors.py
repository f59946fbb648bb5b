"""Error against fp64, beside plain attention in the same low precision: what accumulating in fp32 is worth."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..bench.captured import HEAD_DIM
from ..bench.cell import INPUTS, Cell
from ..bench.inputs import make_case
from ..bench.providers import make
from ..testing.oracle import solve
from .measured import OWN, name_of
from .section import Plot, Section, Series, Table
from .settings import Settings

DTYPES = ("bfloat16", "float16", "float32")
PLAIN = "plain"
HEADS = 4


def errors(settings: Settings, advance: Callable[[], None]) -> Section:
    records = []
    for dtype in DTYPES:
        for inputs in INPUTS:
            records += measured(settings, dtype, inputs)
            advance()
    plots = [
        plot_of(records, "out", "Relative error of out"),
        plot_of(records, "gradients", "Relative error of the worst gradient"),
    ]
    return Section(
        name="errors",
        title="Error against fp64",
        summary=f"‖x − exact‖ / ‖exact‖ of out and of the worst gradient, {HEADS} heads of {HEAD_DIM}, length "
        f"{settings.error_seqlen}, causal. Plain attention computes scores and softmax in the dtype of its inputs; "
        "flashtile sums in float32. In bfloat16 and float16, plain attention's error of out is "
        f"{range_of(records, 'out')} times flashtile's; of the worst gradient {range_of(records, 'gradients')} times.",
        plots=plots,
        tables=[table_of(records)],
        records=records,
        ok=all(math.isfinite(r["error"]) for r in records if r["provider"] == OWN),
    )


def range_of(records: list[dict[str, Any]], which: str) -> str:
    """The least and the most that plain attention's error is in units of flashtile's, in low precision."""
    found = []
    for dtype in DTYPES[:2]:
        for inputs in INPUTS:
            own, plain = (worst_of(records, which, dtype=dtype, inputs=inputs, provider=p) for p in (OWN, PLAIN))
            found.append(plain / own)
    return f"{min(found):.1f} to {max(found):.1f}"


def measured(settings: Settings, dtype: str, inputs: str) -> list[dict[str, Any]]:
    """Relative errors of both, for out and the three gradients."""
    shape: dict[str, Any] = {"heads": HEADS, "seqlen_q": settings.error_seqlen, "head_dim": HEAD_DIM, "causal": True}
    cell = Cell("backward", dtype=dtype, inputs=inputs, **shape)
    case = make_case(cell, settings.device)
    exact = solve(case)
    records = []
    for provider in make((OWN, PLAIN)):
        prepared = provider.prepare(case)
        assert prepared.backward is not None
        assert case.dout is not None
        results = dict(zip(("dq", "dk", "dv"), prepared.backward(case.dout), strict=True)) | {"out": prepared.forward()}
        for name, x in sorted(results.items()):
            found = relative_error(x, exact[name].reference)
            known = {"dtype": dtype, "inputs": inputs, "provider": provider.name, "result": name}
            records.append(known | {"error": found, "epsilon": torch.finfo(case.dtype).eps})
    return records


def relative_error(x: Tensor, exact: Tensor) -> float:
    return float((x.detach().cpu().double() - exact).norm() / exact.norm())


def worst_of(records: list[dict[str, Any]], which: str, **known: str) -> float:
    """The largest error of out, or of the gradients."""
    some = [r for r in records if all(r[name] == x for name, x in known.items())]
    return max(r["error"] for r in some if (r["result"] == "out") == (which == "out"))


def plot_of(records: list[dict[str, Any]], which: str, title: str) -> Plot:
    kinds = [(dtype, inputs) for dtype in DTYPES for inputs in INPUTS]
    series = []
    for provider in (OWN, PLAIN):
        found = [worst_of(records, which, dtype=d, inputs=i, provider=provider) for d, i in kinds]
        points = [(x, float(n)) for n, x in enumerate(found) if 0 < x < float("inf")]
        series.append(Series(name_of(provider), [x for x, _ in points], [n for _, n in points]))
    rows = tuple(f"{short(dtype)} {inputs}" for dtype, inputs in kinds)
    return Plot(f"error_{which}", f"{title} (less is better)", series, "relative error", kind="dots", rows=rows)


def short(dtype: str) -> str:
    return dtype.replace("bfloat", "bf").replace("float", "fp")


def table_of(records: list[dict[str, Any]]) -> Table:
    rows = []
    for dtype in DTYPES:
        for inputs in INPUTS:
            found = [
                worst_of(records, which, dtype=dtype, inputs=inputs, provider=provider)
                for which in ("out", "gradients")
                for provider in (OWN, PLAIN)
            ]
            rows.append((short(dtype), inputs, *(f"{x:.1e}" for x in found)))
    heads = [f"{which}, {name_of(provider)}" for which in ("out", "gradients") for provider in (OWN, PLAIN)]
    return Table(("dtype", "inputs", *heads), rows, frozenset({2, 3, 4, 5}))
