"""The picture of `flashtile-ladder`: step against time, a line for each length."""

from pathlib import Path

from matplotlib import rc_context  # pyright: ignore[reportMissingImports]
from matplotlib.figure import Figure  # pyright: ignore[reportMissingImports]

from .measure import Table
from .stack import STACK_PUBLISHED


def draw(stack: Table, path: Path) -> None:
    """Write the picture in the format that the file's name ends with."""
    steps = list(dict.fromkeys(row["step"] for row in stack.rows))
    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.subplots()
    for number, n in enumerate(dict.fromkeys(row["n"] for row in stack.rows)):
        times = {row["step"]: row["ms"] for row in stack.rows if row["n"] == n}
        axes.plot(range(len(steps)), [times[step] for step in steps], "o-", color=f"C{number}", label=f"N = {n}")
        published = [(steps.index(step), ms[n]) for step, ms in STACK_PUBLISHED.items() if step in steps and n in ms]
        axes.plot(*zip(*published, strict=True), "x", color=f"C{number}")
    axes.plot([], [], "kx", label="published")
    axes.set_yscale("log")
    axes.set_ylabel("milliseconds, forward of one head, d = 16")
    axes.set_xticks(range(len(steps)), steps, rotation=30, ha="right")
    axes.grid(axis="y", alpha=0.3)
    axes.legend()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "flashtile"}):  # text as text, and no random names
        figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)
