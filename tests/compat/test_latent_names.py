"""FlashMLA's, FlashInfer's and FlashAttention-3's names for latent attention."""

import math
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from flashtile import ArgumentError
from flashtile.compat import flash_attn_3, sgl_flash_attn, vllm_flash_attn
from flashtile.compat.flash_mla import flash_mla_with_kvcache, get_mla_metadata
from flashtile.compat.flashinfer import BatchMLAPagedAttentionWrapper

D, DV = 576, 512
SCALE = 192**-0.5


class Step(NamedTuple):
    """A step of decoding over pages of 64 rows."""

    q: Tensor  # [B, Sq, Hq, D]
    pages: Tensor  # [num_pages, 64, Hkv, D]
    table: Tensor
    lengths: Tensor

    def rows(self, b: int) -> Tensor:
        return self.pages[self.table[b].long()].flatten(0, 1)[: int(self.lengths[b])]  # [S, Hkv, D]


def step_of(
    lengths: tuple[int, ...], queries: int, heads: int, heads_kv: int, dtype: torch.dtype, device: str = "cpu"
) -> Step:
    """As FlashMLA's own test draws it: small clamped numbers, pages in any order, NaN behind the keys."""
    generator = torch.Generator(device).manual_seed(sum(lengths) + heads)
    columns = max(1, -(-max(lengths) // 64))
    table = torch.randperm(len(lengths) * columns, generator=generator, device=device).view(-1, columns).int()
    pages = torch.randn(table.numel(), 64, heads_kv, D, generator=generator, device=device, dtype=torch.float32)
    pages = (pages / 10).clamp(-1, 1)
    for row, n in zip(table.tolist(), lengths, strict=True):
        for column, page in enumerate(row):
            pages[page, max(0, min(64, n - 64 * column)) :] = math.nan
    q = torch.randn(len(lengths), queries, heads, D, generator=generator, device=device, dtype=torch.float32)
    return Step(
        q.clamp(-1, 1).to(dtype), pages.to(dtype), table, torch.tensor(lengths, dtype=torch.int32, device=device)
    )


def expected(step: Step, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """The formula in float64: `out [B, Sq, Hq, Dv]`, 0 where a row sees no key, and `lse [B, Hq, Sq]`, +inf there."""
    outs, lses = [], []
    for b in range(len(step.q)):
        group = step.q.shape[2] // step.pages.shape[2]
        rows = step.rows(b).double().repeat_interleave(group, 1)  # [S, Hq, D]
        s = torch.einsum("qhd,khd->hqk", step.q[b].double(), rows) * scale
        if causal:
            queries, keys = s.shape[1:]
            s = s.masked_fill(torch.ones(queries, keys, device=s.device).tril(keys - queries) == 0, -math.inf)
        lse = s.logsumexp(-1)
        p = (s - lse.masked_fill(lse == -math.inf, 0.0)[..., None]).exp()
        outs.append(torch.einsum("hqk,khd->qhd", p, rows[..., :DV]))
        lses.append(lse.masked_fill(lse == -math.inf, math.inf))
    return torch.stack(outs), torch.stack(lses)


def assert_close(x: Tensor, y: Tensor, absolute: float, relative: float, cosine: float | None = None) -> None:
    """FlashMLA's tolerances: each element by its absolute or its relative error, and the angle between all of them."""
    finite = y.isfinite()
    assert torch.equal(x[~finite].double(), y[~finite])
    x, y = x[finite].double(), y[finite]
    error = (x - y).abs()
    assert bool(((error <= absolute) | (error <= relative * y.abs())).all()), f"{error.max()}"
    if cosine is not None and y.numel():
        assert 1 - 2 * (x * y).sum() / (x.square() + y.square()).sum().clamp(min=1e-12) <= cosine or not y.any()


def assert_same(results: tuple[Tensor, Tensor], reference: tuple[Tensor, Tensor]) -> None:
    assert_close(results[0], reference[0], 8e-4, 2.01 / 128, 5e-6)
    assert_close(results[1], reference[1], 1e-6, 8.01 / 65536)


def decode(step: Step, causal: bool, metadata: Any = (), **more: Any) -> tuple[Tensor, Tensor]:
    return flash_mla_with_kvcache(
        step.q, step.pages, step.table, step.lengths, DV, *(metadata or get_mla_metadata()), causal=causal, **more
    )


# FlashMLA -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("heads", "heads_kv"), [(1, 1), (3, 1), (9, 3), (63, 1), (64, 2), (64, 8), (126, 1), (128, 1)])
def test_grid_of_flash_mla(heads: int, heads_kv: int) -> None:
    """Its numbers of heads, sequences without keys, one and two queries."""
    queries, causal = 1 + heads % 2, heads != 63
    step = step_of((70, 0, 1, 129), queries, heads, heads_kv, torch.bfloat16)
    assert_same(decode(step, causal, softmax_scale=SCALE), expected(step, causal, SCALE))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("heads_kv", [1, 2, 3, 8])
@pytest.mark.parametrize("heads", [1, 3, 9, 63, 64, 126, 128])
def test_grid_of_flash_mla_on_a_gpu(heads: int, heads_kv: int, dtype: torch.dtype) -> None:
    if heads % heads_kv:
        pytest.skip("key heads do not divide query heads")
    for lengths in ((4096,) * 8, (0, 1, 63, 64, 65, 1000, 4095, 777)):
        for queries, causal in ((1, False), (1, True), (2, True), (4, False)):
            step = step_of(lengths, queries, heads, heads_kv, dtype, "cuda")
            assert_same(decode(step, causal, softmax_scale=SCALE), expected(step, causal, SCALE))


def test_metadata_and_default_scale() -> None:
    """Metadata of older programs, whose arguments say something, is the same; the default scale is the original's."""
    step = step_of((5, 20), 1, 4, 1, torch.float32)
    metadata = get_mla_metadata(step.lengths, 4, 1, num_heads_q=4, is_fp8_kvcache=False, topk=None)
    assert metadata[1] is None
    out, lse = decode(step, True, metadata)
    assert_same((out, lse), expected(step, True, D**-0.5))
    assert torch.equal(out, decode(step, True)[0])


def test_sinks_of_flash_mla() -> None:
    step, sink = step_of((5, 0), 2, 3, 1, torch.float32), torch.tensor([0.5, -math.inf, math.inf])
    out, lse = decode(step, True, attn_sink=sink, softmax_scale=SCALE)
    plain, same = expected(step, True, SCALE)
    share = 1 / (1 + (sink.double()[:, None] - same).exp())
    share = share.masked_fill(same == math.inf, 0.0)
    torch.testing.assert_close(out.double(), plain * share.transpose(1, 2)[..., None], rtol=1e-5, atol=1e-6)
    assert_close(lse, same, 1e-6, 8.01 / 65536)


def bytes_of(pages: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of 656 bytes, with powers of two for scales as in FlashMLA's test, and the numbers that they stand for."""
    latent = pages[..., :DV].float().unflatten(-1, (4, 128))
    scale = 2.0 ** (latent.abs().nan_to_num().amax(-1) / 448).clamp(min=1e-4).log2().ceil()
    eight_bit = (latent / scale[..., None]).to(torch.float8_e4m3fn)
    numbers = (eight_bit.float() * scale[..., None]).flatten(-2)
    parts = eight_bit.flatten(-2), scale, pages[..., DV:].bfloat16()
    rows = torch.cat([x.contiguous().view(torch.uint8) for x in parts], -1)
    return rows, torch.cat((numbers, parts[2].float()), -1).to(pages.dtype)


def test_rows_of_656_bytes() -> None:
    step = step_of((70, 0, 129), 2, 4, 1, torch.bfloat16)
    rows, numbers = bytes_of(step.pages)
    assert rows.shape[-1] == 656
    out, lse = decode(step._replace(pages=rows), True, softmax_scale=SCALE, is_fp8_kvcache=True)
    assert_same((out, lse), expected(step._replace(pages=numbers), True, SCALE))
    for wrong in (rows[..., :-1], rows.float()):
        with pytest.raises(ArgumentError, match="656"):
            decode(step._replace(pages=wrong), True, is_fp8_kvcache=True)


@pytest.mark.parametrize("name", ["indices", "topk_length", "extra_k_cache", "block_table"])
def test_what_flash_mla_has_more(name: str) -> None:
    step = step_of((5,), 1, 1, 1, torch.float32)
    given = {
        "block_table": step.table,
        "cache_seqlens": step.lengths,
        "head_dim_v": DV,
        "tile_scheduler_metadata": None,
    }
    changed = None if name == "block_table" else step.lengths
    with pytest.raises(ArgumentError) as error:
        flash_mla_with_kvcache(step.q, step.pages, **given | {name: changed})
    assert error.value.argument == name


# FlashInfer -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("together", [False, True])
def test_wrapper_of_flashinfer(together: bool) -> None:
    step = step_of((70, 1, 129), 2, 4, 1, torch.float32)
    counts = -(-step.lengths // 64)
    indices = torch.cat([row[: int(n)] for row, n in zip(step.table, counts, strict=True)])
    offsets = torch.cat((counts.new_zeros(1), counts.cumsum(0))).int()
    wrapper = BatchMLAPagedAttentionWrapper(torch.empty(1))
    queries = torch.arange(0, 7, 2, dtype=torch.int32)
    wrapper.plan(
        queries, offsets, indices, step.lengths, 4, DV, D - DV, 64, True, SCALE, torch.float32, torch.float32
    )  # fmt: skip
    q, rows = step.q.flatten(0, 1), step.pages[:, :, 0]
    parts = [rows[..., :DV], rows[..., DV:]]
    parts = parts if together else [x.clone() for x in parts]
    out, lse = wrapper.run(q[..., :DV], q[..., DV:], *parts, return_lse=True)
    reference, natural = expected(step, True, SCALE)
    natural = natural.masked_fill(natural == math.inf, -math.inf).transpose(1, 2).flatten(0, 1)
    assert_close(out, reference.flatten(0, 1), 1e-6, 1e-5)
    assert_close(lse * math.log(2), natural, 1e-6, 1e-6)
    given = torch.empty_like(q[..., :DV]), torch.empty_like(lse)
    found = wrapper.run(q[..., :DV], q[..., DV:], *parts, *given, return_lse=True, return_lse_base_on_e=True)
    assert found[0] is given[0]
    assert torch.equal(given[0], out)
    assert_close(given[1], natural, 1e-6, 1e-6)


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("scales", [(0.5, 0.5), (0.5, 0.3), (None, 0.3)])
def test_eight_bits_in_the_wrapper_of_flashinfer(scales: tuple[float | None, float], together: bool) -> None:
    """With one scale, with one for each part, and with one for each 128 features."""
    step = step_of((70,), 1, 4, 1, torch.float32)
    eight_bit = step.pages.nan_to_num().to(torch.float8_e4m3fn)
    of_groups = torch.rand(*eight_bit.shape[:2], 4, generator=torch.Generator().manual_seed(0))
    factor = of_groups.repeat_interleave(128, -1)[:, :, None] if scales[0] is None else scales[0]
    numbers = torch.cat((eight_bit[..., :DV].float() * factor, eight_bit[..., DV:].float() * scales[1]), -1)
    wrapper = BatchMLAPagedAttentionWrapper(torch.empty(1))
    begins = torch.tensor([0, 2], dtype=torch.int32)
    wrapper.plan(
        begins // 2, begins, step.table.flatten(), step.lengths, 4, DV, D - DV, 64, True, SCALE, torch.float32,
        torch.float8_e4m3fn,
    )  # fmt: skip
    rows, q = eight_bit[:, :, 0], step.q.flatten(0, 1)
    parts = [rows[..., :DV], rows[..., DV:]]
    parts = parts if together else [x.clone() for x in parts]
    given: dict[str, Any] = {"ckv_scale": scales[0], "kpe_scale": scales[1]}
    given |= {"ckv_scale_arr": of_groups} if scales[0] is None else {}
    reference = expected(step._replace(pages=numbers), True, SCALE)[0]
    assert_close(wrapper.run(q[..., :DV], q[..., DV:], *parts, **given), reference.flatten(0, 1), 1e-6, 1e-5)
    wrong: tuple[dict[str, Any], ...] = ({"kpe_scale": None}, {"ckv_scale": 1.0, "ckv_scale_arr": of_groups})
    for more in (*wrong, {"o_scale": 1.0}, {"ckv_scale": None, "ckv_scale_arr": of_groups[..., :2]}):
        with pytest.raises(ArgumentError):
            wrapper.run(q[..., :DV], q[..., DV:], *parts, **given | more)


def test_what_the_wrapper_refuses() -> None:
    with pytest.raises(ArgumentError, match="before the first run"):
        BatchMLAPagedAttentionWrapper(torch.empty(1)).run(*[torch.zeros(1, 1, 8)] * 4)
    for refused in ({"use_cuda_graph": True}, {"backend": "cutlass"}):
        with pytest.raises(ArgumentError, match=next(iter(refused))):
            BatchMLAPagedAttentionWrapper(torch.empty(1), **refused)  # type: ignore[arg-type]


# FlashAttention-3, vLLM and SGLang ------------------------------------------------------------------------------------


def parts_of(step: Step) -> dict[str, Tensor]:
    """q, k_cache, v_cache and qv as these libraries take them."""
    q, pages = step.q, step.pages
    return {"q": q[..., DV:], "k": pages[..., DV:], "v": pages[..., :DV], "qv": q[..., :DV]}


def test_queries_of_values() -> None:
    step = step_of((64, 64), 2, 4, 1, torch.float32)
    reference = expected(step, True, D**-0.5)[0]
    p = parts_of(step)
    paged = {"cache_seqlens": step.lengths, "page_table": step.table, "causal": True}
    for function in (flash_attn_3.flash_attn_with_kvcache, sgl_flash_attn.flash_attn_with_kvcache):
        assert_close(function(p["q"], p["k"], p["v"], qv=p["qv"], **paged), reference, 1e-6, 1e-5)
    dense = {name: x[step.table[:, 0].long()] if name in "kv" else x for name, x in p.items()}
    assert_close(flash_attn_3.flash_attn_func(**dense, causal=True), reference, 1e-6, 1e-5)
    packed = {name: x.flatten(0, 1) for name, x in dense.items()}
    offsets = [torch.arange(3, dtype=torch.int32) * n for n in (2, 64)]
    call = {"cu_seqlens_q": offsets[0], "max_seqlen_q": 2, "max_seqlen_k": 64, "causal": True}
    varlen = flash_attn_3.flash_attn_varlen_func(**packed, cu_seqlens_k=offsets[1], **call)
    assert_close(varlen.unflatten(0, (2, 2)), reference, 1e-6, 1e-5)
    packed_q = {name: x.flatten(0, 1) if "q" in name else x for name, x in p.items()}
    qv = packed_q.pop("qv")
    used = {"seqused_k": step.lengths}
    out = vllm_flash_attn.flash_attn_varlen_func(**packed_q, q_v=qv, block_table=step.table, **used, **call)
    assert_close(out.unflatten(0, (2, 2)), reference, 1e-6, 1e-5)
    more = used | {"cu_seqlens_k": None, "page_table": step.table}
    out = sgl_flash_attn.flash_attn_varlen_func(**packed_q, qv=qv, **more, **call)
    assert_close(out.unflatten(0, (2, 2)), reference, 1e-6, 1e-5)
