"""Tables and paragraphs of docs/ladder_measurements.md: those of a CPU, and those that both devices have."""

from collections.abc import Callable
from typing import Any

from cells import figure, listed, markdown, paragraph
from ladder_stored import (
    CPP,
    CPP_GRAPH,
    FLASH2,
    FLOATS,
    GRAPH,
    KEPT,
    LITE_ANY,
    PRODUCT,
    STANDARD,
    THREE,
    code,
    command,
    rows,
    stored,
    times,
)

LIKE_WITH_LIKE = "the same, N rows on both sides"
FACTORS = {  # what is divided, and what the course project's text says of it
    "graph over floats, in Python": (GRAPH, FLOATS, "12 to 16; its summary: 9 to 34"),
    "graph over floats, in C++": (CPP_GRAPH, CPP, ""),
    "Python floats over C++": (FLOATS, CPP, "2 to 18"),
    LIKE_WITH_LIKE: (FLOATS, CPP, ""),
    "C++ over PyTorch": (CPP, STANDARD, ""),
    "PyTorch over Triton, lite": (STANDARD, LITE_ANY, ""),
}


def stack(file: str) -> str:
    found = rows(file, "stack", "published_ms")
    lengths = list(dict.fromkeys(row["n"] for row in found))
    body = []
    for step in dict.fromkeys(row["step"] for row in found):
        own = {row["n"]: row for row in found if row["step"] == step}
        cells = []
        for n in lengths:
            row = own.get(n)
            published = row and row["published_ms"]
            cells.append("" if row is None else figure(row["ms"]) + (f" ({published:.3f})" if published else ""))
        last, errors = own[max(own)], [row["error"] for row in own.values()]
        spread = [row["median_ms"] / row["ms"] for row in own.values() if "median_ms" in row]
        cells += [figure(1e3 * last["ms"] / last["n"]), figure(max(errors)), figure(max(spread)) if spread else ""]
        body.append([code(step), *cells])
    heading = ("step", *(f"N = {n}" for n in lengths), "µs for a row, longest N", "largest error", "spread")
    return markdown(heading, body)


def factors() -> str:
    """Ratios of the course project's table 4.1, its text and our run, from N = 8 to 64."""
    runs = [rows(file, "stack", "published_ms") for file in ("cpu", "h200")]
    body = []
    for name, (slow, fast, text) in FACTORS.items():
        ours = [ratios(times(found, "ms", slow), times(found, "ms", fast)) for found in runs]
        slow_published = times(runs[1], "published_ms", slow)
        if name == LIKE_WITH_LIKE:  # the published Python times are those of one row
            slow_published = {n: n * ms for n, ms in slow_published.items()}
            ours = [[] for _ in runs]
        published = ratios(slow_published, times(runs[1], "published_ms", fast))
        body.append([name, span(published), text, *map(span, ours)])
    return markdown(("", "published, table 4.1", "published, text", "measured, CPU", "measured, H200"), body)


def ratios(slow: dict[int, Any], fast: dict[int, Any]) -> list[float]:
    return [slow[n] / fast[n] for n in slow if n in fast and slow[n] and fast[n]]


def span(values: list[float]) -> str:
    return f"{figure(min(values))} to {figure(max(values))}" if values else ""


def stack_words() -> str:
    found = rows("cpu", "stack")
    graph, floats = times(found, "ms", GRAPH), times(found, "ms", FLOATS)
    n, first = max(graph), min(graph)
    published = [times(found, "published_ms", step)[n] for step in (GRAPH, FLOATS)]
    product, call = times(found, "ms", PRODUCT), times(found, "ms", CPP)[first]
    row_of_graph, row_of_floats = figure(graph[n] / n), figure(floats[n] / n)
    one = paragraph(
        "The published times of step 2 grow as N, where N rows over N keys cost N². They fit one row:",
        "ours for a row at",
        f"N = {n}, {row_of_graph} ms with the graph and {row_of_floats} ms without, stand against",
        f"{listed(published)} ms.",
        bullet="- ",
    )
    two = paragraph(
        "The published text gives two ranges for the graph's price, and its own table has a third: see the factors.",
        bullet="- ",
    )
    three = paragraph(
        f"A call has a price: C++ called from Python through tensors takes {figure(call)} ms at N =",
        f"{first}, the product",
        f"{figure(product[first])} ms there and {figure(product[n])} ms at N = {n}. One head of {n} rows",
        "is not what it is",
        "made for.",
        bullet="- ",
    )
    return "\n".join((one, two, three))


def factor(slow: str, fast: str) -> Callable[[], str]:
    """A ratio of two steps at the longest N."""

    def made() -> str:
        found = rows("cpu", "stack")
        a, b = times(found, "ms", slow), times(found, "ms", fast)
        return f"{a[max(a)] / b[max(b)]:.0f}"

    return made


def long_cpu() -> str:
    body, before = [], None
    for row in rows("cpu", "long", "page_faults"):
        n = "" if row["n"] == before else str(row["n"])
        before = row["n"]
        cells = ("ms", "median_ms", "page_faults", "speedup", "published_speedup", "extra_mib", "published_mib")
        body.append([n, code(row["step"]), *(figure(row[x]) for x in (*cells, "saving", "published_saving"))])
    heading = ("N", "step", "ms", "median", "page faults", "speed-up", "published", "extra MiB", "published")
    return markdown((*heading, "saving", "published"), body)


def long_cpu_words() -> str:
    found = rows("cpu", "long", "page_faults")
    n = max(row["n"] for row in found)
    standard, kept, three, product = (times(found, "ms", step)[n] for step in (STANDARD, KEPT, THREE, PRODUCT))
    faults = times(found, "page_faults", THREE)[n]
    speedups = {step: times(found, "speedup", step) for step in (FLASH2, PRODUCT)}
    return paragraph(
        f"At N = {n} the three kernels of step 4 take {figure(three)} ms ({figure(standard)} with lse),",
        f"and {figure(kept)} ms",
        "where S, P and O lie in buffers that are kept: otherwise each call asks the system for",
        f"{figure(faults)} pages,",
        "which the system clears. That is a price of the allocator, and not of standard attention. Step",
        "6, a loop of torch",
        f"operations, has {listed(speedups[FLASH2].values())} times the speed of the three kernels at N =",
        f"{listed(speedups[FLASH2])}; arithmetic is the limit of both (the ridge is given below), so",
        "bytes saved are not",
        f"time saved. The product has {listed(speedups[PRODUCT].values())} times, because its kernel",
        "computes exponentials",
        f"and sums in registers, between the products; against kept buffers it has {figure(kept / product)} times at",
        f"N = {n}.",
    )


def lite(file: str) -> str:
    found = rows(file, "lite", "online")
    body = []
    for row in found:
        cells = (row["lite"], row["published_lite"], row["online"], row.get("online_tf32", "not run"))
        body.append([str(row["n"]), str(row["tiles"]), *map(figure, (*cells, row["published_online"]))])
    heading = ("N", "tiles", "lite", "published", "online, IEEE", "online, TF32", "published")
    table = markdown(heading, body)
    if "online_tf32" not in found[0]:
        return f"{table}\n\n*Not measured yet:* `{command(file, 'lite')}`"
    far = max(abs(row["online_tf32"] - row["published_online"]) for row in found)
    times_smaller = min(row["online_tf32"] / row["online"] for row in found)
    equal = sum(f"{row['online_tf32']:.3f}" == f"{row['published_online']:.3f}" for row in found)
    lite_far = [row["lite"] / row["published_lite"] for row in found if row["tiles"] > 1]
    words = paragraph(
        f"In TF32 the errors of online differ from the published ones by {figure(far)} at most, and {equal} of",
        f"{len(found)} round to them; those of lite are {figure(min(lite_far))} to {figure(max(lite_far))} of the",
        "published, with other random numbers. In IEEE",
        "float32 they are",
        f"at least {figure(times_smaller)} times as small. Precision makes the difference.",
    )
    return f"{table}\n\n{words}"


def intensity(file: str) -> Callable[[], str]:
    def made() -> str:
        found = rows(file, "intensity")
        lengths = list(dict.fromkeys(row["n"] for row in found))
        body = []
        for name in dict.fromkeys(row["algorithm"] for row in found):
            own = {row["n"]: row for row in found if row["algorithm"] == name}
            cells = [figure(own[n][x]) for n in lengths for x in ("mb_moved", "intensity", "published", "bound_ms")]
            body.append([name, *cells, own[lengths[-1]]["limit"]])
        heading = [
            f"{x}, N = {n}" for n in lengths for x in ("MB moved", "operations for a byte", "published", "bound, ms")
        ]
        table = markdown(("", *heading, "limit"), body)
        return f"{table}\n\n{paragraph(*stored(file, 'intensity')['notes'])}"

    return made


def plain(file: str, name: str, columns: dict[str, str]) -> Callable[[], str]:
    """A stored table as it is, with these columns under these headings; a first column that repeats is left out."""

    def made() -> str:
        body, before = [], None
        for row in rows(file, name, *columns):
            cells = [figure(row[column]) for column in columns]
            body.append([*(cells[:1] if row[next(iter(columns))] != before else [""]), *cells[1:]])
            before = row[next(iter(columns))]
        return markdown(columns.values(), body)

    return made


def pointwise_words(file: str) -> Callable[[], str]:
    """Say how near to a copy's rate the operations are, and the gain of one pass in place of two."""

    def made() -> str:
        found = {row["operation"]: row for row in rows(file, "pointwise", "percent_of_copy")}
        alone = [found[name] for name in ("scale", "mask, in place", "softmax", "dropout")]
        rates = " to ".join(figure(x(row["percent_of_copy"] for row in alone)) for x in (min, max))
        two, one, product = (found[x] for x in ("scale, then bias", "scale and bias in one", "S = Q Kᵀ"))
        return paragraph(
            f"Scale, mask, softmax and dropout alone run at {rates}% of the rate of a copy and do at most",
            f"{figure(max(row['operations_for_a_byte'] for row in alone))} operations for a byte; the product does",
            f"{figure(product['operations_for_a_byte'])}. Two operations in one pass have half the accesses and one",
            f"launch in place of two: {figure(one['ms'])} ms in place of {figure(two['ms'])}.",
        )

    return made


def approximate(file: str) -> Callable[[], str]:
    """Linear attention and hashed buckets, and a sentence on each at its longest N."""

    def made() -> str:
        columns = ("method", "n", "parameter", "ms", "all_pairs_ms", "relative_error", "pairs_percent")
        fused = times(rows(file, "long"), "ms", PRODUCT)  # of the same machine, at N of buckets
        found = rows(file, "approximate", *columns)
        body = []
        for row in found:
            buckets = row["method"].startswith("hashed")
            pairs = [row["all_pairs_ms"], fused.get(row["n"])] if buckets else [None, row["all_pairs_ms"]]
            cells = [row[x] for x in columns]
            body.append([figure(x) for x in (*cells[:4], *pairs, *cells[5:])])
        heading = ("method", "N", "features or rounds", "ms", "all pairs, three operations", "all pairs, fused")
        table = markdown((*heading, "error, of the result", "% of pairs"), body)
        linear, hashed = (
            [x for x in found if x["method"].startswith(name)] for name in ("linear, elu", "hashed buckets")
        )
        n = max(row["n"] for row in hashed)
        faster = []
        for pairs in (fused[n], hashed[-1]["all_pairs_ms"]):
            ahead = [row["parameter"] for row in hashed if row["n"] == n and row["ms"] < pairs]
            faster.append(f"with {listed(ahead)} rounds" if ahead else "at no number of rounds")
        first, last = linear[0], linear[-1]
        words = paragraph(
            f"From N = {first['n']} to {last['n']} linear attention takes {figure(last['ms'] / first['ms'])} times the",
            f"time, all pairs {figure(last['all_pairs_ms'] / first['all_pairs_ms'])} times. At N = {n} buckets are",
            f"faster than all pairs in a fused kernel {faster[0]}, and than all pairs by three operations {faster[1]},",
            "with errors of",
            f"{listed(row['relative_error'] for row in hashed if row['n'] == n)} of the result.",
        )
        return f"{table}\n\n{words}"

    return made


def rounding(file: str) -> Callable[[], str]:
    def made() -> str:
        body, before = [], None
        for row in rows(file, "rounding"):
            if (row["where"] == "GPU") != (file == "h200"):
                continue
            scale = "1" if row["scale"] == 1 else "1/8"
            names = ("out_moves_by", "lse_moves_by", "out_error", "lse_error")
            change = f"`{row['change']}`" if row["change"].startswith("-") else row["change"]
            body.append([scale if scale != before else "", change, *(figure(row[x]) for x in names)])
            before = scale
        return markdown(("scale", "change", "out moves by", "lse moves by", "error of out", "error of lse"), body)

    return made


VERDICTS = {  # change: whether a published text finds that it helps
    "sums backwards": False,
    "compensated sums (Kahan)": False,
    "2^(x log2 e) in place of exp": False,
    "sums in pairs": True,
}


def verdicts() -> str:
    """What a published text says of four changes, and whether the errors agree."""
    found = [row for row in rows("cpu", "rounding") if row["where"] == "CPU"]
    plain = {row["scale"]: row["out_error"] for row in found if row["change"] == "none"}
    body = []
    for change, said in VERDICTS.items():
        ratios = [row["out_error"] / plain[row["scale"]] for row in found if row["change"] == change]
        helps = all(ratio < 1 for ratio in ratios)
        words = "holds" if helps == said else "does not hold"
        body.append([change, "helps" if said else "does not help", *map(figure, ratios), words])
    scales = ["1" if scale == 1 else "1/8" for scale in plain]
    heading = ("change", "published", *(f"error, of that without, scale {x}" for x in scales), "verdict")
    return markdown(heading, body)


def notes(file: str, name: str) -> Callable[[], str]:
    return lambda: paragraph(*stored(file, name)["notes"])


def tiles() -> str:
    body = []
    for row in rows("cpu", "tiles", "flash1_median_ms"):
        names = [f"flash{i}_mb_{x}" for i in (1, 2) for x in ("read", "written")] + ["flash1_ms", "flash2_ms"]
        body.append([row["on_chip"], row["tile"], *(figure(row[name]) for name in names)])
    heading = ("on chip", "tile", "1: MB read", "1: MB written", "2: MB read", "2: MB written", "1: ms", "2: ms")
    return markdown(heading, body)


def largest(column: str) -> Callable[[], str]:
    """The largest error of the CPU's table `lite`."""
    return lambda: figure(max(row[column] for row in rows("cpu", "lite", column)))
