"""Forked children and signal handlers of a process that compiles, in a process of its own with a time limit."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from flashtile.backend.user_files import CACHE_VARIABLE

CODE = """
import os, signal, threading, torch, flashtile
from torch.utils.data import DataLoader
from flashtile.backend.cpu import jit
torch.set_num_threads(1)
q = torch.randn(1, 1, 8, 8)
compile_object, compiling = jit.compile_object, threading.Event()

changes = (
    lambda s, b, h, i, j: s * 1.5, lambda s, b, h, i, j: s + i, lambda s, b, h, i, j: s - j,
    lambda s, b, h, i, j: s * i, lambda s, b, h, i, j: s * j,
)

def new_kernel(n):
    return flashtile.attention(q, q, q, score_mod=changes[n])

def interrupted(*arguments):
    jit.compile_object = compile_object
    signal.raise_signal(signal.SIGUSR1)
    return compile_object(*arguments)

def slow(*arguments):
    if threading.current_thread() is not threading.main_thread():
        compiling.set()
        threading.Event().wait(0.3)
    return compile_object(*arguments)

class Items(torch.utils.data.Dataset):
    def __len__(self): return 1
    def __getitem__(self, n): return new_kernel(3)

# A handler compiles while its thread does.
handled = []
signal.signal(signal.SIGUSR1, lambda *_: handled.append(new_kernel(1)))
signal.alarm(30)
jit.compile_object = interrupted
new_kernel(0)
assert torch.equal(handled[0], new_kernel(1))

# This thread forks while another one compiles.
jit.compile_object = slow
thread = threading.Thread(target=lambda: new_kernel(2))
thread.start()
compiling.wait()
if (child := os.fork()) == 0:
    signal.alarm(20)
    new_kernel(3)
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
thread.join()
compiling.clear()
thread = threading.Thread(target=lambda: new_kernel(4))
thread.start()
compiling.wait()
[*DataLoader(Items(), num_workers=1, timeout=20, multiprocessing_context="fork")]
thread.join()
"""


@pytest.mark.skipif(not hasattr(os, "fork") or not hasattr(signal, "SIGUSR1"), reason="no fork")
def test_the_lock_of_compilation_is_not_waited_for_forever(tmp_path: Path) -> None:
    environment = os.environ | {CACHE_VARIABLE: str(tmp_path), "FLASHTILE_CPU_KERNELS": "none"}
    command = [sys.executable, "-c", CODE]
    ended = subprocess.run(command, env=environment, timeout=100, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
