"""Progress on stderr: bars on a terminal, otherwise a plain line every ten seconds."""

import time
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

EVERY = 10.0  # seconds between lines


class Lines(Progress):
    """Lines instead of bars, for a pipe or a log."""

    def __init__(self, console: Console):
        super().__init__(console=console, disable=True)
        self.last = time.monotonic()

    def advance(self, task_id: TaskID, advance: float = 1) -> None:
        super().advance(task_id, advance)
        self.tell(task_id)

    def update(self, task_id: TaskID, **changes: Any) -> None:
        super().update(task_id, **changes)
        self.tell(task_id)

    def tell(self, task_id: TaskID) -> None:
        now = time.monotonic()
        if now - self.last < EVERY:
            return
        self.last = now
        task = self._tasks[task_id]
        of = "" if task.total is None else f" of {task.total:g}"
        line = f"{task.description}: {task.completed:g}{of}, {task.elapsed or 0:.0f} s"
        self.console.print(line, markup=False, highlight=False, soft_wrap=True)


def progress(transient: bool = True) -> Progress:
    """A context with tasks; `transient` bars vanish at its end."""
    console = Console(stderr=True)
    if not console.is_terminal:
        return Lines(console)
    columns = (TextColumn("{task.description:24}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console, transient=transient)
