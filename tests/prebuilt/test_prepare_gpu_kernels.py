"""`flashtile.prepare` for GPUs: which kernels it finds, their compilation by Triton without a GPU, and with one."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from random_problems import H100
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

import flashtile
from flashtile.backend import compiling
from flashtile.backend.gpu.kernel import Kernel
from flashtile.dispatch import observed
from flashtile.prebuilt import needed, prepare, ranges, workload
from flashtile.prebuilt.helpers import TargetDriver, target_of
from flashtile.prebuilt.standard import StandardCall
from flashtile.prebuilt.workload import MOST_ROWS, PRODUCTS, compiled_kernels

KIND = {"heads": 16, "heads_kv": 4, "head_dim": 64, "head_dim_v": 64, "dtype": torch.bfloat16}
KIND |= {"layout": "dense", "page_size": None}
DRAWN = 6


def work_of(kind: dict[str, Any], settings: dict[str, Any], **bounds: Any) -> prepare.Work:
    work = prepare.Work(H100)
    for record in ranges.records_of_ranges(kind, settings, device="cuda", **bounds):
        work.add_record(record)
    return work


@pytest.mark.parametrize(
    ("layout", "training"), [("dense", False), ("dense", True), ("packed", True), ("cache", False), ("pages", False)]
)
def test_ranges_have_the_kernels_of_lengths_between(layout: str, training: bool) -> None:
    kind = KIND | ({"layout": layout} if layout != "pages" else {"layout": "cache", "page_size": 64})
    bounds: dict[str, Any] = {"training": training, "lengths": (64, 1024), "batches": (1, 4)}
    known, draw = work_of(kind, {"causal": True}, **bounds).kernels, random.Random(0)
    assert known
    for _ in range(DRAWN):
        batch, length = (int(2 ** draw.uniform(*x)) for x in ((0, 2), (6, 10)))
        drawn = work_of(kind, {"causal": True}, **bounds | {"lengths": (length, length), "batches": (batch, batch)})
        assert drawn.kernels.keys() <= known.keys(), (batch, length)


def test_the_kernels_of_a_workload(monkeypatch: pytest.MonkeyPatch) -> None:
    """Are those that `flashtile explain --kernels` lists."""

    def call_of(batch: int, rows: int, keys: int) -> StandardCall:
        return ranges.standard_call(KIND, {"causal": True}, (batch, rows, keys), training=True)

    monkeypatch.setattr(workload, "sizes", lambda: ((b, n, n) for b in (1, 8) for n in (512, 4096)))
    listed = {f"{title} {key}" for kernels in compiled_kernels(call_of, H100).values() for title, key in kernels}
    work = work_of(KIND, {"causal": True}, training=True, lengths=(512, 4096), batches=(1, 8))
    products = {key for key, x in work.kernels.items() if x.kernel.name in PRODUCTS}
    assert listed <= products
    assert all(isinstance(x.kernel, Kernel) for x in work.kernels.values())
    assert all(x is not None for x in work.records.values())


def test_a_score_mod_is_compiled_here() -> None:
    """Its kernels cannot be made by another process, which does not have the function."""
    table = torch.zeros(64)
    q, work = torch.zeros(1, 2, 256, 64, dtype=torch.bfloat16), prepare.Work(H100)
    with observed.example(lambda call, needs: work.add_call(call, needs)):
        flashtile.attention(q, q, q, score_mod=lambda s, b, h, i, j: s + table[i % 64])
        flashtile.attention(q, q, q)
    made_for_it = [x for x in work.kernels.values() if not isinstance(x.kernel, Kernel)]
    assert len(made_for_it) == 1
    assert 0 < sum(x is None for x in work.records.values()) < len(work.records)


def test_forward_mode() -> None:
    """The kernel of a call along tangents, from an example and from its record."""
    q, work, again = torch.zeros(1, 2, 256, 64, dtype=torch.bfloat16), prepare.Work(H100), prepare.Work(H100)
    with observed.example(work.add_call):
        out, dout = torch.func.jvp(lambda q: flashtile.attention(q, q, q), (q,), (q,))
    assert not out.any()
    assert not dout.any()
    (kernel,) = work.kernels.values()
    assert kernel.kernel.name == "tangents_kernel"
    (record,) = work.records.values()
    assert record is not None
    again.add_record(record)
    assert again.kernels.keys() == work.kernels.keys()


@pytest.fixture
def without_gpu(tmp_path: Path) -> Iterator[None]:
    """Triton compiles for an H100, into an empty cache."""
    with knobs.cache.scope():
        knobs.cache.dir = str(tmp_path)
        active: Any = TargetDriver(GPUTarget(*target_of(H100)))  # type: ignore[misc]
        driver.set_active(active)
        yield
    driver._active = None


def test_triton_compiles_into_its_cache(without_gpu: None) -> None:
    """What a helper compiles, another process finds."""
    work = work_of(KIND, {}, training=True, lengths=(4096, 4096), batches=(4, 4))
    (small,) = (x for x in work.kernels.values() if x.kernel.name == "preprocess_kernel")
    function: JITFunction[Any] = small.kernel.function()
    before = compiling.compiled
    function.device_caches.clear()
    assert not needed.is_loaded_from_cache(small)
    needed.compile_kernel(small, load=False)
    assert compiling.compiled == before + 1
    function.device_caches.clear()  # as in another process
    with compiling.none_compiled():
        needed.compile_kernel(small, load=False)
    function.device_caches.clear()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_on_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training of random lengths, and a captured graph, compile nothing after their preparation by two processes."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    kind = {"heads": 8, "heads_kv": 2, "head_dim": 96, "dtype": torch.float16, "causal": True}
    bounds: dict[str, Any] = {"lengths": (64, 2048), "batches": (1, 4)}
    prepared = flashtile.prepare(**kind, **bounds, jobs=2)
    assert prepared.kernels > 0
    again = flashtile.prepare(**kind, **bounds)
    assert (again.compiled, again.kernels) == (0, prepared.kernels)
    draw, before = random.Random(0), compiling.compiled
    for _ in range(20):
        batch, length = draw.randint(1, 4), draw.randint(64, 2048)
        shapes = ((batch, 8, length, 96), *[(batch, 2, length, 96)] * 2)
        q, k, v = (torch.randn(x, device="cuda", dtype=torch.float16, requires_grad=True) for x in shapes)
        flashtile.attention(q, k, v, causal=True).sum().backward()
    assert compiling.compiled == before
    with torch.no_grad():
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = flashtile.attention(q, k, v, causal=True)
        graph.replay()
        torch.testing.assert_close(out, flashtile.attention(q, k, v, causal=True))
    assert compiling.compiled == before
    assert MOST_ROWS > 2048 * 4
