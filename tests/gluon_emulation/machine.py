"""Programs and their partitions, taking turns in random order, and the copy engine that works beside them."""

import random
import threading
from collections.abc import Callable
from typing import Any


class EmulationError(RuntimeError):
    """A kernel did what no GPU allows."""


class StoppedError(BaseException):
    """Another partition has failed."""


class Task:
    """A partition of a program. It runs in a thread, but only when it is its turn."""

    def __init__(self, program: "Program", name: str, num_warps: int, run: Callable[[], None]):
        self.program, self.name, self.num_warps = program, name, num_warps
        self.ready: Callable[[], bool] | None = None
        self.waiting_for = ""
        self.done = False
        self.turn = threading.Semaphore(0)
        self.products: list[Any] = []  # in flight
        self.stores: list[Any] = []  # that may not have arrived
        self.unread: list[Any] = []  # stores whose memory is still to be read
        self.phases: dict[int, int] = {}  # of named barriers, that it came to last
        self.seen: dict[Any, int] = {}  # value of the counter that this one looks at in vain
        self.sees: dict[Task, int] = {}  # up to which of their writes others' are done, as named barriers have told
        self.thread = threading.Thread(target=self.main, args=(run,), daemon=True)

    def main(self, run: Callable[[], None]) -> None:
        machine = self.program.machine
        self.turn.acquire()
        try:
            if machine.failure is None:
                run()
                self.finish()
        except StoppedError:
            pass
        except BaseException as error:
            machine.fail(error)
        self.done = True
        machine.leave(self)

    def finish(self) -> None:
        if self.products:
            raise EmulationError(f"{self.name} ends with a product in flight")
        if self.unread:
            raise EmulationError(f"{self.name} ends before the copy engine has read its shared memory")


class Program:
    """One program of a launch, with its shared memory."""

    def __init__(self, machine: "Machine", number: int):
        self.machine, self.number = machine, number
        self.writes = 0
        # Addresses written, which the copy engine does not see yet: by whom, in which of the program's writes.
        self.unfenced: dict[tuple[int, int], tuple[Task, int]] = {}
        self.gates: dict[int, int] = {}  # arrivals at named barriers
        self.told: dict[tuple[int, int], dict[Task, int]] = {}  # what a phase of them tells those whom it lets go


class Machine:
    """One launch: `programs` times `kernel(**arguments)`, all at once."""

    current: "Machine | None" = None

    def __init__(self, seed: int):
        self.rng = random.Random(seed)
        self.tasks: list[Task] = []
        self.task: Task | None = None
        self.pending: list[Callable[[], None]] = []  # what the copy engine was asked for
        self.failure: BaseException | None = None
        self.over = threading.Semaphore(0)
        self.num_programs = 0

    def run(self, kernel: Callable[..., None], num_programs: int, arguments: dict[str, Any]) -> None:
        self.num_programs = num_programs
        for n in range(num_programs):
            self.add(Program(self, n), f"program {n}", 4, lambda: kernel(**arguments))
        Machine.current = self
        try:
            self.hand_on()
            self.over.acquire()
        finally:
            Machine.current = None
        while self.pending and self.failure is None:
            self.pending.pop(0)()
        if self.failure is not None:
            raise self.failure

    def add(self, program: Program, name: str, num_warps: int, run: Callable[[], None]) -> Task:
        task = Task(program, name, num_warps, run)
        self.tasks.append(task)
        task.thread.start()
        return task

    def here(self) -> Task:
        assert self.task is not None
        return self.task

    def wait(self, ready: Callable[[], bool], waiting_for: str) -> None:
        """Others may run before, and have to as long as `ready()` is false."""
        if ready() and self.rng.random() < 0.7:
            return
        task = self.here()
        task.ready, task.waiting_for = ready, waiting_for
        self.hand_on()
        task.turn.acquire()
        if self.failure is not None:
            raise StoppedError
        task.ready = None

    def pause(self) -> None:
        """Others may run here."""
        if self.rng.random() < 0.1:
            self.wait(lambda: True, "its turn")

    def leave(self, task: Task) -> None:
        self.tasks.remove(task)
        if self.tasks:
            self.hand_on()
        else:
            self.over.release()

    def hand_on(self) -> None:
        """Give the turn to a partition that can go on, after some of the copy engine's work."""
        while self.failure is None:
            able = [task for task in self.tasks if task.ready is None or task.ready()]
            if self.pending and (not able or self.rng.random() < 0.4):
                self.pending.pop(self.rng.randrange(len(self.pending)))()
            elif able:
                self.task = self.rng.choice(able)
                break
            else:
                waits = "\n".join(f"  {task.name}: {task.waiting_for}" for task in self.tasks)
                self.failure = EmulationError(f"every partition waits:\n{waits}")
        if self.failure is not None:
            self.task = self.tasks[0]
        self.here().turn.release()

    def fail(self, error: BaseException) -> None:
        self.failure = self.failure or error


def tell(listener: dict[Task, int], told: dict[Task, int]) -> None:
    """Add what is told of writes that are done."""
    for task, write in told.items():
        listener[task] = max(listener.get(task, 0), write)


def machine() -> Machine:
    assert Machine.current is not None
    return Machine.current
