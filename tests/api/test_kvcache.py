"""attention_with_kvcache: what it computes, against the oracle."""

import pytest
import torch
from cached import (
    CACHES,
    Arguments,
    angles,
    appended,
    as_packed,
    assert_right,
    int32,
    problem,
    run,
    same_bits,
    tokens_of,
)
from checking import assert_right as oracle_right
from checking import features, lengths_on_the_device, tile_size
from hypothesis import assume, given
from hypothesis import strategies as st

import flashtile
from flashtile import ArgumentError
from flashtile.testing.generate import random_case
from flashtile.testing.oracle import solve


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
