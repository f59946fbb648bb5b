"""Machine code of the CPU backend: object files, other processors, the length of functions, and refused vectors."""

import functools
import importlib
import itertools
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from checking import dense_case

import flashtile
from flashtile import BackendError
from flashtile.backend import user_files
from flashtile.backend.user_files import CACHE_VARIABLE

arguments, backward, forward, tangents, jit, targets, variants = (
    importlib.import_module(f"flashtile.backend.cpu.{name}")
    for name in ("arguments", "kernels.backward", "kernels.forward", "kernels.tangents", "jit", "targets", "variant")
)


def test_the_argument_block_has_no_other_fields(monkeypatch: pytest.MonkeyPatch) -> None:
    """A misspelled field would be appended behind the block, and the right one would stay 0."""
    strides = arguments.lse_strides
    monkeypatch.setattr(arguments, "lse_strides", lambda *given: strides(*given) | {"lse_stride": 1})
    with pytest.raises(AssertionError, match="lse_stride"):
        dense_case(seqlen_k=11).run("cpu")


VARIANT = arguments.Variant("float32", 1)


compile_object = functools.cache(jit.compile_object)  # tests that ask for the same code compile it once


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    monkeypatch.setattr(jit, "_PARTS", {})
    machine = jit.machine_for(targets.host())
    monkeypatch.setattr(jit, "compile_object", lambda text, _: compile_object(text, machine))
    monkeypatch.setattr(jit, "machine_for", lambda _: machine)
    return tmp_path / "cpu"


def source() -> Any:
    return forward.source(VARIANT, targets.host())


def load() -> int:
    return jit.function_address(variants.FORWARD, VARIANT, targets.host(), source)


def never(*_: Any) -> Any:
    raise AssertionError("it compiled")


def test_object_files_are_used_again(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert load()
    assert len(list(cache.iterdir())) == len(source().texts())
    monkeypatch.setattr(jit, "compile_object", never)
    monkeypatch.setattr(forward, "source", never)
    assert load()


def test_kernels_share_parts(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another kernel of the same dtype compiles what is its own, in this process and in one that finds the files."""
    load()
    compiled, compile_object = [], jit.compile_object
    monkeypatch.setattr(jit, "compile_object", lambda *given: compiled.append(given) or compile_object(*given))
    for n, known in enumerate((jit._PARTS, {})):
        monkeypatch.setattr(jit, "_PARTS", known)
        other, host = VARIANT._replace(softcap=n == 0, dropout=n == 1), targets.host()
        assert jit.function_address(variants.FORWARD, other, host, lambda x=other: forward.source(x, targets.host()))
        assert len(compiled) == n + 1


def test_other_generators_have_other_object_files(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hash of the sources is part of an object file's name, and nothing is stored if sources changed since."""
    copied = cache.parent / "package"
    shutil.copytree(jit.PACKAGE, copied)
    assert jit.hash_sources(copied) == jit.SOURCES_HASH
    copied.joinpath("kernels", "scores.py").write_text("# another\n")
    assert jit.hash_sources(copied) != jit.SOURCES_HASH
    monkeypatch.setattr(jit, "PACKAGE", copied)
    assert load()
    assert not list(cache.iterdir())
    monkeypatch.setattr(jit, "SOURCES_HASH", jit.hash_sources(copied))
    monkeypatch.setattr(jit, "_PARTS", {})
    assert load()
    assert len(list(cache.iterdir())) == len(source().texts())


@pytest.mark.parametrize("damage", ["truncated", "changed", "empty"])
def test_damaged_object_files_are_made_again(damage: str, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load()
    files = {path: path.read_bytes() for path in cache.iterdir()}
    for path, whole in files.items():
        changed = bytearray(whole)
        changed[len(whole) // 2] ^= 1
        path.write_bytes({"truncated": whole[:-100], "changed": bytes(changed), "empty": b""}[damage])
    monkeypatch.setattr(jit, "_PARTS", {})
    assert load()
    assert files == {path: path.read_bytes() for path in cache.iterdir()}


def test_a_directory_that_cannot_be_written_is_no_error(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.parent.joinpath("cpu").write_text("a file where the directory should be")
    assert load()
    monkeypatch.setattr(user_files.tempfile, "mkstemp", mock.Mock(side_effect=PermissionError))
    assert load()


def test_processes_that_begin_at_once_compile_once(tmp_path: Path) -> None:
    """Forked after all imports, so that they need the kernel at the same time."""
    code = (
        "import os, torch, flashtile; from flashtile.backend.cpu import jit\n"
        "q = torch.ones(1, 1, 4, 8); children = []\n"
        "compile_object = jit.compile_object\n"
        "def told(text, machine):\n"
        "    os.write(1, f'{hash(text)}\\n'.encode())\n"
        "    return compile_object(text, machine)\n"
        "jit.compile_object = told\n"
        "for _ in range(6):\n"
        "    children.append(os.fork())\n"
        "    if children[-1] == 0: os._exit(0 if (flashtile.attention(q, q, q) == 1).all() else 1)\n"
        "assert all(os.waitpid(child, 0)[1] == 0 for child in children)"
    )
    environment = os.environ | {CACHE_VARIABLE: str(tmp_path), "FLASHTILE_CPU_KERNELS": "none"}
    ended = subprocess.run(
        [sys.executable, "-c", code], env=environment, timeout=100, check=True, capture_output=True, text=True
    )
    compiled = ended.stdout.split()
    assert len(compiled) == len({*compiled}) == len(list((tmp_path / "cpu").iterdir()))


def test_kernels_for_arm_compile() -> None:
    """Cross-compile: the test inspects the assembly and the object file."""
    from llvmlite import binding as llvm

    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    target = targets.make_target("neon")
    processor = targets.generic("neon", "aarch64-unknown-linux-gnu")
    everything = arguments.Variant(
        "float16", 4, softcap=True, bias="float32", head_terms=("slopes",), mask=True, dropout=True
    )
    moving = everything._replace(tangents=("q", "k", "v", "bias", "slopes"))
    kernels = *itertools.product((forward, backward), (VARIANT, everything)), (tangents, moving)
    for pass_, variant in kernels:
        machine = jit.target_machine(processor)
        for name, text in pass_.source(variant, target).texts().items():
            if name.startswith("scores"):  # of the others the object file alone, which takes the time
                assert "fmla" in machine.emit_assembly(llvm.parse_assembly(text))
            assert jit.compile_object(text, machine)[:4] == b"\x7fELF"


def test_functions_stay_short() -> None:
    """Several passes of LLVM take more than linear time in a function's length. Of a kernel that shares parts with
    others, its own module is less than a third.
    """
    plain = arguments.Variant("float32", 4, row_values=True)
    kernels = (forward, plain), (backward, plain), (tangents, plain._replace(tangents=("q", "k", "v")))
    for pass_, variant in kernels:
        for extra in ({}, {"softcap": True, "bias": "float32", "head_terms": ("slopes",), "mask": True}):
            texts = pass_.source(variant._replace(**extra), targets.host()).texts()
            functions = [len(x.splitlines()) for text in texts.values() for x in text.split("\ndefine ")]
            assert max(functions) < 1000
            assert len(texts[""]) < 1 / 3 * sum(map(len, texts.values()))


@pytest.mark.parametrize("requested", ["mmx", ""])
def test_vectors_that_the_processor_lacks_are_refused(requested: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every use is refused with one message, also for a call that has a plan already."""
    case = dense_case(head_dim=9)
    case.run("cpu")
    q = case.arguments["q"]
    monkeypatch.setenv(targets.VECTORS_VARIABLE, requested)
    told = f"FLASHTILE_CPU_VECTORS is {requested!r}. Accepted here: '"
    for refused in (lambda: case.run("cpu"), lambda: flashtile.attention(q, q, q), lambda: flashtile.explain(q, q, q)):
        with pytest.raises(BackendError) as raised:
            refused()
        assert str(raised.value).startswith(told)
    assert {x.name: x.reason for x in flashtile.backends()}["cpu"].startswith(told)
    assert flashtile.attention(q, q, q, backend="tiled").isfinite().all()  # as the message says
