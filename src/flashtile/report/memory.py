"""Peak memory against sequence length, in a process of its own without other allocations."""

import math
from collections.abc import Callable
from tempfile import TemporaryDirectory

from ..bench.cell import Cell
from ..bench.fresh import Job, in_one_process
from ..bench.results import three_digits
from .measured import OWN, label_of
from .section import Plot, Section, Series, Table
from .settings import Settings
from .tables import MIB, table_of
from .verdict import Comparison, tally, times_as_small

DENSE = "plain"
MEASURES = ("forward_memory", "backward_memory")
BytesUsed = dict[tuple[str, str], dict[int, float]]  # bytes by measure, provider and length


def memory(settings: Settings, advance: Callable[[], None]) -> Section:
    used: BytesUsed = {}
    notes = []
    cells = tuple(cell_of(settings, measure, n) for measure in MEASURES for n in settings.memory_seqlens)
    jobs = [Job(cells, provider, str(settings.device)) for provider in providers(settings)]
    with TemporaryDirectory(ignore_cleanup_errors=True) as caches:
        findings = in_one_process(jobs, caches)
    for job, results in zip(jobs, findings, strict=True):
        for cell, finding in zip(cells, results, strict=True):
            if "value" in finding:
                used.setdefault((cell.measure, job.provider), {})[cell.seqlen_q] = finding["value"]
            else:
                reason = finding.get("declined") or finding.get("error")
                notes.append(f"{label_of(job.provider)} at {cell.label()}: {reason}")
    advance()
    return section_of(settings, used, list(dict.fromkeys(notes)))


def providers(settings: Settings) -> tuple[str, ...]:
    return (OWN, settings.reference, DENSE)


def cell_of(settings: Settings, measure: str, seqlen: int) -> Cell:
    heads, head_dim, dtype = settings.memory_heads, settings.head_dim, settings.dtype
    return Cell(measure=measure, heads=heads, seqlen_q=seqlen, head_dim=head_dim, dtype=dtype)


def section_of(settings: Settings, used: BytesUsed, notes: list[str]) -> Section:
    comparisons = [x for measure in MEASURES for x in compared(settings, measure, used)]
    counted = tally(comparisons).capitalize() if comparisons else "Nothing could be compared"
    return Section(
        name="memory",
        title="Memory",
        summary=f"{counted}. {settings.memory_heads} heads of {settings.head_dim}, {settings.dtype}, not causal; the "
        "peak bytes of PyTorch's allocator, without inputs and results. "
        f"{of_the_longest(settings, used)}",
        plots=[plot_of(settings, measure, used) for measure in MEASURES],
        tables=[
            table_of(comparisons, "", f"All {len(comparisons)} cases, losses first"),
            length_table(settings, used),
        ],
        notes=notes,
        records=[
            {"measure": measure, "provider": provider, "seqlen": n, "bytes": x}
            for (measure, provider), values in used.items()
            for n, x in values.items()
        ],
        comparisons=comparisons,
    )


def compared(settings: Settings, measure: str, used: BytesUsed) -> list[Comparison]:
    """Each length, compared with the smallest other."""
    results, own = [], used.get((measure, OWN), {})
    for n in settings.memory_seqlens:
        others = [(x[n], name) for (m, name), x in used.items() if m == measure and name != OWN and n in x]
        if n in own and others:
            other, peer = min(others)
            case, ratio = f"memory of {pass_of(measure)}, {n:,} tokens", times_as_small(own[n], other)
            results.append(Comparison("memory", pass_of(measure), case, own[n], other, label_of(peer), ratio))
    return results


def pass_of(measure: str) -> str:
    return measure.removesuffix("_memory")


def inputs_bytes(settings: Settings, seqlen: int) -> float:
    """Bytes of q, k, v and out."""
    cell = cell_of(settings, "forward_memory", seqlen)
    return 4 * cell.heads * seqlen * cell.head_dim * cell.torch_dtype.itemsize


def slope(values: dict[int, float]) -> float | None:
    """Exponent of growth: the slope of log(bytes) over log(length), by least squares over the longer half."""
    points = [(math.log(n), math.log(x)) for n, x in sorted(values.items()) if x > 0]
    points = points[len(points) // 2 - (len(points) < 4) :] if len(points) > 2 else points
    if len(points) < 2:
        return None
    mean_x, mean_y = (sum(values) / len(points) for values in zip(*points, strict=True))
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / spread


def plot_of(settings: Settings, measure: str, used: BytesUsed) -> Plot:
    lines = []
    for provider in providers(settings):
        values = {n: x for n, x in used.get((measure, provider), {}).items() if x > 0}
        if values:
            exponent = slope(values)
            grown = "" if exponent is None else f", S^{exponent:.1f}"
            points = sorted(values.items())
            lengths, mib = [float(n) for n, _ in points], [x / MIB for _, x in points]
            lines.append(Series(f"{label_of(provider)}{grown}", lengths, mib))
    lengths = [float(n) for n in settings.memory_seqlens]
    inputs = [inputs_bytes(settings, n) / MIB for n in settings.memory_seqlens]
    lines.append(Series("q, k, v, out, S^1", lengths, inputs, dashed=True))
    title = f"{pass_of(measure).capitalize()}, MiB beyond inputs and results (less is better)"
    return Plot(measure, title, lines, "sequence length", log_y=True)


def of_the_longest(settings: Settings, used: BytesUsed) -> str:
    """Memory at the longest length, of flashtile and of the dense method, in words."""
    words, longest = [], settings.memory_seqlens[-1]
    for measure in MEASURES:
        own, dense = (used.get((measure, name), {}) for name in (OWN, DENSE))
        if longest in own and longest in dense:
            less, more = own[longest] / MIB, dense[longest] / MIB
            words.append(
                f"{pass_of(measure).capitalize()} at {longest:,}: {three_digits(less)} MiB, where {label_of(DENSE)} "
                f"takes {three_digits(more)}."
            )
    return " ".join(words)


def length_table(settings: Settings, used: BytesUsed) -> Table:
    keys = [(measure, provider) for measure in MEASURES for provider in providers(settings)]
    columns = ("length", *(f"{pass_of(m)}, {label_of(p)}" for m, p in keys), "q, k, v and out")
    rows = []
    for n in settings.memory_seqlens:
        bytes_of = [used.get(key, {}).get(n) for key in keys] + [inputs_bytes(settings, n)]
        rows.append((f"{n:,}", *("–" if x is None else three_digits(x / MIB) for x in bytes_of)))
    exponents = [slope(used.get(key, {})) for key in keys]
    rows.append(("grows as", *("–" if e is None else f"S^{e:.2f}" for e in exponents), "S^1.00"))
    caption = "MiB. The exponents are fitted to the longer half."
    return Table(columns, rows, frozenset(range(len(columns))), caption, folded="The figures of the pictures")
