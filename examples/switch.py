"""Switch a model of transformers by one line, see that every layer runs flashtile, and go back."""

from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import flashtile
from flashtile.integrations.transformers import check, register

torch.manual_seed(0)
sizes: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3, "vocab_size": 300}
model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2))
tokens = torch.randint(300, (2, 256))

losses = {}
for implementation in (register(), "sdpa"):  # the name that it registers, and back
    model.set_attn_implementation(implementation)
    with flashtile.calls() as counted:
        losses[implementation] = model(tokens, labels=tokens).loss.item()
    print(f"{implementation}: loss {losses[implementation]:.6f}, {counted.total} calls of flashtile")
model.set_attn_implementation("tile_attention")
print(check(model))
