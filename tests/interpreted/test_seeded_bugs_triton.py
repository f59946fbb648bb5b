"""Bugs planted in the Triton kernels: the contract's bounds notice each one in Triton's interpreter.

A bug is planted by changing the source from which the interpreter compiles a function under `triton.jit`.
"""

import functools
import importlib
import inspect
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from checking import dense_case, features
from forced import first, forced
from mistakes import with_mistake
from packing import packed_case, short_sequences

from flashtile.backend.triton import support
from flashtile.call.plan import Candidate
from flashtile.dispatch import fast_path
from flashtile.testing.case import Case
from flashtile.testing.moving import moving
from flashtile.testing.oracle import Expected, solve
from flashtile.testing.poison import poisoned_allocation
from flashtile.testing.tolerance import compare

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1")
KERNELS = "flashtile.backend.triton.kernels"


class Bug(NamedTuple):
    name: str
    function: str  # module and function below KERNELS
    old: str
    new: str
    call: str  # the one of CALLS that detects it


NEW_SUM = "dk_j = add_product(zeros(CONFIG.BLOCK_N, D, False),"

BUGS = (
    Bug("window: left off by one", "masking.key_bounds", "window_left), lower", "window_left + 1), lower", "window"),
    Bug("window: right off by one", "masking.row_bounds", "window_right), lower", "window_right - 1), lower", "window"),
    Bug("visible blocks taken for full", "masking.key_blocks", "first_row + shift + window", "hi + window", "causal"),
    Bug("chunk before all keys forgotten", "masking.first_of_chunk", "position < 0, -1", "position < 0, 0", "chunks"),
    Bug(
        "chunk one row longer", "masking.row_bounds", "window.attention_chunk - 1)", "window.attention_chunk)", "chunks"
    ),
    Bug("rows not in use computed", "sequences.work_tile", "seqused is not None", "False", "rows"),
    Bug("last block forgotten", "masking.to_blocks", "tl.cdiv(hi - origin, BLOCK)", "(hi - origin) // BLOCK", "causal"),
    Bug("mask ignored", "masking.mask_fill", "params.scores.mask.data is not None", "False", "mask"),
    Bug(
        "mask function ignored",
        "score_gradient.transposed_gradient",
        "params.scores.mask_mod is not None",
        "False",
        "mask function",
    ),
    Bug("mask function of the first head", "scores.visible_by_function", "info.head +", "", "mask function"),
    Bug("heads interleaved", "dkdv.dkdv_kernel", "head * group + g", "head + g * lengths.num_heads_k", "causal"),
    Bug("splits without weights", "combine.combine_splits", "tl.exp2((x - m) * LOG2E)", "1.0", "splits"),
    Bug("keys between splits forgotten", "forward.split_of", "tl.cdiv(count, SPLITS)", "count // SPLITS", "splits"),
    Bug("page off by one", "keys.load_pages", "kv.table + n,", "kv.table + n + 1,", "pages"),
    Bug("dropout words in another order", "rng.keep_mask", "<< (8 * n + 2 * w)", "<< (8 * n + 6 - 2 * w)", "dropout"),
    Bug("dropout not in dp", "score_gradient.score_gradient", "tl.where(keep, dp *", "tl.where(True, dp *", "dropout"),
    Bug("l not rescaled", "softmax.add_row_sums", "state.l, alpha,", "state.l, 1.0,", "causal"),
    Bug("sink not in l", "softmax.init", "l, tl.exp2(sink - m))", "l, 0.0)", "sinks"),
    Bug("compensation dropped", "products.add_scaled", "tl.fma(x.compensation, alpha, part)", "part", "long"),
    Bug("scale missing in dq", "dq.dq_kernel", "scaled(dq_i, scale, D)", "scaled(dq_i, 1.0, D)", "causal"),
    Bug("delta added", "score_gradient.score_gradient", "(dp - delta_i)", "(dp + delta_i)", "causal"),
    Bug("delta without dlse", "preprocess.row_statistics", "dlse.data is not None", "False", "causal"),
    Bug("softcap without derivative", "scores.backward", "params.scores.softcap is not None", "False", "softcap"),
    Bug("dslopes with the wrong sign", "dq.inner_loop", "-dslope, CONFIG", "dslope, CONFIG", "slopes"),
    Bug(
        "score_mod without derivative", "scores.unmodified", "params.scores.score_mod is not None", "False", "score_mod"
    ),
    Bug("score_mod of the first head", "scores.modify", "info.head + part.h0", "part.h0", "score_mod"),
    Bug("exact sums without a sign", "exact_sum.add", "-wide_high, wide_high", "wide_high, wide_high", "score_mod"),
    Bug("fused: splits forgotten", "fused.chunk_of_splits", "tl.range(0, splits)", "tl.range(0, 1)", "few rows"),
    Bug(
        "fused: keys between splits forgotten",
        "fused.split_of",
        "tl.cdiv(tl.cdiv(seqlen, BLOCK), splits)",
        "tl.cdiv(seqlen, BLOCK) // splits",
        "few rows",
    ),
    Bug(
        "fused: dq of a head's first block",
        "fused.store_row_gradient",
        "first, dq.stride_m",
        "given.offset_q, dq.stride_m",
        "few keys",
    ),
    Bug("fused: rows of the first sequence", "fused.load_row_block", "given.offset_q + start", "start", "packed tiles"),
    Bug("fused: dk of the last block", "fused.add_to_keys", "dk_j = add_product(dk_j,", NEW_SUM, "few keys"),
    Bug("fused: scale missing in dk", "fused.store_key_gradients", "scaled(dk_j, scale, D)", "dk_j", "few keys"),
    Bug("fused: slopes of the last split", "fused.store_slopes", "+ first + rows", "+ rows", "few rows"),
    Bug("equal positions taken for one term", "dcaptured.inner_loop", "if first == last", "if True", "score_mod"),
    Bug("tangents: sum not rescaled", "tangents.inner_loop", "u, alpha, tl.sum", "u, 1.0, tl.sum", "moving"),
    Bug("tangents: dv without p", "tangents.inner_loop", "p, load_v(dkv", "pds, load_v(dkv", "moving"),
    Bug("tangents: dlse forgotten", "tangents.along_row", "- dlse[:, None] * out.a", "", "moving"),
    Bug(
        "tangents: dk of q", "tangents.inner_loop", "dqk += inner_products(q_i", "dqk += inner_products(dq_i", "moving"
    ),
    Bug(
        "tangents: NaN of a hidden key",
        "tangents.inner_loop",
        "MASKED\n        or CONFIG.NATURAL",
        "CONFIG.NATURAL",
        "moving, NaN",
    ),
    Bug("tangents: dropout not in ds", "tangents.inner_loop", "tl.where(keep, pds, 0.0)", "pds", "moving, dropout"),
    Bug("tangents: no scale", "score_tangent.score_tangent", "(params.scores.factor * LN2 if", "(1.0 if", "moving"),
    Bug(
        "tangents: softcap",
        "score_tangent.score_tangent",
        "params.scores.softcap is not None",
        "False",
        "moving, softcap",
    ),
    Bug("tangents: slopes", "score_tangent.score_tangent", "ds -= dslope", "ds += dslope", "moving, slopes"),
    Bug("tangents: sink stands still", "tangents.init", "rows.l.total * dsink", "0.0", "moving, sinks"),
    Bug("tangents: table stands still", "score_tangent.score_tangent", "s.modified[2]", "0.0", "moving, score_mod"),
    Bug("tangents: splits", "combine_tangents.combine_splits", "- row_dlse * out_rows", "", "moving, splits"),
    Bug("tangents: dlse of splits", "combine_tangents.combine_splits", "weight * u", "u", "moving, splits"),
    Bug("tangents: score_mod", "score_tangent.score_tangent", "ds * s.modified[1]", "ds", "moving, score_mod"),
)


def with_cache(**options: Any) -> Case:
    """Three queries and 67 keys; `splits` of pages with 3 slots, or of a dense cache."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(1, 2, 3, 16, generator=generator)
    k, v = (torch.randn(1, 2, 67, 16, generator=generator) for _ in range(2))
    arguments: dict[str, Any] = {
        "q": q,
        "k_cache": k,
        "v_cache": v,
        "cache_seqlens": torch.tensor([67], dtype=torch.int32),
    }
    if options.pop("pages", False):
        order = torch.randperm(23, generator=generator)
        for name in ("k_cache", "v_cache"):
            rows = torch.nn.functional.pad(arguments[name], (0, 0, 0, 2))[0].transpose(0, 1)  # [69, H, D]
            arguments[name] = rows.unflatten(0, (23, 3))[order.argsort()].contiguous()
        arguments["page_table"] = order.int()[None]
    return Case("attention_with_kvcache", arguments | options, q, forward_only=True)


def few(rows: int, keys: int, **arguments: Any) -> Case:
    """A call of one head, differentiated by one kernel whose walk several programs share."""
    heads = {"batch": 1, "num_heads_q": 1, "num_heads_kv": 1}
    return dense_case(**heads, seqlen_q=rows, seqlen_k=keys, dtype=torch.float16, **arguments)


def long_sum() -> Case:
    """Sums of 129 blocks, each rounded down by half a unit in the last place."""
    case = dense_case(batch=1, num_heads_q=1, seqlen_q=1, seqlen_k=16 * 129, forward_only=True)
    v = torch.full_like(case.arguments["v"], (1 + 0.98 * 2.0**-14) / 16)
    v[:, :, 0] = 1024
    case.arguments |= {"k": torch.zeros_like(case.arguments["k"]), "v": v}
    return case


def nan_in_the_last_key() -> Case:
    """Of keys that the last row alone sees."""
    case = dense_case(batch=1, num_heads_q=1, causal=True, forward_only=True)
    case.arguments["k"][:, :, -1] = torch.nan
    return case


CALLS = {
    "causal": lambda: dense_case(batch=1, num_heads_q=4, num_heads_kv=2, seqlen_q=4, seqlen_k=34, causal=True),
    "window": lambda: dense_case(batch=1, num_heads_q=1, seqlen_q=5, seqlen_k=20, window=(9, 4)),
    "chunks": lambda: dense_case(batch=1, num_heads_q=1, seqlen_q=9, seqlen_k=7, attention_chunk=4),
    "rows": lambda: packed_case(seqused_q=torch.tensor([2, 0, 3, 5], dtype=torch.int32)),
    "mask": lambda: dense_case(batch=1, mask=torch.rand(1, 1, 7, 9) > 0.5),
    "mask function": lambda: dense_case(batch=1, **features()["mask function"]),
    "softcap": lambda: dense_case(batch=1, softcap=2.0),
    "slopes": lambda: dense_case(batch=1, alibi_slopes=torch.tensor([0.5, 0.1])),
    "sinks": lambda: dense_case(batch=1, sinks=torch.tensor([0.5, 1.0])),
    "dropout": lambda: dense_case(batch=1, num_heads_q=1, seqlen_k=9, dropout_p=0.4, dropout_seed=3),
    "score_mod": lambda: dense_case(batch=1, causal=True, score_mod=features()["score_mod"]["score_mod"]),
    "few rows": lambda: few(5, 70, alibi_slopes=torch.tensor([0.5])),
    "few keys": lambda: few(70, 5),
    "packed tiles": lambda: short_sequences([9, 3], [9, 3]),
    "splits": lambda: with_cache(num_splits=3),
    "pages": lambda: with_cache(pages=True),
    "long": long_sum,
}
CALLS |= {
    "moving": lambda: moving(CALLS["causal"]()),
    "moving, NaN": lambda: moving(nan_in_the_last_key()),
    "moving, dropout": lambda: moving(CALLS["dropout"]()),
    "moving, softcap": lambda: moving(CALLS["softcap"](), ("q",)),
    "moving, slopes": lambda: moving(CALLS["slopes"](), ("alibi_slopes",)),
    "moving, sinks": lambda: moving(CALLS["sinks"](), ("sinks",)),
    "moving, splits": lambda: moving(dense_case(batch=1, seqlen_q=4, seqlen_k=34, causal=True, num_splits=2)),
    "moving, score_mod": lambda: moving(CALLS["score_mod"]()),
}


@functools.cache
def call(name: str) -> tuple[Case, dict[str, Expected]]:
    case = CALLS[name]()
    return case, solve(case)


def wrong(name: str) -> list[str]:
    """The results of a call outside of their bounds."""
    case, expected = call(name)
    fast_path.forget()
    choice = shared_walk if name in ("few rows", "few keys") else first()
    if name == "packed tiles":
        choice = first(where=lambda tile: tile.fused is not None)
    with forced(support, backward=choice), poisoned_allocation():
        results = case.run("triton")
    fast_path.forget()
    return [str(x) for x in compare(results, case, expected) if not x.ok]


def shared_walk(found: list[Candidate]) -> Candidate:
    """One kernel for all gradients, whose walk two programs share."""
    way = first(where=lambda tile: tile.fused is not None and tile.fused.walk is not None)(found)
    return way._replace(tile=way.tile._replace(fused=way.tile.fused._replace(splits=2)))


@contextmanager
def planted(bug: Bug) -> Iterator[None]:
    module, name = bug.function.split(".")
    function = getattr(importlib.import_module(f"{KERNELS}.{module}"), name)
    if name.endswith("_kernel"):  # generated: it calls the function that the module defines
        function = function.fn.__globals__["body"]
    lines, first = inspect.getsourcelines(function.fn)
    changed = with_mistake("".join(lines), bug.name, bug.old, bug.new).splitlines(keepends=True)
    with mock.patch.object(inspect, "getsourcelines", return_value=(changed, first)):
        code = function.rewriter.rewrite_ast()
    with mock.patch.dict(function.rewritten_fn, {function.fn: code}):
        yield


@pytest.mark.parametrize("name", CALLS)
def test_nothing_is_wrong_without_a_bug(name: str) -> None:
    assert wrong(name) == []


@pytest.mark.parametrize("bug", BUGS, ids=[bug.name for bug in BUGS])
def test_bug_is_noticed(bug: Bug) -> None:
    with planted(bug):
        assert wrong(bug.call)
