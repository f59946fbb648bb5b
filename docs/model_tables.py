"""Tables of the calls of real models for docs/make_tables.py, from the stored results of `benchmarks/models.toml`."""

from collections.abc import Sequence

from cells import RESULTS, markdown

from flashtile.bench.cell import Cell
from flashtile.bench.store import Store
from flashtile.report.models import compared, geometric_mean
from flashtile.report.verdict import Comparison, Verdict, by_group, count, figures, losses_first, worse

COLUMNS = ("call", "shape", "flashtile", "best other", "its time / ours")
GPU, CPU = (Store(RESULTS / f"{device}-models.jsonl") for device in ("gpu", "cpu"))


def stored(store: Store = GPU) -> list[tuple[Cell, Comparison]]:
    """The comparisons of each stored cell: of the device's time, and of a short call's eager time."""
    return [(cell, x) for cell, rows in store.read().items() for x in compared({cell: rows})]


def model_means() -> str:
    """Counts and geometric means of each group of calls."""
    body = []
    for group, some in by_group(x for _, x in stored()).items():
        ratios = [x.ratio for x in some]
        counts = [f"{count(some, verdict)}" for verdict in Verdict]
        body.append(
            [group, str(len(some)), *counts, f"{geometric_mean(some):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"]
        )
    return markdown(("calls", "all", "slower", "as fast", "faster", "geometric mean, and range"), body)


def model_losses() -> str:
    """The calls in which another library is faster."""
    calls = stored()
    lost = worse(x for _, x in calls)
    return table([next((cell, x) for cell, x in calls if x is loss) for loss in lost])


def model_calls(store: Store = GPU) -> str:
    """All calls by the device's time, losses first."""
    calls = [(cell, x) for cell, x in stored(store) if not x.group.endswith("eager")]
    ranked = losses_first(x for _, x in calls)
    return table([next((cell, x) for cell, x in calls if x is one) for one in ranked])


def table(calls: Sequence[tuple[Cell, Comparison]]) -> str:
    body = []
    for cell, x in calls:
        other = f"{x.peer} {microseconds(x.other)}"
        body.append([x.case.removeprefix("CPU: "), shape(cell), microseconds(x.own), other, figures(x.ratio)])
    return markdown(COLUMNS, body)


def shape(cell: Cell) -> str:
    """Batch, heads, rows, keys, and features of a call: "16 x 12 x 1024 x 64, causal"."""
    heads = str(cell.heads) if cell.num_heads_kv == cell.heads else f"{cell.heads}/{cell.num_heads_kv}"
    rows = str(cell.seqlen_q) if cell.seqlen_k in (None, cell.seqlen_q) else f"{cell.seqlen_q}:{cell.seqlen_k}"
    widths = str(cell.head_dim) if cell.head_dim_v is None else f"{cell.head_dim}/{cell.head_dim_v}"
    words = [f"{cell.batch} x {heads} x {rows} x {widths}"]
    words += [cell.dtype] if cell.dtype == "float32" else []
    words += ["causal"] if cell.causal else []
    words += ["window"] if cell.window else []
    return ", ".join(words)


def microseconds(seconds: float) -> str:
    return f"{seconds * 1e6:,.0f} µs" if seconds >= 1e-4 else f"{seconds * 1e6:.1f} µs"


def gpu_models() -> str:
    """The GPUs of the rows."""
    return f"Measured on: {', '.join(sorted({*GPU.devices().values()}))}."


TABLES = {
    "model_means": model_means,
    "model_losses": model_losses,
    "model_calls": model_calls,
    "model_gpus": gpu_models,
    "cpu_model_calls": lambda: model_calls(CPU),
}
