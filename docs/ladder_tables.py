"""Tables, and paragraphs with figures, of docs/ladder.md and docs/ladder_measurements.md, for docs/make_tables.py.

All come from the stored runs of `flashtile ladder` and from benchmarks/results. A sentence with a figure is made here,
so that it says what the run says.
"""

import itertools
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cells import figure, listed, markdown, paragraph

ROOT = Path(__file__).parents[1]
STORED = ROOT / "src" / "flashtile" / "cli" / "ladder" / "results"
COUNTERS = ROOT / "benchmarks" / "results"
QUIET = 0.25  # load for each core in the minute before a run, below which a machine is quiet
LOSS = 0.97  # the report's rule: less of a peer's speed than this is a loss
Row = dict[str, Any]


class MissingError(Exception):
    """The stored run lacks a table or a column; the message is the command that makes it."""


def stored(file: str, name: str) -> dict[str, Any]:
    tables = json.loads((STORED / f"{file}.json").read_text(encoding="utf-8"))["tables"]
    if name not in tables:
        raise MissingError(command(file, name))
    return tables[name]


def rows(file: str, name: str, *columns: str) -> list[Row]:
    """Rows of a stored table that has these columns."""
    found = stored(file, name)["rows"]
    if not found or not set(columns) <= set(found[0]):
        raise MissingError(command(file, name))
    return found


def command(file: str, name: str) -> str:
    device = " --device cuda" if file == "h200" else ""
    return f"flashtile ladder{device} --table {name} --save src/flashtile/cli/ladder/results/{file}.json"


def or_missing(make: Callable[[], str]) -> Callable[[], str]:
    """The table, or the command that is to be run for it."""

    def made() -> str:
        try:
            return make()
        except MissingError as missing:
            return f"*Not measured yet:* `{missing}`"

    return made


def times(rows: list[Row], name: str, step: str) -> dict[int, float]:
    """A column of one step, by N."""
    return {row["n"]: row[name] for row in rows if row["step"] == step}


def code(step: str) -> str:
    return step.replace("flashtile.attention", "`flashtile.attention`").replace("Value*", "`Value*`")


# Machines -------------------------------------------------------------------------------------------------------------


def machine(file: str) -> str:
    """One sentence for each group of tables that were measured together, and whether the machine was quiet."""
    tables = json.loads((STORED / f"{file}.json").read_text(encoding="utf-8"))["tables"]
    groups: dict[str, list[str]] = {}
    for name, table in tables.items():
        groups.setdefault(described(table["machine"]), []).append(name)
    lines = [
        paragraph(f"{', '.join(f'`{name}`' for name in names)}: {words}", bullet="- ")
        for words, names in groups.items()
    ]
    noisy = {name: share for name, table in tables.items() if (share := disturbed_share(table["rows"])) > 0}
    if noisy:
        words = ", ".join(f"`{name}` {100 * share:.0f}%" for name, share in noisy.items())
        sentence = f"Times whose median is twice the fastest run or more: {words}. The others have none."
        lines.append(paragraph(sentence, bullet="- "))
    return "\n".join(lines)


def described(machine: Row) -> str:
    about = [machine.get("processor") or machine["device"]]
    if machine.get("processor") and machine["device"].startswith("NVIDIA"):
        about = [machine["device"], f"host {machine['processor']}"]
    about += [f"{name} {machine[key]}" for name, key in PACKAGES.items() if machine.get(key)]
    if machine.get("date"):
        about.append(machine["date"])
    words = ", ".join(about) + "."
    if machine.get("load") is not None:
        quiet = (
            ""
            if machine["load"] < QUIET * machine["cores"]
            else " *The machine was not quiet: these times are provisional.*"
        )
        words += f" One thread; load {machine['load']} on {machine['cores']} cores before the run.{quiet}"
    return words


PACKAGES = {"Python": "python", "PyTorch": "torch", "Triton": "triton", "Numba": "numba"}


def disturbed_share(rows: list[Row]) -> float:
    pairs = [
        row[name[: -len("ms")] + "median_ms"] / row[name]
        for row in rows
        for name in row
        if name.endswith("ms") and name[: -len("ms")] + "median_ms" in row
    ]
    return sum(ratio >= 2 for ratio in pairs) / len(pairs) if pairs else 0.0


# The stack ------------------------------------------------------------------------------------------------------------


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


GRAPH, FLOATS, CPP_GRAPH, CPP = "2 scalar autograd", "2 Python floats", "3 C++ Value*, -O2", "3 C++ -O2"
STANDARD = "4 standard PyTorch"
FACTORS = {  # what is divided, and what the course project's text says of it
    "graph over floats, in Python": (GRAPH, FLOATS, "12 to 16; its summary: 9 to 34"),
    "graph over floats, in C++": (CPP_GRAPH, CPP, ""),
    "Python floats over C++": (FLOATS, CPP, "2 to 18"),
    "C++ over PyTorch": (CPP, STANDARD, ""),
}


def factors() -> str:
    """Ratios of the course project's table 4.1, its text and our run, from N = 8 to 64."""
    found = rows("cpu", "stack")
    body = []
    for name, (slow, fast, text) in FACTORS.items():
        ours = ratios(times(found, "ms", slow), times(found, "ms", fast))
        published = ratios(times(found, "published_ms", slow), times(found, "published_ms", fast))
        body.append([name, span(published), text, span(ours)])
    return markdown(("", "published, table 4.1", "published, text", "measured"), body)


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


# Long sequences -------------------------------------------------------------------------------------------------------

THREE, KEPT, PRODUCT = "4 without lse", "4 with kept buffers", "11 flashtile.attention"
FLASH2, TRITON = "6 FlashAttention-2", "8 Triton, lse"


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


def long_h200(column: str) -> Callable[[], str]:
    def made() -> str:
        found = rows("h200", "long")
        lengths = list(dict.fromkeys(row["n"] for row in found))
        body = []
        for step in dict.fromkeys(row["step"] for row in found):
            own = times(found, column, step)
            body.append([code(step), *(figure(own.get(n)) for n in lengths)])
        return markdown(("milliseconds" if column == "ms" else "extra MiB", *(f"N = {n}" for n in lengths)), body)

    return made


def precision() -> str:
    """Table 4.2 of the course project in both precisions of Triton's products."""
    found = rows("h200", "long")
    standard, ieee, tf32 = (times(found, "ms", step) for step in (THREE, TRITON, f"{TRITON}, TF32"))
    if not tf32:
        raise MissingError(command("h200", "long"))
    torch_tf32 = times(found, "ms", f"{THREE}, TF32")
    published = {n: ratio for n, ratio in times(found, "published_speedup", TRITON).items() if ratio}
    body = []
    for n, ratio in published.items():
        line = [standard[n], ieee[n], tf32[n], standard[n] / ieee[n], standard[n] / tf32[n], torch_tf32[n] / tf32[n]]
        body.append([str(n), *map(figure, (*line, ratio))])
    heading = ("N", "standard, ms", "Triton, IEEE", "Triton, TF32", "ratio, IEEE", "ratio, TF32")
    table = markdown((*heading, "ratio, both in TF32", "published"), body)
    words = paragraph(
        "Precision makes the difference: the same kernel is",
        f"{listed(ieee[n] / tf32[n] for n in published)} times as fast",
        "with Triton's default, TF32, as with IEEE products. PyTorch's default for its own products is IEEE, so the",
        "published comparison has TF32 on one side of it. The column with TF32 on both sides compares like with like.",
    )
    return f"{table}\n\n{words}"


# Errors, intensity, tiles ---------------------------------------------------------------------------------------------


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
    words = paragraph(
        f"In TF32 the errors of online differ from the published ones by {figure(far)} at most; in IEEE",
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


def tiles() -> str:
    body = []
    for row in rows("cpu", "tiles", "flash1_median_ms"):
        names = [f"flash{i}_mb_{x}" for i in (1, 2) for x in ("read", "written")] + ["flash1_ms", "flash2_ms"]
        body.append([row["on_chip"], row["tile"], *(figure(row[name]) for name in names)])
    heading = ("on chip", "tile", "1: MB read", "1: MB written", "2: MB read", "2: MB written", "1: ms", "2: ms")
    return markdown(heading, body)


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


# Of a GPU alone -------------------------------------------------------------------------------------------------------


def dtypes(direction: str, heads: int) -> Callable[[], str]:
    """One line for each dtype and step: ms, TFLOP/s, percent of the peak and of the roofline, by mask and N."""

    def made() -> str:
        found = [x for x in rows("h200", "dtypes", "tflops") if (x["pass"], x["heads"]) == (direction, heads)]
        columns = sorted({(row["mask"], row["n"]) for row in found}, key=lambda x: (x[0] != "full", x[1]))
        lines: dict[tuple[str, str], dict[Any, str]] = {}
        for row in found:
            percent = f"{row['peak_percent']:.0f}, {row['roofline_percent']:.0f}"
            cell = f"{figure(row['ms'])}, {figure(row['tflops'])}, {percent}"
            lines.setdefault((row["dtype"], row["step"]), {})[row["mask"], row["n"]] = cell
        body = [[dtype, code(step), *(line.get(x, "") for x in columns)] for (dtype, step), line in lines.items()]
        return markdown(("dtype", "step", *(f"{mask}, N = {n}" for mask, n in columns)), body)

    return made


def dtypes_words() -> str:
    """The product against standard attention and the best of steps 8 and 9: forward, full, dtype by dtype."""
    found = [x for x in rows("h200", "dtypes", "tflops") if (x["mask"], x["pass"]) == ("full", "forward")]
    lines = []
    for dtype, heads in dict.fromkeys((row["dtype"], row["heads"]) for row in found):
        own = [row for row in found if (row["dtype"], row["heads"]) == (dtype, heads)]
        product, standard = times(own, "ms", PRODUCT), times(own, "ms", STANDARD)
        cells = []
        for n in product:
            best, step = min((row["ms"], row["step"]) for row in own if row["n"] == n and row["step"][0] in "89")
            against = f"{compared(standard[n], product[n])} standard, {compared(best, product[n])} step {step}"
            cells.append(f"at N = {n} {against}")
        title = f"{dtype}, {heads} head{'s' if heads > 1 else ''}: the product is"
        lines.append(paragraph(title, "; ".join(cells) + ".", bullet="- "))
    return "\n".join([*lines, losses(found), limits(found)])


def losses(found: list[Row]) -> str:
    """Cells in which a step of the ladder is ahead of the product, by dtype."""
    cells: dict[str, list[bool]] = {}
    for row in found:
        if row["step"] == PRODUCT:
            key = ("dtype", "heads", "n")
            peers = [x for x in found if all(x[y] == row[y] for y in key) and x["step"].startswith(("8", "9"))]
            cells.setdefault(row["dtype"], []).append(min(x["ms"] for x in peers) < LOSS * row["ms"])
    words = ", ".join(f"{dtype} {sum(lost)} of {len(lost)}" for dtype, lost in cells.items())
    return paragraph(f"Cells in which the product loses to step 8 or 9 by more than 3%: {words}.", bullet="- ")


def limits(found: list[Row]) -> str:
    """The claim that standard attention is limited by memory and fused attention by arithmetic, by the roofline."""
    n, heads = max(row["n"] for row in found), max(row["heads"] for row in found)
    own = [row for row in found if (row["n"], row["heads"]) == (n, heads)]
    by_step = {
        name: [f"{row['limit']} in {row['dtype']}" for row in own if row["step"] == step]
        for name, step in {"standard attention": STANDARD, "the product": PRODUCT}.items()
    }
    words = "; ".join(f"{name} by {', '.join(limits)}" for name, limits in by_step.items())
    return paragraph(f"By the roofline, {heads} heads, N = {n}, the limit is: {words}.", bullet="- ")


def compared(other: float, own: float) -> str:
    """How fast `own` is against `other`; within 3% they are equal."""
    if LOSS < other / own < 1 / LOSS:
        return "as fast as"
    return f"{figure(other / own)} times as fast as" if other > own else f"{figure(own / other)} times as slow as"


def cuda() -> str:
    found = rows("h200", "cuda")
    lengths = list(dict.fromkeys(row["n"] for row in found))
    steps = list(dict.fromkeys(row["step"] for row in found))
    body = []
    for step in steps:
        own = {row["n"]: row for row in found if row["step"] == step}
        cells = [figure(own[n][x]) for n in lengths for x in ("ms", "tflops")]
        body.append([code(step), *cells, figure(max(row["error"] for row in own.values()))])
    heading = [f"{x}, N = {n}" for n in lengths for x in ("ms", "TFLOP/s")]
    ms = [times(found, "ms", step)[lengths[-1]] for step in steps if step.startswith("9")]
    gains = [figure(slow / fast) for slow, fast in itertools.pairwise(ms)]
    words = paragraph(
        f"At N = {lengths[-1]}, rows shared by the lanes of a warp are worth {gains[0]} times, arrays of registers",
        f"{gains[1]} times, and tensor cores in 16 bits {gains[2]} times.",
    )
    return f"{markdown(('step', *heading, 'largest error'), body)}\n\n{words}"


def coalescing() -> str:
    """Times of strided loads, and two laws for them; counters where they have been stored."""
    found, path = rows("h200", "coalescing"), COUNTERS / "h200-coalescing-counters.json"
    counters = {row["stride"]: row for row in json.loads(path.read_text())} if path.exists() else {}
    body = []
    for row in found:
        stride, counted = row["stride"], counters.get(row["stride"], {})
        laws = [str(min(stride, 8)), str(min(stride, 16))]
        cells = [figure(row[x]) for x in ("ms", "gb_per_s_used", "slower")]
        body.append([str(stride), *cells, *laws, *(figure(counted.get(x)) for x in ("l2_ratio", "hbm_ratio"))])
    columns = ("stride", "ms", "GB/s used", "slower", "32-byte sectors", "64-byte pieces")
    table = markdown((*columns, "L2 bytes, counted", "HBM bytes, counted"), body)
    far = [f"{100 * max(abs(row['slower'] / min(row['stride'], law) - 1) for row in found):.0f}%" for law in (8, 16)]
    words = f"Times differ from min(s, 8) by up to {far[0]}, and from min(s, 16) by up to {far[1]}."
    if not counters:
        missing = "python benchmarks/coalescing_counters.py --out benchmarks/results/h200-coalescing-counters.json"
        return f"{table}\n\n{words}\n*Not counted yet:* `{missing}`"
    last = counters[max(counters)]
    decided = paragraph(
        words,
        f"The counters: at stride {max(counters)} L2 hands out {figure(last['l2_ratio'])} bytes for one",
        "that is used, and",
        f"HBM {figure(last['hbm_ratio'])}, so HBM is read in pieces of about {4 * round(last['hbm_ratio'])} bytes.",
    )
    return f"{table}\n\n{decided}"


def banks() -> str:
    found = rows("h200", "banks")
    body = [[row["kernel"], *(figure(row[x]) for x in ("padded_ms", "unpadded_ms", "slower"))] for row in found]
    words = paragraph(
        f"32 turns in place of one, as counted: {figure(found[0]['slower'])} times the time. A whole",
        "kernel waits for shared",
        "memory a part of its time.",
    )
    return f"{markdown(('', 'padded, ms', 'without padding, ms', 'slower'), body)}\n\n{words}"


def counters() -> str:
    """benchmarks/dram_counters.py: predicted and counted GB."""
    body = []
    for row in json.loads((COUNTERS / "h200-dram-counters.json").read_text())["rows"]:
        gigabytes = [f"{row[x] / 1e9:.3f}" for x in ("predicted_read", "read", "predicted_written", "written")]
        body.append([row["case"], *gigabytes, f"{row['difference']:+.1%}", figure(row["intensity"])])
    heading = ("call", "read: predicted", "counted", "written: predicted", "counted", "difference")
    return markdown((*heading, "operations for each byte counted"), body)


BACKWARD = {
    "step": "step",
    "forward_ms": "forward, ms",
    "backward_ms": "backward, ms",
    "kept_mib": "kept, MiB",
    "extra_mib": "backward allocates, MiB",
    "error": "largest error",
}
FEATURES = {
    "step": "step",
    "feature": "feature",
    "ms": "ms",
    "times_plain": "times plain",
    "mb_moved": "MB moved, counted",
    "kept_bytes": "bytes kept for backward",
}
WIDTHS = {
    "head_dim": "d",
    "tile": "tile",
    "mb_moved": "MB moved",
    "bytes_for_1000_flops": "bytes for 1,000 operations",
    "flash1_ms": "step 5, ms",
    "flash1_gflops": "GFLOP/s",
    "product_ms": "product, ms",
    "product_gflops": "GFLOP/s ",
}
POINTWISE = {
    "operation": "operation",
    "accesses": "accesses for a score",
    "ms": "ms",
    "gb_per_s": "GB/s",
    "percent_of_copy": "% of a copy's rate",
    "gflops": "GFLOP/s",
    "operations_for_a_byte": "operations for a byte",
}
LAYERS = {
    "model": "model",
    "n": "N",
    "projections_gflop": "projections, GFLOP",
    "attention_gflop": "attention",
    "feed_forward_gflop": "feed-forward",
    "attention_percent": "attention, %",
    "feed_forward_intensity": "operations for a byte: feed-forward",
    "standard_intensity": "standard attention",
    "layer_standard": "layer, standard",
    "layer_fused": "layer, fused",
}
BLOCKS = {
    "dtype": "dtype",
    "mask": "mask",
    "tile": "tile",
    "ms": "ms",
    "tflops": "TFLOP/s",
    "peak_percent": "% of peak",
    "error": "largest error",
}


def notes(file: str, name: str) -> Callable[[], str]:
    return lambda: paragraph(*stored(file, name)["notes"])


TABLES: dict[str, Callable[[], str]] = {
    "ladder_cpu_machine": lambda: machine("cpu"),
    "ladder_cpu_stack": lambda: stack("cpu"),
    "ladder_cpu_factors": factors,
    "ladder_cpu_stack_words": stack_words,
    "ladder_cpu_long": long_cpu,
    "ladder_cpu_long_words": long_cpu_words,
    "ladder_cpu_backward": plain("cpu", "backward", BACKWARD),
    "ladder_cpu_features": plain("cpu", "features", FEATURES),
    "ladder_cpu_lite": lambda: lite("cpu"),
    "ladder_cpu_intensity": intensity("cpu"),
    "ladder_cpu_tiles": tiles,
    "ladder_cpu_widths": plain("cpu", "widths", WIDTHS),
    "ladder_cpu_pointwise": plain("cpu", "pointwise", POINTWISE),
    "ladder_cpu_layers": plain("cpu", "layers", LAYERS),
    "ladder_cpu_layers_words": notes("cpu", "layers"),
    "ladder_cpu_rounding": rounding("cpu"),
    "ladder_h200_machine": lambda: machine("h200"),
    "ladder_h200_stack": lambda: stack("h200"),
    "ladder_h200_long_ms": long_h200("ms"),
    "ladder_h200_long_mib": long_h200("extra_mib"),
    "ladder_h200_precision": precision,
    "ladder_h200_lite": lambda: lite("h200"),
    "ladder_h200_intensity": intensity("h200"),
    "ladder_h200_backward": plain("h200", "backward", BACKWARD),
    "ladder_h200_pointwise": plain("h200", "pointwise", POINTWISE),
    "ladder_h200_forward_1": dtypes("forward", 1),
    "ladder_h200_forward_16": dtypes("forward", 16),
    "ladder_h200_backward_1": dtypes("backward", 1),
    "ladder_h200_backward_16": dtypes("backward", 16),
    "ladder_h200_dtypes_words": dtypes_words,
    "ladder_h200_blocks": plain("h200", "blocks", BLOCKS),
    "ladder_h200_cuda": cuda,
    "ladder_h200_coalescing": coalescing,
    "ladder_h200_banks": banks,
    "ladder_h200_rounding": rounding("h200"),
    "ladder_h200_counters": counters,
}
TABLES = {name: or_missing(make) for name, make in TABLES.items()}


def counters_differ() -> str:
    """Percent by which the model differs from the counters, at most, for the kernels of this library."""
    found = json.loads((COUNTERS / "h200-dram-counters.json").read_text())["rows"]
    return str(math.ceil(100 * max(abs(x["difference"]) for x in found if not x["case"].startswith("standard"))))


def largest(column: str) -> Callable[[], str]:
    """The largest error of the CPU's table `lite`."""
    return lambda: figure(max(row[column] for row in rows("cpu", "lite", column)))


FIGURES: dict[str, Callable[[], str]] = {
    "tf32_error": largest("online_tf32"),
    "ieee_error": largest("online"),
    "counters_differ": counters_differ,
    "python_graph_factor": factor(GRAPH, FLOATS),
    "cpp_graph_factor": factor(CPP_GRAPH, CPP),
    "python_cpp_factor": factor(FLOATS, CPP),
}
