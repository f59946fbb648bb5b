"""The Triton backend on a GPU: `pytest -m gpu tests/backend/triton/test_triton_gpu.py`."""

from collections.abc import Iterator
from functools import partial
from typing import Any
from unittest import mock

import large_terms
import pytest
import torch
from float32_cases import case_of
from forced import forced
from infinite import infinite_case
from variants import VARIANTS

import flashtile
from flashtile.backend.gpu.chips import memory_of
from flashtile.backend.triton import score_blocks, support
from flashtile.backend.triton.plan import candidates
from flashtile.call.device import describe_device
from flashtile.dispatch import fast_path
from flashtile.testing.case import Case
from flashtile.testing.oracle import solve
from flashtile.testing.poison import poisoned_allocation
from flashtile.testing.tolerance import compare

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]
PROBLEMS = 8  # of each variant


@pytest.mark.parametrize("name", VARIANTS)
def test_random_problems_are_within_the_bound(name: str) -> None:
    failures = []
    for seed in range(PROBLEMS):
        case = VARIANTS[name].case(seed, "cuda")
        with poisoned_allocation():
            results = {key: x.cpu() for key, x in case.run("triton").items()}
        failures += [f"{case.description}\n  {x}" for x in compare(results, case, solve(case)) if not x.ok]
    assert not failures, "\n".join(failures)


@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.parametrize("seqlen_k", [1, 64, 130])
def test_rows_of_nan_and_infinities(seqlen_k: int, num_splits: int) -> None:
    case = infinite_case(seqlen_k, num_splits, "cuda")
    results = {key: x.cpu() for key, x in case.run("triton").items()}
    wrong = [str(x) for x in compare(results, case, solve(case)) if not x.ok]
    assert not wrong, "\n".join(wrong)


def needs_memory_of(head_dim: int, dtype: torch.dtype) -> None:
    """Skip float32 gradients that the backend declines on chips of 99 KiB."""
    if dtype is torch.float32 and head_dim > 384 and memory_of(describe_device(torch.device("cuda"))) < 130:
        pytest.skip("declined on this chip")


@pytest.mark.parametrize(
    ("heads", "rows", "keys", "head_dim"),
    [((160, 80), 450, 517, 64), ((192, 192), 389, 256, 48), ((2, 2), 300, 1030, 512), ((8, 8), 300, 1100, 160)],
)
@pytest.mark.parametrize("values", ["normal", "equal", "infinite"])
def test_float32_products_of_parts(heads: tuple[int, int], rows: int, keys: int, head_dim: int, values: str) -> None:
    """On Hopper by kernels of backward, above 128 features by PyTorch. Checked on the first sequence's first heads:
    the others are there to fill the device.
    """
    needs_memory_of(head_dim, torch.float32)
    generator = torch.Generator("cuda").manual_seed(0)
    shapes = [(1, heads[n > 0], (rows, keys)[n > 0], head_dim) for n in range(3)]
    q, k, v = (torch.randn(shape, device="cuda", generator=generator) for shape in shapes)
    dout = torch.randn(q.shape, device="cuda", generator=generator)
    if values == "equal":  # all errors have one sign
        q, k, v, dout = (torch.full_like(x, 1 / 3) for x in (q, k, v, dout))
    elif values == "infinite":
        v[0, 0, 3, 5], v[0, 0, 7, 1], dout[0, 0, 5, 5] = torch.inf, torch.nan, -torch.inf
    case = Case("attention", {"q": q, "k": k, "v": v}, dout)
    with poisoned_allocation():
        results = {name: x.cpu() for name, x in case.run("triton").items()}
    group = heads[0] // heads[1]
    part = Case("attention", {"q": q[:, :group], "k": k[:, :1], "v": v[:, :1]}, dout[:, :group])
    first = {name: x[:, : 1 if name in ("dk", "dv") else group] for name, x in results.items()}
    assert [str(x) for x in compare(first, part) if not x.ok] == []


WIDE = {  # B, Hq, Hkv, Sq, Sk, D, Dv, and options
    "groups": ((1, 4, 2, 300, 333, 512, 512), {"causal": True}),
    "more rows than keys": ((1, 4, 1, 450, 300, 512, 512), {"causal": True, "transposed": True, "values": "outliers"}),
    "window": ((1, 2, 1, 600, 600, 320, 512), {"window": (130, 10), "values": "equal"}),
    "chunks": ((1, 2, 1, 500, 520, 384, 384), {"attention_chunk": 100, "causal": True}),
    "padding": ((1, 2, 1, 260, 300, 512, 512), {"mask": torch.arange(300) > 37, "causal": True}),
    "sinks": ((1, 4, 2, 200, 260, 512, 264), {"mask": torch.arange(260) % 3 > 0, "sinks": torch.ones(4)}),
    "bias": ((1, 2, 1, 200, 264, 512, 512), {"softcap": 3.0, "bias": torch.arange(264) % 7 * 0.3, "window": (150, 9)}),
    "dropout": (
        (1, 4, 2, 200, 264, 512, 512),
        {"alibi_slopes": torch.ones(4), "dropout_p": 0.2, "dropout_seed": 5},
    ),
    "infinite": ((2, 4, 2, 300, 300, 512, 512), {"values": "infinite", "causal": True}),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", WIDE)
def test_pytorch_multiplies_wide_heads(name: str, dtype: torch.dtype) -> None:
    """In blocks of few scores, whose rows see a part of the keys."""
    sizes, options = WIDE[name]
    needs_memory_of(max(sizes[5:]), dtype)
    given = case_of(sizes, **options)
    pairs = {x: y.expand(1, 1, 1, -1) for x in ("mask", "bias") if (y := given.arguments.get(x)) is not None}
    tensors = {x: y.cuda() for x, y in (given.arguments | pairs).items() if isinstance(y, torch.Tensor)}
    tensors |= {x: tensors[x].to(dtype) for x in ("q", "k", "v", "bias") if x in tensors}
    assert given.dout is not None
    assert given.dlse is not None
    case = Case("attention", given.arguments | tensors, given.dout.to(dtype).cuda(), given.dlse.cuda())
    score_blocks.blocks_of.cache_clear()
    fast_path.forget()
    with (
        mock.patch.object(candidates, "multiplies", return_value=True),
        forced(support),
        mock.patch.multiple(score_blocks, SCORES=2**16, BLOCK_COST=0, KEY_COST=0),
        poisoned_allocation(),
    ):
        results = {x: y.cpu() for x, y in case.run("triton").items()}
    score_blocks.blocks_of.cache_clear()
    fast_path.forget()
    assert [str(x) for x in compare(results, case, solve(case)) if not x.ok] == []


def test_there_are_few_variants() -> None:
    assert len(VARIANTS) <= 45  # each is compiled for each architecture: a new one should replace another


def test_repeats_are_bitwise_equal() -> None:
    for name in ("hdim 128 causal, grouped heads", "everything", "packed"):
        case = VARIANTS[name].case(3, "cuda")
        first = case.run("triton")
        for _ in range(50):
            again = case.run("triton")
            assert all(torch.equal(first[key].nan_to_num(), again[key].nan_to_num()) for key in first), name


def dense(batch: int, heads: int, seqlen: int, head_dim: int = 64, **options: Any) -> list[torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(0)
    shape = (batch, heads, seqlen, head_dim)
    return [torch.randn(shape, device="cuda", dtype=torch.bfloat16, generator=generator, **options) for _ in range(3)]


def close(x: torch.Tensor, y: torch.Tensor) -> None:
    torch.testing.assert_close(x.float(), y.float(), atol=2e-2, rtol=2e-2)


def test_auto_takes_triton() -> None:
    q, k, v = dense(1, 1, 40)
    assert flashtile.explain(q, k, v).backend == "triton"
    assert torch.equal(flashtile.attention(q, k, v), flashtile.attention(q, k, v, backend="triton"))


@pytest.fixture
def roomy() -> Iterator[None]:
    if torch.cuda.mem_get_info()[0] < 60 * 2**30:
        pytest.skip("needs 60 GiB of GPU memory")
    yield
    torch.cuda.empty_cache()


def test_more_elements_than_32_bits_count(roomy: None) -> None:
    """The last sequence lies past element 2**31 of q, k, v, out and every gradient."""
    batch, heads, seqlen = 35, 32, 32768
    q, k, v = (torch.zeros(batch, heads, seqlen, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    assert q[-1].storage_offset() > 2**31
    small = dense(1, heads, seqlen)
    for x, y in zip((q, k, v), small, strict=True):
        x[-1] = y[0]
    part = [x[-1:].requires_grad_() for x in (q, k, v)]
    # Rows see few keys: the sizes matter here, not the work.
    whole = flashtile.attention(q, k, v, window=(64, 0))
    close(whole[-1:], flashtile.attention(*small, window=(64, 0)))
    out = flashtile.attention(*part, window=(64, 0))
    gradients = torch.autograd.grad(out.float().square().sum(), part)
    leaves = [x.requires_grad_() for x in small]
    expected = torch.autograd.grad(flashtile.attention(*leaves, window=(64, 0)).float().square().sum(), leaves)
    for x, y in zip(gradients, expected, strict=True):
        close(x, y)


def test_strides_past_32_bits(roomy: None) -> None:
    """Rows 2**29 elements apart, so that offsets within a tile pass 2**31."""
    buffer = torch.zeros(8 * 2**29, device="cuda", dtype=torch.bfloat16)
    values = dense(1, 1, 8)
    far = [buffer[64 * n :].as_strided((1, 1, 8, 64), (8 * 2**29, 8 * 2**29, 2**29, 1)) for n in range(3)]
    for x, y in zip(far, values, strict=True):
        x.copy_(y)
    leaves, near = [x.detach().requires_grad_() for x in far], [x.requires_grad_() for x in values]
    out, expected = flashtile.attention(*leaves, causal=True), flashtile.attention(*near, causal=True)
    close(out, expected)
    for x, y in zip(
        torch.autograd.grad(out.float().square().sum(), leaves),
        torch.autograd.grad(expected.float().square().sum(), near),
        strict=True,
    ):
        close(x, y)


def test_cotangents_with_any_strides() -> None:
    """Stride 0 everywhere, as `.sum().backward()` makes it, and every second feature of a larger tensor."""
    q, k, v = (x.requires_grad_() for x in dense(2, 4, 130))
    out = flashtile.attention(q, k, v, causal=True)
    ones = torch.ones((), device="cuda", dtype=torch.bfloat16).expand(out.shape)
    wide = torch.randn(2, 4, 130, 128, device="cuda", dtype=torch.bfloat16)
    for dout in (ones, wide[..., ::2]):
        found = torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)
        expected = torch.autograd.grad(out, (q, k, v), dout.contiguous(), retain_graph=True)
        assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))


def test_forward_and_backward_in_a_captured_graph() -> None:
    q, k, v = (x.requires_grad_() for x in dense(2, 4, 130))
    dout = torch.randn_like(q)

    def step() -> list[torch.Tensor]:
        out = flashtile.attention(q, k, v, causal=True)
        return [out, *torch.autograd.grad(out, (q, k, v), dout)]

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        for x in (q, k, v, dout):
            x.normal_()
    graph.replay()
    for x, y in zip(captured, step(), strict=True):
        assert torch.equal(x, y)


def test_a_growing_cache_does_not_recompile() -> None:
    from flashtile.backend.triton.kernels.forward import forward_kernel

    def compiled() -> int:
        return sum(len(caches[0]) for caches in forward_kernel.device_caches.values())

    q = dense(1, 8, 1)[0]
    k, v = (torch.randn(1, 2, 1100, 64, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    flashtile.attention(q, k[:, :, :520].contiguous(), v[:, :, :520].contiguous())
    before = compiled()
    for n in (521, 544, 600, 777, 1000):
        flashtile.attention(q, k[:, :, :n].contiguous(), v[:, :, :n].contiguous())
    assert compiled() == before


@torch.no_grad()
def test_a_fixed_split_makes_rows_independent_of_their_batch() -> None:
    """`num_splits` given: a sequence's bits are the same alone and among others, whatever their lengths."""
    q = torch.randn(9, 8, 1, 128, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(9, 2, 700, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    lengths = torch.tensor([700, 1, 64, 65, 300, 512, 0, 699, 128], dtype=torch.int32, device="cuda")
    for num_splits in (1, 3, 5):

        def run(chosen: slice, splits: int = num_splits) -> torch.Tensor:
            given = (x[chosen].clone() for x in (q, k, v))
            return flashtile.attention_with_kvcache(*given, cache_seqlens=lengths[chosen], num_splits=splits)

        together = run(slice(0, 9))
        for n in range(9):
            assert torch.equal(run(slice(n, n + 1))[0], together[n])


DECODED = {  # batch, query and key heads, queries, keys, width: those that have tiles or splits of their own
    "alone on a core": (1, 14, 2, 1, 1100, 64),
    "several of a core": (16, 12, 12, 1, 300, 64),
    "two chunks": (8, 10, 10, 1, 333, 80),
    "larger blocks": (2, 32, 8, 1, 1500, 128),
    "two tiles of a group": (3, 71, 1, 1, 700, 64),
    "wide": (2, 8, 4, 1, 900, 256),
    "speculative": (8, 32, 8, 5, 900, 128),
    "speculative, alone": (1, 32, 8, 8, 3000, 128),
}


@torch.no_grad()
@pytest.mark.parametrize("page_size", [None, 16, 64, 128])
@pytest.mark.parametrize("name", DECODED)
def test_decoding_is_right_and_repeats(name: str, page_size: int | None) -> None:
    """Dense caches and pages of any order, all lengths, what is not in use poisoned."""
    batch, heads, heads_kv, rows, keys, width = DECODED[name]
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v = (
        torch.randn(batch, h, n, width, device="cuda", dtype=torch.bfloat16, generator=generator)
        for h, n in ((heads, rows), (heads_kv, keys), (heads_kv, keys))
    )
    lengths = torch.tensor([keys - 97 * b % (keys - rows) for b in range(batch)], dtype=torch.int32, device="cuda")
    unused = (torch.arange(keys, device="cuda") >= lengths[:, None])[:, None, :, None]
    expected = fp64_decoding(q, k, v, lengths)
    caches, table = [x.masked_fill(unused, torch.nan) for x in (k, v)], None
    if page_size is not None:
        pages = -(-keys // page_size)
        table = torch.randperm(batch * pages, device="cuda", generator=generator).view(batch, pages)
        caches = [in_pages(x, table, page_size) for x in caches]
    step = partial(
        flashtile.attention_with_kvcache, q, *caches, cache_seqlens=lengths, causal=True, return_lse=True,
        page_table=None if table is None else table.int(), backend="triton",
    )  # fmt: skip
    for num_splits in (None, 1, 2, 7, 16, 33):
        out, lse = step(num_splits=num_splits)
        torch.testing.assert_close(out.double(), expected[0], rtol=2e-2, atol=2e-2)
        torch.testing.assert_close(lse.double(), expected[1], rtol=1e-4, atol=1e-4)
        for _ in range(20):
            again = step(num_splits=num_splits)
            assert torch.equal(again[0], out)
            assert torch.equal(again[1], lse)


def fp64_decoding(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: torch.Tensor) -> tuple[Any, Any]:
    k, v = (x.double().repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    last = torch.arange(q.shape[2], device="cuda")[:, None] + (lengths.view(-1, 1, 1, 1) - q.shape[2])
    s = q.double() @ k.mT * q.shape[-1] ** -0.5
    s = s.masked_fill(torch.arange(k.shape[2], device="cuda") > last, -torch.inf)
    return torch.softmax(s, -1) @ v, torch.logsumexp(s, -1)


def in_pages(x: torch.Tensor, table: torch.Tensor, page_size: int) -> torch.Tensor:
    """Pages `[num_pages, page_size, H, D]` of `x [B, H, S, D]`, in the table's order, with NaN after the last key."""
    rows = torch.nn.functional.pad(x, (0, 0, 0, table.shape[1] * page_size - x.shape[2]), value=torch.nan)
    pages = rows.unflatten(2, (table.shape[1], page_size)).permute(0, 2, 3, 1, 4)
    found = torch.empty_like(pages.flatten(0, 1), memory_format=torch.contiguous_format)
    found[table.flatten()] = pages.flatten(0, 1)
    return found


@torch.no_grad()
def test_split_steps_run_side_by_side() -> None:
    """Two graphs and two streams at once: none counts the splits of another."""
    steps = []
    for n in (3000, 5000):
        q = torch.randn(1, 8, 1, 128, device="cuda", dtype=torch.bfloat16)
        k, v = (torch.randn(1, 2, n, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        lengths = torch.tensor([n], dtype=torch.int32, device="cuda")
        steps.append(partial(flashtile.attention_with_kvcache, q, k, v, cache_seqlens=lengths, num_splits=7))
    expected = [step() for step in steps]
    torch.cuda.synchronize()
    graphs, streams, found = [], [torch.cuda.Stream() for _ in range(4)], []
    for step in steps:
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1]):
            found.append([step() for _ in range(20)])
    for _ in range(20):
        for graph, stream in zip(graphs, streams[:2], strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        for step, stream, y in zip(steps, streams[2:], expected, strict=True):
            with torch.cuda.stream(stream):
                assert torch.equal(step(), y)
    torch.cuda.synchronize()
    assert all(torch.equal(x, y) for xs, y in zip(found, expected, strict=True) for x in xs)


@torch.no_grad()
def test_splits_agree_to_rounding() -> None:
    q = torch.randn(2, 8, 3, 64, device="cuda")
    k, v = (torch.randn(2, 2, 900, 64, device="cuda") for _ in range(2))
    lengths = torch.tensor([900, 431], dtype=torch.int32, device="cuda")
    given = {"cache_seqlens": lengths, "causal": True, "sinks": torch.randn(8, device="cuda"), "return_lse": True}
    expected = flashtile.attention_with_kvcache(q, k, v, **given, num_splits=1)
    for num_splits in (None, 2, 7, 32):
        found = flashtile.attention_with_kvcache(q, k, v, **given, num_splits=num_splits)
        for x, y in zip(found, expected, strict=True):
            torch.testing.assert_close(x, y, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_table_entries_outside_the_pages_hold_no_keys() -> None:
    q = torch.randn(2, 4, 1, 64, device="cuda")
    k, v = (torch.randn(6, 16, 2, 64, device="cuda") for _ in range(2))
    lengths = torch.tensor([48, 40], dtype=torch.int32, device="cuda")
    table = torch.tensor([[0, 1, 2], [3, 4, 5]], dtype=torch.int32, device="cuda")
    bad = torch.tensor([[0, 1, 2], [3, 2**31 - 1, -7]], dtype=torch.int32, device="cuda")
    expected = flashtile.attention_with_kvcache(q, k, v, cache_seqlens=lengths, page_table=table)
    found = flashtile.attention_with_kvcache(q, k, v, cache_seqlens=lengths, page_table=bad)
    assert torch.equal(found[0], expected[0])
    fewer = torch.tensor([48, 16], dtype=torch.int32, device="cuda")
    torch.testing.assert_close(
        found[1], flashtile.attention_with_kvcache(q, k, v, cache_seqlens=fewer, page_table=table)[1]
    )


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU")
def test_the_second_gpu_while_the_first_is_current() -> None:
    given = [x.to("cuda:1").requires_grad_() for x in dense(1, 2, 300)]
    here = [x.detach().to("cuda:0").requires_grad_() for x in given]
    with torch.cuda.device(0):
        out = flashtile.attention(*given, causal=True, backend="triton")
        gradients = torch.autograd.grad(out.float().sum(), given)
    assert out.device == given[0].device
    expected = flashtile.attention(*here, causal=True, backend="triton")
    assert torch.equal(out.cpu(), expected.cpu())
    for x, y in zip(gradients, torch.autograd.grad(expected.float().sum(), here), strict=True):
        assert torch.equal(x.cpu(), y.cpu())


def test_one_problem_from_each_end() -> None:
    """Shapes that broke other libraries: Sq > Sk, one token, zero lengths between long ones."""
    offsets_q = torch.tensor([0, 0, 300, 300, 301, 430], dtype=torch.int32)
    offsets_k = torch.tensor([0, 7, 7, 200, 201, 220], dtype=torch.int32)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(n, 2, 64, generator=generator).bfloat16().cuda() for n in (430, 220, 220))
    arguments = {"q": q, "k": k, "v": v, "cu_seqlens_q": offsets_q.cuda(), "cu_seqlens_k": offsets_k.cuda()}
    dout, dlse = torch.randn(430, 2, 64).bfloat16().cuda(), torch.randn(2, 430).cuda()
    case = Case("attention_varlen", arguments | {"causal": True}, dout, dlse)
    with poisoned_allocation():
        results = {key: x.cpu() for key, x in case.run("triton").items()}
    worst = compare(results, case, solve(case))[0]
    assert worst.ok, worst


@pytest.mark.parametrize("term", large_terms.TERMS)
@pytest.mark.parametrize(("form", "rows"), [("bias", 5), ("bias", 300), ("score_mod", 300), ("split", 5)])
def test_a_large_term_in_all_scores_of_rows(form: str, rows: int, term: float) -> None:
    given = [x.cuda() for x in large_terms.inputs(term, rows, keys=600)]
    for backend in ("triton", "triton", "triton", "tiled"):  # repeated calls are replays
        assert large_terms.failures(form, backend, *given) == []
