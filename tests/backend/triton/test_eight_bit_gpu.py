"""Keys and values of 8 bits on a GPU: `pytest -m gpu tests/backend/triton/test_eight_bit_gpu.py`."""

from typing import Any

import pytest
import torch
from cached import same_bits

import flashtile
from flashtile.dispatch.status import rounds_to_eight_bits
from flashtile.testing.case import CACHES, Case
from flashtile.testing.eight_bit import FORMATS, KINDS_OF_Q, OUT_DTYPES, takes_queries, with_eight_bits, with_queries
from flashtile.testing.generate import random_case
from flashtile.testing.oracle.eight_bit import magnitudes
from flashtile.testing.poison import poisoned_allocation
from flashtile.testing.tolerance import compare

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]
KINDS = ("none", "heads", "sequences", "pages", "tokens")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def assert_right(case: Case, backend: str = "triton") -> None:
    with poisoned_allocation():
        results = {name: x.cpu() for name, x in case.run(backend).items()}
    rounds = rounds_to_eight_bits(backend)
    wrong = [str(x) for x in compare(results, case, rounds_to_eight_bits=rounds) if not x.ok]
    assert not wrong, "\n".join([case.description, *wrong])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", FORMATS)
def test_random_problems_are_within_the_bound(dtype: torch.dtype, kind: str) -> None:
    generator = torch.Generator().manual_seed(0)
    for seed in range(24):
        function = "attention_varlen" if seed % 3 == 0 else "attention_with_kvcache"
        case = random_case(seed, device="cuda", dtypes=DTYPES, function=function)
        widths = [x.shape[-1] for name, x in case.arguments.items() if name in ("q", "v", "v_cache")]
        if max(widths) > 512 or not ("k_cache" in case.arguments or "page_table" in case.arguments):
            continue
        assert_right(with_eight_bits(case, dtype, kind, KINDS[seed % 5], generator))


def decoding(q_dtype: torch.dtype, heads: int, width: int, page_size: int | None, keys: int = 1024) -> Case:
    q, k, v = torch.randn(3, heads, 1, width), torch.randn(3, 2, keys, width), torch.randn(3, 2, keys, width)
    lengths = torch.tensor([keys - 1, 0, keys // 2 + 1], dtype=torch.int32)
    given: dict[str, Any] = {"q": q, "cache_seqlens": lengths}
    if page_size is not None:
        k, v = (x.transpose(1, 2).reshape(-1, page_size, 2, width) for x in (k, v))
        given["page_table"] = torch.randperm(len(k)).view(3, -1).int()
    given |= {"k_cache": k, "v_cache": v, "k": torch.randn(3, 2, 1, width), "v": torch.randn(3, 2, 1, width)}
    moved = {name: x.cuda().to(q_dtype) if x.is_floating_point() else x.cuda() for name, x in given.items()}
    return Case("attention_with_kvcache", moved | {"causal": True})


@pytest.mark.parametrize("page_size", [None, 16, 256])
@pytest.mark.parametrize("width", [64, 96, 128, 256])
@pytest.mark.parametrize("heads", [2, 8, 32])
def test_decoding(heads: int, width: int, page_size: int | None) -> None:
    """Tiles of 8, of 16 and of more rows, with scales of tokens, which new keys get."""
    for dtype, q_dtype in zip((*FORMATS, FORMATS[0]), (*DTYPES[:2], *DTYPES[:2]), strict=True):
        case = with_eight_bits(decoding(q_dtype, heads, width, page_size), dtype, "tokens", "tokens")
        assert_right(case)
        assert_right(with_eight_bits(decoding(q_dtype, heads, width, page_size), dtype, "heads", "heads"), "auto")


@pytest.mark.parametrize("kind", ["heads", "tokens"])
@pytest.mark.parametrize("q_dtype", [torch.bfloat16, torch.float16])
def test_small_scales_of_values(q_dtype: torch.dtype, kind: str) -> None:
    """Probabilities times scales are far outside of float16's normal numbers."""
    case = with_eight_bits(decoding(q_dtype, 8, 128, 16), FORMATS[0], kind, kind)
    for factor in (1e-4, 1e3):
        arguments = case.arguments | {"v_descale": case.arguments["v_descale"] * factor}
        arguments |= {"k": None, "v": None}
        assert_right(Case(case.function, arguments))


@pytest.mark.parametrize("dtype", FORMATS)
def test_equal_values_of_a_long_cache(dtype: torch.dtype) -> None:
    """The mean of 131072 ones is one."""
    q = torch.randn(1, 8, 1, 128, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.ones(1, 1, 2**17, 128, device="cuda").to(dtype) for _ in range(2))
    for descale in (None, torch.ones(1, device="cuda"), torch.ones(1, 1, 2**17, device="cuda")):
        out = flashtile.attention_with_kvcache(
            q, k, v, cache_seqlens=2**17, k_descale=descale, v_descale=descale, causal=True
        )
        assert (out == 1).all()


@pytest.mark.parametrize("kind", ["heads", "tokens"])
@pytest.mark.parametrize("dtype", FORMATS)
def test_appended_numbers_are_those_of_torch(dtype: torch.dtype, kind: str) -> None:
    grid = magnitudes(dtype)
    numbers = torch.cat((grid, (grid[1:] + grid[:-1]) / 2, grid[-1:] * 1.5, grid.new_tensor([torch.inf, torch.nan])))
    numbers = torch.cat((numbers, -numbers)).float().cuda()
    numbers = numbers.repeat(-(-1024 // len(numbers)))[:1024].view(1, 2, 16, 32)
    found = []
    for backend in ("triton", "tiled"):
        caches: dict[str, Any] = {f"{x}_cache": torch.zeros(1, 2, 20, 32, device="cuda").to(dtype) for x in "kv"}
        shape = (1, 2, 20) if kind == "tokens" else (2,)
        caches |= {f"{x}_descale": torch.full(shape, 3.0, device="cuda") for x in "kv"}
        new = {"k": numbers, "v": numbers * 3, "cache_seqlens": 2}
        flashtile.attention_with_kvcache(numbers[:, :, :1].nan_to_num(), **caches, **new, backend=backend)
        found.append(caches)
    assert all(same_bits(found[0][name].float(), found[1][name].float()) for name in CACHES)


@pytest.mark.parametrize("kind", ["heads", "tokens"])
def test_captured_steps(kind: str) -> None:
    """A CUDA graph appends and attends as calls outside of it do, while lengths grow."""
    case = with_eight_bits(decoding(torch.bfloat16, 8, 128, 16), FORMATS[0], kind, kind)
    outside, inside = ({n: x.clone() if torch.is_tensor(x) else x for n, x in case.arguments.items()} for _ in range(2))
    for given in (outside, inside):
        given["cache_seqlens"].fill_(100)
    flashtile.attention_with_kvcache(**inside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = flashtile.attention_with_kvcache(**inside)
    for _ in range(5):
        graph.replay()
        assert torch.equal(out, flashtile.attention_with_kvcache(**outside))
        for given in (outside, inside):
            given["cache_seqlens"] += 1
    assert all(same_bits(inside[name].float(), outside[name].float()) for name in CACHES)


def test_hopper_declines_with_a_reason() -> None:
    case = with_eight_bits(decoding(torch.bfloat16, 8, 128, 16), FORMATS[0], "heads", "heads")
    with pytest.raises(flashtile.BackendError, match=r"8 bits|Hopper"):
        case.run("hopper")


@pytest.mark.parametrize("dtype", FORMATS)
def test_compiled_steps(dtype: torch.dtype) -> None:
    """`torch.compile` and `torch.export` append and attend as eager calls do."""
    torch._dynamo.reset()
    case = with_eight_bits(decoding(torch.bfloat16, 8, 64, 16), dtype, "tokens", "tokens")

    class Step(torch.nn.Module):
        def forward(self, given: dict[str, Any]) -> torch.Tensor:
            return flashtile.attention_with_kvcache(**given, causal=True)

    def inputs() -> dict[str, Any]:
        given = {name: x.clone() for name, x in case.arguments.items() if torch.is_tensor(x)}
        given["cache_seqlens"].fill_(100)
        return given

    expected = inputs()
    with torch.no_grad():
        out = Step()(expected)
        for program in (torch.compile(Step(), fullgraph=True), torch.export.export(Step(), (inputs(),)).module()):
            given = inputs()
            assert torch.equal(program(given), out)
            assert all(same_bits(given[name].float(), expected[name].float()) for name in CACHES)


@pytest.mark.parametrize("dtype", FORMATS)
def test_packed_keys(dtype: torch.dtype) -> None:
    """Packed keys with scales of tokens give what pages of 64 of the same keys give, within rounding."""
    lengths = (300, 0, 513, 64)
    starts = torch.tensor([0, *lengths]).cumsum(0).int().cuda()
    q = torch.randn(877, 8, 128, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(877, 2, 128, device="cuda").to(dtype) for _ in range(2))
    descales = {name: torch.rand(2, 877, device="cuda") for name in ("k_descale", "v_descale")}
    given: dict[str, Any] = {"causal": True, "max_seqlen_q": 513, "max_seqlen_k": 513}
    out = flashtile.attention_varlen(q, k, v, starts, starts, **given, **descales)
    wide = [x.float() * scale.t()[..., None] for x, scale in zip((k, v), descales.values(), strict=True)]
    expected = flashtile.attention_varlen(q.float(), *wide, starts, starts, **given, backend="tiled")
    torch.testing.assert_close(out.float(), expected, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("kind", KINDS_OF_Q)
@pytest.mark.parametrize("dtype", FORMATS)
def test_queries_of_8_bits(dtype: torch.dtype, kind: str) -> None:
    """Dense, packed and cached problems, in each dtype of results."""
    generator = torch.Generator().manual_seed(0)
    for seed in range(12):
        function = ("attention", "attention_varlen", "attention_with_kvcache")[seed % 3]
        case = random_case(1000 + seed, device="cuda", dtypes=DTYPES, function=function)
        widths = [x.shape[-1] for name, x in case.arguments.items() if name in ("q", "v", "v_cache")]
        if max(widths) > 512 or case.arguments["q"].dtype.itemsize == 1 or not takes_queries(case):
            continue
        case = with_eight_bits(case, dtype, KINDS[seed % 5], KINDS[(seed + 2) % 5], generator)
        assert_right(with_queries(case, kind, OUT_DTYPES[seed % 4], generator))


@pytest.mark.parametrize("width", [64, 128, 256])
def test_long_rows_of_8_bits(width: int) -> None:
    """131072 keys whose values are one, and a tail of small weights, by the backend that `auto` takes."""
    keys = 2**17
    q, k = (torch.randn(1, 2, n, width, device="cuda") for n in (3, keys))
    v = torch.ones(1, 2, keys, width, device="cuda")
    k[:, :, :1] = 3 * q[:, :, :1]  # most of the weight of the first row
    given = [x.to(FORMATS[0]) for x in (q, k, v)]
    out = flashtile.attention(*given, out_dtype=torch.float32)
    assert (out - 1).abs().max() < 1e-3
    v[:, :, 0] = 3.0
    given[2] = v.to(FORMATS[0])
    out = flashtile.attention(*given, out_dtype=torch.float32)
    wide = flashtile.attention(*(x.double() for x in given), backend="tiled")
    assert (out - wide).abs().max() < 0.02


def test_queries_of_8_bits_in_a_graph() -> None:
    q, k, v = (torch.randn(2, h, 300, 64, device="cuda").to(FORMATS[0]) for h in (8, 2, 2))
    scale = torch.ones(2, 2, device="cuda")

    def call() -> Any:
        return flashtile.attention(q, k, v, q_descale=scale, k_descale=scale, v_descale=scale, causal=True)

    for _ in range(3):
        expected = call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    q.copy_(torch.randn(q.shape, device="cuda").to(FORMATS[0]))
    graph.replay()
    assert not torch.equal(out, expected)
    assert torch.equal(out, call())
