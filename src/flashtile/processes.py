"""Processes that a command starts: none is left behind, however the command ends.

`ended_by_signals` is the first line: SIGINT, SIGTERM and SIGHUP end everything below this process before they end the
process itself. `end_with_parent` is the second, for a parent that could do nothing, because it was killed.
"""

import _thread
import contextlib
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from multiprocessing import resource_tracker
from pathlib import Path
from types import FrameType
from typing import Any

PATIENCE = 2.0  # seconds for processes that were asked to end
RETRY = 0.001  # seconds until a signal comes again that came at a bad moment
UNWINDING = 20.0  # seconds for a block to end after a signal
PROC = Path("/proc")


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """Let SIGINT, SIGTERM and SIGHUP end what was started in this block, and then the block: by `KeyboardInterrupt` or
    by `SystemExit(128 + signal)`. A signal that is ignored, as under nohup, stays so; a second one ends at once.

    The block is left by an exception, so that results are written. Where that takes longer than `UNWINDING`, because
    the exception got lost in a destructor, say, the process ends without it.
    """
    before: dict[int, Any] = {}
    received: list[int] = []
    left: list[bool] = []

    def end(number: int, frame: FrameType | None) -> None:
        if frame is not None and frame.f_code.co_name in ("__enter__", "__exit__"):
            # An exception now would leave a lock locked that other threads wait for: that of a pool's queue, say, which
            # `threading.Condition.__enter__` has just acquired.
            _thread.start_new_thread(send_again, (number,))
            return
        restore()
        received.append(number)
        _thread.start_new_thread(insist, (number,))  # `threading.Thread` takes a lock that this thread may have
        end_descendants()
        raise ending(number)

    def insist(number: int) -> None:
        time.sleep(UNWINDING)
        if not left:
            end_descendants()
            os._exit(128 + number)

    def send_again(number: int) -> None:
        time.sleep(RETRY)
        if hasattr(signal, "pthread_kill"):
            signal.pthread_kill(threading.main_thread().ident or 0, number)  # also while it waits
        else:
            _thread.interrupt_main(signal.Signals(number))

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    if threading.current_thread() is threading.main_thread():  # no other thread may set handlers
        numbers = (getattr(signal, name, None) for name in ("SIGINT", "SIGTERM", "SIGHUP"))
        before = {n: signal.getsignal(n) for n in numbers if n is not None}
        before = {n: handler for n, handler in before.items() if handler not in (signal.SIG_IGN, None)}
        for number in before:
            signal.signal(number, end)
    try:
        yield
    finally:
        restore()
        left.append(True)
        if received:  # also if it was lost, or if a pool without its processes raised something else
            raise ending(received[0])


def ending(number: int) -> BaseException:
    """The exception of a process that a signal ends."""
    return KeyboardInterrupt() if number == signal.SIGINT else SystemExit(128 + number)


def end_with_parent() -> None:
    """In a process of `multiprocessing` or `run_python`: end it, and all below it, as soon as its parent has ended."""
    parent = multiprocessing.parent_process()

    def watch() -> None:
        if parent is None:
            os.read(0, 1)  # `run_python` holds the other end of this pipe, and writes nothing
        else:
            parent.join()
        end_descendants()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def run_python(
    code: str, *arguments: str, env: Mapping[str, str] | None = None, timeout: float | None = None
) -> subprocess.CompletedProcess[str]:
    """Run `code` in a process of its own, which ends with this one. It imports nothing from the working directory.

    Raises:
        subprocess.TimeoutExpired: after `timeout` seconds; the process and all below it have ended.
    """
    code = f"from flashtile import processes; processes.end_with_parent()\n{code}"
    command = [sys.executable, "-P", "-c", code, *arguments]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=env) as process:
        # Taken away from `communicate`, which would close it at once.
        stdin, process.stdin = process.stdin, None
        try:
            out, err = process.communicate(timeout=timeout)
        except BaseException:
            end_descendants(process.pid)
            process.kill()
            raise
        finally:
            assert stdin is not None
            stdin.close()
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def importing_alike() -> dict[str, str]:
    """The environment of a `run_python` that imports from where this process does, and this package as it is here."""
    paths = (
        *(path for path in sys.path if path),
        str(Path(__file__).parents[1]),
    )  # an empty one is the working directory
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths)}


def end_descendants(root: int | None = None) -> None:
    """End every process below `root`, which is this one by default: with SIGTERM, and where that is not enough with
    SIGKILL.
    """
    root = os.getpid() if root is None else root
    left = descendants(root)
    for number in (signal.SIGTERM, getattr(signal, "SIGKILL", signal.SIGTERM)):  # Windows has one way only
        left |= descendants(root)  # started meanwhile
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, number)
        deadline = time.monotonic() + PATIENCE
        while left and time.monotonic() < deadline:
            left &= parents().keys()
            time.sleep(0.01)


def descendants(root: int) -> set[int]:
    """Every process below `root`, at any depth, without the one that `multiprocessing` has for its semaphores: it ends
    with the last of the others, and has to outlive them.
    """
    below: dict[int, list[int]] = {}
    for pid, parent in parents().items():
        below.setdefault(parent, []).append(pid)
    found: set[int] = set()
    front = [root]
    while front:
        children = below.get(front.pop(), [])
        found.update(children)
        front += children
    return found - {getattr(resource_tracker._resource_tracker, "_pid", None)}


def parents() -> dict[int, int]:
    """The parent of each process that has not ended; where there is no /proc, as `ps` knows it; on Windows none."""
    if not (PROC / "self" / "stat").exists():
        if shutil.which("ps") is None:
            return {}
        listed = subprocess.run(["ps", "-A", "-o", "pid=,ppid=,stat="], capture_output=True, text=True).stdout
        lines = [line.split() for line in listed.splitlines()]
        return {int(pid): int(parent) for pid, parent, state in lines if not state.startswith("Z")}
    found = {}
    for folder in PROC.iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):  # it has ended meanwhile
                state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]  # names may have spaces
                if state not in "ZX":
                    found[int(folder.name)] = int(parent)
    return found
