"""Error against fp64, compared with PyTorch's attention and plain attention in the same dtype."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..bench.captured import HEAD_DIM
from ..bench.cell import INPUTS, Cell
from ..bench.inputs import make_case
from ..bench.providers import Declined, make
from ..testing.oracle import solve
from .measured import OWN, label_of
from .section import Plot, Section, Series, Table
from .settings import Settings
from .tables import table_of
from .verdict import Comparison, tally, times_as_small

DTYPES = ("float32", "bfloat16", "float16")
RESULTS = ("out", "gradients")
INPUTS_IN_WORDS = {"normal": "normal inputs", "outliers": "inputs with outliers", "captured": "captured inputs"}
PLAIN = "plain"
HEADS = 4


def errors(settings: Settings, advance: Callable[[], None]) -> Section:
    records, notes = [], []
    for dtype in DTYPES:
        for inputs in INPUTS:
            measurements, reasons = measured(settings, dtype, inputs)
            records += measurements
            notes += reasons
            advance()
    return section_of(settings, records, list(dict.fromkeys(notes)))


def section_of(settings: Settings, records: list[dict[str, Any]], notes: list[str]) -> Section:
    comparisons = compared(records)
    by_dtype = {dtype: [x for x in comparisons if x.group.startswith(f"{dtype},")] for dtype in DTYPES}
    counted = "; ".join(f"{dtype}: {tally(some)}" for dtype, some in by_dtype.items() if some)
    return Section(
        name="errors",
        title="Error against fp64",
        summary=f"‖x − exact‖ / ‖exact‖ of out and of the worst gradient, {HEADS} heads of {HEAD_DIM}, length "
        f"{settings.error_seqlen}, causal, compared with the more exact of {label_of(settings.reference)} and "
        f"{label_of(PLAIN)}. In {counted or 'no dtype was anything to compare'}. Plain attention computes scores and "
        "softmax in the dtype of its inputs; flashtile sums in float32.",
        plots=[
            plot_of(records, "out", "Relative error of out"),
            plot_of(records, "gradients", "Relative error of the worst gradient"),
        ],
        tables=[
            table_of(comparisons, "", f"All {len(comparisons)} cases, losses first"),
            figures_table(records),
        ],
        notes=notes,
        records=records,
        ok=all(math.isfinite(r["error"]) for r in records if r["provider"] == OWN),
        comparisons=comparisons,
    )


def measured(settings: Settings, dtype: str, inputs: str) -> tuple[list[dict[str, Any]], list[str]]:
    """Relative errors of out and the three gradients for each provider, and the reasons of those without any."""
    shape: dict[str, Any] = {"heads": HEADS, "seqlen_q": settings.error_seqlen, "head_dim": HEAD_DIM, "causal": True}
    cell = Cell("backward", dtype=dtype, inputs=inputs, **shape)
    case = make_case(cell, settings.device)
    exact = solve(case)
    records, notes = [], []
    for provider in make((OWN, settings.reference, PLAIN)):
        try:
            prepared = provider.prepare(case)
        except Declined as reason:
            notes.append(f"{label_of(provider.name)} has no figures in {dtype}: {reason}")
            continue
        assert prepared.backward is not None
        assert case.dout is not None
        results = dict(zip(("dq", "dk", "dv"), prepared.backward(case.dout), strict=True)) | {"out": prepared.forward()}
        for name, x in sorted(results.items()):
            error = relative_error(x, exact[name].reference)
            known = {"dtype": dtype, "inputs": inputs, "provider": provider.name, "result": name}
            records.append(known | {"error": error, "epsilon": torch.finfo(case.dtype).eps})
    return records, notes


def relative_error(x: Tensor, exact: Tensor) -> float:
    return float((x.detach().cpu().double() - exact).norm() / exact.norm())


def compared(records: list[dict[str, Any]]) -> list[Comparison]:
    """Each dtype and kind of input, compared with the more exact other. A result that is not finite has no comparison:
    it fails the section.
    """
    comparisons = []
    for which in RESULTS:
        for dtype in DTYPES:
            for inputs in INPUTS:
                ranked = worst_of(records, which, dtype=dtype, inputs=inputs)
                own = ranked.pop(OWN, math.inf)
                if ranked and math.isfinite(own):
                    peer = min(ranked, key=ranked.__getitem__)
                    ratio = times_as_small(own, ranked[peer])
                    group, case = f"{dtype}, {which}", f"{dtype}, {which}, {INPUTS_IN_WORDS[inputs]}"
                    comparisons.append(Comparison("error", group, case, own, ranked[peer], label_of(peer), ratio))
    return comparisons


def worst_of(records: list[dict[str, Any]], which: str, **known: str) -> dict[str, float]:
    """The largest error of out, or of the gradients, of each provider."""
    largest: dict[str, float] = {}
    for r in records:
        if all(r[name] == x for name, x in known.items()) and (r["result"] == "out") == (which == "out"):
            error = r["error"] if math.isfinite(r["error"]) else math.inf
            largest[r["provider"]] = max(error, largest.get(r["provider"], 0.0))
    return largest


def plot_of(records: list[dict[str, Any]], which: str, title: str) -> Plot:
    kinds = [(dtype, inputs) for dtype in DTYPES for inputs in INPUTS]
    series = []
    for provider in dict.fromkeys(r["provider"] for r in records):
        values = [worst_of(records, which, dtype=d, inputs=i).get(provider, math.inf) for d, i in kinds]
        points = [(x, float(n)) for n, x in enumerate(values) if 0 < x < float("inf")]
        series.append(Series(label_of(provider), [x for x, _ in points], [n for _, n in points]))
    rows = tuple(f"{dtype} {inputs}" for dtype, inputs in kinds)
    return Plot(f"error_{which}", f"{title} (less is better)", series, "relative error", kind="dots", rows=rows)


def figures_table(records: list[dict[str, Any]]) -> Table:
    names = list(dict.fromkeys(r["provider"] for r in records))
    rows = []
    for dtype in DTYPES:
        for inputs in INPUTS:
            worst = [worst_of(records, which, dtype=dtype, inputs=inputs) for which in RESULTS]
            rows.append((dtype, inputs, *(f"{x[name]:.1e}" if name in x else "–" for x in worst for name in names)))
    heads = [f"{which}, {label_of(name)}" for which in RESULTS for name in names]
    numbers = frozenset(range(2, 2 + len(heads)))
    return Table(("dtype", "inputs", *heads), rows, numbers, folded="The figures of the pictures")
