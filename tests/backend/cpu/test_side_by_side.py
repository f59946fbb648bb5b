"""Kernels of both passes and parts of kernels that threads compile at the same time: once, into the same code."""

import ctypes
import threading
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import flashtile
from flashtile.backend import compiling
from flashtile.backend.archive import NO_ARCHIVE
from flashtile.backend.cpu import archive, jit, machine_code, side_by_side
from flashtile.backend.user_files import CACHE_VARIABLE
from flashtile.dispatch import fast_path

FACTOR = 1.25  # of a function whose kernels no other test has


def compiled_by(
    count: int, folder: Path, monkeypatch: pytest.MonkeyPatch, *, training: bool = True
) -> tuple[dict[str, bytes], list[int]]:
    """The files that a call compiles with `count` threads beside its own, and the number of kernels after each pass."""
    monkeypatch.setenv(CACHE_VARIABLE, str(folder))
    monkeypatch.setenv(archive.KERNELS_VARIABLE, NO_ARCHIVE)
    monkeypatch.setattr(jit, "free_threads", lambda: count)
    monkeypatch.setattr(jit, "_PARTS", {})
    archive.forget()
    machine_code.loaded.cache_clear()
    fast_path.forget()
    q, before, kernels = torch.randn(1, 2, 20, 8, requires_grad=training), compiling.compiled, []
    out = flashtile.attention(q, q, q, score_mod=lambda s, b, h, i, j: s * FACTOR, backend="cpu")
    kernels.append(compiling.compiled - before)
    if training:
        torch.autograd.grad(out.sum(), q)
        kernels.append(compiling.compiled - before)
    return {x.name: x.read_bytes() for x in (folder / "cpu").iterdir()}, kernels


def test_both_passes_of_a_training_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    by_turns, kernels = compiled_by(0, tmp_path / "0", monkeypatch)
    assert kernels == [1, 2]
    texts, compile_object = [], jit.compile_object

    def noted(text: str, machine: Any) -> bytes:
        texts.append((threading.current_thread() is threading.main_thread(), text))
        return compile_object(text, machine)

    monkeypatch.setattr(jit, "compile_object", noted)
    at_once, kernels = compiled_by(2, tmp_path / "2", monkeypatch)
    assert kernels == [2, 2]
    assert at_once == by_turns
    assert len({text for _, text in texts}) == len(texts) == len(by_turns)
    assert {in_this_thread for in_this_thread, _ in texts} == {True, False}
    assert not jit._AHEAD


def test_a_call_without_gradients_compiles_one_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert compiled_by(2, tmp_path, monkeypatch, training=False)[1] == [1]


@pytest.mark.parametrize("known", ["another function", "other arguments"])
def test_another_llvmlite(known: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the names that this code knows, llvmlite compiles under its lock."""

    def refused(*_: Any) -> None:
        raise ctypes.ArgumentError

    function = SimpleNamespace() if known == "another function" else SimpleNamespace(_cfn=refused)
    library = SimpleNamespace(LLVMPY_TargetMachineEmitToMemory=function)
    monkeypatch.setattr(side_by_side.llvm.ffi, "lib", library)
    machine = SimpleNamespace(emit_object=lambda module: module)
    monkeypatch.setattr(side_by_side.llvm.ffi, "OutputString", nullcontext)
    assert side_by_side.emit_object(machine, b"code") == b"code"


def test_threads_that_wait_for_no_free_one() -> None:
    """Work that no thread has begun is done by the one that needs it."""
    with side_by_side.Threads(1) as threads:
        held = threading.Event()
        first = threads.begin(held.wait, 10)
        assert threads.begin(threading.current_thread)() is threading.main_thread()
        held.set()
        assert first()
