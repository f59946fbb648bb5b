"""What `check` says of a model's layers, against the calls that a forward pass makes."""

from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

transformers = pytest.importorskip("transformers", minversion="5.0", reason="needs the extra `transformers`")

from tiny_models import TEXT, seeing, tiny, tokens, use  # noqa: E402
from transformers import AttentionInterface  # noqa: E402

from flashtile.integrations.transformers import NAME, check, register  # noqa: E402
from flashtile.integrations.transformers.attention import tile_attention  # noqa: E402
from flashtile.integrations.transformers.layers import OWN  # noqa: E402

register()


def calling(model: nn.Module, **inputs: Any) -> set[str]:
    """Names of the modules that call the attention function in a forward pass."""
    names, called = {module: name for name, module in model.named_modules()}, set()

    def counted(module: nn.Module, *arguments: Any, **more: Any) -> Any:
        called.add(names[module])
        return tile_attention(module, *arguments, **more)

    with mock.patch.dict(AttentionInterface._global_mapping, {NAME: counted}), torch.no_grad():
        model(**inputs)
    return called


@pytest.mark.parametrize("name", ["llama", "t5", "whisper", "clip", "paligemma"])
def test_layers_that_run(name: str) -> None:
    """As many as there are, and none before the implementation is set."""
    model = seeing(name) if name == "paligemma" else tiny(name)
    inputs: dict[str, Any] = {} if name == "whisper" else {"input_ids": tokens(2, 9)}
    if name in ("t5", "whisper"):
        inputs["decoder_input_ids"] = tokens(2, 7)
    if name in ("clip", "paligemma"):
        inputs["pixel_values"] = torch.randn(2, 3, 24, 24)
    if name == "paligemma":
        inputs["input_ids"][:] = 1
        inputs["input_ids"][:, :9] = 60
    if name == "whisper":
        inputs["input_features"] = torch.randn(2, 8, 40)
    assert not any(row.runs for row in check(model))
    assert not calling(model, **inputs)
    use(model, NAME)
    assert {row.layer for row in check(model) if row.runs} == calling(model, **inputs) != set()


def test_parts_that_the_setter_does_not_reach() -> None:
    model = tiny("t5")
    model.set_attn_implementation(NAME)
    report = check(model)
    assert not any(row.runs for row in report)
    assert all("T5Config has 'eager'" in row.reason for row in report)
    model.encoder.set_attn_implementation(NAME)
    assert [row.layer for row in report] == [row.layer for row in check(model)]
    assert [row.layer for row in check(model) if row.runs] == [x.layer for x in report if x.layer.startswith("encoder")]


def test_layers_of_their_own() -> None:
    """Rows and text."""
    sizes = {"vocab_size": 61, "hidden_size": 32, "n_layer": 2, "n_head": 4}
    report = check(transformers.BloomForCausalLM(transformers.BloomConfig(**sizes)))
    name = "transformer.h.0.self_attention"
    assert report[0] == (name, "BloomAttention", False, OWN)
    assert str(report) == f"0 of 2 attention layers run flashtile\n  BloomAttention, {name} and 1 more: {OWN}"
    model = transformers.BertModel(transformers.BertConfig(**TEXT, attn_implementation=NAME))
    assert str(check(model)).splitlines()[0] == "2 of 2 attention layers run flashtile"
    assert not check(nn.Linear(2, 2))
