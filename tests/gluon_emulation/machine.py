"""Programs, their partitions in random order, and asynchronous TMA operations."""

import ctypes
import os
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from roomy import with_room

CURRENT_CORE: Callable[[], int] | None = getattr(ctypes.CDLL(None), "sched_getcpu", None)


class EmulationError(RuntimeError):
    """A deadlock, a race or an out-of-bounds access in a kernel."""


class StoppedError(BaseException):
    """Ends a partition after another one has failed."""


class Task:
    """A partition of a program: a thread that only runs when the machine resumes it."""

    def __init__(self, program: "Program", name: str, num_warps: int, run: Callable[[], None]):
        self.program, self.name, self.num_warps = program, name, num_warps
        self.ready: Callable[[], bool] | None = None
        self.waiting_for = ""
        self.done = False
        self.resume = threading.Semaphore(0)
        self.products: list[Any] = []  # in flight
        self.copies: list[Any] = []  # to shared memory, in no group yet
        self.copy_groups: list[list[Any]] = []  # in flight
        self.stores: list[Any] = []  # perhaps not yet written to global memory
        self.unread_stores: list[Any] = []  # perhaps not yet read from shared memory
        self.barrier_phases: dict[int, int] = {}  # last phase arrived at, by named barrier
        self.polled: dict[Any, int] = {}  # last value loaded, by semaphore
        self.clock: dict[Task, int] = {}  # vector clock: number of each task's writes known to be complete
        self.thread = threading.Thread(target=self.main, args=(run,), daemon=True)

    @torch.inference_mode()
    def main(self, run: Callable[[], None]) -> None:
        machine = self.program.machine
        self.resume.acquire()
        try:
            if machine.failure is None:
                with_room(run)
                self.check_finished()
        except StoppedError:
            pass
        except BaseException as error:
            machine.fail(error)
        self.done = True
        machine.leave(self)

    def check_finished(self) -> None:
        if self.products:
            raise EmulationError(f"{self.name} ends with a product in flight")
        self.check_copied("ends")
        if self.unread_stores:
            raise EmulationError(f"{self.name} ends before TMA has read its shared memory")

    def check_copied(self, action: str, memory: Any = None) -> None:
        """Require that no asynchronous copy is in flight, or none to a part of shared memory."""
        for copy in (x for group in (*self.copy_groups, self.copies) for x in group):
            first, last = copy.target.span
            if memory is None or (first < memory.span[1] and memory.span[0] < last):
                raise EmulationError(f"{self.name} {action} with a copy to {copy.target.shape} in flight")


class Program:
    """One program of a launch and the state of its shared memory."""

    def __init__(self, machine: "Machine", number: int):
        self.machine, self.number = machine, number
        self.writes = 0
        # Address ranges without a proxy fence since their last write: the writer, and the write's number.
        self.unfenced: dict[tuple[int, int], tuple[Task, int]] = {}
        self.named_barriers: dict[int, int] = {}  # arrivals
        self.barrier_clocks: dict[tuple[int, int], dict[Task, int]] = {}  # merged by a phase's arrivals


class Machine:
    """One launch: all programs of `kernel(**arguments)` at once."""

    current: "Machine | None" = None

    def __init__(self, seed: int):
        self.rng = random.Random(seed)
        self.tasks: list[Task] = []
        self.running: Task | None = None
        self.tma_operations: list[Callable[[], None]] = []  # issued, not complete
        self.failure: BaseException | None = None
        self.finished = threading.Semaphore(0)
        self.num_programs = 0
        self.grid_controls: list[str] = []  # what programs did of `griddepcontrol`

    @torch.inference_mode()  # of its own threads as of this one, which also completes TMA operations
    def run(self, kernel: Callable[..., None], num_programs: int, arguments: dict[str, Any]) -> None:
        self.num_programs = num_programs
        Machine.current = self
        try:
            with one_core():
                for n in range(num_programs):
                    self.add(Program(self, n), f"program {n}", 4, lambda: kernel(**arguments))
                self.switch()
                self.finished.acquire()
        finally:
            Machine.current = None
        while self.tma_operations and self.failure is None:
            self.tma_operations.pop(0)()
        if self.failure is not None:
            raise self.failure

    def add(self, program: Program, name: str, num_warps: int, run: Callable[[], None]) -> Task:
        task = Task(program, name, num_warps, run)
        self.tasks.append(task)
        task.thread.start()
        return task

    def current_task(self) -> Task:
        assert self.running is not None
        return self.running

    def wait(self, ready: Callable[[], bool], waiting_for: str) -> None:
        """Let others run; returns once `ready()` is true."""
        if ready() and self.rng.random() < 0.7:
            return
        task = self.current_task()
        task.ready, task.waiting_for = ready, waiting_for
        self.switch()
        task.resume.acquire()
        if self.failure is not None:
            raise StoppedError
        task.ready = None

    def pause(self) -> None:
        """Let others run, at random."""
        if self.rng.random() < 0.1:
            self.wait(lambda: True, "its turn")

    def leave(self, task: Task) -> None:
        self.tasks.remove(task)
        if self.tasks:
            self.switch()
        else:
            self.finished.release()

    def switch(self) -> None:
        """Complete some TMA operations, then resume a random partition that can run."""
        while self.failure is None:
            runnable = [task for task in self.tasks if task.ready is None or task.ready()]
            if self.tma_operations and (not runnable or self.rng.random() < 0.4):
                self.tma_operations.pop(self.rng.randrange(len(self.tma_operations)))()
            elif runnable:
                self.running = self.rng.choice(runnable)
                break
            else:
                waits = "\n".join(f"  {task.name}: {task.waiting_for}" for task in self.tasks)
                self.failure = EmulationError(f"deadlock:\n{waits}")
        if self.failure is not None:
            self.running = self.tasks[0]
        self.current_task().resume.release()

    def fail(self, error: BaseException) -> None:
        self.failure = self.failure or error


@contextmanager
def one_core() -> Iterator[None]:
    """Keep this thread, and those it starts, on the core that it is on. They run by turns: on another core each would
    find nothing of the last one's memory in the cache, a quarter of a launch's time.
    """
    if CURRENT_CORE is None or not hasattr(os, "sched_setaffinity"):
        yield
        return
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {CURRENT_CORE()})
    try:
        yield
    finally:
        os.sched_setaffinity(0, allowed)


def merge_clock(clock: dict[Task, int], other: dict[Task, int]) -> None:
    """Raise `clock` to at least `other`."""
    for task, write in other.items():
        clock[task] = max(clock.get(task, 0), write)


def machine() -> Machine:
    assert Machine.current is not None
    return Machine.current
