"""`generate` with "tile_attention" against "eager": the same tokens, and logits up to rounding."""

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

transformers = pytest.importorskip("transformers", minversion="5.0", reason="needs the extra `transformers`")

from tiny_models import padded, tiny, tokens, use  # noqa: E402
from transformers.generation.continuous_batching import cache as pages  # noqa: E402

from flashtile.errors import ArgumentError  # noqa: E402
from flashtile.integrations.transformers import paged, register  # noqa: E402

register()


def agree(model: Any, inputs: dict[str, Tensor], **options: Any) -> None:
    """Assert that both implementations generate the same."""
    results = []
    for implementation in ("eager", "tile_attention"):
        use(model, implementation)
        settings = {"max_new_tokens": 8, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
        settings |= {"disable_compile": True, "pad_token_id": 0, "eos_token_id": None}
        results.append(model.generate(**inputs, **settings | options))
    eager, ours = results
    assert eager.sequences.shape[1] > 5
    assert torch.equal(ours.sequences, eager.sequences)
    if eager.logits is not None:
        torch.testing.assert_close(torch.stack(ours.logits), torch.stack(eager.logits), rtol=1e-3, atol=1e-3)


def prompt() -> dict[str, Tensor]:
    return {"input_ids": tokens(2, 9), "attention_mask": padded(2, 9, left=4)}


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt_oss", "llama4", "deepseek_v3"])
def test_caches_with_left_padding(name: str, cache: str) -> None:
    if (name, cache) == ("llama4", "static"):
        pytest.skip("transformers 5.17 has no mask of chunks over a static cache, with any implementation")
    agree(tiny(name), prompt(), cache_implementation=None if cache == "dynamic" else cache)


def test_beam_search() -> None:
    agree(tiny("llama"), prompt(), num_beams=3, output_logits=False)


def test_assisted_decoding() -> None:
    """A model's own draft of several tokens, of which it accepts some: several queries over a longer cache."""
    assistant = tiny("llama")
    assistant.model.layers, assistant.config.num_hidden_layers = assistant.model.layers[:1], 1
    agree(tiny("llama"), {"input_ids": tokens(1, 9)}, assistant_model=assistant)


def test_encoder_and_decoder() -> None:
    agree(tiny("t5"), {"input_ids": tokens(2, 9), "attention_mask": padded(2, 9, right=4)})
    sound = torch.randn(2, 8, 40, generator=torch.Generator().manual_seed(3))
    agree(tiny("whisper"), {"input_features": sound}, cache_implementation="static")


def test_continuous_batching() -> None:
    """Prompts of several lengths, of windows and sinks, as if each were alone."""
    model, prompts = tiny("gpt_oss"), [tokens(n, seed=n).tolist() for n in (3, 9, 5)]
    config = transformers.GenerationConfig(max_new_tokens=6, do_sample=False, eos_token_id=-1, pad_token_id=0)
    expected = [model.generate(torch.tensor([x]), generation_config=config)[0, len(x) :].tolist() for x in prompts]
    model.set_attn_implementation("tile_attention")
    batching = transformers.ContinuousBatchingConfig(num_blocks=16, block_size=16, max_batch_tokens=32)
    free = mock.patch.object(pages, "get_device_and_memory_breakdown", return_value=("cpu", 1 << 34, 0, 0))
    with free, mock.patch.object(paged, "attention_varlen", wraps=paged.attention_varlen) as calls:
        settings: dict[str, Any] = {"generation_config": config, "continuous_batching_config": batching}
        found = model.generate_batch(prompts, **settings, progress_bar=False)
    assert [list(x.generated_tokens) for x in found.values()] == expected
    assert calls.call_count >= 12
    q = torch.randn(1, 4, 5, 8)
    with pytest.raises(ArgumentError, match="PagedAttentionCache"):
        paged.paged_tile_attention(torch.nn.Module(), q, q, q)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.parametrize("name", ["llama", "gpt_oss"])
def test_a_static_cache_in_a_cuda_graph(name: str) -> None:
    """transformers compiles a decode step and captures it; the tokens are those of `eager`, which is not compiled."""
    model = tiny(name).cuda()
    inputs = {key: x.cuda() for key, x in prompt().items()}
    settings = {"max_new_tokens": 24, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    settings |= {"pad_token_id": 0, "eos_token_id": None}
    expected = model.generate(**inputs, **settings)
    model.set_attn_implementation("tile_attention")
    for _ in range(2):  # a graph is captured in the second use
        found = model.generate(**inputs, **settings, cache_implementation="static")
        assert torch.equal(found.sequences, expected.sequences)
        torch.testing.assert_close(torch.stack(found.logits), torch.stack(expected.logits), rtol=1e-3, atol=1e-3)
