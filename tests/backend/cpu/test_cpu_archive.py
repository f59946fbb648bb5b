"""Kernels compiled ahead: they run without LLVM and win over the cache, and an archive that does not fit is ignored."""

import importlib
import itertools
import os
import subprocess
import sys
import warnings
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checking import assert_right, dense_case, offsets

import flashtile
from flashtile.backend import archive as archives
from flashtile.cli import build_kernels
from flashtile.dispatch import fast_path
from flashtile.errors import AttentionWarning
from flashtile.prebuilt import cpu
from flashtile.prebuilt.build import write_archive

archive, jit, host_backward, host_forward, machine_code, targets, variants = (
    importlib.import_module(f"flashtile.backend.cpu.{name}")
    for name in ("archive", "jit", "host_backward", "host_forward", "machine_code", "targets", "variant")
)
DTYPES = (torch.float32, torch.bfloat16)  # kernels for float16 are those for bfloat16
SHAPE: dict[str, Any] = {"num_heads_q": 4, "num_heads_kv": 2, "seqlen_q": 40, "seqlen_k": 50, "head_dim": 64}
WIDTH = next((x for x in targets.usable_widths() if x in cpu.WIDTHS), "")

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or not WIDTH, reason="there are no kernels compiled ahead for this machine"
)


def forget() -> None:
    archive.forget()
    machine_code.loaded.cache_clear()
    fast_path.forget()


@pytest.fixture(autouse=True)
def anew() -> Iterator[None]:
    """Neither archives nor kernels are known."""
    forget()
    yield
    forget()


@pytest.fixture(scope="session")
def compiled() -> list[Any]:
    """A plain kernel of each pass."""
    plain = (x for x in cpu.standard_kernels(WIDTH, "float32") if x.variant.row_values and x.variant.vectors > 1)
    first = {x.name: x for x in reversed([x for x in plain if x.variant == x.variant.without_features])}
    return cpu.compiled(WIDTH, first.values())


@pytest.fixture
def path(compiled: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An archive with them, which the environment names."""
    file = tmp_path / "kernels.zip"
    cpu.write(file, compiled)
    monkeypatch.setenv(archive.KERNELS_VARIABLE, str(file))
    return file


@pytest.fixture
def without_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any) -> Any:
        raise AssertionError("it compiled, or read the cache")

    monkeypatch.setattr(jit, "function_address", never)


@pytest.mark.usefixtures("path", "without_compiler")
def test_its_kernels_are_right_and_win_over_the_cache() -> None:
    assert_right(dense_case(**SHAPE, causal=True), "cpu")


NO_LLVM = """
import sys
sys.modules["llvmlite"] = None  # an import is an error
import torch, flashtile
q = torch.randn(1, 4, 70, 64, requires_grad=True)
out = flashtile.attention(q, q, q, causal=True, backend="cpu")
(grad,) = torch.autograd.grad(out.sum(), q)
assert out.isfinite().all() and grad.isfinite().all()
assert not [name for name in sys.modules if name.startswith("flashtile.backend.cpu.kernels")]
"""


def test_its_kernels_need_no_llvm(path: Path) -> None:
    subprocess.run([sys.executable, "-c", NO_LLVM], env=dict(os.environ), check=True)


def altered(path: Path) -> None:
    """Change the machine code of all kernels."""
    with zipfile.ZipFile(path) as old:
        contents, comment = {name: old.read(name) for name in old.namelist()}, old.comment
    with zipfile.ZipFile(path, "w") as new:
        for name, content in contents.items():
            new.writestr(name, content if name == archives.INDEX else content[:-1] + b"X")
        new.comment = comment


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "cut off": (lambda path: path.write_bytes(path.read_bytes()[:-200]), "zip"),
    "altered code": (altered, "a kernel was altered"),
    "of GPUs": (lambda path: write_archive(path, "sm_90", {}, {}), "for sm_90, not for cpu"),
    "of other sources": (lambda path: write_archive(path, "cpu", {"sources": ""}, {}), "other sources"),
    "without kernels": (lambda path: write_archive(path, "cpu", {"sources": archive.sources()}, {}), "kernels"),
    "missing": (lambda path: path.unlink(), "No such file"),
}


@pytest.fixture
def addresses(compiled: list[Any], monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[int]]:
    """The addresses of the two kernels: 1 of each that is compiled here."""
    monkeypatch.setattr(jit, "function_address", lambda *_: 1)
    return lambda: [machine_code.function_address(*x.kernel) for x in compiled]


@pytest.mark.parametrize("name", DAMAGE)
def test_one_that_does_not_fit_is_ignored_with_one_warning(
    name: str, path: Path, addresses: Callable[[], list[int]]
) -> None:
    damage, reason = DAMAGE[name]
    damage(path)
    with pytest.warns(AttentionWarning, match=reason) as warned:
        assert addresses() == [1, 1]
    assert len(warned) == 1


@pytest.mark.parametrize("value", ["other processors", archives.NO_ARCHIVE])
def test_kernels_that_it_does_not_have_are_compiled(
    value: str,
    path: Path,
    compiled: list[Any],
    addresses: Callable[[], list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Those of another processor's vectors are not taken."""
    assert 1 not in addresses()
    forget()
    if value == archives.NO_ARCHIVE:
        monkeypatch.setenv(archive.KERNELS_VARIABLE, value)
    other = [x._replace(kernel=x.kernel._replace(target=targets.make_target("baseline"))) for x in compiled]
    cpu.write(path, other)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert addresses() == [1, 1]


@pytest.mark.usefixtures("path")
def test_memory_that_may_not_be_executed_is_no_error(
    addresses: Callable[[], list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def denied(*_: Any) -> Any:
        raise PermissionError("no memory of this process may be executed")

    monkeypatch.setattr(archive.mmap, "mmap", denied)
    with pytest.warns(AttentionWarning, match="may be executed") as warned:
        assert addresses() == [1, 1]
    assert len(warned) == 1


@pytest.mark.usefixtures("path")
def test_code_is_never_writable_and_executable(addresses: Callable[[], list[int]]) -> None:
    assert 1 not in addresses()
    with open("/proc/self/maps") as maps:
        found = [line.split()[1] for line in maps if "memfd:flashtile" in line]
    assert found
    assert {*found} == {"r-xp"}


def test_the_standard_kernels_serve_plain_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever kernel a call without score functions chooses is one of them: all head dimensions, few rows and many,
    grouped heads, packed sequences, caches, masks and dropout.
    """
    wanted: dict[Any, str] = {}

    def noted(name: str, variant: Any, target: Any) -> int:
        wanted[archive.key_of(name, variant, target)] = f"{name} {variant} {target}"
        return 1

    for host in (host_forward, host_backward):
        monkeypatch.setattr(host, "function_address", noted)
        monkeypatch.setattr(host, "run", lambda launch, tensors: None)
    for dtype, (head_dim, rows) in itertools.product(
        DTYPES, ((64, 1), (128, 300), (80, 3), (40, 1), (40, 90), (24, 2))
    ):
        q, k, v = (torch.zeros(1, 4, n, head_dim, dtype=dtype).requires_grad_() for n in (rows, 300, 300))
        features: list[dict[str, Any]] = [{}, {"window": (30, 0)}]
        if head_dim % 16 == 0:
            mask = torch.ones(1, 1, 1, 300, dtype=torch.bool)
            features += [{"mask": mask}, {"softcap": 3.0}, {"dropout_p": 0.1, "dropout_seed": 1}]
        for given in features:
            flashtile.attention(q, k[:, :2], v[:, :2], backend="cpu", **given).sum().backward()
        with torch.no_grad():
            lengths = torch.tensor([7], dtype=torch.int32)
            flashtile.attention_with_kvcache(q[:, :, :1], k, v, cache_seqlens=lengths, backend="cpu")
        packed = [x.detach()[0].transpose(0, 1).requires_grad_() for x in (q, k, v)]
        longest: dict[str, Any] = {"max_seqlen_q": rows, "max_seqlen_k": 300, "backend": "cpu"}
        q, k, v = packed
        flashtile.attention_varlen(q, k, v, offsets(rows), offsets(300), **longest).sum().backward()
    known = {archive.key_of(*x) for dtype in cpu.DTYPES for x in cpu.standard_kernels(WIDTH, dtype)}
    assert len(wanted) > 20
    assert not [x for key, x in wanted.items() if key not in known]


def test_the_command_writes_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal kernels give equal bytes."""
    kernels = {x: list(cpu.standard_kernels("avx2", x))[-1:] for x in cpu.DTYPES}  # the shortest
    monkeypatch.setattr(cpu, "standard_kernels", lambda width, dtype: kernels[dtype])
    files = [tmp_path / name for name in ("a.zip", "b.zip")]
    for file in files:
        build_kernels.run(archs=None, cpu=True, out=file, jobs=1, sweeps=(), only="avx2", wheel=None)
    found = archive.of_this_version(files[0]).index["kernels"]
    assert {width: len(x) for width, x in found.items()} == {"avx2": len(cpu.DTYPES)}
    assert files[0].read_bytes() == files[1].read_bytes()
