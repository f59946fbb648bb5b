"""No process is left behind, however a command ends."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from flashtile import processes
from flashtile.processes import descendants, ended_by_signals, run_python

PATIENCE = 60.0  # seconds, on a machine with other work
VERIFY = "from flashtile.cli import main; main('verify --cases 100000 --jobs 2 --backend reference'.split())"
WORKER = """
import os, time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
import processes  # without the package, which would import PyTorch twice
if __name__ == "__main__":
    pool = ProcessPoolExecutor(1, get_context("spawn"), initializer=processes.end_with_parent)
    pool.submit(os.system, "echo there; sleep 600")
    time.sleep(600)
"""


def wait_until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < end, "it takes too long"
        time.sleep(0.05)


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_a_command_that_is_ended_takes_its_processes_along() -> None:
    """One that may still do something about it, and one that is killed, and whose worker has a process of its own."""
    folder = str(Path(processes.__file__).parent)
    ended = subprocess.Popen([sys.executable, "-c", VERIFY])
    killed = subprocess.Popen(
        [sys.executable, "-c", WORKER], stdout=subprocess.PIPE, env=os.environ | {"PYTHONPATH": folder}
    )
    commands = ended, killed
    try:
        wait_until(lambda: len(descendants(ended.pid)) >= 3)  # two workers, and the process for semaphores
        assert killed.stdout is not None
        assert killed.stdout.readline() == b"there\n"
        left = descendants(ended.pid) | descendants(killed.pid)
        assert len(left) >= 6
        ended.terminate()
        killed.kill()
        assert [command.wait(PATIENCE) for command in commands] == [128 + signal.SIGTERM, -signal.SIGKILL]
        wait_until(lambda: not left & processes.parents().keys())
    finally:
        for command in commands:
            processes.end_descendants(command.pid)
            command.kill()
            command.communicate()


def test_patience_ends_a_process() -> None:
    before = descendants(os.getpid())
    with pytest.raises(subprocess.TimeoutExpired):
        run_python("import time; time.sleep(600)", timeout=0.2)
    assert descendants(os.getpid()) <= before


def test_signals_that_are_ignored_stay_so(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = []
    monkeypatch.setattr(processes, "end_descendants", lambda: ends.append(True))  # not those of the other tests
    before = {n: signal.signal(n, signal.SIG_IGN if n == signal.SIGHUP else signal.SIG_DFL) for n in HANDLED}
    try:
        with pytest.raises(SystemExit, match=str(128 + signal.SIGTERM)), ended_by_signals():
            send_two(ends)
        assert ends == [True]
        assert [signal.getsignal(n) for n in HANDLED] == [signal.SIG_IGN, signal.SIG_DFL]
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def send_two(ends: list[bool]) -> None:
    os.kill(os.getpid(), signal.SIGHUP)
    assert not ends
    os.kill(os.getpid(), signal.SIGTERM)


HANDLED = (signal.SIGHUP, signal.SIGTERM)


class Lock:
    """A lock with Python methods, as `threading.Condition`; a signal arrives when it has just been acquired."""

    locked = False

    def __enter__(self) -> None:
        self.locked = True
        os.kill(os.getpid(), signal.SIGTERM)

    def __exit__(self, *exception: object) -> None:
        self.locked = False


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_a_signal_leaves_no_lock_locked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "end_descendants", lambda: None)
    lock = Lock()
    with pytest.raises(SystemExit), ended_by_signals(), lock:
        time.sleep(PATIENCE)
    assert not lock.locked


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_an_exception_that_is_lost_ends_the_block_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the block's end; and in a block that waits for ever, the process."""
    monkeypatch.setattr(processes, "end_descendants", lambda: None)
    with pytest.raises(SystemExit, match=str(128 + signal.SIGTERM)), ended_by_signals(), pytest.raises(SystemExit):
        os.kill(os.getpid(), signal.SIGTERM)
    code = """
import contextlib, os, signal, time
processes.UNWINDING = 0.1
with processes.ended_by_signals():
    with contextlib.suppress(SystemExit):
        os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(600)
"""
    assert run_python(code, timeout=PATIENCE).returncode == 128 + signal.SIGTERM


def test_a_process_ends_where_neither_proc_nor_ps_exist(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As on Windows, which has no SIGKILL either."""
    monkeypatch.setattr(processes, "PROC", tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(processes, "signal", SimpleNamespace(SIGTERM=signal.SIGTERM))
    with pytest.raises(subprocess.TimeoutExpired):
        processes.run_python("import time; time.sleep(60)", timeout=1)


def test_modules_import_without_what_windows_lacks() -> None:
    code = """
import sys
for name in ("fcntl", "resource", "pwd", "grp", "termios"):
    sys.modules[name] = None
import flashtile
from flashtile.soak import memory
from flashtile.cli import main
"""
    subprocess.run([sys.executable, "-c", code], check=True)
