"""`generate` over a cache of 8 bits: against the same cache read by "eager", and against a dense cache."""

from typing import Any
from unittest import mock

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="5.0", reason="needs the extra `transformers`")

from tiny_models import padded, tiny, tokens, use  # noqa: E402

from flashtile.errors import ArgumentError, AttentionError  # noqa: E402
from flashtile.integrations.transformers import cache as caches  # noqa: E402
from flashtile.integrations.transformers import register  # noqa: E402
from flashtile.integrations.transformers.cache import EightBitCache, EightBitKeys  # noqa: E402
from flashtile.testing.eight_bit import FORMATS  # noqa: E402

register()


def generated(model: Any, implementation: str, cache: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    use(model, implementation)
    settings = {"max_new_tokens": 4, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    settings |= {"disable_compile": True, "pad_token_id": 0, "eos_token_id": None, "past_key_values": cache}
    settings |= {"input_ids": tokens(2, 9), "attention_mask": padded(2, 9, left=4)}
    found = model.generate(**settings | options)
    return found.sequences, None if found.logits is None else torch.stack(found.logits)


@pytest.mark.parametrize(
    ("name", "dtype"), [("gemma3", FORMATS[0]), ("gpt_oss", FORMATS[2]), ("deepseek_v3", FORMATS[1])]
)
def test_kernels_read_what_eager_dequantizes(name: str, dtype: torch.dtype) -> None:
    model = tiny(name)
    expected, logits = generated(model, "eager", EightBitCache(dtype))
    reads = mock.patch.object(EightBitKeys, "dequantized", autospec=True, side_effect=EightBitKeys.dequantized)
    with reads as dequantized:
        found, own_logits = generated(model, "tile_attention", EightBitCache(dtype))
    assert bool(dequantized.call_count) == (name == "deepseek_v3")  # which expands what its cache holds
    assert torch.equal(found, expected)
    torch.testing.assert_close(own_logits, logits, rtol=1e-3, atol=1e-3)


def test_numbers_are_close_to_those_of_a_dense_cache() -> None:
    """And it grows: its first allocation has no room for all tokens."""
    model = tiny("llama")
    _, logits = generated(model, "tile_attention", None)
    cache = EightBitCache(torch.int8)
    with mock.patch.object(caches, "LEAST_ROOM", 4):
        _, found = generated(model, "tile_attention", cache)
    assert logits is not None
    torch.testing.assert_close(found[0], logits[0], rtol=0, atol=0.02 * float(logits[0].std()))
    assert cache.get_seq_length() == 12
    assert cache.nbytes() < 2 * 12 * 2 * 2 * 2 * 2 * (8 + 4)  # rows, room, heads, k and v, layers, twice the length


def test_beams_and_drafts() -> None:
    model = tiny("llama")
    plain, _ = generated(model, "eager", EightBitCache(), num_beams=3, output_logits=False)
    beams, _ = generated(model, "tile_attention", EightBitCache(), num_beams=3, output_logits=False)
    assert torch.equal(beams, plain)
    cache = EightBitCache()
    with torch.no_grad():
        model(tokens(2, 9), past_key_values=cache, use_cache=True)
    cache.crop(-3)
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([3, 0]))
    cache.crop(5)
    assert cache.get_seq_length() == 5
    other = EightBitCache()
    with torch.no_grad():
        model(tokens(2, 9).flip(0)[:, :5], past_key_values=other, use_cache=True)
    for mine, theirs in zip(cache.layers, other.layers, strict=True):
        torch.testing.assert_close(mine.keys[:, :, :5].float(), theirs.keys[:, :, :5].float())


def test_errors() -> None:
    with pytest.raises(ArgumentError, match="int8"):
        EightBitCache(torch.float16)
    with pytest.raises(AttentionError, match="no_grad"):  # and not a gradient without these keys
        tiny("llama")(tokens(2, 9), past_key_values=EightBitCache(), use_cache=True)
