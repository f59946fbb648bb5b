"""attention_with_kvcache: what it computes, what it writes, and that it writes and plans nothing else."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from cached import (
    NAN,
    Arguments,
    angles,
    appended,
    as_packed,
    as_tokens,
    assert_right,
    problem,
    run,
    same_bits,
    slots,
    tokens_of,
    turned,
)
from checking import assert_right as oracle_right
from checking import changed_during_calls, features, lengths_on_the_device, tile_size
from hypothesis import assume, given
from hypothesis import strategies as st
from no_reads import NoReads
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.library import opcheck

import flashtile
from flashtile import ArgumentError, AttentionError
from flashtile.testing.case import Case
from flashtile.testing.eight_bit import with_eight_bits
from flashtile.testing.generate import random_case
from flashtile.testing.oracle import solve
from flashtile.testing.poison import with_guard_bands

CACHES = ("k_cache", "v_cache")


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


# What it computes -----------------------------------------------------------------------------------------------------


@given(seed=st.integers(0, 2**32 - 1))
def test_random_calls(seed: int) -> None:
    """Results and caches against the fp64 oracle; whatever is not to be read is NaN."""
    with tile_size(16, 48):
        oracle_right(random_case(seed, function="attention_with_kvcache"))


@given(seed=st.integers(0, 2**32 - 1))
def test_random_calls_with_lengths_on_the_device(seed: int) -> None:
    """The way of a GPU, where nothing is read back."""
    with lengths_on_the_device(), tile_size(16, 48):
        oracle_right(random_case(seed, function="attention_with_kvcache"))


@given(seed=st.integers(0, 2**32 - 1))
def test_the_oracle_is_the_contract_sequence_by_sequence(seed: int) -> None:
    """Two ways to write down what has to come out: the oracle's, and that of `cached`, as a packed call."""
    case = random_case(seed, function="attention_with_kvcache")
    assume(case.arguments["k_cache"].dtype is case.dtype)  # `test_eight_bit` has others
    expected = solve(case)
    k_cache, v_cache, _ = appended(case.arguments)
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        torch.testing.assert_close(expected[name].reference, cache.double(), equal_nan=True)
    packed = solve(as_packed(case.arguments, k_cache, v_cache))
    used = packed["out"].reference.shape[0]
    out, lse = tokens_of(expected["out"].reference), expected["lse"].reference
    lse = lse if lse.dim() == 2 else lse.transpose(0, 1).flatten(1)  # [H, T]
    torch.testing.assert_close(out[:used], packed["out"].reference, equal_nan=True)
    torch.testing.assert_close(lse[:, :used], packed["lse"].reference, equal_nan=True)
    assert not out[used:].any()
    assert (lse[:, used:] == -torch.inf).all()


@pytest.mark.parametrize("page_size", [None, 1, 2, 3, 5, 12, 64])
@pytest.mark.parametrize("held", [(0, 0, 0), (10, 10, 10), (4, 0, 9)], ids=["empty", "full", "mixed"])
def test_page_sizes_and_lengths(held: tuple[int, ...], page_size: int | None) -> None:
    """New keys fill the cache to its end, start it, or cross from page to page."""
    cos, sin = angles(12, 6)
    assert_right(problem(held=held, page_size=page_size, causal=True, rotary_cos=cos, rotary_sin=sin))


@pytest.mark.parametrize("page_size", [None, 3])
@pytest.mark.parametrize("name", features())
def test_every_score_feature(name: str, page_size: int | None) -> None:
    """Masks and biases are those of `[B, H, Sq, S_max]`, positions those of the cache."""
    arguments = features()[name] | {"seed": 3}
    arguments.pop("num_heads_kv", None)
    sizes: Arguments = {"held": (5, 2), "new": 7, "heads": (2, 1), "capacity": 9 if name == "bias" else 12}
    for pairwise in ("mask", "bias"):
        if isinstance(arguments.get(pairwise), torch.Tensor):
            arguments[pairwise] = torch.nn.functional.pad(arguments[pairwise], (0, 3))
            sizes["capacity"] = 12
    assert_right(problem(**sizes, page_size=page_size, **arguments))


@pytest.mark.parametrize("rows", [(2, 0, 1), (4, 1, 3), (0, 3, 2)])
def test_cache_batch_idx(rows: tuple[int, ...]) -> None:
    """Rows in any order; those of no sequence stay as they are, whatever they hold."""
    arguments = problem(cache_batch_idx=int32(*rows))
    step = assert_right(arguments)
    moved = dict(arguments)
    del moved["cache_batch_idx"]
    for name in CACHES:
        moved[name] = arguments[name][list(rows)]
    expected = run(moved)
    assert torch.equal(step.out, expected.out)
    assert same_bits(step.k_cache[list(rows)], expected.k_cache)


def test_two_sequences_may_read_one_row() -> None:
    """Without new keys nothing is written, so a common beginning is shared."""
    arguments = problem(held=(3, 8), new=None, queries=2)
    arguments |= {"cache_batch_idx": int32(1, 1), "cache_seqlens": int32(3, 8)}
    assert_right(arguments)


@pytest.mark.parametrize("page_size", [None, 4])
def test_leftpad_is_a_mask_of_the_first_keys(page_size: int | None) -> None:
    """They are no keys, but positions: causal, ALiBi and bias stay where they are."""
    pad = int32(2, 0, 8)
    features = {"causal": True, "alibi_slopes": torch.rand(4), "bias": torch.randn(1, 4, 2, 12)}
    arguments = problem(page_size=page_size, leftpad_k=pad, **features)
    step = assert_right(arguments)
    masked = problem(page_size=page_size, mask=torch.arange(12) >= pad[:, None, None, None], **features)
    torch.testing.assert_close(step.out, run(masked).out)


def test_rows_that_see_nothing() -> None:
    """All of a sequence is padding, or the window ends before its first key, or there is no key."""
    arguments = problem(held=(3, 0, 8), new=None, leftpad_k=int32(3, 0, 0), sinks=torch.ones(4))
    step = assert_right(arguments)
    assert not step.out[:2].any()
    assert (step.lse[:2] == 1).all()
    del arguments["sinks"]
    assert (assert_right(arguments).lse[:2] == -torch.inf).all()


@pytest.mark.parametrize("num_splits", [1, 2, 5, 10**9])
def test_num_splits(num_splits: int) -> None:
    arguments = problem(held=(30, 5), capacity=40)
    expected, found = run(arguments), run(arguments, num_splits=num_splits)
    torch.testing.assert_close(found, expected, equal_nan=True)


@pytest.mark.parametrize("page_size", [None, 2])
@pytest.mark.parametrize("appends", [False, True])
def test_packed_queries_are_a_loop_of_calls(appends: bool, page_size: int | None) -> None:
    """Sequences with no new token among them; each call alone is dense with a batch of one."""
    queries, held = (2, 0, 3, 1, 0), (4, 6, 0, 9, 0)
    cos, sin = angles(16, 8)
    features = {"causal": True, "softcap": 3.0, "rotary_cos": cos, "rotary_sin": sin}
    sizes: Arguments = {"held": held, "new": queries if appends else None, "queries": queries, "capacity": 16}
    if not appends:
        sizes["held"] = (4, 6, 3, 9, 0)  # queries are the last tokens, so there are as many keys
    arguments = problem(**sizes, page_size=page_size, **features)
    step = assert_right(arguments)
    cu = arguments["cu_seqlens_q"].tolist()
    for b in range(len(queries)):
        rows = slice(cu[b], cu[b + 1])
        alone = {n: x[rows].transpose(0, 1)[None] for n, x in arguments.items() if n in ("q", "k", "v")}
        alone |= {"cache_seqlens": arguments["cache_seqlens"][b : b + 1]} | features
        alone |= {name: arguments[name] for name in CACHES}
        alone |= {"page_table": arguments["page_table"][b : b + 1]} if page_size else {"cache_batch_idx": int32(b)}
        one = run(alone)
        torch.testing.assert_close(step.out[rows], one.out[0].transpose(0, 1))
        torch.testing.assert_close(step.lse[:, rows], one.lse[0])


@pytest.mark.parametrize("change", ["int64", "no appended tokens", "no sequences", "inference mode", "no lse"])
def test_forms_of_a_call(change: str) -> None:
    arguments = problem(page_size=3, causal=True)
    expected = run(arguments)
    if change == "int64":
        for name in ("cache_seqlens", "page_table"):
            arguments[name] = arguments[name].long()
        assert torch.equal(run(arguments).out, expected.out)
    if change == "no appended tokens":
        nothing = problem(page_size=3, new=None, queries=2)
        with_empty = nothing | {
            name: nothing[f"{name}_cache"].new_empty(3, 2, 0, w) for name, w in (("k", 8), ("v", 6))
        }
        assert torch.equal(run(with_empty).out, run(nothing).out)
    if change == "no sequences":
        for name in ("q", "k", "v", "cache_seqlens", "page_table"):
            arguments[name] = arguments[name][:0]
        step = run(arguments)
        assert step.out.shape == (0, 4, 2, 6)
        assert same_bits(step.k_cache, arguments["k_cache"])
    if change == "inference mode":
        with torch.inference_mode():
            assert torch.equal(run(arguments).out, expected.out)
    if change == "no lse":
        out = flashtile.attention_with_kvcache(**arguments)
        assert torch.equal(out, expected.out)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast(dtype: torch.dtype) -> None:
    """q and the new keys and values take autocast's dtype; the caches are written in place and have it already."""
    cos, sin = angles(12, 8)
    arguments = problem(dtype=dtype, causal=True, rotary_cos=cos, rotary_sin=sin)
    wide = arguments | {name: arguments[name].float() for name in ("q", "k", "v")}
    with torch.autocast("cpu", dtype=dtype):
        found = run(wide)
    expected = run(arguments)
    assert found.out.dtype is dtype
    assert torch.equal(found.out, expected.out)
    assert same_bits(found.k_cache, expected.k_cache)
    with torch.autocast("cpu", dtype=dtype), pytest.raises(ArgumentError) as error:
        run(wide | {name: arguments[name].float() for name in CACHES})
    assert error.value.argument == "k_cache"


# Rotary ---------------------------------------------------------------------------------------------------------------


def test_the_two_conventions_differ_by_the_order_of_features() -> None:
    """Pairs (0, 1), (2, 3), ... or (n, n + width / 2): the same after a permutation, also of a part of D."""
    width, head_dim = 6, 8
    cos, sin = angles(12, width)
    halves = problem(head_dim=head_dim, causal=True, rotary_cos=cos, rotary_sin=sin, rotary_interleaved=False)
    order = [*(n // 2 + (n % 2) * (width // 2) for n in range(width)), *range(width, head_dim)]
    interleaved = halves | {name: halves[name][..., order] for name in ("q", "k", "k_cache")}
    assert_right(halves)
    assert_right(interleaved | {"rotary_interleaved": True})
    torch.testing.assert_close(run(interleaved | {"rotary_interleaved": True}).out, run(halves).out)
    interleaved.pop("rotary_interleaved")  # the default
    torch.testing.assert_close(run(interleaved).out, run(halves).out)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("width", [2, 6, 8])
def test_features_past_rotary_dim_are_left_alone(width: int, interleaved: bool) -> None:
    cos, sin = angles(12, width)
    arguments = problem(rotary_cos=cos, rotary_sin=sin, rotary_interleaved=interleaved)
    step = assert_right(arguments)
    _, _, written = appended(arguments)
    given, kept = arguments["k"][..., width:], step.k_cache[written].unflatten(0, (-1, 8))[:, width:]
    assert same_bits(kept.sort(0).values, given.flatten(0, 2).sort(0).values)


def test_only_relative_positions_matter() -> None:
    """Ten keys of padding in front of everything turn q and k alike."""
    cos, sin = angles(64, 8)
    step = run(problem(held=(0,), new=6, capacity=30, causal=True, rotary_cos=cos, rotary_sin=sin))
    shifted = problem(held=(10,), new=6, capacity=30, causal=True, rotary_cos=cos, rotary_sin=sin, leftpad_k=int32(10))
    fresh = problem(held=(0,), new=6, capacity=30)
    torch.testing.assert_close(run(shifted | {name: fresh[name] for name in "qkv"}).out, step.out)


@pytest.mark.parametrize("queries", [1, 2, 3])
def test_queries_are_the_last_tokens(queries: int) -> None:
    """With fewer queries than new keys they are the last of them, for rotary as for causal."""
    cos, sin = angles(12, 8)
    features = {"causal": True, "rotary_cos": cos, "rotary_sin": sin}
    all_rows = problem(new=3, **features)
    some = all_rows | {"q": all_rows["q"][:, :, 3 - queries :]}
    assert_right(some)
    torch.testing.assert_close(run(some).out, run(all_rows).out[:, :, 3 - queries :])


@pytest.mark.parametrize("interleaved", [False, True])
def test_queries_in_front_of_position_0_turn_as_there(interleaved: bool) -> None:
    cos, sin = angles(12, 8)
    arguments = problem(held=(2, 0), new=1, queries=4, rotary_interleaved=interleaved)
    turning = arguments | {"rotary_cos": cos, "rotary_sin": sin}
    by_hand = dict(arguments)
    for name, first in (("q", (-1, -3)), ("k", (2, 0))):
        x, places = arguments[name].transpose(1, 2), torch.arange(arguments[name].shape[2])
        by_hand[name] = torch.stack(
            [turned(x[b], (places + first[b]).clamp(min=0), turning).transpose(0, 1) for b in range(2)]
        )
    torch.testing.assert_close(run(turning).out, run(by_hand).out)


# What it writes -------------------------------------------------------------------------------------------------------


def guarded(arguments: Arguments) -> tuple[Arguments, list[Any]]:
    """The call with poison in front of and behind the caches."""
    guards = {name: with_guard_bands(arguments[name]) for name in CACHES}
    return arguments | {name: guard.tensor for name, guard in guards.items()}, list(guards.values())


def call_in_place(arguments: Arguments, **options: Any) -> Any:
    return flashtile.attention_with_kvcache(**arguments, **options)


@pytest.mark.parametrize("page_size", [None, 1, 4])
def test_appends_in_place(page_size: int | None) -> None:
    """Into the tensors that were given; all other bits of them stay, and those around them."""
    arguments = problem(page_size=page_size)
    caches, guards = guarded(arguments)
    expected = appended(arguments)
    call_in_place(caches)
    assert same_bits(caches["k_cache"], expected[0])
    assert same_bits(caches["v_cache"], expected[1])
    assert all(guard.intact() for guard in guards)


def views(arguments: Arguments) -> dict[str, Callable[[], tuple[Tensor, Tensor]]]:
    """Layouts in which caches are kept, as k and v of the problem's shapes (of equal widths)."""
    batch, heads, capacity, width = arguments["k_cache"].shape
    full = torch.full
    return {  # type: ignore[return-value]
        "k and v side by side": lambda: full((batch, heads, capacity, 2 * width), NAN).split(width, dim=-1),
        "k and v in one tensor": lambda: full((batch, 2, heads, capacity, width), NAN).unbind(1),
        "positions first": lambda: full((2, capacity, batch, heads, width), NAN).permute(0, 2, 3, 1, 4).unbind(0),
        "features before positions": lambda: full((2, batch, heads, width, capacity), NAN).mT.unbind(0),
        "every other slot": lambda: full((2, batch, heads, 2 * capacity, width), NAN)[:, :, :, 1::2].unbind(0),
    }


@pytest.mark.parametrize("layout", views(problem()))
@pytest.mark.parametrize("paged", [False, True])
def test_strided_caches(layout: str, paged: bool) -> None:
    """Views of other tensors: written where they lie, and nothing between them."""
    arguments = problem(page_size=4 if paged else None, head_dim_v=8)
    k_view, v_view = views(arguments)[layout]()
    k_view.copy_(arguments["k_cache"])
    v_view.copy_(arguments["v_cache"])
    root = k_view._base
    assert root is not None
    before = root.clone()
    out = call_in_place(arguments | {"k_cache": k_view, "v_cache": v_view})
    torch.testing.assert_close(out, run(arguments).out)
    k_expected, v_expected, _ = appended(arguments)
    assert same_bits(k_view, k_expected)
    assert same_bits(v_view, v_expected)
    k_view.copy_(arguments["k_cache"])
    v_view.copy_(arguments["v_cache"])
    assert same_bits(root, before)  # with the views put back, everything is


def test_a_common_beginning_in_pages() -> None:
    """Two sequences share a page and append to pages of their own."""
    arguments = problem(held=(4, 4), page_size=4)
    arguments["page_table"][1, 0] = arguments["page_table"][0, 0]
    assert_right(arguments)


# Decoding -------------------------------------------------------------------------------------------------------------


def decode_inputs(steps: int) -> tuple[Tensor, Tensor, Tensor, Arguments]:
    """q, k and v of a whole sequence, and rotary tables; two query heads on one of k and v."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, heads, steps, 4, generator=generator) for heads in (2, 1, 1))
    cos, sin = angles(steps, 4)
    return q, k, v, {"causal": True, "rotary_cos": cos, "rotary_sin": sin}


def decode(step: Callable[..., Any], count: int, page_size: int | None) -> Tensor:
    """One token at a time through `step`; the output of every step, `[B, H, S, D]`."""
    q, k, v, features = decode_inputs(count)
    lengths, slots = torch.zeros(2, dtype=torch.int32), count + 3
    shape = (2, 1, slots, 4) if page_size is None else (2 * -(-slots // page_size), page_size, 1, 4)
    caches = {name: torch.full(shape, NAN) for name in CACHES}
    if page_size is not None:
        features["page_table"] = torch.randperm(shape[0]).int().reshape(2, -1)
    outs = []
    for n in range(count):
        now = slice(n, n + 1)
        outs.append(step(q=q[:, :, now], k=k[:, :, now], v=v[:, :, now], cache_seqlens=lengths, **caches, **features))
        lengths += 1
    return torch.cat(outs, dim=2)


def prefill(count: int) -> Tensor:
    q, k, v, features = decode_inputs(count)
    caches = {name: torch.full((2, 1, count, 4), NAN) for name in CACHES}
    lengths = torch.zeros(2, dtype=torch.int32)
    return call_in_place({"q": q, "k": k, "v": v, "cache_seqlens": lengths} | caches | features)


@pytest.mark.parametrize(("page_size", "steps"), [(16, 1000), (None, 100)])
def test_a_thousand_steps_plan_once(page_size: int | None, steps: int) -> None:
    """And give what one prefill gives; a dense cache is one with long pages."""
    flashtile.dispatch.fast_path.forget()
    outs = decode(flashtile.attention_with_kvcache, steps, page_size)
    assert flashtile.dispatch.planner._plan.cache_info().misses == 1
    torch.testing.assert_close(outs, prefill(steps))


def test_prefill_is_causal_self_attention() -> None:
    """The same from `attention`, on q and k turned by hand."""
    q, k, v, features = decode_inputs(40)
    positions = torch.arange(40)
    q, k = (
        torch.stack([turned(one.transpose(0, 1), positions, features).transpose(0, 1) for one in x]) for x in (q, k)
    )
    torch.testing.assert_close(prefill(40), flashtile.attention(q, k, v, causal=True))


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("page_size", [None, 16])
def test_compiled_steps_compile_once(page_size: int | None) -> None:
    counter = CompileCounter()
    step = torch.compile(lambda **x: flashtile.attention_with_kvcache(**x), fullgraph=True, backend=counter)
    outs = decode(step, 70, page_size)
    assert counter.frame_count == 1
    torch.testing.assert_close(outs, prefill(70))


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_compiled_graph_sees_the_caches_change(backend: str) -> None:
    """Reads before the call see old values, reads after it new ones, and the caller's tensors are written."""
    arguments = problem(causal=True)
    for name in CACHES:
        arguments[name] = arguments[name].nan_to_num(nan=0.5)

    def step(k_cache: Tensor, v_cache: Tensor, **others: Any) -> tuple[Tensor, ...]:
        before = k_cache.sum() + v_cache.square().sum()
        out = flashtile.attention_with_kvcache(others.pop("q") * 2, k_cache, v_cache, **others)
        k_cache[0, 0, 0] += 1
        return out + 1, before, k_cache.sum() + v_cache.square().sum()

    expected, found = ({name: arguments[name].clone() for name in CACHES} for _ in range(2))
    eager = step(**arguments | expected)
    compiled = torch.compile(step, fullgraph=True, backend=backend)(**arguments | found)
    torch.testing.assert_close(compiled, eager)
    assert all(torch.equal(found[name], expected[name]) for name in CACHES)
    assert not torch.equal(found["k_cache"], arguments["k_cache"])


# The operator ---------------------------------------------------------------------------------------------------------


def operator_calls() -> dict[str, Arguments]:
    cos, sin = angles(12, 8)
    rotary = {"rotary_cos": cos, "rotary_sin": sin}
    mod = flashtile.ScoreMod(lambda score, b, h, i, j, w: score * w[h], (torch.rand(4),))
    features = {"bias": torch.randn(1, 4, 2, 12), "sinks": torch.randn(4), "dropout_p": 0.5, "dropout_seed": 3}
    return {
        "dense": problem(leftpad_k=int32(1, 0, 2), cache_batch_idx=int32(2, 0, 1), **rotary),
        "pages": problem(page_size=3, causal=True, num_splits=2),
        "packed": problem(new=(2, 0, 1), page_size=3, **rotary),
        "features": problem(score_mod=mod, softcap=2.0, window=(4, 0), alibi_slopes=torch.rand(4), **features),
        "nothing to append": problem(new=None, queries=3),
        "8 bits": with_eight_bits(Case("attention_with_kvcache", problem()), torch.int8, "tokens", "heads").arguments,
    }


def operator_arguments(arguments: Arguments, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, ...]:
    """Arguments that the public function passes to its operator."""
    seen: list[tuple[Any, ...]] = []

    def operator(*given: Any) -> tuple[Tensor, Tensor]:
        seen.append(given)
        return torch.empty(0), torch.empty(0)

    with monkeypatch.context() as patch:
        patch.setattr("flashtile.api.normalize.is_plain_eager", lambda *_: False)
        patch.setattr(torch.ops.flashtile.attention_with_kvcache, "default", operator)
        call_in_place(arguments)
    return seen[0]


@pytest.mark.parametrize("name", operator_calls())
def test_opcheck(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Schema (what is written is declared, nothing is aliased), shapes, static and dynamic tracing."""
    given = operator_arguments(operator_calls()[name], monkeypatch)
    given = tuple(x.nan_to_num() if isinstance(x, Tensor) and x.is_floating_point() else x for x in given)
    opcheck(torch.ops.flashtile.attention_with_kvcache.default, given)


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3), (2, 0, 1, 3)])
@pytest.mark.parametrize("name", operator_calls())
def test_fake_results_are_like_real_ones(name: str, order: tuple[int, ...]) -> None:
    """Shapes, dtypes and strides, for q in any order of memory; a compiler plans with them."""
    arguments = operator_calls()[name]
    if arguments["q"].dim() == 4:
        inverse = [order.index(n) for n in range(4)]
        arguments["q"] = arguments["q"].permute(order).contiguous().permute(inverse)
    real = run(arguments)[:2]
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = {n: mode.from_tensor(x) if isinstance(x, Tensor) else x for n, x in arguments.items()}
        predicted = flashtile.attention_with_kvcache(**fake, return_lse=True)
    for x, y in zip(predicted, real, strict=True):
        assert (x.shape, x.dtype, x.device) == (y.shape, y.dtype, y.device)
        assert x.stride() == y.stride()


# Derivatives ----------------------------------------------------------------------------------------------------------


def refused(arguments: Arguments, call: Callable[[Arguments], Any]) -> None:
    """An error of ours, and untouched caches."""
    before = {name: arguments[name].clone() for name in CACHES}
    with pytest.raises(AttentionError, match="attention_with_kvcache"):
        call(arguments)
    assert all(same_bits(arguments[name].detach(), before[name]) for name in CACHES)


@pytest.mark.parametrize("name", ["q", "k", "v", "k_cache", "v_cache", "bias", "sinks", "rotary_cos"])
def test_arguments_that_require_a_gradient(name: str) -> None:
    cos, sin = angles(12, 8)
    arguments = problem(rotary_cos=cos, rotary_sin=sin, sinks=torch.ones(4), bias=torch.ones(1, 1, 1, 12))
    arguments[name] = arguments[name].clone().requires_grad_()
    refused(arguments, call_in_place)
    with torch.no_grad():
        call_in_place(arguments)


def test_score_mod_that_requires_a_gradient() -> None:
    weight = torch.ones(4, requires_grad=True)
    mod = flashtile.ScoreMod(lambda score, b, h, i, j, w: score * w[h], (weight,))
    refused(problem(score_mod=mod), call_in_place)


TRANSFORMS: dict[str, Callable[[Callable[[Tensor], Tensor], Tensor], Any]] = {
    "grad": lambda f, q: torch.func.grad(lambda q: f(q).sum())(q),
    "vjp": lambda f, q: torch.func.vjp(f, q),
    "jvp": lambda f, q: torch.func.jvp(f, (q,), (q,)),
    "vmap": lambda f, q: torch.func.vmap(f)(torch.stack((q, q))),
    "vmap of grad": lambda f, q: torch.func.vmap(torch.func.grad(lambda q: f(q).sum()))(torch.stack((q, q))),
    "grad of vmap": lambda f, q: torch.func.grad(lambda q: torch.func.vmap(f)(q).sum())(torch.stack((q, q))),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_are_refused(name: str) -> None:
    refused(problem(), lambda x: TRANSFORMS[name](lambda q: call_in_place(x | {"q": q}), x["q"]))


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("inside", [True, False])
def test_compiled_transforms_are_refused(name: str, inside: bool) -> None:
    """Compiled around a transform or under one: any error will do, but no zero derivative."""
    arguments = problem()

    def call(q: Tensor) -> Tensor:
        return flashtile.attention_with_kvcache(**arguments | {"q": q})

    def compiled(f: Callable[..., Any]) -> Callable[..., Any]:
        return torch.compile(f, backend="aot_eager")

    def run() -> Any:
        if inside:
            return compiled(lambda q: TRANSFORMS[name](call, q))(arguments["q"])
        return TRANSFORMS[name](compiled(call), arguments["q"])

    with pytest.raises((AttentionError, RuntimeError)):
        run()


@pytest.mark.parametrize("how", ["make_fx", "export"])
@pytest.mark.parametrize("name", [*TRANSFORMS, "requires_grad"])
def test_traced_programs_are_refused(name: str, how: str) -> None:
    """Where none of our Python is left but the operator's."""
    arguments = problem()

    class Program(torch.nn.Module):
        def forward(self, q: Tensor) -> Tensor:
            return flashtile.attention_with_kvcache(**arguments | {"q": q})  # type: ignore[return-value]

    q = arguments["q"]
    program = make_fx(Program())(q) if how == "make_fx" else torch.export.export(Program(), (q,)).module()
    torch.testing.assert_close(program(q), run(arguments).out)
    transformed = TRANSFORMS.get(name, lambda f, q: f(q.clone().requires_grad_()))
    with pytest.raises(AttentionError, match="attention_with_kvcache"):
        transformed(program, q)


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("name", ["q", "k", "sinks"])
def test_compiled_arguments_that_require_a_gradient(name: str) -> None:
    arguments = problem(sinks=torch.ones(4))
    arguments[name].requires_grad_()
    with pytest.raises((AttentionError, torch._dynamo.exc.TorchDynamoException)):
        torch.compile(call_in_place, backend="aot_eager")(arguments).sum().backward()


# Errors ---------------------------------------------------------------------------------------------------------------


def without(name: str) -> Callable[[Arguments], Arguments]:
    return lambda x: {n: value for n, value in x.items() if n != name}


def side_by_side(arguments: Arguments, shared: int = 0) -> Arguments:
    """Caches as parts of one tensor, with features in common."""
    k, v = (arguments[name] for name in CACHES)
    both = torch.cat((k, v[..., shared:]), dim=-1)
    return {"k_cache": both[..., : k.shape[-1]], "v_cache": both[..., k.shape[-1] - shared :]}


def changed(name: str, change: Callable[[Any], Any]) -> Callable[[Arguments], Arguments]:
    return lambda x: x | {name: change(x.get(name))}


COS, SIN = angles(12, 8)
COLUMN = torch.arange(3)  # of page tables
ROTARY: Arguments = {"rotary_cos": COS, "rotary_sin": SIN}
Change = Callable[[Arguments], Arguments]
# The argument that the error names, a call that works, and what is wrong with it.
MISTAKES: dict[str, tuple[str, Arguments, Change]] = {
    "cache too small": ("k_cache", {}, changed("cache_seqlens", lambda _: int32(3, 0, 11))),
    "cache much too small": ("cache_seqlens", {}, changed("cache_seqlens", lambda _: int32(3, 0, 2**31 - 1))),
    "longer than pages": (
        "cache_seqlens",
        {"page_size": 4},
        changed("cache_seqlens", lambda _: int32(3, 0, 2**31 - 2)),
    ),
    "expanded k_cache": ("k_cache", {}, changed("k_cache", lambda x: x[:, :, :1].expand(x.shape))),
    "expanded v_cache": ("v_cache", {}, changed("v_cache", lambda x: x[:1].expand(x.shape))),
    "pages that overlap": (
        "v_cache",
        {"page_size": 4},
        changed("v_cache", lambda x: x.as_strided(x.shape, (x.stride(0) - 1, *x.stride()[1:]))),
    ),
    "one cache for k and v": ("v_cache", {}, lambda x: x | {"v_cache": x["k_cache"], "v": x["k"]}),
    "caches that share a feature": ("v_cache", {}, lambda x: x | side_by_side(x, shared=1)),
    "page table too short": ("page_table", {"page_size": 4}, changed("page_table", lambda x: x[:, :2])),
    "page below": ("page_table", {"page_size": 4}, changed("page_table", lambda x: x.where(COLUMN != 1, -1))),
    "page above": ("page_table", {"page_size": 4}, changed("page_table", lambda x: x.where(COLUMN != 0, 99))),
    "row below": ("cache_batch_idx", {}, changed("cache_batch_idx", lambda _: int32(0, -1, 2))),
    "row above": ("cache_batch_idx", {}, changed("cache_batch_idx", lambda _: int32(0, 5, 2))),
    "one row twice": ("cache_batch_idx", {}, changed("cache_batch_idx", lambda _: int32(0, 1, 0))),
    "rows of pages": (
        "cache_batch_idx",
        {"page_size": 4},
        lambda given: given | {"cache_batch_idx": int32(0, len(given["page_table"]), 2)},
    ),
    "rows of float": ("cache_batch_idx", {}, changed("cache_batch_idx", lambda _: torch.zeros(3))),
    "too few rows": ("cache_batch_idx", {}, changed("cache_batch_idx", lambda _: int32(0, 1))),
    "negative length": ("cache_seqlens", {}, changed("cache_seqlens", lambda _: int32(3, -1, 8))),
    "too few lengths": ("cache_seqlens", {}, changed("cache_seqlens", lambda x: x[:2])),
    "lengths of float": ("cache_seqlens", {}, changed("cache_seqlens", lambda x: x.float())),
    "lengths of a list": ("cache_seqlens", {}, changed("cache_seqlens", lambda x: x.tolist())),
    "no lengths": ("cache_seqlens", {}, changed("cache_seqlens", lambda _: None)),
    "leftpad too long": ("leftpad_k", {}, changed("leftpad_k", lambda _: int32(6, 0, 0))),
    "leftpad below": ("leftpad_k", {}, changed("leftpad_k", lambda _: int32(0, -1, 0))),
    "leftpad of one": ("leftpad_k", {}, changed("leftpad_k", lambda _: int32(0))),
    "rotary too short": ("rotary_cos", ROTARY, lambda x: x | {"rotary_cos": COS[:9], "rotary_sin": SIN[:9]}),
    "rotary too wide": ("rotary_cos", {}, lambda x: x | dict(zip(ROTARY, angles(12, 10), strict=True))),
    "rotary of one dimension": ("rotary_cos", ROTARY, lambda x: x | {"rotary_cos": COS[0], "rotary_sin": SIN[0]}),
    "no sine": ("rotary_sin", ROTARY, without("rotary_sin")),
    "no cosine": ("rotary_cos", ROTARY, without("rotary_cos")),
    "sine of another size": ("rotary_sin", ROTARY, changed("rotary_sin", lambda x: x[:-1])),
    "cosine of another dtype": ("rotary_cos", ROTARY, changed("rotary_cos", lambda x: x.double())),
    "no k": ("k", {}, without("k")),
    "no v": ("v", {}, without("v")),
    "k of another dtype": ("k", {}, changed("k", lambda x: x.half())),
    "k of other heads": ("k", {}, changed("k", lambda x: x[:, :1])),
    "k of another width": ("k", {}, changed("k", lambda x: x[..., :4])),
    "k of another batch": ("k", {}, changed("k", lambda x: x[:2])),
    "k longer than v": ("v", {}, changed("v", lambda x: x[:, :, :1])),
    "k not packed": ("k", {"new": (2, 1, 1)}, changed("k", lambda x: x[None].transpose(1, 2))),
    "v of another width": ("v", {}, changed("v", lambda x: x[..., :4])),
    "q of three dimensions": ("q", {}, changed("q", lambda x: x[0])),
    "q packed without offsets": ("q", {"new": (2, 1, 1)}, without("cu_seqlens_q")),
    "q of other heads": ("k_cache", {}, changed("q", lambda x: x[:, :3])),
    "q of another width": ("k_cache", {}, changed("q", lambda x: x[..., :4])),
    "q no tensor": ("q", {}, changed("q", lambda x: x.tolist())),
    "cache no tensor": ("v_cache", {}, changed("v_cache", lambda _: None)),
    "cache of another dtype": ("k_cache", {}, changed("k_cache", lambda x: x.double())),
    "caches of two lengths": ("v_cache", {}, changed("v_cache", lambda x: x[:, :, :-1])),
    "caches of two batches": ("v_cache", {}, changed("v_cache", lambda x: x[:-1])),
    "caches too few": ("k_cache", {}, lambda x: x | {name: x[name][:2] for name in CACHES}),
    "cache of no slots": ("k_cache", {}, lambda x: x | {name: x[name][:, :, :0] for name in CACHES}),
    "pages of no slots": ("k_cache", {"page_size": 4}, lambda x: x | {name: x[name][:, :0] for name in CACHES}),
    "cache of three dimensions": ("k_cache", {}, changed("k_cache", lambda x: x[0])),
    "table of one dimension": ("page_table", {"page_size": 4}, changed("page_table", lambda x: x[0])),
    "table of float": ("page_table", {"page_size": 4}, changed("page_table", lambda x: x.float())),
    "offsets that fall": ("cu_seqlens_q", {"new": (2, 1, 1)}, changed("cu_seqlens_q", lambda _: int32(0, 2, 1, 4))),
    "offsets past the end": (
        "cu_seqlens_q",
        {"new": (2, 1, 1), "capacity": 20},
        changed("cu_seqlens_q", lambda _: int32(0, 2, 3, 9)),
    ),
    "offsets from 1": ("cu_seqlens_q", {"new": (2, 1, 1)}, changed("cu_seqlens_q", lambda _: int32(1, 2, 3, 4))),
    "splits of zero": ("num_splits", {}, changed("num_splits", lambda _: 0)),
    "splits of a half": ("num_splits", {}, changed("num_splits", lambda _: 0.5)),
    "mask of another length": ("mask", {}, changed("mask", lambda _: torch.ones(1, 1, 1, 11, dtype=torch.bool))),
    "bias of another length": ("bias", {}, changed("bias", lambda _: torch.ones(1, 1, 2, 10))),
    "window of one side": ("window", {}, changed("window", lambda _: (2,))),
    "rotary_interleaved of None": ("rotary_interleaved", ROTARY, changed("rotary_interleaved", lambda _: None)),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_named_and_change_nothing(name: str) -> None:
    """Before anything is written: the caches are as they were."""
    argument, sizes, change = MISTAKES[name]
    works = problem(**sizes)
    run(works)
    wrong = change(works)
    tensors = {n: wrong[n] for n in CACHES if isinstance(wrong[n], Tensor)}
    before = {n: x.clone() for n, x in tensors.items()}
    with pytest.raises(ArgumentError) as error:
        call_in_place(wrong)
    assert error.value.argument == argument
    assert f"`{argument}`" in str(error.value)
    assert "attention" in str(error.value)  # a call that works
    assert all(same_bits(x, before[n]) for n, x in tensors.items())


def test_caches_that_share_memory_can_be_read() -> None:
    """Without tokens to append; and side by side they may be written."""
    arguments = problem(new=None)
    expanded = arguments["v_cache"].nan_to_num()[:1].expand(arguments["v_cache"].shape)
    found = call_in_place(arguments | {"v_cache": expanded})
    assert same_bits(found, call_in_place(arguments | {"v_cache": expanded.clone()}))
    arguments = problem()
    adjacent = arguments | side_by_side(arguments)
    assert same_bits(call_in_place(adjacent), run(arguments).out)


def test_caches_come_to_share_memory() -> None:
    """After a call of the same signature on caches that do not."""
    arguments = problem(head_dim_v=8)
    run(arguments)
    k_cache, v_cache = (arguments[name] for name in CACHES)
    assert k_cache.stride() == v_cache.stride()
    with pytest.raises(ArgumentError, match="shares no element with k_cache"):
        call_in_place(arguments | {"v_cache": k_cache})


def test_an_unknown_backend_changes_nothing() -> None:
    refused_by_name = problem()
    before = refused_by_name["k_cache"].clone()
    with pytest.raises(flashtile.BackendError):
        call_in_place(refused_by_name, backend="none")
    assert same_bits(refused_by_name["k_cache"], before)


@pytest.mark.parametrize("backend", ["cpu", "tiled", "reference"])
@pytest.mark.parametrize("sizes", [{}, {"page_size": 4}, {"new": (2, 1, 1)}], ids=str)
def test_indices_that_change_during_a_call(sizes: dict[str, Any], backend: str) -> None:
    arguments = problem(**sizes) | {"leftpad_k": int32(1, 0, 2)}
    if "page_size" not in sizes:
        arguments["cache_batch_idx"] = int32(2, 0, 1)
    expected = run(arguments, backend=backend)
    names = ("cache_seqlens", "page_table", "cache_batch_idx", "leftpad_k", "cu_seqlens_q")
    with changed_during_calls([arguments[name] for name in names if name in arguments]) as entered:
        found = run(arguments, backend=backend)
    assert entered
    assert all(same_bits(x, y) for x, y in zip(found, expected, strict=True))


# On the device --------------------------------------------------------------------------------------------------------


def on_the_device(arguments: Arguments) -> tuple[Arguments, Tensor]:
    """The call in place between guard bands, as on a GPU; the caches as they are after it."""
    caches, guards = guarded(arguments)
    with lengths_on_the_device():
        out = call_in_place(caches)
    assert all(guard.intact() for guard in guards)
    return caches, out


def assert_written(caches: Arguments, arguments: Arguments, places: dict[tuple[int, int], Tensor]) -> None:
    """k's cache has the given keys at `(page, slot)`, and all else of it is as it was."""
    expected = arguments["k_cache"].clone()
    for place, key in places.items():
        as_tokens(expected, arguments)[place] = key
    assert same_bits(caches["k_cache"], expected)


@pytest.mark.parametrize("entry", [-1, -(2**31), 100, 2**31 - 1])
def test_keys_of_a_page_that_does_not_exist_are_dropped(entry: int) -> None:
    """Sequence 1 appends its third and fourth key; the fourth's page is none."""
    arguments = problem(held=(3, 2), new=2, page_size=3, capacity=9)
    arguments["page_table"][1, 1] = entry
    caches, out = on_the_device(arguments)
    table, k = arguments["page_table"], arguments["k"]
    kept = {(int(table[0, 1]), n): k[0, :, n] for n in range(2)} | {(int(table[1, 0]), 2): k[1, :, 0]}
    assert_written(caches, arguments, kept)
    hidden = torch.ones(2, 1, 1, 9, dtype=torch.bool)
    hidden[1, ..., 3:6] = False
    good = arguments | {"page_table": arguments["page_table"].clone(), "mask": hidden}
    good["page_table"][1, 1] = good["page_table"][1, 2]
    torch.testing.assert_close(out, run(good).out)


@pytest.mark.parametrize("page_size", [None, 3])
def test_keys_past_the_end_of_a_cache_are_dropped(page_size: int | None) -> None:
    """Sequence 0 has room for one of its two new keys, sequence 1 for none."""
    arguments = problem(held=(7, 7), new=2, capacity=9, page_size=page_size)
    page, slot = slots(arguments, 0)
    arguments["cache_seqlens"] = int32(8, 9)
    caches, out = on_the_device(arguments)
    assert_written(caches, arguments, {(int(page[8]), int(slot[8])): arguments["k"][0, :, 0]})
    assert out.shape == (2, 4, 2, 6)


@pytest.mark.parametrize("row", [-1, 7, 2**31 - 1])
def test_rows_that_do_not_exist_are_dropped(row: int) -> None:
    arguments = problem(held=(3, 2), new=2)
    arguments["cache_batch_idx"] = int32(row, 1)
    caches, out = on_the_device(arguments)
    assert_written(caches, arguments, {(1, 2 + n): arguments["k"][1, :, n] for n in range(2)})
    assert not out[0].any()


def test_nothing_fits() -> None:
    """Every write is dropped, also the first."""
    arguments = problem(held=(3, 2), new=2)
    arguments["cache_batch_idx"] = int32(-1, 9)
    caches, out = on_the_device(arguments)
    assert_written(caches, arguments, {})
    assert not out.any()


def test_tokens_of_no_sequence_are_dropped() -> None:
    """In packed tensors, also where they stand in front of everything that fits."""
    arguments = problem(held=(3, 2), new=(0, 0))
    caches, out = on_the_device(arguments)
    assert_written(caches, arguments, {})
    assert not out.any()
    arguments = problem(held=(3, 2), new=(1, 2))
    caches, out = on_the_device(arguments)
    kept = {(0, 3): arguments["k"][0]} | {(1, 2 + n): arguments["k"][1 + n] for n in range(2)}
    assert_written(caches, arguments, kept)
    assert not out[3:].any()


def test_negative_lengths_and_short_rotary_tables_stay_inside() -> None:
    """A negative length counts as 0, and angles past the table are its last."""
    arguments = problem(held=(3, 2), new=2, rotary_cos=COS[:4], rotary_sin=SIN[:4])
    arguments["cache_seqlens"] = int32(3, -5)
    caches, out = on_the_device(arguments)
    positions = {0: torch.tensor([3, 3]), 1: torch.tensor([0, 1])}
    for b, angle in positions.items():
        first = 3 if b == 0 else 0
        keys = turned(arguments["k"][b].transpose(0, 1), angle, arguments)
        torch.testing.assert_close(caches["k_cache"][b, :, first : first + 2].transpose(0, 1), keys)
    assert out.isfinite().all()


@pytest.mark.parametrize("new", [2, (1, 2), (0, 0)])
def test_tables_without_entries(new: int | tuple[int, ...]) -> None:
    """No page and no angle exists: nothing is written, and nothing turns."""
    arguments = problem(held=(3, 2), new=new, page_size=3, rotary_cos=COS[:0], rotary_sin=SIN[:0])
    arguments |= {"page_table": arguments["page_table"][:, :0], "cache_seqlens": int32(0, 0)}
    caches, out = on_the_device(arguments)
    assert_written(caches, arguments, {})
    assert not out.any()


@pytest.mark.parametrize("pad", [-1, 5, 99])
def test_any_leftpad_hides_keys(pad: int) -> None:
    """None of them, or all."""
    arguments = problem(held=(3, 2), new=2)
    _, out = on_the_device(arguments | {"leftpad_k": int32(pad, 0)})
    expected = run(arguments).out
    torch.testing.assert_close(out[1], expected[1])
    if pad < 0:
        torch.testing.assert_close(out[0], expected[0])
    else:
        assert not out[0].any()


@pytest.mark.parametrize("offsets", [(0, 2, 1, 4), (0, 2, 3, 9), (0, -1, 3, 4), (0, 2**31 - 1, 3, 4)])
def test_offsets_outside_of_q_touch_nothing_else(offsets: tuple[int, ...]) -> None:
    """`on_the_device` looks at the guard bands of the caches."""
    arguments = problem(new=(2, 1, 1), page_size=3, rotary_cos=COS, rotary_sin=SIN)
    arguments["cu_seqlens_q"] = int32(*offsets)
    assert on_the_device(arguments)[1].shape == (*arguments["q"].shape[:2], 6)


@pytest.mark.parametrize("name", operator_calls())
def test_nothing_is_read_back(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Below the operator, which would hide its operations."""
    from flashtile.dispatch import cache_operator

    given = operator_arguments(operator_calls()[name], monkeypatch)
    monkeypatch.setattr(Tensor, "tolist", lambda _: pytest.fail("tolist reads values on the host"))
    with lengths_on_the_device(), NoReads():
        out, _ = cache_operator.run(*given)
    assert tokens_of(out).shape[1] == 4
