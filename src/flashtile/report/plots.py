"""Plots as SVG whose colors are CSS variables of the page, so that one drawing serves light and dark mode.

Drawn with matplotlib; text stays text, in the fonts of the page. matplotlib draws placeholder colors, which then become
`var(--name)`. The size fits a phone: a wide page shows two plots next to each other, scaled up.
"""

import html
import io
import re
from collections.abc import Callable
from typing import Any

from .section import Plot, Series

WIDTH, HEIGHT, ROW_HEIGHT = 4.6, 3.1, 0.26  # inches
ROOM = 30  # letters of two names in one row of a legend
ENLARGED = 1.3  # as a file of its own
SPREAD = 0.24  # spread of the dots of one row, in rows
FONT_SIZE = 11
INK, MUTED, GRID, BAD = "#010101", "#020202", "#030303", "#040404"
SERIES = ("#110000", "#120000", "#130000", "#140000", "#150000", "#160000", "#170000")
NAMED = {
    "bad": (BAD, "o"),
    "muted": (MUTED, "s"),
    "good": (SERIES[0], "^"),
}  # whose color has a meaning
VARIABLES = {INK: "--ink", MUTED: "--muted", GRID: "--grid", BAD: "--bad"}
VARIABLES |= {x: f"--series-{n}" for n, x in enumerate(SERIES, 1)}
DECADES = tuple(10.0**n for n in range(-3, 5))
TICKS = tuple(step * decade for decade in DECADES for step in (1, 2, 5))
MOST_TICKS = 7  # with more, only powers of ten are labeled
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
# Style of an SVG file, outside a page that defines the colors.
STANDALONE = """<style>
svg { --ink: #1c1e21; --muted: #5c6370; --grid: #e3e5e8; --bad: #b3261e; --series-1: #0a5fc2;
--series-2: #b4530a; --series-3: #5c6370;
--series-4: #0b7a4b; --series-5: #8a3ffc; --series-6: #a11d4e; --series-7: #0e7490; background: #ffffff;
font-family: system-ui, sans-serif; }
@media (prefers-color-scheme: dark) { svg { --ink: #e6e8eb; --muted: #a0a6b0; --grid: #33373d; --bad: #ff8a80;
--series-1: #6ab0ff;
--series-2: #f0a35e; --series-3: #a0a6b0; --series-4: #5fce9a; --series-5: #c3a2ff; --series-6: #ff8fb1;
--series-7: #67d3e5; background: #16181b; } }
</style>"""


def svg_of(plot: Plot) -> str:
    """An `<svg>` element. The `gid`s of its data groups are "data-0", "data-1", ..."""
    import matplotlib
    from matplotlib.figure import Figure

    settings: Any = {
        "svg.fonttype": "none",
        "svg.hashsalt": plot.name,
        "font.size": FONT_SIZE,
        "font.family": "sans-serif",
    }
    with matplotlib.rc_context(settings):
        height = HEIGHT if plot.kind == "lines" else max(1.6, 1.0 + ROW_HEIGHT * len(plot.rows))
        figure = Figure((WIDTH, height), layout="constrained")
        axes = figure.add_subplot()
        draw: Callable = lines if plot.kind == "lines" else dots
        draw(axes, plot)
        style(axes, plot)
        file = io.StringIO()
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    return themed(file.getvalue(), plot)


def lines(axes: Any, plot: Plot) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter

    for n, series in enumerate(plot.series):
        color, marker = (MUTED, None) if series.dashed else (SERIES[n % len(SERIES)], MARKERS[n % len(MARKERS)])
        if len(series.x) > 30:
            marker = None
        dashes = "--" if series.dashed else "-"
        (line,) = axes.plot(
            series.x, series.y, dashes, color=color, marker=marker, ms=5, lw=1.8, label=literal(series.name)
        )
        line.set_gid(f"data-{n}")
        if series.low is not None and series.high is not None:
            axes.fill_between(series.x, series.low, series.high, color=color, alpha=0.18, lw=0)
    lengths = sorted({x for series in plot.series for x in series.x})
    if plot.x_label == "sequence length":
        axes.set_xscale("log", base=2)
        axes.set_xticks(lengths, [thousands(x) for x in lengths])
        axes.minorticks_off()
    if plot.log_y:
        axes.set_yscale("log")
        low, high = axes.get_ylim()
        axes.yaxis.set_major_locator(LogLocator(subs=(1,) if high > 100 * low else (1, 2, 5)))
        axes.yaxis.set_major_formatter(lambda x, _: f"{x:,.0f}" if x >= 1 else f"{x:g}")
        axes.yaxis.set_minor_formatter(NullFormatter())
    else:
        axes.set_ylim(0, 1.06 * axes.get_ylim()[1])


def dots(axes: Any, plot: Plot) -> None:
    """Draw dots in rows, from top to bottom."""
    axes.set_xscale("log")
    for n, series in enumerate(plot.series):
        color, marker = NAMED.get(series.color or "", (SERIES[n % len(SERIES)], MARKERS[n % len(MARKERS)]))
        y = [row + SPREAD * (n - (len(plot.series) - 1) / 2) for row in series.y]  # dots of one row must not overlap
        if series.low is not None and series.high is not None:
            axes.hlines(y, series.low, series.high, color=color, lw=2.5, alpha=0.4)
        (line,) = axes.plot(series.x, y, marker, color=color, ms=6, label=literal(series.name))
        line.set_gid(f"data-{n}")
    axes.set_yticks(range(len(plot.rows)), [literal(row) for row in plot.rows])
    axes.set_ylim(len(plot.rows) - 0.5, -0.5)
    if plot.mark is not None:
        axes.axvline(plot.mark, color=INK, lw=1)
        values = [x for s in plot.series for x in (*s.x, *(s.low or ()), *(s.high or ())) if x > 0]
        axes.set_xlim(min(*values, plot.mark) / 1.3, max(*values, plot.mark) * 1.3)
        least, most = axes.get_xlim()
        ticks = [x for x in TICKS if least <= x <= most]
        if len(ticks) > MOST_TICKS:
            ticks = [x for x in ticks if x in DECADES]
        axes.set_xticks(ticks, [f"{x:g}" for x in ticks])
        axes.minorticks_off()


def style(axes: Any, plot: Plot) -> None:
    axes.patch.set_gid("axes-area")
    axes.set_axisbelow(True)
    axes.grid(True, which="major", color=GRID, lw=0.8)
    for side, spine in axes.spines.items():
        spine.set_visible(side == "bottom" or (side == "left" and plot.kind == "lines"))
        spine.set_color(MUTED)
    axes.tick_params(which="both", color=MUTED, labelcolor=INK, length=3)
    axes.set_xlabel(literal(plot.x_label), color=MUTED)
    if len(plot.series) > 1:
        place = {"loc": "lower left", "bbox_to_anchor": (-0.02, 1.0), "borderaxespad": 0.2, "handlelength": 1.6}
        names = sorted((len(series.name) for series in plot.series), reverse=True)
        columns = 2 if sum(names[:2]) <= ROOM else 1
        axes.legend(ncols=columns, frameon=False, labelcolor=INK, columnspacing=1.2, **place)


def literal(text: str) -> str:
    """Words for Matplotlib, which takes those between two dollar signs for a formula."""
    return text.replace("$", r"\$")


def thousands(x: float) -> str:
    return f"{x / 1024:g}k" if x >= 1024 and x % 1024 == 0 else f"{x:g}"


def themed(svg: str, plot: Plot) -> str:
    """The element alone, with variables for colors, ids unique on the page, and a description for screen readers."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>\s*", "", svg, flags=re.DOTALL)
    for color, variable in VARIABLES.items():
        svg = svg.replace(color, f"var({variable})")
    svg = re.sub(r"font: ([\d.]+)px [^;\"]*", r"font-size: \1px", svg)  # the font itself is the page's
    svg = re.sub(r'(\bid=")|(href="#)|(url\(#)', lambda m: f"{m[0]}{plot.name}-", svg)
    words = f"{plot.title}. {'; '.join(map(described, plot.series))}"
    svg = re.sub(r'\s(?:width|height)="[\d.]+pt"', "", svg, count=2)
    return svg.replace("<svg", f'<svg role="img" aria-label="{html.escape(words)}"', 1)


def described(series: Series) -> str:
    if not series.x:
        return f"{series.name}: nothing"
    return f"{series.name}: from {series.y[0]:.3g} at {series.x[0]:g} to {series.y[-1]:.3g} at {series.x[-1]:g}"


def standalone(svg: str) -> str:
    """An SVG file made of the element."""
    view_box = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', svg)
    assert view_box is not None
    size = 'width="{:.0f}" height="{:.0f}"'.format(*(ENLARGED * float(x) for x in view_box.groups()))
    svg = svg.replace("<svg", f"<svg {size}", 1)
    end = svg.index(">") + 1
    return f'<?xml version="1.0" encoding="utf-8"?>\n{svg[:end]}\n{STANDALONE}{svg[end:]}\n'
