"""The ladder's further Triton and CUDA kernels: the running log-sum-exp, any size, a block for each query."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from emulated_cuda import ORDERS, EmulationError, emulation, needs_compiler
from simulated import run_simulated
from torch import Tensor

from flashtile.ladder import (
    block_query,
    cuda_compile,
    running_lse_cuda,
    running_lse_triton,
    triton_any_size,
    triton_or_not,
)

needs_triton = pytest.mark.skipif(not triton_or_not.INSTALLED, reason="Triton is not installed")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")


def exact(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> tuple[Tensor, Tensor]:
    """out and lse in float64."""
    q, k, v = (x.cpu().double() for x in (q, k, v))
    s = q @ k.mT / math.sqrt(q.shape[1])
    if causal:
        s = s.masked_fill(torch.ones(s.shape).triu(1) > 0, -math.inf)
    return torch.softmax(s, 1) @ v, torch.logsumexp(s, 1)


def near(found: tuple[Tensor, Tensor | None], expected: tuple[Tensor, Tensor], atol: float = 5e-6) -> bool:
    pairs = [(x, y) for x, y in zip(found, expected, strict=True) if x is not None]
    return all(torch.allclose(x.cpu().double(), y, rtol=0, atol=atol) for x, y in pairs)


def strided(n: int, d: int, device: str = "cpu") -> Tensor:
    """A head of a `[N, 3, d]` tensor."""
    return torch.randn(n, 3, d, device=device)[:, 1]


def triton_calls(device: str = "cpu") -> list[tuple[str, dict[str, Any]]]:
    calls: list[tuple[str, dict[str, Any]]] = []
    for n, causal in ((1, False), (70, False), (70, True)):
        q, k, v = torch.randn(3, n, 16, device=device)
        calls.append(("running_lse_triton", {"q": q, "k": k, "v": v, "causal": causal}))
    for rows, keys, d in ((1, 1, 1), (8, 8, 16), (65, 70, 24)):
        q, k, v = strided(rows, d, device), strided(keys, d, device), torch.randn(d, keys, device=device).mT
        calls.append(("triton_any_size", {"q": q, "k": k, "v": v}))
    return calls


def assert_triton_is_right(calls: list[tuple[str, dict[str, Any]]], results: list[Any]) -> None:
    for (module, given), found in zip(calls, results, strict=True):
        assert (found[1] is None) == (module == "triton_any_size")
        assert near(found, exact(**given)), f"{module}: {[tuple(x.shape) for x in list(given.values())[:3]]}"


@needs_triton
def test_triton_in_the_interpreter(tmp_path: Path) -> None:
    """Also lite: right with all keys in one tile, of any number, and wrong with two."""
    calls = triton_calls()
    q, k, v = torch.randn(3, 65, 24)
    lite = [("triton_any_size", {"q": q, "k": k[:n], "v": v[:n], "online": False}) for n in (24, 65)]
    results = run_simulated(calls + lite, tmp_path, TRITON_INTERPRET="1")
    assert_triton_is_right(calls, results[: len(calls)])
    assert near(results[-2], exact(q, k[:24], v[:24]))
    assert not near(results[-1], exact(q, k, v), atol=0.1)


@needs_triton
def test_triton_compiles_for_a_gpu_that_is_not_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel with masks and strides; the other has nothing that step 8's have not."""
    module = triton_any_size
    if triton_or_not.interprets(module.kernel):
        pytest.skip("Triton interprets in this process")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    constants = {"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_D": 32, "ONLINE": True}
    types = dict.fromkeys("QKVO", "*fp16") | {"scale": "fp32"}
    names = module.kernel.arg_names
    source = ASTSource(
        module.kernel,
        signature={name: "constexpr" if name in constants else types.get(name, "i32") for name in names},
        constexprs={name: value for name, value in constants.items() if name in names},
    )
    compiled = triton_or_not.triton.compile(source, target=GPUTarget("cuda", 80, 32), options={"num_stages": 2})
    assert "mma" in compiled.asm["ptx"]


def test_limits_are_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    q = torch.zeros(5, 16)
    for module, error in ((triton_any_size, triton_or_not), (block_query, cuda_compile)):
        if not triton_or_not.INSTALLED or not triton_or_not.interprets(triton_any_size.kernel):
            name = "TritonUnavailableError" if error is triton_or_not else "CudaUnavailableError"
            with pytest.raises(getattr(error, name), match="cannot run this call"):
                module.attention(q, q, q)
    monkeypatch.setattr(triton_any_size, "unavailable", lambda kernel, device: None)
    monkeypatch.setattr(block_query.cuda_launch, "unavailable", lambda device: None)
    for module in (triton_any_size, block_query):
        for k in (q[:0], q[:, :8], q[None]):
            with pytest.raises(ValueError, match="one shape"):
                module.attention(q, k, k)
        with pytest.raises(ValueError, match="d to"):
            module.attention(*(torch.zeros(3, 5, 300)))
        with pytest.raises(ValueError, match="causal"):
            module.attention(q, q[:3], q[:3], True)


# CUDA ----------------------------------------------------------------------------------------------------------------

KERNELS: dict[str, tuple[Any, dict[str, Any]]] = {
    "running lse": (running_lse_cuda, {}),
    "block for each query, tree": (block_query, {"reduction": "tree"}),
    "block for each query, shuffles": (block_query, {"reduction": "shuffles"}),
}


@needs_compiler
@pytest.mark.parametrize("name", KERNELS)
def test_cuda_in_the_emulation(name: str) -> None:
    """Partial tiles and blocks, rows that see no key of a tile, threads in three orders, two blocks of 128 rows."""
    module, keywords = KERNELS[name]
    if module is running_lse_cuda:
        q, k, v = torch.randn(3, 2, 2, 130, 16)
        with emulation("shuffled"):
            out, lse = module.attention(q, k, v, True)
        for b, h in ((0, 1), (1, 0)):
            assert near((out[b, h], lse[b, h]), exact(q[b, h], k[b, h], v[b, h], True))
    for order, n, causal in (("forward", 3, False), ("backward", 66, True), ("shuffled", 40, False)):
        q, k, v = torch.randn(3, n, 16)
        with emulation(order):
            assert near(module.attention(q, k, v, causal, **keywords), exact(q, k, v, causal))
    if module is block_query:
        with emulation("shuffled"):
            assert near(module.attention(q[:9], k, v, **keywords), exact(q[:9], k, v))


@needs_compiler
def test_without_a_barrier_of_the_tree_an_order_goes_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    barrier = "__syncthreads();  // this level is complete"
    without = block_query.source_for(16, "tree")._replace(replaced=(barrier, "//"))
    monkeypatch.setattr(block_query, "source_for", lambda *_: without)
    q, k, v = torch.randn(3, 40, 16)
    wrong = 0
    for order in ORDERS:
        with emulation(order):
            try:
                wrong += not near(block_query.attention(q, k, v), exact(q, k, v))
            except EmulationError:
                wrong += 1
    assert wrong


def test_cuda_compiles_for_a_gpu_that_is_not_here() -> None:
    if cuda_compile.nvrtc() is None and cuda_compile.nvcc() is None:
        pytest.skip("there is neither NVRTC (pip install nvidia-cuda-nvrtc) nor nvcc")
    no_spills = ("--ptxas-options=--warn-on-spills", "--ptxas-options=--warning-as-error")
    for module, keywords in KERNELS.values():
        code = cuda_compile.cubin(module.source_for(64, *keywords.values())._replace(flags=no_spills), 90)
        assert module.NAME.encode() in code


@pytest.mark.gpu
@needs_gpu
def test_on_a_gpu() -> None:
    calls = triton_calls("cuda")
    modules = {"running_lse_triton": running_lse_triton, "triton_any_size": triton_any_size}
    assert_triton_is_right(calls, [modules[module].attention(**given) for module, given in calls])
    for module, keywords in KERNELS.values():
        for n, d, causal in ((3, 16, False), (130, 32, True), (1000, 64, False), (257, 64, True)):
            q, k, v = torch.randn(3, n, d, device="cuda")
            # The running log-sum-exp loses digits with N: 4.5e-6 at 1,024 keys.
            atol = 2e-5 if module is running_lse_cuda else 5e-6
            found, expected = module.attention(q, k, v, causal, **keywords), exact(q, k, v, causal)
            assert near(found, expected, atol), (module.NAME, keywords, n, d, causal)
