"""Draw the course's pictures, from stored measurements, counted bytes and the sources' own formulas.

    python docs/make_pictures.py

A test compares the files with what this makes.
"""

import colorsys
import sys
from pathlib import Path
from typing import NamedTuple

sys.path += [str(Path(__file__).parent), str(Path(__file__).parents[2] / "docs")]
from drawing import FAINT, INK, PAPER, line, picture, polygon, readable, rect, shade, text
from ladder_stored import rows
from wall import wall

FOLDER = Path(__file__).parent
MULTIPROCESSORS = 132  # of an H200
CYCLES_PER_SECOND = 1.98e9  # at most, by its data sheet
PEAK_16_BITS = 989.5e12  # operations in a second, by its data sheet
EXPONENTIALS = 16  # of a multiprocessor in a cycle, by CUDA's programming guide


# The memory pyramid ---------------------------------------------------------------------------------------------------

SIZES = {
    "registers": ("of a thread", "256 KB for each multiprocessor"),
    "shared": ("of a block", "228 KB for each multiprocessor"),
    "L2": ("of all blocks", "50 MB"),
    "HBM": ("whole matrices", "141 GB"),
}


def memory() -> str:
    """Levels of memory, with latency and rate as `memory_levels` has measured them."""
    found = {row["level"]: row for row in rows("h200", "memory", "latency_cycles", "tb_per_s")}
    parts = [text(20, 30, "Levels of memory of an H200: smaller is nearer", 17, bold=True)]
    for x, words in ((420, "size"), (640, "latency"), (770, "rate of all")):
        parts.append(text(x, 62, words, 12, fill=FAINT))
    middle, top, height, half = 205, 75, 66, 185
    for i, (level, (owner, size)) in enumerate(SIZES.items()):
        y, upper, lower = top + i * height, half * (i + 0.9) / 4.9, half * (i + 1.9) / 4.9
        fill = shade(0.15 + 0.75 * i / 3)
        corners = [(middle - upper, y), (middle + upper, y), (middle + lower, y + height), (middle - lower, y + height)]
        name = "shared memory" if level == "shared" else level
        parts += [
            polygon(corners, fill),
            text(middle, y + 31, name, 13 if i else 11, "middle", readable(fill), bold=True),
            text(middle, y + 48, owner, 11 if i else 9.5, "middle", readable(fill)),
            text(420, y + 38, size, 13),
            text(640, y + 38, f"{found[level]['latency_cycles']:.3g} cycles", 13),
            text(770, y + 38, f"{found[level]['tb_per_s']:.3g} TB/s", 13),
            line([(410, y + height), (870, y + height)], "#e5e7eb", 1),
        ]
    note = "Latency and rate are measured (measure/memory_levels.py); sizes are the data sheet's."
    return picture(890, 372, "Memory pyramid of an H200", [*parts, text(20, 360, note, 12, fill=FAINT)])


# The fragments of one mma ---------------------------------------------------------------------------------------------


def owner_of_a(row: int, column: int) -> tuple[int, int]:
    """Lane and register of a number of A `[16, 16]`."""
    return row % 8 * 4 + column % 8 // 2, row // 8 + 2 * (column // 8)


def owner_of_b(row: int, column: int) -> tuple[int, int]:
    """The same of B `[16, 8]`."""
    return column * 4 + row % 8 // 2, row // 8


def owner_of_c(row: int, column: int) -> tuple[int, int]:
    """The same of C `[16, 8]`, whose registers hold one number each."""
    return row % 8 * 4 + column // 2, row // 8 * 2 + column % 2


def color(lane: int) -> str:
    """A hue for lane / 4, and a lightness for lane % 4."""
    channels = colorsys.hls_to_rgb(lane // 4 / 8, 0.86 - 0.13 * (lane % 4), 0.65)
    return "#" + "".join(f"{round(255 * x):02x}" for x in channels)


def fragments() -> str:
    """Which lane holds what of A, B and C."""
    size, a, b = 21, (45, 425), (450, 70)
    c = (b[0], a[1])
    shown = 5
    parts = [text(20, 30, "Who holds what in C += A B, one mma.sync of 16 x 8 x 16", 17, bold=True)]
    lines = (
        "Each number of a matrix is in a register of one lane;",
        "the number in a cell is that lane, of 32 in a warp.",
        "",
        "A and B are of 16 bits, two to a register. C is float32.",
        "Registers of a lane: a0 to a3, b0 and b1, c0 to c3.",
        "",
        f"Outlined: what lane {shown} holds. Its numbers of C, twice side",
        "by side, lie where its numbers of A do: that is why P = exp(S)",
        "goes into the next product without leaving the registers.",
    )
    parts += [text(20, 76 + 20 * i, words, 13) for i, words in enumerate(lines)]
    grids = (
        ("A", a, (16, 16), owner_of_a, "a"),
        ("B", b, (16, 8), owner_of_b, "b"),
        ("C", c, (16, 8), owner_of_c, ""),
    )
    for name, (x, y), (height, width), owner, register in grids:
        marks = []
        parts.append(text(x, y - 8, f"{name}  [{height}, {width}]", 14, bold=True))
        for row in range(height):
            for column in range(width):
                lane, place = owner(row, column)
                left, top, fill = x + size * column, y + size * row, color(lane)
                parts.append(rect(left, top, size, size, fill, PAPER, 1))
                parts.append(text(left + size / 2, top + 15, str(lane), 11, "middle", INK, lane == shown))
                if lane == shown:
                    marks.append(rect(left + 1, top + 1, size - 2, size - 2, "none", INK, 2))
        parts += marks
        for row in range(0, height, 8):
            for column in range(0, width, 8):
                place = owner(row, column)[1]
                left = name != "C" and column == 0
                words = f"{register}{place}" if register else f"c{place}, c{place + 1}"
                edge = x - 8 if left else x + size * width + 8
                parts.append(text(edge, y + size * (row + 4) + 4, words, 12, "end" if left else "start", FAINT))
    return picture(690, 780, "Lanes that hold the numbers of A, B and C of one mma instruction", parts)


# The timeline of a double buffer --------------------------------------------------------------------------------------

ROWS, KEYS, DIM = 64, 64, 128


class Span(NamedTuple):
    lane: str  # copies, products or softmax
    words: str
    start: float
    end: float


def durations() -> dict[str, float]:
    """Microseconds of one multiprocessor's share: a copy of K or V, a product, the softmax of a tile."""
    rate = next(row["tb_per_s"] for row in rows("h200", "memory", "tb_per_s") if row["level"] == "L2") * 1e12
    return {
        "copy": 1e6 * 2 * KEYS * DIM / (rate / MULTIPROCESSORS),
        "product": 1e6 * 2 * ROWS * KEYS * DIM / (PEAK_16_BITS / MULTIPROCESSORS),
        "softmax": 1e6 * ROWS * KEYS / (EXPONENTIALS * CYCLES_PER_SECOND),
    }


def schedule(stages: int, tiles: int) -> list[Span]:
    """Spans of the last kernel of step 9, by what each waits for."""
    took = durations()
    spans: list[Span] = []

    def add(lane: str, words: str, kind: str, *after: float) -> float:
        free = max((span.end for span in spans if span.lane == lane), default=0.0)
        start = max((free, *after))
        spans.append(Span(lane, words, start, start + took[kind]))
        return start + took[kind]

    done, key = 0.0, add("copies", "K1", "copy") if stages == 2 else 0.0
    for i in range(1, tiles + 1):
        if stages == 1:
            key = add("copies", f"K{i}", "copy", done)  # the buffer is free when the last P V is done
        value = add("copies", f"V{i}", "copy", done, key) if stages == 2 else 0.0
        scores = add("products", f"S{i}", "product", key, done)
        if stages == 1:
            value = add("copies", f"V{i}", "copy", scores)  # over K
        weights = add("softmax", f"P{i}", "softmax", scores)
        if stages == 2 and i < tiles:
            key = add("copies", f"K{i + 1}", "copy", weights, value)
        done = add("products", f"O{i}", "product", weights, value)
    return spans


def timeline() -> str:
    """One stage of copies and two, on one axis of time."""
    tiles, lanes = 3, ("copies", "products", "softmax")
    plans = {1: schedule(1, tiles), 2: schedule(2, tiles)}
    most = max(span.end for spans in plans.values() for span in spans)
    fills = {"copies": "#fdba74", "products": "#93c5fd", "softmax": "#bbf7d0"}
    parts = [text(20, 30, "A second buffer: copies run while tiles are computed", 17, bold=True)]
    across = 740 / most
    for i, (stages, spans) in enumerate(plans.items()):
        top = 66 + 150 * i
        name = "one stage: K and V share a buffer" if stages == 1 else "two stages: a buffer for K and one for V"
        end = max(span.end for span in spans)
        parts.append(text(20, top, f"{name}; {tiles} tiles take {end:.2f} µs", 14, bold=True))
        for j, lane in enumerate(lanes):
            parts.append(text(20, top + 30 + 32 * j, lane, 12, fill=FAINT))
            parts.append(line([(95, top + 37 + 32 * j), (95 + 740, top + 37 + 32 * j)], "#e5e7eb", 1))
        for span in spans:
            x, y = 95 + across * span.start, top + 12 + 32 * lanes.index(span.lane)
            width = across * (span.end - span.start)
            parts.append(rect(x, y, width, 25, fills[span.lane], PAPER))
            parts.append(text(x + width / 2, y + 17, span.words, 12, "middle"))
    for i in range(int(2 * most) + 1):
        x = 95 + across * i / 2
        parts += [line([(x, 358), (x, 364)], FAINT, 1), text(x, 378, f"{i / 2:g} µs", 11, "middle", FAINT)]
    parts.append(line([(95, 358), (835, 358)], FAINT, 1))
    notes = (
        f"A model of one block of {ROWS} rows on each multiprocessor, tiles of {KEYS} keys, d = {DIM}, 16 bits: "
        "copies at the measured rate of the L2,",
        "products at the data sheet's, 16 exponentials in a cycle. S: Q K^T; P: softmax; O: acc + P V. Several blocks "
        "fill each other's gaps too.",
    )
    parts += [text(20, 402 + 17 * i, note, 12, fill=FAINT) for i, note in enumerate(notes)]
    return picture(860, 430, "Timeline of copies, products and softmax with one and two stages", parts)


PICTURES = {"memory": memory, "wall": wall, "fragments": fragments, "double-buffer": timeline}


def main() -> None:
    for name, draw in PICTURES.items():
        (FOLDER / f"{name}.svg").write_text(draw(), encoding="utf-8")


if __name__ == "__main__":
    main()
