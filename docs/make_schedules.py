"""Draw docs/images/schedule-*.svg, who works and who waits in Hopper's kernels: `python docs/make_schedules.py`.

A picture is computed: each task begins when its lane or unit is free and what it needs is done. Lengths are cycles that
a unit takes alone: products at 4096 operations a cycle, exponentials at 16, loads from the L2 cache at 64 bytes and
from memory at a core's share of 3.35 TB/s. What takes few cycles (maxima, masks, barriers) is drawn as a small constant
or left out, so that pictures show the order of the work, not its measured time.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import matplotlib
import matplotlib.pyplot as plt

IMAGES = Path(__file__).parent / "images"
OPERATIONS, EXPONENTIALS, L2_BYTES, MEMORY_BYTES = 4096, 16, 64, 14.5  # a cycle of one core
DQ_BYTES = 65536 / 4700  # a cycle that one warp sends by TMA: see "Two kernels over 128 features"
SMALL = 48  # cycles of a store to shared memory or an exchange of registers
COLORS = {
    "load": "#b9c4d0", "scores": "#1f4e8c", "softmax": "#d98e32", "sums": "#7f9fc6", "dq": "#5b8c5a", "send": "#a3c4a2",
}  # fmt: skip
WHITE = ("scores", "dq")  # whose labels are white


class Task(NamedTuple):
    """A task in the order in which its lane issues it."""

    name: str
    lane: str
    kind: str
    cycles: float
    after: tuple[str, ...] = ()
    unit: str = ""  # that lanes share; without one the lane itself is busy
    label: str = ""


class Bar(NamedTuple):
    lane: str
    kind: str
    start: float
    cycles: float
    label: str


def product(rows: int, columns: int, depth: int) -> float:
    return 2 * rows * columns * depth / OPERATIONS


def bars(tasks: Iterable[Task]) -> Iterator[Bar]:
    """When each task runs: lanes keep their order, and a shared unit takes the task that is ready first. Names that are
    never given are done from the start.
    """
    waiting = list(tasks)
    names = {task.name for task in waiting}
    free: dict[str, float] = {}
    end: dict[str, float] = {}
    while waiting:
        heads = list({task.lane: task for task in reversed(waiting)}.values())[::-1]
        ready = [task for task in heads if all(name in end or name not in names for name in task.after)]
        starts = {
            task: max([free.get(task.unit or task.lane, 0.0), *(end.get(x, 0.0) for x in task.after)]) for task in ready
        }
        task = min(ready, key=lambda task: (starts[task], waiting.index(task)))
        waiting.remove(task)
        free[task.unit or task.lane] = end[task.name] = starts[task] + task.cycles
        yield Bar(task.lane, task.kind, starts[task], task.cycles, task.label)


def forward() -> Iterator[Task]:
    """Two warpgroups of 64 rows, 128 features, blocks of 128 keys."""
    one, exps, load = product(64, 128, 128), 64 * 128 / EXPONENTIALS, 128 * 128 * 2 / L2_BYTES
    for n in range(5):
        freed = tuple(f"s{n - 2}{w}" for w in "12"), tuple(f"o{n - 3}{w}" for w in "12")
        yield Task(f"k{n}", "producer warp", "load", load, freed[0], label=f"k {n}")
        if n > 0:
            yield Task(f"v{n - 1}", "producer warp", "load", load, freed[1], label=f"v {n - 1}")
        for w in "12":
            ready = (f"p{n - 1}{w}", f"o{n - 2}{w}")
            lane = f"products of {w}"
            yield Task(f"s{n}{w}", lane, "scores", one, (*ready, f"k{n}"), "tensor cores", f"q k {n}")
            if n > 0:
                yield Task(f"o{n - 1}{w}", lane, "sums", one, (*ready, f"v{n - 1}"), "tensor cores", f"p v {n - 1}")
            yield Task(f"p{n}{w}", f"warpgroup {w}", "softmax", exps, (f"s{n}{w}",), label=f"softmax {n}")


def fused_backward() -> Iterator[Task]:
    """Two warpgroups of 64 keys, 128 features, blocks of 64 rows."""
    one, exps = product(64, 64, 128), 64 * 64 / EXPONENTIALS
    for w in "12":
        yield Task(f"s0{w}", f"products of {w}", "scores", one, (), "tensor cores", "s 0")
    for n in range(3):
        for w in "12":
            lane = f"products of {w}"
            yield Task(f"dp{n}{w}", lane, "scores", one, (f"s{n}{w}", f"dk{n - 1}{w}"), "tensor cores", f"dp {n}")
            yield Task(f"p{n}{w}", f"warpgroup {w}", "softmax", exps, (f"s{n}{w}",), label=f"p {n}")
            yield Task(f"ds{n}{w}", f"warpgroup {w}", "softmax", SMALL, (f"dp{n}{w}",), label="")
            yield Task(f"dv{n}{w}", lane, "sums", one, (f"ds{n}{w}",), "tensor cores", f"dv {n}")
        for w in "12":
            both = tuple(f"ds{n}{x}" for x in "12")
            lane = f"products of {w}"
            yield Task(f"dq{n}{w}", lane, "dq", one, both, "tensor cores", f"dq {n}")
            yield Task(f"s{n + 1}{w}", lane, "scores", one, (f"dv{n}{w}",), "tensor cores", f"s {n + 1}")
            yield Task(f"dk{n}{w}", lane, "sums", one, (), "tensor cores", f"dk {n}")
            sent = (f"dq{n}{w}", f"send{n - 1}{w}")
            yield Task(f"hand{n}{w}", f"warpgroup {w}", "send", SMALL, sent, label="")
            lane = f"warp that adds dq of {w}"
            yield Task(f"send{n}{w}", lane, "send", 64 * 64 * 4 / DQ_BYTES, (f"hand{n}{w}",), label=f"dq {n}")


def split_backward() -> Iterator[Task]:
    """dk and dv of 64 keys of 256 features, one warpgroup for each, blocks of 64 rows."""
    one, exps = product(64, 64, 256), 64 * 64 / EXPONENTIALS
    for n in range(3):
        freed = f"dv{n - 2}", f"dk{n - 2}"
        for name in ("q", "dout"):
            yield Task(f"{name}{n}", "producer warp", "load", 64 * 256 * 2 / L2_BYTES, freed, label=f"{name} {n}")
        yield Task(f"s{n}", "products of p and dv", "scores", one, (f"q{n}", f"dv{n - 1}"), "tensor cores", f"s {n}")
        after = f"dout{n}", f"dk{n - 1}"
        yield Task(f"dp{n}", "products of ds and dk", "scores", one, after, "tensor cores", f"dp {n}")
        yield Task(f"p{n}", "warpgroup of dv", "softmax", exps, (f"s{n}",), label=f"p {n}")
        yield Task(f"w{n}", "warpgroup of dv", "send", SMALL, (), label="")
        yield Task(f"dv{n}", "products of p and dv", "sums", one, (f"w{n}",), "tensor cores", f"dv {n}")
        yield Task(f"ds{n}", "warpgroup of dk", "softmax", SMALL, (f"dp{n}", f"w{n}"), label="")
        yield Task(f"dk{n}", "products of ds and dk", "sums", one, (f"ds{n}",), "tensor cores", f"dk {n}")


def decoding() -> Iterator[Task]:
    """Eight query heads of one key head, 128 features, 384 keys of three programs, blocks of 64 keys."""
    load, work = 2 * 64 * 128 * 2 / MEMORY_BYTES, 2 * product(64, 8, 128) + 64 * 8 / EXPONENTIALS + SMALL
    for program, late in (("1", 0), ("2", 500), ("3", 900)):
        yield Task(f"start{program}", f"loads of program {program}", "load", late)
        for n in range(2):
            yield Task(f"k{n}{program}", f"loads of program {program}", "load", load, label=f"k, v {n}")
        for n in range(2):
            yield Task(f"c{n}{program}", f"program {program}", "softmax", work, (f"k{n}{program}",), label="")
        yield Task(f"out{program}", f"program {program}", "send", 3 * SMALL, (), label="")
    yield Task("merge", "program 3", "dq", 700, ("out1", "out2", "out3"), label="merge")


PICTURES = {
    "forward": (forward, "Forward, 128 features: one warpgroup's softmax during the other's products"),
    "fused-backward": (fused_backward, "Backward, 128 features: five products a block, dq sent by two more warps"),
    "split-backward": (split_backward, "dk and dv of 256 features: one warpgroup for each"),
    "decoding": (decoding, "Decoding: memory is busy, the last program to finish merges"),
}


def draw(name: str) -> None:
    tasks, title = PICTURES[name]
    found = [bar for bar in bars(tasks()) if bar.kind != "load" or bar.label]
    lanes = sorted({bar.lane for bar in found}, key=order)
    figure, ax = plt.subplots(figsize=(11, 0.9 + 0.42 * len(lanes)))
    for bar in found:
        y = len(lanes) - 1 - lanes.index(bar.lane)
        ax.broken_barh([(bar.start, bar.cycles)], (y - 0.38, 0.76), facecolors=COLORS[bar.kind], edgecolor="white")
        color = "white" if bar.kind in WHITE else "black"
        size = 7.5 if len(bar.label) < 9 else 6  # of points, within the bar
        ax.text(bar.start + bar.cycles / 2, y, bar.label, ha="center", va="center", fontsize=size, color=color)
    ax.set(yticks=range(len(lanes)), yticklabels=lanes[::-1], ylim=(-0.6, len(lanes) - 0.4))
    ax.set_xlabel("cycles, each unit as if alone")
    ax.set_title(title, fontsize=10, loc="left")
    ax.margins(x=0.01)
    for side in ("top", "right", "left"):
        ax.spines[side].set_visible(False)
    ax.tick_params(axis="y", length=0)
    figure.tight_layout()
    figure.savefig(IMAGES / f"schedule-{name}.svg", metadata={"Date": None})
    plt.close(figure)


def order(lane: str) -> tuple[int, str]:
    """Loads above, then products, then those who compute and send."""
    first = ("producer", "loads", "products", "warpgroup", "program", "warp that")
    return next(n for n, word in enumerate(first) if lane.startswith(word)), lane


def main() -> None:
    matplotlib.rcParams.update({"svg.hashsalt": "flashtile", "svg.fonttype": "none"})
    for name in PICTURES:
        draw(name)


if __name__ == "__main__":
    main()
