"""`torch.compile` around "tile_attention": a whole model, and layers that get a mask from outside."""

from collections.abc import Callable
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

transformers = pytest.importorskip("transformers", minversion="5.0", reason="needs the extra `transformers`")

from tiny_models import padded, tiny, tokens  # noqa: E402
from transformers.masking_utils import (  # noqa: E402
    and_masks,
    causal_mask_function,
    chunked_causal_mask_function,
    or_masks,
    packed_sequence_mask_function,
)

from flashtile.integrations.transformers import mask as masks  # noqa: E402
from flashtile.integrations.transformers import register  # noqa: E402
from flashtile.integrations.transformers.attention import tile_attention  # noqa: E402

register()


@torch.no_grad()
def test_a_whole_model() -> None:
    """One graph, with the mask made inside of it."""
    model, ids, mask = tiny("llama"), tokens(2, 13), padded(2, 13, left=4)
    expected = model(input_ids=ids, attention_mask=mask).logits[mask.bool()]
    model.set_attn_implementation("tile_attention")
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    found = compiled(input_ids=ids, attention_mask=mask, use_cache=False).logits[mask.bool()]
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("name", ["llama", "bert"])
def test_no_mask_is_made_without_padding(name: str) -> None:
    """Layers know that they are causal. (Without a cache, a traced Llama always allows for packed sequences.)"""
    model, ids = tiny(name), tokens(2, 13)
    expected = model(input_ids=ids).logits
    model.set_attn_implementation("tile_attention")
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    with mock.patch.object(masks, "sdpa_mask", side_effect=AssertionError):
        found = compiled(input_ids=ids).logits
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_layers() -> None:
    """Each graph is for the pattern and offset of its mask: another mask is never taken for it."""
    model, ours, ids = tiny("mistral"), tiny("mistral"), tokens(2, 20)
    ours.set_attn_implementation("tile_attention")
    ours.model.layers[0].compile(fullgraph=True, backend="aot_eager")
    caches, done = [transformers.DynamicCache(config=model.config) for _ in range(2)], 0
    for rows, left in ((6, 2), (4, 2), (1, 2), (4, 3), (4, 3)):
        mask = padded(2, done + rows, left=left)
        new = {"input_ids": ids[:, done : done + rows], "attention_mask": mask}
        expected, found = (x(**new, past_key_values=c).logits for x, c in zip((model, ours), caches, strict=True))
        seen = mask[:, done:].bool()
        torch.testing.assert_close(found[seen], expected[seen], atol=1e-4, rtol=1e-4)
        done += rows


def image(size: int) -> Callable[..., Tensor]:
    """Causal, but for the first tokens, which see each other."""
    return or_masks(causal_mask_function, lambda b, h, q, kv: (q < size) & (kv < size))


def packed(size: int) -> Callable[..., Tensor]:
    """Sequences of some tokens, packed, of which each batch has others."""
    ids = torch.stack([torch.arange(20) // n for n in (size, size + 1)])
    return and_masks(packed_sequence_mask_function(ids), causal_mask_function)


def chunks(size: int) -> Callable[..., Tensor]:
    return chunked_causal_mask_function(size, torch.zeros(2, dtype=torch.long))


@torch.no_grad()
@pytest.mark.parametrize("function", [image, packed, chunks])
def test_mask_functions_in_compiled_layers(function: Callable[[int], Callable[..., Tensor]]) -> None:
    """They are not made dense, and a graph is taken for no other function."""
    layer, (q, k, v) = torch.nn.Module(), torch.randn(3, 2, 4, 20, 16).unbind()
    attend = torch.compile(lambda mask: tile_attention(layer, q, k, v, mask)[0], fullgraph=True, backend="aot_eager")
    for size in (7, 11):
        mask = masks.tile_mask(2, 20, 20, mask_function=function(size))
        assert mask is not None
        expected = scaled_dot_product_attention(q, k, v, attn_mask=mask.clone()).transpose(1, 2)
        with mock.patch.object(masks.TileMask, "dense", side_effect=AssertionError):
            found = attend(mask)
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
