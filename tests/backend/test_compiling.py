"""The line on stderr while a kernel is compiled, and one compilation for several processes."""

import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flashtile.backend import compiling, user_files
from flashtile.backend.cpu import jit, targets
from flashtile.backend.gpu.compiled_once import compiled_once
from flashtile.backend.user_files import CACHE_VARIABLE

PROCESSES = 32


@pytest.mark.parametrize("seconds", [0.0, 0.3])
def test_a_line_where_it_takes_long(seconds: float, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    monkeypatch.setattr(compiling, "PATIENCE", 0.1)
    before = compiling.compiled
    with compiling.compiling(lambda: "/the/folder"), compiling.compiling(lambda: "/a/part"):
        time.sleep(seconds)
    line = "flashtile: compiling a kernel, once; cached in /the/folder\n"
    assert capfd.readouterr().err == line * (seconds > 0)
    assert compiling.compiled == before + 1


def test_without_a_cache(monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, "relative")
    user_files.warn_once.cache_clear()
    with pytest.warns(match="is not used as a cache"):
        compiling.tell(user_files.directory)
    assert capfd.readouterr().err == "flashtile: compiling a kernel\n"


class Jitted:
    """What `compiled_once` knows of a function under Triton's `jit`."""

    cache_key = "source"

    def __init__(self, cache: Path):
        self.cache = cache
        self.ASTSource: Any = lambda *_: SimpleNamespace(make_ir=lambda *_: time.sleep(0.2))

    def _do_compile(self, key: str, *arguments: Any) -> str:
        """As Triton's: code is made where its file is not there."""
        source = self.ASTSource(*arguments)
        file = self.cache / key
        if not file.exists():
            source.make_ir("a target")
            file.write_text("code")
        return file.read_text()


def test_kernels_of_triton_that_are_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    function, before = compiled_once(Jitted(tmp_path)), compiling.compiled
    source = function.ASTSource
    with pytest.raises(compiling.NotCompiledError), compiling.none_compiled():
        function._do_compile("one")
    assert function._do_compile("one") == "code"
    assert compiling.compiled == before + 1
    with compiling.none_compiled():
        assert function._do_compile("one") == "code"
    assert (compiling.compiled, function.ASTSource) == (before + 1, source)


def test_threads_compile_kernels_of_one_function(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """None leaves its source to another one, which would count for ever."""
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    function, before = compiled_once(Jitted(tmp_path)), compiling.compiled
    source = function.ASTSource
    with ThreadPoolExecutor(2) as pool:
        begun = pool.submit(function._do_compile, "one")
        time.sleep(0.1)  # it compiles for 0.2 s
        assert pool.submit(function._do_compile, "two").result() == begun.result() == "code"
    assert (compiling.compiled, function.ASTSource) == (before + 2, source)


@pytest.mark.skipif(not user_files.FILE_LOCKS or not hasattr(os, "fork"), reason="no locks, or no fork")
@pytest.mark.parametrize("kind", ["cpu", "triton"])
def test_processes_compile_a_kernel_once(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))

    def make() -> bytes:
        time.sleep(0.1)
        return b"code"

    def kernel() -> None:
        if kind == "cpu":
            jit.found_or_made("a kernel", targets.host(), make)
        else:
            compiled_once(Jitted(tmp_path))._do_compile("a kernel")

    children = []
    for _ in range(PROCESSES):
        if (child := os.fork()) == 0:
            compiling.compiled = 100
            try:
                kernel()
            finally:
                os._exit(compiling.compiled)
        children.append(child)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    assert sorted(codes) == [100] * (PROCESSES - 1) + [101]
