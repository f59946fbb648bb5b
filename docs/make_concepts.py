"""Draw docs/images/concept-*.svg, the pictures of docs/concepts.md: `python docs/make_concepts.py`.

What a query sees is computed by the library: with queries of zeros every visible key has the same weight, and with the
identity as values a row of the result is its weights.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
import matplotlib.pyplot as plt
import torch
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap

from flashtile import attention, attention_varlen

IMAGES = Path(__file__).parent / "images"
SHADES = ("#ffffff", "#dce6f2", "#7f9fc6", "#1f4e8c")
SEQUENCES = ("#1f4e8c", "#d98e32", "#5b8c5a")
LENGTHS = (3, 5, 2)


def visible(queries: int, keys: int, **arguments: Any) -> torch.Tensor:
    """Whether each query sees each key, `[Sq, Sk]`."""
    q, k, v = torch.zeros(1, 1, queries, 8), torch.zeros(1, 1, keys, 8), torch.eye(keys)[None, None]
    return attention(q, k, v, **arguments)[0, 0] > 0


def packed(lengths: Sequence[int]) -> torch.Tensor:
    """As `visible`, for sequences one after the other."""
    total = sum(lengths)
    offsets = torch.tensor([0, *lengths]).cumsum(0).int()
    zeros = torch.zeros(total, 1, 8)
    return attention_varlen(zeros, zeros, torch.eye(total)[:, None], offsets, offsets, causal=True)[:, 0] > 0


def grid(ax: Axes, cells: torch.Tensor, title: str, colors: Sequence[str] = SHADES) -> None:
    """A cell for each query and key."""
    ax.imshow(cells, cmap=ListedColormap(colors), vmin=0, vmax=len(colors) - 1)
    ax.set_title(title, fontsize=9)
    ax.set_xticks(torch.arange(cells.shape[1] + 1) - 0.5, [])
    ax.set_yticks(torch.arange(cells.shape[0] + 1) - 0.5, [])
    ax.grid(color="#c8c8c8", linewidth=0.6)
    ax.tick_params(length=0)
    ax.set_xlabel("key", fontsize=8)
    ax.set_ylabel("query", fontsize=8)


def boxes(ax: Axes, y: float, cells: Sequence[tuple[str, str]], start: float = 0) -> None:
    """A row of boxes with a text and a color each."""
    for n, (text, color) in enumerate(cells):
        ax.add_patch(plt.Rectangle((start + n, y), 0.94, 0.8, color=color))
        dark = color in (*SEQUENCES, SHADES[2], SHADES[3])
        ax.text(start + n + 0.47, y + 0.4, text, ha="center", va="center", color="white" if dark else "black")


def words(ax: Axes, width: float, height: float, texts: Sequence[tuple[float, float, str]]) -> None:
    for x, y, text in texts:
        ax.text(x, y, text, va="center")
    ax.set(xlim=(0, width), ylim=(height, 0))
    ax.axis("off")


def layouts() -> None:
    """Three sequences of 3, 5 and 2 tokens: padded, packed, in pages."""
    ax = plt.figure(figsize=(9.6, 3.6)).gca()
    longest = max(LENGTHS)
    for b, (length, color) in enumerate(zip(LENGTHS, SEQUENCES, strict=True)):
        boxes(ax, b, [(str(n), color) for n in range(length)] + [("", SHADES[1])] * (longest - length), 3)
    tokens = [(str(n), color) for length, color in zip(LENGTHS, SEQUENCES, strict=True) for n in range(length)]
    boxes(ax, 3.6, tokens, 3)
    texts = [(0, 1.4, "dense\n[B, H, S, D]"), (0, 4, "packed\n[T, H, D]"), (13.4, 4, "cu_seqlens\n0, 3, 8, 10")]
    words(ax, 16, 4.7, [*texts, (8.4, 0.4, "3 of 5 in use"), (8.4, 1.4, "5 of 5"), (8.4, 2.4, "2 of 5")])


def pages() -> None:
    """The same sequences in a pool of pages of two tokens."""
    ax = plt.figure(figsize=(9.6, 2.7)).gca()
    table = ((4, 1), (0, 5, 2), (6,))
    pool: dict[int, list[tuple[str, str]]] = {}
    for length, color, numbers in zip(LENGTHS, SEQUENCES, table, strict=True):
        for n, page in enumerate(numbers):
            pool[page] = [
                (str(t) if t < length else "", color if t < length else SHADES[1]) for t in (2 * n, 2 * n + 1)
            ]
    for page in range(7):
        boxes(ax, 0.8, pool.get(page, [("", SHADES[1])] * 2), 2.2 * page + 2.5)
    texts = [(2.2 * page + 2.9, 0.4, f"page {page}") for page in range(7)]
    for b, (numbers, color) in enumerate(zip(table, SEQUENCES, strict=True)):
        boxes(ax, 2.4, [(str(page), color) for page in numbers], 5 * b + 2.5)
    texts += [(0, 1.2, "pool\n[P, page, H, D]"), (0, 2.8, "page_table\n[B, max_pages]")]
    words(ax, 18, 3.6, texts)


def alignment() -> None:
    """Fewer queries than keys, and more: where the diagonal of a causal call ends."""
    _, axes = plt.subplots(1, 4, figsize=(9.6, 2.6))
    for ax, (queries, keys, causal) in zip(
        axes, ((3, 7, True), (3, 7, "top_left"), (6, 4, True), (6, 4, "top_left")), strict=True
    ):
        grid(ax, 3 * visible(queries, keys, causal=causal).int(), f"causal={causal!r}\n{queries} queries, {keys} keys")


def visibility() -> None:
    """What is visible is what every part allows; blocks that show nothing cost nothing."""
    _, axes = plt.subplots(1, 4, figsize=(9.6, 2.8))
    n, block = 16, 4
    mask = (torch.arange(n)[:, None] // 2 + torch.arange(n)) % 5 > 0
    grid(axes[0], 3 * visible(n, n, causal=True).int(), "causal")
    grid(axes[1], 3 * visible(n, n, window=(6, 6)).int(), "window=(6, 6)")
    grid(axes[2], 3 * mask.int(), "mask")
    pairs = visible(n, n, causal=True, window=(6, 6), mask=mask[None, None])
    shown = pairs.view(n // block, block, n // block, block).any(3).any(1)
    shown = shown.repeat_interleave(block, 0).repeat_interleave(block, 1)
    grid(axes[3], torch.where(pairs, 3, shown.int()), "all three: white blocks\nare never read")


def sequences() -> None:
    """Sequences of a packed call see themselves alone."""
    ax = plt.figure(figsize=(3, 3)).gca()
    own = torch.repeat_interleave(torch.arange(1, len(LENGTHS) + 1), torch.tensor(LENGTHS))
    grid(ax, packed(LENGTHS) * own[:, None], "packed, causal=True", ("#ffffff", *SEQUENCES))


def merging() -> None:
    """Keys in two parts: what each part gives, and the whole."""
    ax = plt.figure(figsize=(9.6, 2.4)).gca()
    scores = torch.tensor([1.0, 3.0, 0.5, 2.0, 2.5, -1.0, 0.0, 1.5])
    boxes(ax, 0.3, [(f"{s:g}", SHADES[1] if n < 4 else SHADES[2]) for n, s in enumerate(scores.tolist())], 2.2)
    whole = scores.logsumexp(0)
    texts = [(0, 0.7, "scores of a row")]
    for n, part in enumerate((scores[:4], scores[4:])):
        lse = part.logsumexp(0)
        texts.append(
            (2.2 + 4.2 * n, 1.6, f"lse{n + 1} = {lse:.2f}, weight exp(lse{n + 1} - lse) = {(lse - whole).exp():.2f}")
        )
    formula = f"out = exp(lse1 - lse) out1 + exp(lse2 - lse) out2, with lse = log(exp(lse1) + exp(lse2)) = {whole:.2f}"
    words(ax, 12, 3, [*texts, (0, 1.6, "parts"), (0, 2.5, "whole"), (2.2, 2.5, formula)])


def main() -> None:
    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.hashsalt": "flashtile", "svg.fonttype": "none", "font.size": 9})
    for draw in (layouts, pages, sequences, alignment, visibility, merging):
        draw()
        plt.tight_layout()
        plt.savefig(IMAGES / f"concept-{draw.__name__}.svg", metadata={"Date": None})
        plt.close()


if __name__ == "__main__":
    main()
