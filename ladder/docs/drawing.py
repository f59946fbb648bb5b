"""SVG, as little of it as the course's pictures need."""

from collections.abc import Sequence
from html import escape

INK, FAINT, PAPER = "#1f2937", "#6b7280", "#ffffff"
SHADES = ("#dbeafe", "#1e3a8a")  # the first of an order, and the last
MARK = "#ea580c"
FONT = "font-family='system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif'"


def picture(width: int, height: int, title: str, parts: Sequence[str]) -> str:
    """A whole file; `title` is what a screen reader says."""
    head = f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width} {height}' width='{width}' height='{height}'"
    head += f" role='img' aria-label='{escape(title, quote=True)}' {FONT}>"
    return "\n".join([head, rect(0, 0, width, height, PAPER), *parts, "</svg>", ""])


def rect(x: float, y: float, width: float, height: float, fill: str, stroke: str = "none", thick: float = 1) -> str:
    size = f"x='{x:g}' y='{y:g}' width='{width:g}' height='{height:g}'"
    return f"<rect {size} fill='{fill}' stroke='{stroke}' stroke-width='{thick:g}'/>"


def text(
    x: float, y: float, words: str, size: float = 13, anchor: str = "start", fill: str = INK, bold: bool = False
) -> str:
    """One line; y is that of its letters' feet."""
    weight = " font-weight='600'" if bold else ""
    where = f"x='{x:g}' y='{y:g}' font-size='{size:g}' text-anchor='{anchor}'"
    return f"<text {where} fill='{fill}'{weight}>{escape(words)}</text>"


def line(points: Sequence[tuple[float, float]], stroke: str = INK, thick: float = 1.5, dashed: bool = False) -> str:
    drawn = " ".join(f"{x:.4g},{y:.4g}" for x, y in points)
    dashes = " stroke-dasharray='3 3'" if dashed else ""
    return f"<polyline points='{drawn}' fill='none' stroke='{stroke}' stroke-width='{thick:g}'{dashes}/>"


def polygon(points: Sequence[tuple[float, float]], fill: str) -> str:
    drawn = " ".join(f"{x:.4g},{y:.4g}" for x, y in points)
    return f"<polygon points='{drawn}' fill='{fill}' stroke='{PAPER}' stroke-width='2'/>"


def shade(part: float, ends: tuple[str, str] = SHADES) -> str:
    """A color between two, for 0 to 1."""
    pairs = zip(*(tuple(int(end[i : i + 2], 16) for i in (1, 3, 5)) for end in ends), strict=True)
    return "#" + "".join(f"{round(a + part * (b - a)):02x}" for a, b in pairs)


def readable(fill: str) -> str:
    """Black or white, whichever is read better on this color."""
    red, green, blue = (int(fill[i : i + 2], 16) for i in (1, 3, 5))
    return INK if 0.299 * red + 0.587 * green + 0.114 * blue > 140 else PAPER
