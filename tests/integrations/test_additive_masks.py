"""Models that do not accept "sdpa" take their masks for numbers to add, as "eager" makes them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

transformers = pytest.importorskip("transformers", minversion="5.0", reason="needs the extra `transformers`")

from tiny_models import PICTURE, TEXT, compare, make, padded, tokens  # noqa: E402
from transformers import masking_utils as originals  # noqa: E402

from flashtile.integrations.transformers import register  # noqa: E402
from flashtile.integrations.transformers.mask import TileMask, tile_mask  # noqa: E402
from flashtile.integrations.transformers.models import takes_numbers  # noqa: E402

register()

GIT = TEXT | {"vision_config": PICTURE, "bos_token_id": 1, "eos_token_id": 1}
COMPRESSED = ["heavily_compressed_attention", "compressed_sparse_attention"]
DEEPSEEK_V4 = {x: TEXT[x] for x in TEXT if x != "intermediate_size"} | {
    "head_dim": 8,
    "num_key_value_heads": 1,
    "q_lora_rank": 16,
    "o_lora_rank": 8,
    "o_groups": 2,
    "hc_mult": 2,
    "index_n_heads": 2,
    "index_head_dim": 8,
    "index_topk": 2,
    "sliding_window": 5,
    "layer_types": COMPRESSED,
    "compress_rates": dict(zip(COMPRESSED, (4, 2), strict=True)),
    "mlp_layer_types": ["moe", "moe"],
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}


@pytest.mark.parametrize(("name", "arguments"), [("Git", GIT), ("DeepseekV4", DEEPSEEK_V4)])
def test_models(name: str, arguments: dict[str, Any]) -> None:
    """GIT adds its mask to another one; DeepSeek-V4 appends columns of numbers and of zeros."""
    model, ids, mask = make(f"{name}ForCausalLM", f"{name}Config", arguments), tokens(2, 13), padded(2, 13, right=3)
    compare(model, lambda out: out.logits, input_ids=ids)
    compare(model, lambda out: out.logits[mask.bool()], input_ids=ids, attention_mask=mask)


def test_models_with_attention_of_their_own() -> None:
    """BLOOM adds the mask to its scores whatever its configuration says."""
    logits = []
    for implementation in ("eager", "tile_attention"):
        torch.manual_seed(0)
        sizes = {"vocab_size": 61, "hidden_size": 32, "n_layer": 1, "n_head": 4}
        config = transformers.BloomConfig(**sizes, attn_implementation=implementation)
        logits.append(transformers.BloomForCausalLM(config).eval()(tokens(2, 9)).logits)
    assert torch.equal(*logits)


PICTURES = originals.or_masks(originals.causal_mask_function, lambda b, h, i, j: (i < 3) & (j < 4))


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("function", [originals.causal_mask_function, PICTURES])
def test_operations(function: Callable[..., Any], rows: int) -> None:
    """They see the mask of `eager`, in the dtype of the model."""
    arguments: dict[str, Any] = {"batch_size": 2, "q_length": rows, "kv_length": 5, "q_offset": 5 - rows}
    arguments |= {"mask_function": function, "attention_mask": padded(2, 5, right=2).bool(), "dtype": torch.bfloat16}
    ours = tile_mask(**arguments, config=transformers.GitConfig())
    expected = originals.eager_mask(**arguments)
    scores = torch.randn(2, 4, rows, 5, dtype=torch.bfloat16)
    assert isinstance(ours, Tensor)
    assert ours.dtype == expected.dtype
    operations: list[Callable[[Tensor], Tensor]] = [lambda x: scores + x, lambda x: x[..., :3]]
    operations += [lambda x: pad(x, (0, 2), value=0.0), lambda x: torch.cat([x, scores[:, :1]], dim=-1)]
    for operation in operations:
        assert torch.equal(operation(ours), operation(expected))
    assert isinstance(ours, TileMask) == (rows > 1 or function is originals.causal_mask_function)


def test_which_models() -> None:
    """Those that say that they do not support SDPA, by their configurations' classes, or the package of a part's."""
    from transformers.models.pp_doclayout_v2 import configuration_pp_doclayout_v2 as layout

    models = ("LlamaModel", "T5Model", "PPDocLayoutV2Model", "GptOssModel", "GitModel", "BloomModel")
    accepting, refusing = (
        [getattr(transformers, name).config_class for name in names] for names in (models[:3], models[3:])
    )
    accepting.append(transformers.PreTrainedConfig)
    refusing.append(layout.PPDocLayoutV2ReadingOrderConfig)
    assert [takes_numbers(config) for config in accepting + refusing] == [False] * 4 + [True] * 4
