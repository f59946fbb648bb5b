"""DeepSeek's models with absorbed projections against their own "eager": the same tokens, by the rows of the cache."""

from typing import Any
from unittest import mock

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="5.0", reason="needs the extra `transformers`")

from test_generate import prompt  # noqa: E402
from tiny_models import DECODERS, LATENT, ROUTED, TEXT, make, tiny, tokens, use  # noqa: E402

from flashtile.errors import ArgumentError  # noqa: E402
from flashtile.integrations.transformers import absorb, attention, expand  # noqa: E402

RANK, ROPE = 16, 8  # of the tiny models


def latent_model(name: str) -> Any:
    if name in DECODERS:
        return tiny(name)
    sizes = TEXT | LATENT | ROUTED | {"num_key_value_heads": 4, "first_k_dense_replace": 1}
    return make("DeepseekV2ForCausalLM", "DeepseekV2Config", sizes)


def generated(model: Any, **options: Any) -> Any:
    settings = {"max_new_tokens": 8, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    settings |= {"disable_compile": True, "pad_token_id": 0, "eos_token_id": None}
    return model.generate(**prompt(), **settings | options)


@pytest.mark.parametrize(("name", "cache"), [("deepseek_v2", "dynamic"), ("deepseek_v3", "static")])
def test_tokens_are_those_of_eager(name: str, cache: str) -> None:
    """Decoding reads rows: one key head, and values that are columns of the keys."""
    model = latent_model(name)
    use(model, "eager")
    options = {"cache_implementation": None if cache == "dynamic" else cache}
    eager = generated(model, **options)
    assert absorb(model) == 2
    shapes = []
    attend = attention.attention

    def recorded(q: Any, k: Any, v: Any, **more: Any) -> Any:
        shapes.append((q.shape[2], k.shape[1], k.shape[-1], v.shape[-1], k.data_ptr() == v.data_ptr()))
        return attend(q, k, v, **more)

    with mock.patch.object(attention, "attention", recorded):
        ours = generated(model, **options)
    assert torch.equal(ours.sequences, eager.sequences)
    torch.testing.assert_close(torch.stack(ours.logits), torch.stack(eager.logits), rtol=1e-3, atol=1e-3)
    assert {x for x in shapes if x[0] == 1} == {(1, 1, RANK + ROPE, RANK, True)}
    expand(model)
    use(model, "eager")
    assert torch.equal(generated(model, **options).sequences, eager.sequences)


def test_the_cache_has_latent_rows() -> None:
    """Bytes of a token and layer: those of a row, not those of all heads."""
    model = tiny("deepseek_v3")
    absorb(model)
    cache = transformers.DynamicCache(config=model.config)
    with torch.no_grad():
        model(tokens(1, 9), past_key_values=cache)
    held = sum(x.numel() * x.element_size() for layer in cache.layers for x in (layer.keys, layer.values))
    assert held == 2 * 9 * (RANK + ROPE) * 4


def test_gradients_and_many_queries_expand_the_rows() -> None:
    model = tiny("deepseek_v3").eval()
    ids = tokens(1, 120)
    use(model, "eager")
    expected = model(ids).logits
    absorb(model)
    torch.testing.assert_close(model(ids).logits, expected, rtol=1e-4, atol=1e-4)
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, expected, rtol=1e-4, atol=1e-4)


def test_models_without_latent_layers_are_refused() -> None:
    with pytest.raises(ArgumentError, match="latent attention"):
        absorb(tiny("llama"))
