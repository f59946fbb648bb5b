"""The CPU backend's threads and processes, and the memory around its tensors."""

import ctypes
import importlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from checking import dense_case
from cpu_widths import request_width

threads = importlib.import_module("flashtile.backend.cpu.threads")


# Memory outside of tensors --------------------------------------------------------------------------------------------


def run_guarded(*words: str) -> subprocess.CompletedProcess:
    program = [sys.executable, str(Path(__file__).parents[2] / "support" / "guarded.py"), *words]
    return subprocess.run(program, capture_output=True, text=True, check=False)


# Compilation takes most of the time: float32, with the most residues, meets the widths that differ in it, float16 those
# with instructions that convert it and without, and each other dtype one width. Of matrix tiles there is forward alone.
GUARDED = {
    "avx512": ("float32", "bfloat16"),
    "avx2": ("float32", "float16"),
    "baseline": ("float32", "float16", "float64"),
    "amx-emulated": ("bfloat16",),
}


@pytest.mark.parametrize("width", GUARDED)
def test_nothing_is_touched_outside_of_tensors(width: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random calls in a process of their own, with every tensor between protected pages; and calls of every
    residue of rows, keys and head dimensions, forward and backward, whose inputs lie among NaN.
    """
    request_width(width, monkeypatch)
    first = 1000 * list(GUARDED).index(width)
    process = run_guarded(str(first), str(first + 2), *GUARDED[width])
    assert process.returncode == 0, process.stdout.splitlines()[-1:] + process.stderr.splitlines()[-3:]
    calls = sum(96 if dtype == "float32" else 32 for dtype in GUARDED[width])
    assert len(process.stdout.splitlines()) >= 2 + calls * (1 if width == "amx-emulated" else 2)


def test_the_guard_would_notice() -> None:
    """A kernel that is told of one key too many ends the process."""
    code = (
        "import importlib, torch, guarded, flashtile; from unittest import mock;"
        "from flashtile.backend.cpu import lengths as a; lengths = a.dense_lengths;"
        "wrong = lambda b, q, k, *rest: lengths(b, q, k + 1, *rest);"
        "q = guarded.guarded(torch.randn(1, 1, 8, 1024 // 4 * 2), False);"
        "mock.patch.object(a, 'dense_lengths', wrong).start();"
        "flashtile.attention(q, q, q, backend='cpu')"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), *sys.path])}
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False, env=environment)
    assert process.returncode in (-signal.SIGSEGV, -signal.SIGBUS)


# Threads and processes ------------------------------------------------------------------------------------------------


@contextmanager
def num_threads(n: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(n)
    try:
        yield
    finally:
        torch.set_num_threads(before)


CALLS = [
    dense_case(seqlen_q=300, seqlen_k=600, head_dim=24, causal=True, dropout_p=0.2, dropout_seed=3),
    dense_case(batch=1, num_heads_q=4, seqlen_q=1, seqlen_k=4000, head_dim=24),  # split over keys
]


@pytest.mark.parametrize("openmp", [True, False], ids=["OpenMP", "own threads"])
def test_same_bits_on_any_number_of_threads(openmp: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not openmp:
        monkeypatch.setattr(threads, "openmp", lambda: None)
    for case in CALLS:
        results = []
        for n in (1, 2, 3):
            with num_threads(n):
                results.append(case.run("cpu"))
        assert all(torch.equal(results[0][name], other[name]) for other in results[1:] for name in other)


def test_calls_from_several_python_threads() -> None:
    expected = [case.run("cpu") for case in CALLS]
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda n: CALLS[n % 2].run("cpu"), range(24)))
    for n, result in enumerate(results):
        assert all(torch.equal(result[name], expected[n % 2][name]) for name in result)


FORKING = """
import os, signal, sys, numpy, torch, flashtile
from torch.utils.data import DataLoader

def results():  # arrays, for operations on large tensors would hang; so do those inside of a call
    found = []
    for backend in "cpu", "tiled":
        leaves = [x.detach().requires_grad_() for x in (q, q, q)]
        out = flashtile.attention(*leaves, backend=backend)
        found += [out, *torch.autograd.grad(out, leaves, q)]
    return [x.detach().numpy() for x in found]

class Results(torch.utils.data.Dataset):
    def __len__(self):
        return 2
    def __getitem__(self, n):
        signal.alarm(20)
        torch.set_num_threads(2)  # as PyTorch's workers do not, but users may
        return same(results(), expected) and torch.get_num_threads() == 2

def same(*found):
    return all(numpy.array_equal(x, y) for x, y in zip(*found, strict=True))

torch.set_num_threads(2)
q = torch.randn(1, 4, 300, 64).bfloat16().float()
expected = results()
child = os.fork()
if child == 0:
    signal.alarm(20)
    os._exit(0 if same(results(), expected) and torch.get_num_threads() == 2 else 1)
assert os.waitpid(child, 0)[1] == 0
assert same(results(), expected)
assert list(DataLoader(Results(), num_workers=1, batch_size=None, multiprocessing_context="fork")) == [True, True]
"""


def test_forked_processes_answer() -> None:
    """A forked process runs on one thread: a parallel region would wait forever for threads of the parent."""
    process = subprocess.run([sys.executable, "-c", FORKING], timeout=60, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    assert process.stderr.count("AttentionWarning: attention runs on one thread in a forked process") == 2


def test_threads_are_those_of_pytorch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels use PyTorch's OpenMP library, even if another package has loaded its own: two have twice the threads."""
    with open("/proc/self/maps") as maps:
        path = next((line.split()[-1] for line in maps if "/libgomp" in line), None)
    if path is None:
        pytest.skip("PyTorch has another OpenMP library")
    other = ctypes.CDLL(shutil.copy(path, tmp_path / "libgomp-0.so"))
    monkeypatch.setattr(threads, "openmp", threads.openmp.__wrapped__)
    found, unwanted = (ctypes.cast(x, ctypes.c_void_p).value for x in (threads.openmp(), other.GOMP_parallel))
    assert found is not None
    assert found != unwanted
