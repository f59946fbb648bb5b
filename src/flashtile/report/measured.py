"""Sweeps of `flashtile bench` inside a report: rows, display names, and the lines of a plot."""

from collections.abc import Callable, Sequence

from ..bench.providers import make
from ..bench.results import OK, Row
from ..bench.rounds import Band
from ..bench.run import Bench
from ..bench.sweep import Sweep
from ..dispatch.status import backends
from .cells import Kind
from .section import Series
from .settings import Settings

OWN = "flashtile"
NAMES = {"sdpa": "PyTorch SDPA", "sdpa:flash": "SDPA flash", "sdpa:math": "SDPA math", "sdpa:cudnn": "SDPA cuDNN"}
NAMES |= {"sdpa:efficient": "SDPA efficient", "onnx": "ONNX Runtime"}
NAMES |= {"flex": "FlexAttention", "plain": "plain PyTorch"}
NAMES |= {"fa2": "FlashAttention-2", "fa3": "FlashAttention-3", "fa4": "FlashAttention-4"}


def rows_of(settings: Settings, kind: Kind, advance: Callable[[], None]) -> list[Row]:
    work = Bench(settings.device, make(providers(settings, kind.peers)), kind.timing, settings.reference, None)
    return list(work.run(Sweep("report", kind.cells), lambda cell: advance()))


def providers(settings: Settings, peers: tuple[str, ...]) -> tuple[str, ...]:
    """flashtile, on a GPU also each usable backend with kernels, and the others."""
    kernels = [status.name for status in backends() if status.usable and status.name not in ("tiled", "reference")]
    return (OWN, *(f"{OWN}:{name}" for name in kernels if settings.device.type != "cpu"), *peers)


def label_of(provider: str) -> str:
    return NAMES.get(provider, provider)


def series_of(rows: Sequence[Row], figure: Callable[[Row], Band | None], scale: float) -> list[Series]:
    """A line for each provider that has figures: over sequence length, in units of `scale`."""
    lines = []
    for provider in dict.fromkeys(row.provider for row in rows):
        points = [(row.cell.seqlen_q, band) for row in rows if row.provider == provider and (band := figure(row))]
        if points:
            seqlens, bands = zip(*points, strict=True)
            median, low, high = ([x / scale for x in values] for values in zip(*bands, strict=True))
            lines.append(Series(label_of(provider), [float(n) for n in seqlens], median, low, high))
    return lines


def reasons(rows: Sequence[Row]) -> list[str]:
    """Reasons of providers without figures, each once."""
    failures = {(row.provider, row.status, row.reason): row.cell for row in rows if row.status != OK}
    return [f"{label_of(name)} {status} at {cell.label()}: {why}" for (name, status, why), cell in failures.items()]
