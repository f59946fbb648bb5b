"""`"tile_attention"` in models of transformers against their own `"eager"`: outputs and gradients."""

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="5.0", reason="needs the extra `transformers`")

from tiny_models import DECODERS, SEEING, compare, padded, seeing, tiny, tokens  # noqa: E402

from flashtile.integrations.transformers import mask as masks  # noqa: E402
from flashtile.integrations.transformers import register  # noqa: E402

register()


@pytest.fixture
def no_dense_mask() -> Iterator[None]:
    """No mask of the test is ever dense; `eager` makes its own."""
    with mock.patch.object(masks, "sdpa_mask", side_effect=AssertionError("a dense mask")):
        yield


@pytest.mark.parametrize("name", DECODERS)
def test_decoders(name: str) -> None:
    """Alone, and two rows of which one is padded on the left."""
    model, ids, mask = tiny(name), tokens(2, 13), padded(2, 13, left=4)
    compare(model, lambda out: out.logits[mask.bool()], input_ids=ids, attention_mask=mask)
    compare(model, lambda out: out.logits, input_ids=ids)


@pytest.mark.usefixtures("no_dense_mask")
@pytest.mark.parametrize("name", ["llama", "gemma3", "llama4"])
def test_packed_sequences(name: str) -> None:
    """Position ids that begin again begin another sequence."""
    positions = torch.cat([torch.arange(n) for n in (3, 8, 2)])[None]
    compare(tiny(name), lambda out: out.logits, input_ids=tokens(1, 13), position_ids=positions, use_cache=False)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_packed_sequences_by_offsets(name: str) -> None:
    """As a data collator makes them for FlashAttention, in a model that makes a cache."""
    model, ids, lengths = tiny(name).eval(), tokens(1, 13), (3, 8, 2)
    model.set_attn_implementation("tile_attention")
    offsets = torch.tensor([0, 3, 11, 13], dtype=torch.int32)
    packed: dict[str, Any] = {"cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets, "max_length_q": 8, "max_length_k": 8}
    packed["position_ids"] = torch.cat([torch.arange(n) for n in lengths])[None]
    expected = torch.cat([model(part).logits for part in ids.split(lengths, dim=1)], dim=1)
    torch.testing.assert_close(model(ids, **packed).logits, expected)
    dense = torch.ones(13, 13).tril().bool()[None, None]  # as a compiled model has it
    if name == "llama":
        torch.testing.assert_close(model(ids, attention_mask=dense, **packed).logits, expected)
        numbers = torch.zeros(1, 1, 13, 13).masked_fill(~dense, -torch.inf)
        torch.testing.assert_close(model(ids, attention_mask=numbers, **packed).logits, expected)


@pytest.mark.usefixtures("no_dense_mask")
@pytest.mark.parametrize("name", SEEING)
def test_pictures(name: str) -> None:
    """Tokens of a picture see each other, and padding hides some of the second row."""
    model, ids, mask = seeing(name), tokens(2, 17), padded(2, 17, left=2)
    types = torch.zeros_like(ids)
    types[:, 3:9] = 1
    types[1, 11:14] = 1
    compare(model, lambda out: out.logits, input_ids=ids, token_type_ids=types)
    inputs = {"input_ids": ids, "token_type_ids": types, "attention_mask": mask}
    compare(model, lambda out: out.logits[mask.bool()], **inputs)


@pytest.mark.usefixtures("no_dense_mask")
@pytest.mark.parametrize("name", ["mistral", "gemma3", "llama4"])
def test_several_queries_over_a_cache(name: str) -> None:
    """Windows and chunks that begin in the cache, with padding on the left."""
    model, ids, mask = tiny(name), tokens(2, 18), padded(2, 18, left=3)
    results = []
    for implementation in ("eager", "tile_attention"):
        model.set_attn_implementation(implementation)
        cache = transformers.DynamicCache(config=model.config)
        with torch.no_grad():
            model(input_ids=ids[:, :9], attention_mask=mask[:, :9], past_key_values=cache)
            results.append(model(input_ids=ids[:, 9:], attention_mask=mask, past_key_values=cache).logits)
    torch.testing.assert_close(*results, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_masks_of_four_dimensions(dtype: torch.dtype) -> None:
    """`eager` adds them to its scores, also a bool one; "tile_attention" takes a bool one as SDPA does."""
    model, ids = tiny("llama"), tokens(2, 13)
    visible = torch.rand(2, 1, 13, 13, generator=torch.Generator().manual_seed(3)) < 0.5
    visible |= torch.eye(13, dtype=torch.bool)
    added = torch.where(visible, 0.0, torch.finfo(torch.float32).min)
    if dtype is torch.float32:
        compare(model, lambda out: out.logits, input_ids=ids, attention_mask=added)
        return
    model.set_attn_implementation("eager")
    expected = model(input_ids=ids, attention_mask=added).logits
    model.set_attn_implementation("tile_attention")
    torch.testing.assert_close(model(input_ids=ids, attention_mask=visible).logits, expected, atol=1e-4, rtol=1e-4)


def test_padding_with_holes() -> None:
    mask = padded(2, 13, left=2)
    mask[1, 6] = 0
    ids = tokens(2, 13)
    compare(tiny("mistral"), lambda out: out.logits[mask.bool()], input_ids=ids, attention_mask=mask)


def test_bert() -> None:
    ids, mask = tokens(3, 17), padded(3, 17, right=6)
    compare(tiny("bert"), lambda out: out.logits[mask.bool()], input_ids=ids, attention_mask=mask)


def test_t5() -> None:
    """Encoder, decoder and cross-attention, the first two with a bias of positions that has a gradient."""
    ids, mask, decoder_ids = tokens(2, 11), padded(2, 11, right=4), tokens(2, 7, seed=1)
    model = tiny("t5")
    compare(model, lambda out: out.logits, input_ids=ids, attention_mask=mask, decoder_input_ids=decoder_ids)
    assert model.encoder.block[0].layer[0].SelfAttention.relative_attention_bias.weight.grad.abs().max() > 0


def test_whisper() -> None:
    sound = torch.randn(2, 8, 40, generator=torch.Generator().manual_seed(3))
    compare(tiny("whisper"), lambda out: out.logits, input_features=sound, decoder_input_ids=tokens(2, 7))


def test_vit() -> None:
    pictures = torch.randn(2, 3, 24, 24, generator=torch.Generator().manual_seed(3))
    compare(tiny("vit"), lambda out: out.last_hidden_state, pixel_values=pictures)


def test_clip() -> None:
    pictures = torch.randn(2, 3, 24, 24, generator=torch.Generator().manual_seed(3))
    inputs = {"input_ids": tokens(2, 9), "attention_mask": padded(2, 9, right=3), "pixel_values": pictures}
    compare(tiny("clip"), lambda out: torch.cat([out.text_embeds, out.image_embeds], 1), **inputs)


def test_bfloat16_and_dropout_run() -> None:
    """Dropout in training, with a seed of PyTorch's; no other thing may be random."""
    model = tiny("llama").to(torch.bfloat16).train()
    model.set_attn_implementation("tile_attention")
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    results = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        results.append(model(input_ids=tokens(1, 9)).logits)
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])
