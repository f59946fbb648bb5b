"""Tables and paragraphs of docs/ladder_measurements.md that a GPU alone has."""

import itertools
import json
import math
import runpy
from collections.abc import Callable
from typing import Any

import ladder_stored
from cells import figure, listed, markdown, paragraph
from ladder_agreement import disagreements
from ladder_stored import PRODUCT, STANDARD, THREE, TRITON, MissingError, Row, code, command, rows, times

PUBLISHED_LEVELS = {"registers": (1, 19), "shared": (5, 19), "L2": (30, 4), "HBM": (400, 3)}  # cycles, TB/s
TENSOR_CORES = "9 CUDA C++, tensor cores, float16"
MMA, STAGES, HOPPER = "9 CUDA C++, tensor cores", "9 CUDA C++, two stages", "9 Gluon, Hopper"
BACKWARD = "8 Triton, backward"
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


PUBLISHED_MS = {1024: (0.081, 0.039), 2048: (0.258, 0.158), 4096: (1.668, 0.462)}  # table 4.2: standard, Triton


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
        line = [standard[n], PUBLISHED_MS[n][0], ieee[n], tf32[n], PUBLISHED_MS[n][1]]
        line += [standard[n] / ieee[n], standard[n] / tf32[n], torch_tf32[n] / tf32[n], ratio]
        body.append([str(n), *map(figure, line)])
    heading = ("N", "standard, ms", "published", "Triton, IEEE", "Triton, TF32", "published", "ratio, IEEE")
    table = markdown((*heading, "ratio, TF32", "ratio, both in TF32", "published"), body)
    n = max(published)
    gains = [PUBLISHED_MS[n][0] / standard[n], PUBLISHED_MS[n][1] / tf32[n]]
    met = [n for n, ratio in published.items() if standard[n] / tf32[n] >= LOSS * ratio]
    words = paragraph(
        f"The same kernel is {listed(ieee[n] / tf32[n] for n in published)} times as fast with Triton's default, TF32,",
        "as with IEEE products. PyTorch's default for its own products is IEEE, so the published comparison has TF32",
        "on one side of it. The column with TF32 on both sides compares like with like. With Triton in TF32 the",
        f"published ratio is met at {f'N = {listed(met)}' if met else 'no N'}: against the published machine,",
        f"at N = {n}, the standard kernels are {figure(gains[0])} times as fast here and the Triton kernel",
        f"{figure(gains[1])} times. A",
        "ratio of two kernels holds for one machine.",
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
    stale = {(rate.dtype, rate.step) for pair in disagreements("h200") for rate in pair if rate.table == "dtypes"}
    full = [x for x in rows("h200", "dtypes", "tflops") if (x["mask"], x["pass"]) == ("full", "forward")]
    left = list(dict.fromkeys(x["dtype"] for x in full if (x["dtype"], x["step"]) in stale))
    found = [x for x in full if x["dtype"] not in left]
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
    if left:
        words = f"{listed(left)}: left out, because another table of this page disagrees (see above)."
        lines.append(paragraph(words, bullet="- "))
    return "\n".join([*lines, losses(found), limits(full)])


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
        takes = [figure(own[lengths[-1]][x]) for x in ("registers", "spilled_bytes", "shared_bytes")]
        body.append([code(step), *cells, figure(max(row["error"] for row in own.values())), *takes])
    heading = [f"{x}, N = {n}" for n in lengths for x in ("ms", "TFLOP/s")]
    last = ("largest error", "registers", "local bytes", "shared bytes")
    return f"{markdown(('step', *heading, *last), body)}\n\n{cuda_words(found, lengths[-1])}"


def large() -> str:
    """Steps with tensor cores on a call that fills the GPU, and how far they are from the last one."""
    found = rows("h200", "large")
    own = {(row["pass"], row["step"], row["mask"]): row for row in found}
    columns = [(mask, x) for mask in ("full", "causal") for x in ("ms", "tflops", "peak_percent")]
    body = [
        [*key[:1], code(key[1]), *(figure(own.get((*key, mask), {}).get(x)) for mask, x in columns)]
        for key in dict.fromkeys((row["pass"], row["step"]) for row in found)
    ]
    heading = [f"{x}, {mask}" for mask in ("full", "causal") for x in ("ms", "TFLOP/s", "% of peak")]
    rates = {(row["pass"], row["step"]): row["tflops"] for row in found if row["mask"] == "full"}
    share = {x: f"{100 * rate / rates[x[0], PRODUCT]:.0f}%" for x, rate in rates.items()}
    stages, hopper = rates["forward", STAGES], rates["forward", HOPPER]
    words = paragraph(
        f"Two stages are worth {figure(stages / rates['forward', MMA])} times the kernel before, and Hopper's",
        f"instructions {figure(hopper / stages)} times that: {share['forward', HOPPER]} of the product's rate.",
        f"Triton's two kernels of backward reach {share['backward', BACKWARD]} of it, counted as five products",
        "of which they do seven.",
    )
    return f"{markdown(('pass', 'step', *heading), sorted(body, key=lambda x: x[0], reverse=True))}\n\n{words}"


def cuda_words(found: list[Row], n: int) -> str:
    """Steps of step 9 against one another; a tree against shuffles, and split-Q against split-K, where they are."""
    ms = {row["step"]: row["ms"] for row in found if row["n"] == n}
    gains = [figure(slow / fast) for slow, fast in itertools.pairwise(x for step, x in ms.items() if step[0] == "9")]
    lines = [
        f"At N = {n}, rows shared by the lanes of a warp are worth {gains[0]} times, arrays of registers",
        f"{gains[1]} times, and tensor cores in 16 bits {gains[2]} times.",
    ]
    pairs = {
        ("block for each query, tree", "block for each query, shuffles"): "A tree in shared memory takes {} ms and"
        " shuffles {} for the same reductions of a block.",
        ("split-K, float16", TENSOR_CORES): "Keys to the warps (split-K) take {} ms and rows (split-Q, step 9) {}.",
    }
    lines += [words.format(*(figure(ms[x]) for x in names)) for names, words in pairs.items() if names[0] in ms]
    tree, shuffles, product = (ms.get(x) for x in (*next(iter(pairs)), f"{PRODUCT}, float32"))
    if tree and shuffles and product:
        slower = figure(tree / product)
        lines.append(
            f"The {100 * (tree / shuffles - 1):.0f}% more of the tree are for nine barriers in place of two, in a "
            f"kernel that takes {slower} times the product's time: it waits for other things, and cannot "
            "show what a barrier costs."
        )
    numba = next((row for row in found if row["step"].startswith("7") and row["n"] == n), None)
    if numba is not None and numba["spilled_bytes"]:
        lines.append(
            f"Numba's kernel has {figure(numba['spilled_bytes'])} bytes of local memory for each thread, where arrays "
            "lie that are not in registers: step 9 keeps them there by loops that are unrolled when it is compiled."
        )
    return paragraph(*lines)


def memory() -> str:
    """Latency and rate, level by level, and the factors from one to the next."""
    found = rows("h200", "memory", "latency_ns")
    body = []
    for row in found:
        cycles, rate = PUBLISHED_LEVELS[row["level"]]
        cells = (row["latency_cycles"], cycles, row["latency_ns"], row["tb_per_s"], rate, row["kb_under_way"])
        body.append([row["level"], *map(figure, cells)])
    heading = ("level", "latency, cycles", "published, H100", "latency, ns", "TB/s", "published, H100", "KB under way")
    table = markdown(heading, body)
    slower = listed(far["latency_ns"] / near["latency_ns"] for near, far in itertools.pairwise(found))
    rates = listed(near["tb_per_s"] / far["tb_per_s"] for near, far in itertools.pairwise(found))
    names = [row["level"] for row in found]
    words = paragraph(
        f"From {names[0]} to {names[1]}, to {names[2]} and to {names[3]} an access takes {slower} times as long, and",
        f"the rate is {rates} times lower. An access that nothing waits for costs its bytes alone: the last column is",
        "the number of bytes that have to be under way for that. The published figures are those of a text on an H100,",
        "whose first three levels are these; [none was measured there](ladder-claims.md#levels-of-memory).",
    )
    return f"{table}\n\n{words}"


def shared() -> str:
    """Tiles of one stage and of two, up to those that have to ask for shared memory."""
    columns = ("head_dim", "tile", "stages", "shared_kb", "registers", "spilled_bytes", "ms", "tflops", "error")
    found = rows("h200", "shared", *columns)
    heading = ("d", "tile", "stages", "shared memory, KB", "registers", "local bytes", "ms", "TFLOP/s", "error")
    table = markdown(heading, [[figure(row[x]) for x in columns] for row in found])
    best = [min((row for row in found if row["head_dim"] == d), key=lambda row: row["ms"]) for d in (64, 128, 256)]
    fastest = ", ".join(f"{row['tile']} with {row['stages']} at d = {row['head_dim']}" for row in best)
    return f"{table}\n\n{paragraph(f'Fastest: {fastest} (tile, stages).')}"


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


def sanitizer() -> str:
    """Errors that compute-sanitizer found in the ladder's kernels, and in two with a mistake; what has not been run."""
    path = ladder_stored.COUNTERS / "h200-ladder-sanitizer.json"
    command = f"python benchmarks/ladder_sanitizer.py --out {path.relative_to(ladder_stored.ROOT)}"
    if not path.exists():
        raise MissingError(command)
    titles = {
        "kernels": "kernels of attention in CUDA C++",
        "memory": "kernels that measure memory",
        "numba": "step 7's kernel",
        "triton": "backward in Triton, and step 9's kernel in Gluon",
        "barrier": "step 9, tensor cores, with one barrier less",
        "bound": "step 9, rows, with one bound less",
    }
    found = json.loads(path.read_text())
    table = markdown(
        ("tool", "run on", "errors"),
        [[x["tool"], titles[x["run"]], "did not finish" if x["errors"] is None else str(x["errors"])] for x in found],
    )
    done = {(x["tool"], x["run"]) for x in found}
    missing = [pair for pair in sanitizer_runs() if pair not in done]
    tools = {run: ", ".join(tool for tool, x in missing if x == run) for _, run in missing}
    left = [f"{titles[run]} ({names})" for run, names in tools.items()]
    return f"{table}\n\n*Not run yet:* {', '.join(left)}: `{command}`." if left else table


def sanitizer_runs() -> list[tuple[str, str]]:
    """All runs of benchmarks/ladder_sanitizer.py, that of Numba's kernel too."""
    names = runpy.run_path(str(ladder_stored.ROOT / "benchmarks" / "ladder_sanitizer.py"))
    return names["planned"](names["CORRECT"])


def parts() -> str:
    """What the last kernels of steps 8 and 9 take without one of their parts."""
    path = ladder_stored.COUNTERS / "h200-step-parts.json"
    if not path.exists():
        raise MissingError(f"python benchmarks/step_parts.py --out {path.relative_to(ladder_stored.ROOT)}")
    found = json.loads(path.read_text())["rows"]
    body, words = [], []
    for step in dict.fromkeys(row["step"] for row in found):
        whole, *without = (row for row in found if row["step"] == step)
        most = min(without, key=lambda row: row["of_whole"])
        cells = [f"{row['without']} {max(0.0, 100 * (1 - row['of_whole'])):.0f}%" for row in without]
        body.append([code(step), figure(whole["ms"]), figure(whole["peak_percent"]), ", ".join(cells)])
        words.append(f"{most['without'] if most['of_whole'] < 0.95 else 'none of these'} ({code(step)})")
    heading = ("step", "ms", "% of peak", "time that goes with a part")
    return f"{markdown(heading, body)}\n\n{paragraph('Most time goes with ' + ', '.join(words) + '.')}"


def taken() -> str:
    """Registers, local memory and shared memory of step 9's kernels."""
    found = rows("h200", "cuda", "registers")
    n = max(row["n"] for row in found)
    columns = ("registers", "spilled_bytes", "shared_bytes")
    body = [
        [row["step"].removeprefix("9 CUDA C++, "), *(figure(row[x]) for x in columns)]
        for row in found
        if row["n"] == n and row["step"].startswith("9") and row["registers"] is not None  # Gluon's are not read
    ]
    heading = ("", "registers of a thread", "spilled bytes of a thread", "shared memory of a block, bytes")
    return markdown(heading, body)


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
