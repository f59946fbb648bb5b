"""`torch.compile` around "tile_attention": a whole model, and layers that get a mask from outside."""

from unittest import mock

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="5.0", reason="needs the extra `transformers`")

from tiny_models import padded, tiny, tokens  # noqa: E402

from flashtile.integrations.transformers import mask as masks  # noqa: E402
from flashtile.integrations.transformers import register  # noqa: E402

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
