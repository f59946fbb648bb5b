"""The contract on small shapes, with the Triton kernels in Triton's interpreter on CPU tensors.
`tests/backend/triton/test_interpreter.py` runs this in a process of its own: the interpreter is a mode of the process.

The interpreter's bf16 products are wrong; fp16 and fp32 stand for all.
"""

import gc
import itertools
import math
import os
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from checking import dense_case, offsets
from infinite import INF, NAN, infinite_case
from torch.multiprocessing.reductions import StorageWeakRef
from variants import VARIANTS

import flashtile
from flashtile.backend.gpu import replay
from flashtile.backend.triton.plan import candidates
from flashtile.backend.triton.tile_config import KernelConfig
from flashtile.dispatch import fast_path
from flashtile.testing.generate import random_case
from flashtile.testing.oracle import solve
from flashtile.testing.poison import poisoned_allocation
from flashtile.testing.tolerance import compare

pytestmark = [
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy's, of infinities that the contract allows
]
LENGTHS = (1, 15, 17, 33)
CHOSEN = (
    "hdim 64 causal", "hdim 96", "hdim 33/5", "fp32", "fp32 everything", "top left", "window",
    "softcap", "bias", "bias of heads and keys", "bias of sequences and rows", "one bias, negative scale", "mask",
    "slopes", "sinks", "dropout", "packed", "packed window", "packed, hdim 48 apart", "packed everything", "paged",
    "one query", "packed chunks, rows unused", "packed, three queries",
)  # fmt: skip


@pytest.mark.parametrize("name", CHOSEN)
def test_variants(name: str) -> None:
    variant = VARIANTS[name]
    variant = replace(variant, dtype=torch.float32 if variant.dtype is torch.float32 else torch.float16)
    variant = replace(variant, head_dim=min(variant.head_dim, 96))
    if "everything" in name:  # of one group, as everything takes long
        variant = replace(variant, heads=(2, 1))
    for seed in (1,) if variant.layout == "dense" else (0, 2):  # sequences of which some have rows and keys
        case = variant.case(seed, "cpu", LENGTHS)
        with poisoned_allocation():
            results = case.run("triton")
        wrong = [str(x) for x in compare(results, case, solve(case)) if not x.ok]
        assert not wrong, "\n".join([case.description, *wrong])


@pytest.mark.parametrize("name", ["bias", "bias of heads and keys", "bias of sequences and rows"])
def test_a_bias_that_is_loaded_once(name: str) -> None:
    """Its gradient keeps a tile of the bias, as on a Hopper GPU."""
    case = replace(VARIANTS[name], dtype=torch.float16).case(1, "cpu", LENGTHS)

    def tile(dq: KernelConfig, *_: object) -> KernelConfig:
        return dq._replace(num_stages=1, bias_once=True)

    with mock.patch.object(candidates, "dbias_tile", tile):
        results = case.run("triton")
    assert [str(x) for x in compare(results, case, solve(case)) if not x.ok] == []


@pytest.fixture
def maxima_of_a_gpu() -> Iterator[None]:
    """`max(x, NaN)` is x on a GPU, and NaN in Triton's interpreter."""
    from triton.runtime.interpreter import InterpreterBuilder

    def drop_nan(builder: InterpreterBuilder, x: object, y: object) -> object:
        return builder.binary_op(x, y, np.fmax)

    with mock.patch.object(InterpreterBuilder, "create_maxnumf", drop_nan):
        yield


@pytest.mark.usefixtures("maxima_of_a_gpu")
@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.parametrize("seqlen_k", [16, 67])
def test_rows_of_nan_and_infinities(seqlen_k: int, num_splits: int) -> None:
    case = infinite_case(seqlen_k, num_splits, "cpu")
    wrong = [str(x) for x in compare(case.run("triton"), case, solve(case)) if not x.ok]
    assert not wrong, "\n".join([case.description, *wrong])


def test_a_sink_of_infinity_takes_all_the_weight() -> None:
    case = dense_case(seqlen_q=5, seqlen_k=9, head_dim=16, sinks=torch.tensor([INF, 0.5]))
    results = case.run("triton")
    wrong = [str(x) for x in compare(results, case, solve(case)) if not x.ok]
    assert not wrong, "\n".join([case.description, *wrong])
    torch.testing.assert_close(results["dsinks"][0], case.dlse[:, 0].sum())


@pytest.mark.usefixtures("maxima_of_a_gpu")
@pytest.mark.parametrize("value", [INF, NAN])
@pytest.mark.parametrize("name", ["q", "k"])
def test_infinities_spread_as_in_the_oracle(name: str, value: float) -> None:
    """Also if dropout removes the only value with a weight."""
    case = dense_case(seqlen_q=3, dropout_p=0.5, dropout_seed=3, forward_only=True)
    case.arguments[name][0, 0, 1, 0] = value
    results, expected = case.run("triton"), case.run("reference")
    for key in ("out", "lse"):
        torch.testing.assert_close(results[key], expected[key], equal_nan=True)


@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(3, 0), (0, 3)])
def test_a_bias_without_elements(seqlen_q: int, seqlen_k: int) -> None:
    case = dense_case(seqlen_q=seqlen_q, seqlen_k=seqlen_k, bias=torch.zeros(1, 2, seqlen_q, seqlen_k))
    wrong = [str(x) for x in compare(case.run("triton"), case, solve(case)) if not x.ok]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("seed", range(10))
def test_caches(seed: int) -> None:
    """Dense caches and pages, appended and rotated tokens, packed queries, splits."""
    rng = random.Random(seed)
    case = random_case(seed, dtypes=(torch.float16, torch.float32), function="attention_with_kvcache")
    if max(case.arguments["q"].shape[-1], case.arguments["k_cache"].shape[-2]) > 160:
        pytest.skip("large")
    case.arguments["num_splits"] = rng.choice((None, 1, 3))
    expected = solve(case)
    wrong = [str(x) for x in compare(case.run("triton"), case, expected) if not x.ok]
    assert not wrong, "\n".join([case.description, *wrong])


def test_shards_count_from_where_they_lie() -> None:
    """Positions, windows, ALiBi and dropout of a part of a larger call, whose first key is anywhere in a counter."""
    from flashtile.api.explain import described_call
    from flashtile.dispatch.passes import entry_of
    from flashtile.dispatch.planner import plan_call

    q, k, v = (torch.randn(2, 2, n, 16) for n in (20, 37, 37))
    given = {"causal": True, "alibi_slopes": torch.rand(2), "dropout_p": 0.3, "dropout_seed": 9, "window": (30, 0)}
    for i0, j0 in ((0, 0), (3, 5), (17, 8)):
        results = []
        for backend in ("triton", "reference"):
            call = described_call(q, k, v, None, None, given | {"backend": backend})
            settings = call.settings._replace(b0=1, h0=2, i0=i0, j0=j0, diagonal=9, num_heads=7)
            chosen = plan_call(call._replace(settings=settings))
            results.append(entry_of(chosen.backend).forward(chosen, call._replace(settings=settings)))
        for x, y in zip(*results, strict=True):
            torch.testing.assert_close(x, y, atol=2e-6, rtol=2e-6)


def test_offsets_outside_the_tokens_are_keys_that_do_not_exist() -> None:
    q, k, v = (torch.randn(30, 2, 16) for _ in range(3))
    good, bad = offsets(10, 1, 19), torch.tensor([0, 10, 11, 1000], dtype=torch.int32)
    expected = flashtile.attention_varlen(q, k, v, good, good, backend="triton")
    with mock.patch("flashtile.call.device.host_readable", return_value=False):
        found = flashtile.attention_varlen(q, k, v, bad, bad, backend="triton")
    assert torch.equal(found, expected)


def test_derivatives_that_kernels_do_not_have() -> None:
    """Forward mode and second derivatives of a call that names this backend come from `tiled`."""
    q, k, v = (torch.randn(1, 2, 9, 8, requires_grad=True) for _ in range(3))
    found = []
    for backend in ("triton", "tiled"):

        def attend(q: torch.Tensor, backend: str = backend) -> torch.Tensor:
            return flashtile.attention(q, k, v, causal=True, backend=backend)

        _, tangent = torch.func.jvp(attend, (q.detach(),), (torch.ones_like(q),))
        (dq,) = torch.autograd.grad(attend(q).square().sum(), q, create_graph=True)
        found.append((tangent, dq, *torch.autograd.grad(dq.square().sum(), (q, k, v))))
    for x, y in zip(*found, strict=True):
        torch.testing.assert_close(x, y, atol=2e-5, rtol=2e-5)


def on_the_device() -> Any:
    """Lengths are not read, as on a GPU: what follows from a call's layout is kept."""
    return mock.patch("flashtile.call.device.host_readable", return_value=False)


def like(x: object) -> object:
    """Other values in the same memory layout; integers and booleans stay as they are."""
    if not isinstance(x, torch.Tensor) or not x.is_floating_point():
        return x
    memory = x.untyped_storage().clone()
    x.new_empty(0).set_(memory).mul_(0.7)  # type: ignore[call-overload]
    return x.new_empty(0).set_(memory, x.storage_offset(), x.shape, x.stride())  # type: ignore[call-overload]


REPEATED = (
    "hdim 64 causal", "fp32 everything", "bias of heads and keys", "mask", "sinks", "dropout",
    "packed everything", "packed chunks, rows unused", "paged",
)  # fmt: skip


@pytest.mark.parametrize("name", [*REPEATED, "cache 1", "cache 3", "cache 8"])
def test_a_call_like_one_before(name: str) -> None:
    """A recorded call is replayed for others and keeps none of its memory."""
    if name.startswith("cache"):
        dtypes = (torch.float32,)
        case = random_case(int(name[6:]), dtypes=dtypes, function="attention_with_kvcache")
        case.arguments["score_mod"] = None
    else:
        variant = replace(VARIANTS[name], dtype=torch.float32)
        case = replace(variant, head_dim=16, heads=(2, 1)).case(2, "cpu", (1, 17))  # two tiles
    other = replace(case, arguments={key: like(x) for key, x in case.arguments.items()})
    fast_path.forget()
    with on_the_device():
        memory = [StorageWeakRef(x.untyped_storage()) for _ in range(2) for x in case.run("triton").values()]
        gc.collect()
        assert all(x.expired() for x in memory)
        with mock.patch.object(replay, "Recorder", side_effect=AssertionError("not replayed")):
            found = other.run("triton")
    fast_path.forget()
    expected = other.run("triton")
    for key, x in expected.items():
        assert torch.equal(found[key].nan_to_num(), x.nan_to_num()), key


@pytest.mark.parametrize(
    ("kind", "rotary"),
    [
        *itertools.product(("dense", "rows", "pages", "packed"), (None, "in the cache")),
        *itertools.product(("dense", "packed", "rows of pages", "packed apart"), ("from a start",)),
    ],
)
def test_steps_of_a_decoding_are_written_down_once(kind: str, rotary: str | None) -> None:
    """As on a GPU, whose lengths the host does not read: steps that differ in lengths only share one recording."""
    fast_path.forget()
    table = torch.tensor([[2, 0], [3, 1]], dtype=torch.int32)
    options: dict[str, dict[str, Any]] = {
        "dense": {},
        "rows": {"cache_batch_idx": torch.tensor([3, 1], dtype=torch.int32)},
        "pages": {"page_table": table},
        "rows of pages": {"page_table": table.flip(0), "cache_batch_idx": torch.tensor([1, 0], dtype=torch.int32)},
        "packed": {"page_table": table, "cu_seqlens_q": offsets(2, 1)},
        "packed apart": {
            "page_table": table,
            "cu_seqlens_q": offsets(2, 1),
            "cu_seqlens_k_new": offsets(1, 2),
        },
    }
    given = options[kind]
    if rotary:
        angles = torch.rand(32, 4)
        given |= {"rotary_cos": angles.cos(), "rotary_sin": angles.sin()}
    if rotary == "from a start":
        given |= {"rotary_start": torch.tensor([3, 9], dtype=torch.int32), "rotary_q_fixed": kind == "packed"}
    shape = (4, 16, 1, 16) if "page_table" in given else (4, 1, 32, 16)
    caches = {name: torch.randn(shape) for name in ("k_cache", "v_cache")}
    others = {name: x.clone() for name, x in caches.items()}
    with on_the_device():
        for n in (0, 5, 11, 17):
            lengths = torch.tensor([4 + n, n], dtype=torch.int32)
            packed = "cu_seqlens_q" in given
            q, k, v = (torch.randn(3 if packed else 2, heads, 16) for heads in (2, 1, 1))
            q, k, v = (x if packed else x[:, :, None] for x in (q, k, v))
            more = {"k": k, "v": v, "cache_seqlens": lengths, "causal": True} | given
            found = flashtile.attention_with_kvcache(q, **caches, **more, backend="triton", num_splits=2)
            expected = flashtile.attention_with_kvcache(q, **others, **more, backend="reference")
            torch.testing.assert_close(found, expected)
            torch.testing.assert_close(caches, others)
    [recorded] = [
        entry
        for (call, *_), entry in fast_path.table.recent.items()
        if isinstance(entry, fast_path.Entry) and call[1].backend == "triton"
    ]
    assert recorded.forward.replay is not None


@pytest.mark.parametrize("packed", [False, True])
def test_tables_without_entries(packed: bool) -> None:
    """No page and no angle exists, and the lengths are not checked: nothing is read, written or turned."""
    pages = torch.randn(2, 3, 4, 1, 16)
    angles = torch.empty(0, 4)
    shape = (3, 2, 16) if packed else (2, 2, 1, 16)
    more = {"cu_seqlens_q": offsets(1, 1)} if packed else {}
    options = {"page_table": torch.empty(2, 0, dtype=torch.int32), "rotary_cos": angles, "rotary_sin": angles, **more}
    q, lengths = torch.randn(shape), torch.tensor([0, 7], dtype=torch.int32)
    k, v = torch.randn(2, *shape[:-2], 1, 16) if packed else torch.randn(2, 2, 1, 1, 16)
    before = pages.clone()
    with on_the_device():
        out = flashtile.attention_with_kvcache(
            q, pages[0], pages[1], k=k, v=v, cache_seqlens=lengths, **options, backend="triton"
        )
    assert not out.any()
    assert torch.equal(pages, before)


DQ_LAYOUTS = [((64, 32), 64), ((128,), 64), ((64,), 32)]  # chunks of columns, and a warpgroup's share


@pytest.mark.parametrize(("chunks", "share"), DQ_LAYOUTS)
def test_hopper_preprocess_and_postprocess(chunks: tuple[int, ...], share: int) -> None:
    """Preprocess and postprocess. All semaphores and sums of dq are cleared, whatever was in memory."""
    from flashtile.backend.hopper.kernels.postprocess import postprocess_kernel
    from flashtile.backend.hopper.kernels.preprocess import preprocess_kernel
    from flashtile.backend.hopper.tile_config import NUM_WARPGROUPS, HeadDim

    batch, heads, rows, width, block = 1, 2, 80, sum(chunks), 64
    natural = width == 128
    out, dout = (torch.randn(batch, heads, rows, width) for _ in range(2))
    lse, residual = torch.randn(2, batch, heads, rows)
    lse[0, 1, 3], residual[0, 1, 3] = -torch.inf, 0
    tiles = -(-rows // block)
    neg_lse, neg_delta, neg_residual = (torch.full((heads, tiles * block), torch.nan) for _ in range(3))
    dq_semaphore = torch.full((heads * tiles, NUM_WARPGROUPS), 7, dtype=torch.int32)
    counts = [torch.full((2,), 7, dtype=torch.int32) for _ in range(3)]  # of tiles: for one kernel each
    cleared = torch.full((heads * tiles * block, width), torch.nan)
    lengths = {"num_tiles": tiles, "num_heads": heads, "seqlen_q": rows, "batch": batch}
    lengths |= {"HEAD_DIM": HeadDim(chunks, min(chunks)), "ALIGN": 1, "BLOCK_M": block}
    strides = {
        f"stride_{name}_{dim}": n for name in ("out", "dout") for dim, n in zip("bhm", out.stride(), strict=False)
    }
    strides |= {"stride_lse_b": lse.stride(0), "stride_lse_h": lse.stride(1)}
    strides |= {f"stride_dlse_{dim}": None for dim in "bhm"}
    preprocess_kernel[(heads * tiles,)](
        out, dout, lse, residual if natural else None, None, neg_lse, neg_residual if natural else None, neg_delta,
        cleared, dq_semaphore, *counts, None, **strides, **lengths, columns=None, dq_parts=1,
    )  # fmt: skip
    assert not cleared.any()
    assert not dq_semaphore.any()
    assert [x.tolist() for x in counts] == [[0, 7]] * 3
    seen = lse[0].isfinite()
    expected = torch.where(seen, -(out * dout).sum(-1)[0], 0)
    torch.testing.assert_close(neg_delta[:, :rows], expected)
    unit = 1 if natural else math.log(2)
    torch.testing.assert_close(neg_lse[:, :rows], torch.where(seen, -lse[0] / unit, -torch.inf))
    assert (neg_lse[:, rows:] == -torch.inf).all()
    if natural:
        torch.testing.assert_close(neg_residual[:, :rows], -residual[0] / math.log(2))
        assert (neg_residual[:, rows:] == 0).all()
    assert (neg_delta[:, rows:] == 0).all()

    dq_accum = torch.randn(heads * tiles * block, width)
    dq_semaphore[1] = 4
    dq = torch.full_like(out, torch.nan)
    strides = {f"stride_dq_{dim}": n for dim, n in zip("bhm", dq.stride(), strict=False)}
    postprocess_kernel[(heads * tiles,)](
        swizzled(dq_accum, chunks, share), dq_semaphore, dq, None, **strides, **lengths, scale=0.5, columns=None,
        dq_parts=1, DQ_BOX=min(*chunks, share), DQ_SHARE=share,
    )  # fmt: skip
    expected = torch.zeros_like(dq)
    expected[0, 0, block:] = dq_accum[block:rows] * 0.5
    torch.testing.assert_close(dq, expected)


def swizzled(dq_accum: torch.Tensor, chunks: tuple[int, ...], share: int) -> torch.Tensor:
    """dq accumulators `[..., rows, D]` in the order that the Hopper kernel writes: swizzled in blocks of 64 rows and of
    a warpgroup's share of columns, or fewer where a chunk has no more.
    """
    return torch.cat([swizzled_chunk(x, share) for x in dq_accum.split(chunks, -1)], -1)


def swizzled_chunk(dq_accum: torch.Tensor, share: int) -> torch.Tensor:
    width = min(dq_accum.shape[-1], share)
    squares = dq_accum.unflatten(-1, (-1, width)).unflatten(-3, (-1, 64)).transpose(-3, -2)  # [..., R, C, 64, width]
    parts = squares.unflatten(-2, (4, 2, 4, 2)).unflatten(-1, (-1, 2, 4, 2))  # w h g2 g0 j2 j1 t e
    first = parts.dim() - 8
    order = [*range(first), *(first + n for n in (0, 2, 4, 1, 3, 6, 5, 7))]
    return parts.permute(order).reshape(squares.shape).transpose(-3, -2).reshape(dq_accum.shape)


@pytest.mark.parametrize(("chunks", "share"), DQ_LAYOUTS)
def test_hopper_postprocess_of_packed_rows(chunks: tuple[int, ...], share: int) -> None:
    """Sequence b begins with block `cu_seqlens_q[b] // BLOCK_M + b`; tokens outside all sequences are one more
    sequence.
    """
    from flashtile.backend.hopper.kernels.postprocess import postprocess_kernel
    from flashtile.backend.hopper.tile_config import NUM_WARPGROUPS, HeadDim

    cu_seqlens_q, tokens, heads, width, block = [0, 5, 5, 138, 142], 147, 2, sum(chunks), 64
    batch = len(cu_seqlens_q) - 1
    tiles = tokens // block + batch + 1
    lengths = {"num_tiles": tiles, "num_heads": heads, "seqlen_q": tokens, "batch": batch}
    lengths |= {"HEAD_DIM": HeadDim(chunks, min(chunks)), "ALIGN": 1, "BLOCK_M": block}
    dq_accum = torch.randn(heads, tiles * block, width)
    dq_semaphore = torch.ones(heads * tiles, NUM_WARPGROUPS, dtype=torch.int32)
    dq = torch.full((tokens, heads, width), torch.nan)
    strides = {"stride_dq_b": 0, "stride_dq_h": dq.stride(1), "stride_dq_m": dq.stride(0)}
    cu_tensor = torch.tensor(cu_seqlens_q, dtype=torch.int32)
    postprocess_kernel[(heads * tiles,)](
        swizzled(dq_accum, chunks, share),
        dq_semaphore,
        dq,
        cu_tensor,
        **strides,
        **lengths,
        scale=0.5,
        columns=None,
        dq_parts=1,
        DQ_BOX=min(*chunks, share),
        DQ_SHARE=share,
    )
    for b, (first, stop) in enumerate(itertools.pairwise([*cu_seqlens_q, tokens])):
        row = (first // block + b) * block
        expected = dq_accum[:, row : row + stop - first].transpose(0, 1) * 0.5
        torch.testing.assert_close(dq[first:stop], expected)


def test_a_cache_without_sequences() -> None:
    """There is no page table to read, and four tokens belong to no sequence."""
    q, k, v = (torch.randn(4, heads, 16) for heads in (2, 1, 1))
    caches = [torch.zeros(2, 1, 8, 16) for _ in range(2)]
    none = torch.zeros(0, dtype=torch.int32)
    given = {"k": k, "v": v, "cache_seqlens": none, "cu_seqlens_q": torch.zeros(1, dtype=torch.int32)}
    given |= {"cache_batch_idx": none}
    out, lse = flashtile.attention_with_kvcache(q, *caches, **given, backend="triton", return_lse=True)
    assert not out.any()
    assert (lse == -INF).all()
    assert not any(cache.any() for cache in caches)


@pytest.mark.parametrize("keys", [40, 33])
def test_a_bias_of_more_keys_than_pages_hold(keys: int) -> None:
    """Its gradient is 0 there, not what was in memory."""
    q, k = torch.randn(5, 2, 16, dtype=torch.float16), torch.randn(3, 16, 1, 16, dtype=torch.float16)
    bias = torch.randn(1, 2, 5, keys, dtype=torch.float16, requires_grad=True)
    lengths = {"seqused_k": torch.tensor([20]), "max_seqlen_q": 5, "max_seqlen_k": keys}
    offsets_q, table = torch.tensor([0, 5], dtype=torch.int32), torch.tensor([[2, 0]], dtype=torch.int32)
    with poisoned_allocation():
        out = flashtile.attention_varlen(
            q, k, k, offsets_q, offsets_q, page_table=table, bias=bias, backend="triton", **lengths
        )
        (found,) = torch.autograd.grad(out.float().sum(), bias)
    assert (found[..., :20] != 0).any()
    assert not found[..., 20:].any()
