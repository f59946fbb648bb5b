"""Masks of transformers: known patterns, what they show, and their dense form."""

import logging
import random
from typing import Any
from unittest import mock

import pytest
import torch
from formula import dense_formula
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask
from torch.utils._python_dispatch import TorchDispatchMode

transformers = pytest.importorskip("transformers", minversion="5.0", reason="needs the extra `transformers`")

from transformers import masking_utils as originals  # noqa: E402

from flashtile.errors import ArgumentError, AttentionError  # noqa: E402
from flashtile.integrations import optional  # noqa: E402
from flashtile.integrations.transformers import (  # noqa: E402
    NAME,
    functions,
    register,
    unregister,
)
from flashtile.integrations.transformers.attention import tile_attention  # noqa: E402
from flashtile.integrations.transformers.mask import TileMask, tile_mask  # noqa: E402
from flashtile.integrations.transformers.patterns import Pattern, pattern_of  # noqa: E402


def drawn(seed: int, device: str) -> tuple[dict[str, Any], Tensor, Tensor]:
    """Arguments of a mask function, its dense mask `[B, 1, Sq, Sk]`, and which queries count, `[B, Sq]`: tokens of
    self-attention under a causal mask, and all others.
    """
    rng = random.Random(seed)
    batch, rows = rng.randint(1, 3), rng.choice([1, 5, 12, 17])
    past = rng.choice([0, 0, 3, 8])
    hidden = min(past, rng.choice([0, 0, 2]))  # keys that a sliding cache has dropped
    keys = rows + past - hidden + rng.choice([0, 0, 6])  # the last ones are a static cache's empty ones
    whole = hidden + keys
    begin = torch.tensor([rng.randint(0, 2) for _ in range(batch)])
    makers = [
        lambda: originals.causal_mask_function,
        lambda: originals.bidirectional_mask_function,
        lambda: originals.sliding_window_causal_mask_function(4),
        lambda: originals.sliding_window_bidirectional_mask_function(3),
        lambda: originals.chunked_causal_mask_function(5, begin),
        lambda: originals.chunked_overlay(5, begin),
        lambda: originals.and_masks(
            originals.causal_mask_function,
            originals.packed_sequence_mask_function((torch.rand(batch, whole) < 0.2).cumsum(1)),
        ),
        lambda: originals.or_masks(originals.causal_mask_function, originals.blockwise_overlay(pictures(batch, whole))),
        lambda: originals.and_masks(
            originals.sliding_window_causal_mask_function(6), lambda b, h, i, j: (h == 0) & ((i - j) % 3 != 1)
        ),
    ]
    padding = None
    if rng.random() < 0.6:
        padding = torch.ones(batch, past + rows, dtype=torch.bool)
        for b in range(batch):
            left, right = rng.choice([(0, 0), (2, 0), (0, 3), (1, 2)])
            padding[b, :left] = False
            padding[b, past + rows - right :] = False
        if rng.random() < 0.3:
            padding[:, (past + rows) // 2] = False
    arguments = {"batch_size": batch, "q_length": rows, "kv_length": keys, "q_offset": past, "kv_offset": hidden}
    arguments |= {"mask_function": rng.choice(makers)(), "attention_mask": padding, "device": device}
    dense = originals.sdpa_mask(**arguments, allow_is_causal_skip=False)
    pattern = pattern_of(arguments["mask_function"])
    causal = padding is not None and pattern is not None and pattern.right == 0
    return arguments, dense, padding[:, past:] if causal else torch.ones(batch, rows, dtype=torch.bool)


def pictures(batch: int, length: int) -> Tensor:
    """Numbers of pictures by token `[batch, length]`, -1 for text, as Gemma 3 has them."""
    place = torch.arange(length) + 2 * torch.arange(batch)[:, None]
    return torch.where(place % 5 < 3, place // 5, -1)


SEEDS: list[Any] = [pytest.param("cpu", seed) for seed in range(40)]
NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
SEEDS += [pytest.param("cuda", seed, marks=[pytest.mark.gpu, NEEDS_GPU]) for seed in range(16)]


@pytest.mark.parametrize(("device", "seed"), SEEDS)
def test_random_masks(device: str, seed: int) -> None:
    """The result of a pattern or function is that of the dense mask, which several queries never need."""
    torch.manual_seed(seed)
    with torch.device(device):
        arguments, dense, tokens = drawn(seed, device)
        batch, rows, keys = (arguments[name] for name in ("batch_size", "q_length", "kv_length"))
        q, k = torch.randn(batch, 4, rows, 16), torch.randn(batch, 2, keys, 16)
        v = torch.randn(batch, 2, keys, 24)
        more = {"s_aux": torch.randn(4) if seed % 3 == 0 else None}
        more["position_bias"] = torch.randn(1, 4, rows, keys) if seed % 4 == 0 else None
        found = tile_mask(**arguments)
    if isinstance(found, TileMask):
        assert torch.equal(found._make(), dense)
    else:
        assert rows == 1
        assert torch.equal(found, dense)
    if rows > 1:
        found._make = mock.Mock(side_effect=AssertionError)
    out, weights = tile_attention(nn.Module(), q, k, v, found, scaling=0.5, softcap=3.0, **more)
    assert weights is None
    sinks, bias = (None if x is None else x.cpu() for x in more.values())
    q, k, v, mask, tokens = (x.cpu() for x in (q, k, v, dense, tokens))
    expected = dense_formula(q, k, v, scale=0.5, softcap=3.0, bias=bias, sinks=sinks, mask=mask)[0].transpose(1, 2)
    torch.testing.assert_close(out.cpu()[tokens], expected[tokens], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["holes", "order"])
def test_visible_keys_that_are_not_consecutive(kind: str) -> None:
    """Padding between tokens, and a packed sequence that goes on after another one."""
    causal, arguments = originals.causal_mask_function, {"batch_size": 1, "q_length": 12, "kv_length": 12}
    if kind == "holes":
        arguments["attention_mask"] = torch.arange(12)[None] % 5 != 3
    else:
        ids = torch.arange(12)[None] // 3 % 2
        arguments["mask_function"] = originals.and_masks(causal, originals.packed_sequence_mask_function(ids))
    q = torch.randn(1, 4, 12, 8)
    out, _ = tile_attention(nn.Module(), q, q, q, tile_mask(**arguments))
    expected = dense_formula(q, q, q, mask=originals.sdpa_mask(**arguments, allow_is_causal_skip=False))[0]
    torch.testing.assert_close(out, expected.transpose(1, 2))


def test_the_offset_of_a_static_cache_is_read_at_once() -> None:
    """The first layer adds to it before the second one may ask for the dense mask."""
    offset, arguments = torch.tensor(3), {"batch_size": 1, "q_length": 4, "kv_length": 12}
    found, before = tile_mask(**arguments, q_offset=offset), originals.sdpa_mask(**arguments, q_offset=3)
    offset += 4
    assert torch.equal(found & True, before)


PREFILL = {"batch_size": 2, "q_length": 12, "kv_length": 12}
PADDED = torch.arange(12).ge(torch.tensor([[0], [3]]))
CHUNKS = {
    "kv_length": 20,
    "q_offset": 8,
    "mask_function": originals.chunked_causal_mask_function(5, torch.tensor([0, 3])),
}
CHUNKS |= {"batch_size": 2, "q_length": 12}
PICTURE_SELF = originals.sliding_window_overlay(2)
PICTURES = originals.or_masks(originals.causal_mask_function, originals.blockwise_overlay(pictures(2, 12)))


@pytest.mark.parametrize(
    "arguments",
    [
        PREFILL,
        PREFILL | {"attention_mask": PADDED},
        PREFILL | {"mask_function": originals.sliding_window_causal_mask_function(4), "attention_mask": PADDED},
        PREFILL | {"mask_function": originals.chunked_causal_mask_function(5, torch.tensor([0, 3]))},
        PREFILL | {"mask_function": originals.packed_sequence_mask_function(torch.arange(12)[None] // 5)},
        PREFILL | {"kv_length": 20},
        PREFILL | {"kv_length": 20, "q_offset": torch.tensor(8), "attention_mask": torch.ones(2, 20).bool()},
        PREFILL | {"kv_length": 20, "q_offset": 8, "attention_mask": torch.arange(20).ge(torch.tensor([[0], [3]]))},
        CHUNKS,
        CHUNKS | {"kv_length": 20, "q_offset": 8, "attention_mask": torch.arange(20).ge(torch.tensor([[0], [3]]))},
        PREFILL | {"mask_function": PICTURES, "attention_mask": PADDED},
        PREFILL | {"mask_function": PICTURES, "use_vmap": True},
    ],
)
def test_no_dense_mask_is_made(arguments: dict[str, Any]) -> None:
    """Neither by transformers nor, forward and backward, by anything else: no tensor has an element for each pair."""
    q, k = torch.randn(2, 4, 12, 8, requires_grad=True), torch.randn(2, 2, arguments["kv_length"], 8)
    pairs = 12 * arguments["kv_length"]

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **kwargs or {})
            found = [x for x in torch.utils._pytree.tree_leaves(result) if isinstance(x, Tensor)]
            assert not any(x.shape[-2:].numel() >= pairs for x in found if x.dim() > 1), func
            return result

    with Sizes():
        out, _ = tile_attention(nn.Module(), q, k, k, tile_mask(**arguments))
        out.sum().backward()


def test_padding_tokens_give_zero() -> None:
    """Under a causal mask, as with transformers' own flash attention; `eager` leaves numbers there."""
    q = torch.randn(2, 4, 12, 8)
    out, _ = tile_attention(nn.Module(), q, q, q, tile_mask(**PREFILL, attention_mask=PADDED))
    assert (out[~PADDED] == 0).all()


TWICE = originals.and_masks(originals.bidirectional_mask_function, originals.sliding_window_overlay(3))


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"mask_function": TWICE, "use_vmap": True},
        {"mask_function": originals.or_masks(TWICE, lambda b, h, i, j: PADDED[b][i] & (j < 4)), "use_vmap": True},
    ],
)
def test_operations_on_a_mask_see_the_dense_one(more: dict[str, Any]) -> None:
    """Also where transformers would make it by `vmap`, which does not work in an operation."""
    arguments = PREFILL | {"attention_mask": PADDED} | more
    for operation in (
        lambda x: x[:, :, -3:, :5],
        lambda x: x & torch.ones(12, 12).tril(2).bool(),
        lambda x: torch.where(x, 0.0, -1.0),
        lambda x: x.to(torch.float32),
        lambda x: torch.cat([x, x], dim=-1),
        lambda x: x.expand(2, 4, 12, 12),
    ):
        found, dense = tile_mask(**arguments), originals.sdpa_mask(**arguments, allow_is_causal_skip=False)
        assert isinstance(found, TileMask)
        assert found.shape == dense.shape
        assert torch.equal(operation(found), operation(dense))
        assert type(operation(found)) is Tensor
    assert "TileMask([2, 1, 12, 12]" in repr(found)


def test_patterns() -> None:
    """By the closures of transformers; one that is not known has none, also inside of another."""
    begin = torch.zeros(1, dtype=torch.long)
    assert pattern_of(originals.causal_mask_function) == Pattern(right=0)
    assert pattern_of(originals.sliding_window_causal_mask_function(4)) == Pattern(left=3, right=0)
    assert pattern_of(originals.sliding_window_bidirectional_mask_function(4)) == Pattern(left=4, right=4)
    assert pattern_of(originals.chunked_causal_mask_function(4, begin)) == Pattern(right=0, chunk=(4, begin))
    unknown = [lambda b, h, q, k: k <= q, originals.blockwise_overlay(begin[None]), object()]
    unknown.append(originals.or_masks(originals.causal_mask_function, originals.bidirectional_mask_function))
    unknown.append(originals.and_masks(originals.causal_mask_function, unknown[0]))
    unknown.append(originals.and_masks(*(originals.chunked_overlay(n, begin) for n in (4, 5))))
    unknown.append(originals.add_offsets_to_mask_function(originals.causal_mask_function, 1, 0))
    assert [pattern_of(function) for function in unknown] == [None] * len(unknown)


def test_functions_that_cannot_be_traced_make_a_dense_mask() -> None:
    """Closures that each forward pass makes anew are tried once."""
    tried = len(functions._untraceable)
    for n in (4, 5):
        function = originals.or_masks(
            originals.causal_mask_function, lambda b, h, i, j, n=n: j.clamp(max=n).cumsum(-1) < 9
        )
        settings = PREFILL | {"mask_function": function, "attention_mask": PADDED}
        with mock.patch.object(functions.MaskMod, "of", wraps=functions.MaskMod.of) as made:
            found = tile_mask(**settings)
        assert made.call_count == (n == 4)
        assert type(found) is Tensor
        assert torch.equal(found, originals.sdpa_mask(**settings, allow_is_causal_skip=False))
    assert len(functions._untraceable) == tried + 1


def test_a_function_is_traced_once_for_all_layers_and_lengths() -> None:
    """Offsets are tensors: a cache that grows needs no other kernels."""
    keys = set()
    for start in (3, 5, 8):
        q, k = torch.randn(2, 4, 12, 8), torch.randn(2, 2, 20, 8)
        with mock.patch.object(functions.MaskMod, "of", wraps=functions.MaskMod.of) as made:
            found = tile_mask(**CHUNKS | {"q_offset": start})
            results = [tile_attention(nn.Module(), q, k, k, found)[0] for _ in range(2)]
        assert isinstance(found, TileMask)
        assert made.call_count == 1
        assert torch.equal(*results)
        mod = found.mod()
        assert mod is not None
        keys.add(mod.key)
    assert len(keys) == 1


@pytest.mark.parametrize("rows", [1, 12])
@pytest.mark.parametrize("batch", [1, 3])
def test_one_mask_for_several_sequences_and_queries(batch: int, rows: int) -> None:
    """As SDPA broadcasts it: a function would look for a row that its tensors do not have."""
    hidden = torch.arange(12)[None] > torch.tensor([2, 0, 4])[:batch, None]
    whole = originals.or_masks(originals.blockwise_overlay(pictures(batch, 12)), PICTURE_SELF)
    for function in (originals.bidirectional_mask_function, PICTURE_SELF, whole):
        arguments = {"batch_size": batch, "q_length": rows, "kv_length": 12, "q_offset": 12 - rows}
        found = tile_mask(**arguments, mask_function=function, attention_mask=hidden)
        q = torch.randn(3, 4, 12, 8)
        out, _ = tile_attention(nn.Module(), q, q, q, found)
        dense = originals.sdpa_mask(
            **arguments, mask_function=function, attention_mask=hidden, allow_is_causal_skip=False
        )
        torch.testing.assert_close(out, dense_formula(q, q, q, mask=dense)[0].transpose(1, 2))


@pytest.mark.parametrize("batches", [(1, 3), (3, 1)])
def test_one_sequence_of_queries_or_keys_for_several(batches: tuple[int, int]) -> None:
    """As SDPA broadcasts them, under masks of either batch; other batches are errors."""
    q, k = (torch.randn(n, 4, 12, 8) for n in batches)
    for mask in (None, tile_mask(1, 12, 12), tile_mask(3, 12, 12, attention_mask=torch.arange(12).expand(3, 12) > 2)):
        out, _ = tile_attention(nn.Module(), q, k, k, mask, is_causal=True)
        dense = torch.ones(12, 12).tril().bool()[None, None] if mask is None else mask.dense()
        whole = (x.expand(3, -1, -1, -1) for x in (q, k, k))
        tokens = torch.ones(12, dtype=torch.bool) if mask is None or mask.shape[0] == 1 else torch.arange(12) > 2
        expected = dense_formula(*whole, mask=dense)[0].transpose(1, 2)
        torch.testing.assert_close(out[:, tokens], expected[:, tokens])
    with pytest.raises(ArgumentError, match="batch"):
        tile_attention(nn.Module(), torch.randn(2, 4, 12, 8), *(torch.randn(3, 4, 12, 8),) * 2, None)


@pytest.mark.parametrize(
    ("mask", "words"),
    [
        (torch.ones(2, 12), "attention_mask"),
        ("causal", "attention_mask"),
        (create_block_mask(lambda b, h, q, k: q >= k, None, None, 12, 12, device="cpu"), "attention_mask"),
        (tile_mask(**PREFILL | {"kv_length": 13}), "a mask of 12 queries and 12 keys"),
        (torch.ones(2, 1, 12, 13, dtype=torch.bool), "mask"),
    ],
)
def test_other_masks_are_errors(mask: Any, words: str) -> None:
    q = torch.randn(2, 4, 12, 8)
    with pytest.raises(ArgumentError, match=words):
        tile_attention(nn.Module(), q, q, q, mask)


def test_weights_are_not_there(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """One warning for all layers, as with `sdpa`."""
    q = torch.randn(2, 4, 12, 8)
    transformers.utils.logging.warning_once.cache_clear()
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    for _ in range(2):
        out, weights = tile_attention(nn.Module(), q, q, q, None, output_attentions=True)
        assert weights is None
    assert torch.equal(out, tile_attention(nn.Module(), q, q, q, None)[0])
    assert [x.message.count("attn_implementation='eager'") for x in caplog.records] == [1]


def test_no_mask_is_causal_where_the_layer_says_so() -> None:
    """As in transformers' SDPA: aligned to the first query and key, and all keys for one query."""
    layer, q, k = nn.Module(), torch.randn(2, 4, 5, 8), torch.randn(2, 4, 9, 8)
    layer.is_causal = True
    for rows, argument, causal in ((5, None, True), (5, False, False), (1, None, False), (1, True, False)):
        out, _ = tile_attention(layer, q[:, :, :rows], k, k, None, is_causal=argument)
        visible = torch.ones(rows, 9).tril().bool() if causal else None
        expected = dense_formula(q[:, :, :rows], k, k, mask=None if visible is None else visible[None, None])[0]
        torch.testing.assert_close(out, expected.transpose(1, 2))


def test_register_and_unregister() -> None:
    assert register() == register() == NAME
    assert NAME in transformers.AttentionInterface()
    assert NAME in transformers.AttentionMaskInterface()
    unregister()
    assert NAME not in transformers.AttentionInterface()
    assert NAME not in transformers.AttentionMaskInterface()
    register()


def test_absent_or_old_packages_are_named() -> None:
    with pytest.raises(
        AttentionError, match=r"(?s)no-such-package is not installed.*pip install 'no-such-package>=5.0,<6.0'"
    ):
        optional.require("no-such-package", ((5, 0), (6, 0)))
    with pytest.raises(AttentionError, match=r"(?s)transformers is version 5.*accepted: 7.0 up to 8.0"):
        optional.require("transformers", ((7, 0), (8, 0)))
