"""Step 9's last kernel: its partitions, barriers and copies in an emulation of Gluon; machine code; and on a GPU."""

import importlib
import math
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
from gluon_emulation.machine import EmulationError, Machine
from gluon_emulation.package import arguments_of, triton_modules
from mistakes import with_mistake
from torch import Tensor

from flashtile.backend.gpu.pointers import TmaDescriptor
from flashtile_ladder import step09_hopper
from flashtile_ladder._host import gluon_or_not, triton_or_not
from flashtile_ladder._host.triton_or_not import TritonUnavailableError

on_hopper = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


def emulated(*mistake: str) -> ModuleType:
    """The step on the emulation of Gluon; with a text of it that another one replaces."""
    package = step09_hopper.__package__
    names = [f"{package}._host.{name}" for name in ("triton_or_not", "gluon_or_not")]
    modules = triton_modules()
    modules["triton"].__version__ = "emulated"  # type: ignore[attr-defined]
    source = Path(step09_hopper.__file__).read_text(encoding="utf-8")
    found = ModuleType(f"{package}.step09_hopper_emulated")
    with mock.patch.dict(sys.modules, modules):
        for name in names:
            sys.modules.pop(name)
            importlib.import_module(name)
        vars(found)["__package__"] = package
        exec(with_mistake(source, "a mistake", *mistake) if mistake else source, vars(found))
    for name in names:  # `import a.b` also sets an attribute of a
        setattr(sys.modules[f"{package}._host"], name.rpartition(".")[2], sys.modules[name])
    return found


def exact(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """out and lse in float64."""
    s = q.double() @ k.double().mT / math.sqrt(q.shape[-1])
    if causal:
        s = s.masked_fill(torch.ones(s.shape[-2:], device=s.device).triu(1) > 0, -math.inf)
    return torch.softmax(s, dim=-1) @ v.double(), s.logsumexp(-1)


def run(step: Any, heads: int, n: int, causal: bool, seed: int = 0, d: int = 64) -> float:
    """The largest error of out and lse of a launch in the emulation."""
    q, k, v = (torch.randn(heads, n, d).half() for _ in range(3))
    out, lse = torch.full_like(q, math.nan), torch.full((heads, n), math.nan)
    boxes = {
        f"{name}_desc": TmaDescriptor(x, list(x.shape), list(x.stride()), [1, rows, d])
        for name, x, rows in (("q", q, 64), ("k", k, step.BLOCK_N), ("v", v, step.BLOCK_N), ("o", out, 64))
    }
    values = boxes | {"LSE": lse, "N": n, "scale_log2": step.LOG2_E / math.sqrt(d)}
    values |= {"D": d, "STAGES": step.STAGES, "CAUSAL": causal}
    Machine(seed).run(step.kernel, heads * -(-n // step.BLOCK_M), arguments_of(step.kernel, values))
    return max(
        float((x.double() - y).abs().nan_to_num(math.inf).max())
        for x, y in zip((out, lse), exact(q, k, v, causal), strict=True)
    )


# One block of keys; a partial block and two heads; more blocks than stages, so that buffers are filled again.
@pytest.mark.parametrize(("heads", "n", "causal"), [(1, 1, False), (2, 130, True), (1, 450, False), (1, 512, True)])
def test_in_the_emulation(heads: int, n: int, causal: bool) -> None:
    step = emulated()
    for seed in range(2):
        assert run(step, heads, n, causal, seed) < 2e-3


@pytest.mark.parametrize(
    "mistake",
    [
        ("hopper.mbarrier.wait(v_empty.index(stage), phase ^ 1)\n", "pass\n"),
        ("hopper.mbarrier.wait(k_full.index(stage), j // STAGES & 1)\n", "pass\n"),
        ("    hopper.fence_async_shared()\n    tma_store", "    tma_store"),
        ("s = hopper.warpgroup_mma_wait(1, deps=(s,))", "s = hopper.warpgroup_mma_wait(2, deps=(s,))"),
        ("j // STAGES & 1)\n        k_j", "j % STAGES)\n        k_j"),
    ],
)
def test_mistakes_are_seen(mistake: tuple[str, str]) -> None:
    """A buffer that is filled too early, one that is read too early, a missing fence, a product in flight, a phase."""
    step = emulated(*mistake)
    wrong = 0
    for seed in range(8):
        try:
            wrong += run(step, 1, 512, False, seed) > 1e-2
        except EmulationError:
            wrong += 1
    assert wrong


@pytest.mark.skipif(gluon_or_not.tma_load is None, reason="there is no Gluon")
def test_compiles_for_hopper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight products of 64 x 128 x 16 for each of S and P V, in two places of two warpgroups; nothing spills."""
    if triton_or_not.interprets(step09_hopper.kernel):
        pytest.skip("Triton interprets in this process")
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon._runtime import GluonASTSource

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    layout = gluon_or_not.gl.NVMMASharedLayout.get_default_for([1, 64, 128], gluon_or_not.gl.float16)
    types = {f"{x}_desc": f"tensordesc<fp16[1, {64 if x in 'qo' else 128}, 128],{layout!r}>" for x in "qkvo"}
    types |= {"LSE": "*fp32", "N": "i32", "scale_log2": "fp32"}
    constants = {"D": 128, "STAGES": 2, "CAUSAL": True}
    source = GluonASTSource(step09_hopper.kernel, types | dict.fromkeys(constants, "constexpr"), constants)
    compiled = triton_or_not.triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    assert len(re.findall(r"wgmma\.mma_async\S*\.m64n128k16", compiled.asm["ptx"])) == 2 * 2 * 2 * 8
    assert "cp.async.bulk.tensor" in compiled.asm["ptx"]
    assert "ld.local" not in compiled.asm["ptx"]


def test_what_it_does_not_take_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    q = torch.zeros(64, 64, dtype=torch.float16)
    with pytest.raises(TritonUnavailableError, match=r"Hopper GPUs alone|pip install triton"):
        step09_hopper.attention(q, q, q)
    monkeypatch.setattr(gluon_or_not, "hopper_problem", lambda device: None)
    for x, scale, words in ((q[:, :32], None, "d in"), (q.float(), None, "float16 or bfloat16"), (q, -1.0, "above 0")):
        with pytest.raises(ValueError, match=words):
            step09_hopper.attention(x, x, x, scale=scale)


@pytest.mark.gpu
@pytest.mark.skipif(not on_hopper, reason="there is no Hopper GPU")
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float16, 2e-3), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("d", [64, 128])
def test_on_a_gpu(d: int, dtype: torch.dtype, bound: float, causal: bool) -> None:
    for n in (1, 64, 129, 300, 1000):
        q, k, v = (torch.randn(2, 3, n, d, device="cuda").to(dtype) for _ in range(3))
        for x, y in zip(step09_hopper.attention(q, k, v, causal), exact(q, k, v, causal), strict=True):
            torch.testing.assert_close(x.double(), y, rtol=0, atol=bound)
