"""Tables and paragraphs of docs/ladder_measurements.md that a GPU alone has."""

import itertools
import json
import math
from collections.abc import Callable
from typing import Any

import ladder_stored
from cells import figure, listed, markdown, paragraph
from ladder_stored import PRODUCT, STANDARD, THREE, TRITON, MissingError, Row, code, command, rows, times

LOSS = 0.97  # the report's rule: less of a peer's speed than this is a loss


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
    """Speed of `own` relative to `other`; within 3% they are equal."""
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
    found, path = rows("h200", "coalescing"), ladder_stored.COUNTERS / "h200-coalescing-counters.json"
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
    for row in json.loads((ladder_stored.COUNTERS / "h200-dram-counters.json").read_text())["rows"]:
        gigabytes = [f"{row[x] / 1e9:.3f}" for x in ("predicted_read", "read", "predicted_written", "written")]
        body.append([row["case"], *gigabytes, f"{row['difference']:+.1%}", figure(row["intensity"])])
    heading = ("call", "read: predicted", "counted", "written: predicted", "counted", "difference")
    return markdown((*heading, "operations for each byte counted"), body)


def counters_differ() -> str:
    """Percent by which the model differs from the counters, at most, for the kernels of this library."""
    found = json.loads((ladder_stored.COUNTERS / "h200-dram-counters.json").read_text())["rows"]
    return str(math.ceil(100 * max(abs(x["difference"]) for x in found if not x["case"].startswith("standard"))))
