"""The order of a report's measurements, each with its own progress bar."""

import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from ..bench.cell import INPUTS
from ..bench.origin import origin
from ..bench.providers import make
from ..bench.run import stamp
from ..progress import progress
from . import errors, gate, ladder, memory, models, planner, speed, training
from .cells import kinds
from .measured import providers
from .overview import overview
from .section import Section
from .settings import Settings

Advance = Callable[[], None]
ORDER = ("overview", "gate", "speed", "models", "memory", "errors", "planner", "training", "ladder")
Step = tuple[str, int, Callable[..., Any]]  # title of its progress bar, number of steps, maker of its section


@dataclass(frozen=True)
class Report:
    sections: list[Section]
    about: dict[str, Any]
    seconds: float

    @property
    def ok(self) -> bool:
        return all(section.ok for section in self.sections)


def gather(
    settings: Settings,
    machine: dict[str, Any],
    keep: Callable[[list[Section]], None] = lambda sections: None,
) -> Report:
    """Measure everything. `machine` comes from `flashtile env`; `keep` gets the
    sections so far after each step.
    """
    start, started, parts = time.perf_counter(), stamp(), {}
    sections: list[Section] = []
    with progress(transient=False) as bar:
        for words, total, measure in steps(settings):
            task = bar.add_task(words, total=total)
            begun = time.perf_counter()
            sections.append(attempted(words, measure, settings, lambda task=task: bar.advance(task)))
            keep(sections)
            bar.update(task, completed=total)
            parts[words] = time.perf_counter() - begun
    sections.insert(0, overview(sections))
    sections.sort(key=lambda section: ORDER.index(section.name) if section.name in ORDER else len(ORDER))
    about = {"date": started} | origin(settings.device, make(providers(settings, settings.peers)), machine)
    return Report(sections, about | {"seconds": parts}, time.perf_counter() - start)


def attempted(words: str, measure: Callable[..., Any], settings: Settings, advance: Advance) -> Any:
    """Run a step. A failure becomes a section that says so, and the other sections are kept."""
    try:
        return measure(settings, advance)
    except Exception as error:
        traceback.print_exc()
        name = words.replace(" ", "-")
        return Section(name, words.capitalize(), f"Not measured: {type(error).__name__}: {error}", ok=False)


def steps(settings: Settings) -> Iterator[Step]:
    """Training is first, because others use its tensors."""
    yield "training a small model", settings.steps, training.trained
    yield "correctness gate", settings.cases + settings.captured_cases + settings.long_cases, gate.gate
    yield "speed", sum(len(kind.cells) for kind in kinds(settings)), speed.speed
    yield "models", 1, models.models
    yield "memory", 1, memory.memory
    yield "error against fp64", len(errors.DTYPES) * len(INPUTS), errors.errors
    yield "plans", len(planner.CALLS), planner.planner
    yield "ladder", 1, ladder.ladder
