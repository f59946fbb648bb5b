"""The calls that a report times: a range of lengths, and calls that such a library tends to lose."""

from dataclasses import dataclass, replace
from typing import Any

from ..bench.cell import Cell
from ..bench.sweep import Timing
from .settings import Settings

DECODE_KEYS = (256, 1024, 4096)
LONGER = 4  # times the longest length
DENSE = ("plain", "sdpa:math")  # their score matrices would fill the memory at the longest
DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Kind:
    """Cells that share a row of the picture, how they are timed, and the providers compared."""

    name: str
    cells: tuple[Cell, ...]
    timing: Timing
    peers: tuple[str, ...]


def kinds(settings: Settings) -> list[Kind]:
    """All calls that are timed; those by length come first."""
    timing, peers = settings.timing, settings.peers
    brief = replace(timing, sample_seconds=timing.sample_seconds / 5, rest_seconds=timing.rest_seconds / 5)
    fused = tuple(name for name in peers if name not in DENSE)
    first, last = settings.seqlens[0], settings.seqlens[-1]
    long = both(settings, LONGER * last, heads=settings.long_heads or settings.heads, inputs="normal")
    return [
        Kind(f"{first:,} to {last:,}", both(settings, *settings.seqlens), timing, peers),
        Kind("small", small_cells(settings), brief, peers),
        Kind("decoding", decode_cells(settings), brief, peers),
        Kind("one feature", feature_cells(settings), brief, peers),
        Kind("other dtypes", dtype_cells(settings), brief, peers),
        Kind("long", long, timing, fused),
    ]


def both(settings: Settings, *seqlens: int, **fields: Any) -> tuple[Cell, ...]:
    """Forward and backward at each length."""
    return tuple(settings.speed_cell(n, m, **fields) for m in ("forward", "backward") for n in seqlens)


def small_cells(settings: Settings) -> tuple[Cell, ...]:
    """A call with almost no work, a batch of short sequences, and one short sequence."""
    shapes: tuple[dict[str, Any], ...] = (
        {"batch": 1, "heads": 1, "seqlen": 4},
        {"batch": 64, "heads": settings.heads, "seqlen": 16},
        {"batch": 1, "heads": settings.heads, "seqlen": 64},
    )
    cells: list[Cell] = []
    for shape in shapes:
        cells += both(settings, shape.pop("seqlen"), inputs="normal", **shape)
    return tuple(cells)


def decode_cells(settings: Settings) -> tuple[Cell, ...]:
    """One query over a cache, short or long, with grouped heads; at a length in the middle in another dtype."""
    fields: dict[str, Any] = {"heads_kv": grouped(settings), "inputs": "normal", "batch": 1, "causal": False}
    other = next(dtype for dtype in ("bfloat16", "float32") if dtype != settings.dtype)
    variants = zip(DECODE_KEYS, (settings.dtype, other, settings.dtype), strict=True)
    return tuple(settings.speed_cell(1, "decode", seqlen_k=n, dtype=dtype, **fields) for n, dtype in variants)


def feature_cells(settings: Settings) -> tuple[Cell, ...]:
    """One difference from the other cells at a time, at a length in the middle."""
    variants: tuple[dict[str, Any], ...] = (
        {"causal": False},
        {"heads_kv": grouped(settings)},
        {"window": (127, 0)},
        {"bias": True},
        {"alibi": True},
    )
    cells = [settings.speed_cell(settings.middle_seqlen, "forward", inputs="normal", **x) for x in variants]
    return (*cells, settings.speed_cell(settings.middle_seqlen, "backward", inputs="normal", causal=False))


def dtype_cells(settings: Settings) -> tuple[Cell, ...]:
    """Forward and backward in the dtypes that the other cells do not have."""
    others = [dtype for dtype in DTYPES if dtype != settings.dtype]
    pairs = [both(settings, settings.middle_seqlen, inputs="normal", dtype=dtype) for dtype in others]
    return tuple(cell for pair in pairs for cell in pair)


def grouped(settings: Settings) -> int:
    return max(1, settings.heads // 4)


def in_words(cell: Cell, settings: Settings) -> str:
    """The cell's differences from the others, in words: "backward, 64 × 16 tokens", "decode, 4,096 keys, bfloat16"."""
    usual, decodes = settings.speed_cell(cell.seqlen_q, cell.measure), cell.measure == "decode"
    length = f"{cell.keys:,} keys" if decodes else f"{cell.seqlen_q:,} tokens"
    words = [cell.measure, f"{cell.batch} × {length}" if cell.batch > 1 else length]
    words += [f"{cell.heads} head{'s' * (cell.heads > 1)}"] if cell.heads != usual.heads else []
    words += [cell.dtype] if cell.dtype != usual.dtype else []
    words += ["grouped heads"] if cell.num_heads_kv != cell.heads and not decodes else []
    words += ["not causal"] if not cell.causal and not decodes else []
    return ", ".join([*words, *(x for x in cell.features() if x != "causal" and not x.endswith("inputs"))])
