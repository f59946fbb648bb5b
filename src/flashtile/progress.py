"""Progress on stderr: one line that changes on a terminal, otherwise a plain line every ten seconds."""

import sys
import time
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

EVERY = 10.0  # seconds between lines
REDRAWN = 0.1  # seconds between changes of a line on a terminal


@dataclass
class Task:
    description: str
    total: int | None
    completed: float = 0
    started: float = field(default_factory=time.monotonic)

    def __str__(self) -> str:
        of = "" if self.total is None else f" of {self.total}"
        return f"{self.description}: {self.completed:g}{of}, {time.monotonic() - self.started:.0f} s"


class Progress:
    """A context with tasks; the last one is shown. On a terminal its line vanishes at the end if it is
    `transient`; else the line of each task stays.
    """

    def __init__(self, transient: bool) -> None:
        self.transient, self.terminal = transient, sys.stderr.isatty()
        self.tasks: list[Task] = []
        self.told = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.leave()

    def add_task(self, description: str, total: int | None = None) -> int:
        """Begin a task, and return its number."""
        self.leave()
        self.tasks.append(Task(description, total))
        return len(self.tasks) - 1

    def advance(self, number: int, steps: float = 1) -> None:
        self.update(number, completed=self.tasks[number].completed + steps)

    def update(self, number: int, description: str | None = None, completed: float | None = None) -> None:
        task = self.tasks[number]
        task.description = task.description if description is None else description
        task.completed = task.completed if completed is None else completed
        now = time.monotonic()
        if now - self.told >= (REDRAWN if self.terminal else EVERY):
            self.told = now
            print(f"\r\x1b[K{task}" if self.terminal else task, end="" if self.terminal else "\n", file=sys.stderr)
            sys.stderr.flush()

    def leave(self) -> None:
        """Remove or end the line on a terminal."""
        if self.terminal and self.tasks:
            kept = "" if self.transient else f"{self.tasks[-1]}\n"
            print(f"\r\x1b[K{kept}", end="", file=sys.stderr, flush=True)


def progress(transient: bool = True) -> Progress:
    return Progress(transient)
