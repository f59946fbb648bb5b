"""The ladder's further Triton and CUDA kernels: the running log-sum-exp, any size, a block for each query."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from ladder_cases import needs_compiler
from torch import Tensor

from flashtile_ladder._host import cuda_compile, triton_or_not
from flashtile_ladder._host.cuda_steps import running_lse as running_lse_cuda
from flashtile_ladder._host.cuda_steps import split_keys, tensor_cores_of, tile_bytes
from flashtile_ladder._host.emulation import ORDERS, EmulationError, emulation
from flashtile_ladder.related import block_query, shared_memory, triton_any_size

needs_triton = pytest.mark.skipif(not triton_or_not.INSTALLED, reason="Triton is not installed")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")


def exact(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> tuple[Tensor, Tensor]:
    """out and lse in float64."""
    q, k, v = (x.cpu().double() for x in (q, k, v))
    s = q @ k.mT / math.sqrt(q.shape[1])
    if causal:
        s = s.masked_fill(torch.ones(s.shape).triu(1) > 0, -math.inf)
    return torch.softmax(s, 1) @ v, torch.logsumexp(s, 1)


def near(found: tuple[Tensor | None, Tensor | None], expected: tuple[Tensor, Tensor], atol: float = 5e-6) -> bool:
    pairs = [(x, y) for x, y in zip(found, expected, strict=True) if x is not None]
    assert pairs
    return all(torch.allclose(x.cpu().double(), y, rtol=0, atol=atol) for x, y in pairs)


@needs_triton
def test_triton_compiles_for_a_gpu_that_is_not_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel with masks and strides, and the softmax that step 8's kernels do not have."""
    module = triton_any_size
    if triton_or_not.interprets(module.kernel):
        pytest.skip("Triton interprets in this process")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    constants = {"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_D": 32, "CAUSAL": True, "SOFTMAX": "running lse"}
    types = dict.fromkeys("QKVO", "*fp16") | {"LSE": "*fp32", "scale": "fp32"}
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
    monkeypatch.setattr(block_query.cuda_launch, "unavailable", lambda device, dtype=None: None)
    for module in (triton_any_size, block_query):
        for k in (q[:0], q[:, :8], q[None]):
            with pytest.raises(ValueError, match="one shape"):
                module.attention(q, k, k)
        with pytest.raises(ValueError, match="d to"):
            module.attention(*(torch.zeros(3, 5, 300)))
        with pytest.raises(ValueError, match="causal"):
            module.attention(q, q[:3], q[:3], True)
    for softmax, causal in (("lite", True), ("safe", False)):
        with pytest.raises(ValueError, match=r"one of .'lite', 'online', 'running lse'"):
            triton_any_size.attention(q, q, q, causal, softmax=softmax)


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


HALVES: dict[str, tuple[Any, dict[str, Any]]] = {
    "tensor cores, one stage": (tensor_cores_of(block_n=32), {}),
    "tensor cores, two stages": (tensor_cores_of(128, 32, 2), {}),
    "split keys": (split_keys, {}),
}


def near_in_half(found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor], most: float = 4.0) -> bool:
    """lse is float32's; out and the weights have 11 bits: a rounding of each, for values of v up to `most`."""
    return near((found[0], None), expected, 2 * most * 2.0**-11) and near((None, found[1]), expected, 1e-5 * most)


@needs_compiler
@pytest.mark.parametrize("name", HALVES)
def test_cuda_in_16_bits_in_the_emulation(name: str) -> None:
    """Partial tiles of rows and keys, warps that see no key, grouped heads; a d that is no tile's width."""
    module, keywords = HALVES[name]
    d = 24 if module is not split_keys else 32
    rows = module.rows_for_a_read
    for order, n, causal in (("forward", 3, False), ("backward", rows, True), ("shuffled", rows + 6, True)):
        q, k, v = torch.randn(3, n, d).half()
        with emulation(order):
            assert near_in_half(module.attention(q, k, v, causal, **keywords), exact(q, k, v, causal))
    q, k, v = torch.randn(2, 2, 40, d).half(), *torch.randn(2, 2, 1, 40, d).half()
    with emulation("shuffled"):
        out, lse = module.attention(q, k, v, **keywords)
    assert near_in_half((out[1, 1], lse[1, 1]), exact(q[1, 1], k[1, 0], v[1, 0]))


@needs_compiler
def test_block_query_in_16_bits_in_the_emulation() -> None:
    dtype = torch.bfloat16
    q, k, v = torch.randn(9, 24).to(dtype), *torch.randn(2, 70, 24).to(dtype)
    with emulation("shuffled"):
        out, lse = block_query.attention(q, k, v)
    expected = exact(q, k, v)
    assert out.dtype is dtype
    assert near((None, lse), expected)
    torch.testing.assert_close(out, expected[0].to(dtype), rtol=torch.finfo(dtype).eps, atol=5e-6)


BARRIERS = {  # what a text of a kernel becomes without it, and the call that shows it
    "a level of the tree": (block_query, {"reduction": "tree"}, "__syncthreads();  // this level is complete", "//"),
    "two stages, copies": (
        tensor_cores_of(stages=2),
        {},
        "    wait_for_copies();\n    __syncthreads();",
        "    wait_for_copies();",
    ),
    "split keys, V over K": (split_keys, {}, "__syncthreads();  // no thread reads K any more", "//"),
    "split keys, merge": (split_keys, {}, "__syncthreads();  // this warp has added its part", "//"),
}


@needs_compiler
@pytest.mark.parametrize("name", BARRIERS)
def test_without_a_barrier_an_order_goes_wrong(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, keywords, *replaced = BARRIERS[name]
    right = module.source_for
    monkeypatch.setattr(
        module, "source_for", lambda *given, **tile: right(*given, **tile)._replace(replaced=tuple(replaced))
    )
    half = module is not block_query
    q, k, v = (x.half() if half else x for x in torch.randn(3, 70, 32 if module is split_keys else 16))
    wrong = 0
    for order in ORDERS:
        with emulation(order):
            try:
                found = module.attention(q, k, v, **keywords)
                wrong += not (near_in_half if half else near)(found, exact(q, k, v))
            except EmulationError:
                wrong += 1
        if wrong:
            return
    raise AssertionError("no order shows it")


def test_cuda_compiles_for_a_gpu_that_is_not_here() -> None:
    if cuda_compile.nvrtc() is None and cuda_compile.nvcc() is None:
        pytest.skip("there is neither NVRTC (pip install nvidia-cuda-nvrtc) nor nvcc")
    no_spills = ("--ptxas-options=--warn-on-spills", "--ptxas-options=--warning-as-error")
    half = torch.float16
    sources = [(module, module.source_for(64, *keywords.values())) for module, keywords in KERNELS.values()]
    sources += [
        (step, step.source_for(x.d)) for x in shared_memory.MEASURED[-5::4] for step in [tensor_cores_of(**x.keywords)]
    ]
    sources += [(split_keys, split_keys.source_for(64))]
    sources += [(block_query, block_query.source_for(64, "tree", half))]
    for module, source in sources:
        assert module.NAME.encode() in cuda_compile.cubin(source._replace(flags=no_spills), 90)
    bfloat16 = block_query.source_for(64, "tree", torch.bfloat16)
    assert block_query.NAME.encode() in cuda_compile.cubin(bfloat16, 80), "sm_80 has no instruction that widens it"


def test_shared_memory_is_the_formulas() -> None:
    for tile in shared_memory.MEASURED:
        assert tile_bytes(tile.d, tile.rows + tile.stages * tile.keys) == tile.bytes
    assert tile_bytes(24, 128) == shared_memory.Tile(64, 64, 32).bytes
    for keywords in ({"block_m": 40}, {"block_n": 8}, {"stages": 3}):
        with pytest.raises(ValueError, match="multiples of 16"):
            tensor_cores_of(**keywords)


@pytest.mark.gpu
@needs_gpu
def test_on_a_gpu() -> None:
    for module, keywords in KERNELS.values():
        for n, d, causal in ((3, 16, False), (130, 32, True), (1000, 64, False), (257, 64, True)):
            q, k, v = torch.randn(3, n, d, device="cuda")
            # The running log-sum-exp loses digits with N: 4.5e-6 at 1,024 keys.
            atol = 2e-5 if module is running_lse_cuda else 5e-6
            found, expected = module.attention(q, k, v, causal, **keywords), exact(q, k, v, causal)
            assert near(found, expected, atol), (module.NAME, keywords, n, d, causal)
    for tile in shared_memory.MEASURED:
        q, k, v = torch.randn(3, 1000, tile.d, device="cuda").half()
        for causal in (False, True):
            found = tensor_cores_of(**tile.keywords).attention(q, k, v, causal)
            assert near_in_half(found, exact(q, k, v, causal), float(v.abs().max())), (tile, causal)
    for n, d in ((3, 16), (130, 32), (1000, 64)):
        q, k, v = torch.randn(3, n, d, device="cuda").half()
        for causal in (False, True):
            found, most = split_keys.attention(q, k, v, causal), float(v.abs().max())
            assert near_in_half(found, exact(q, k, v, causal), most), (n, d, causal)
