"""Generate over caches of 8 bits, with a tiny Llama of bytes that is trained first.

    pip install 'flashtile[transformers]'
    python examples/eight_bit_cache.py                 # less than a minute on two cores
    python examples/eight_bit_cache.py --device cuda

Texts are Python's help topics. Perplexity is that of tokens of texts that training leaves out, in pieces that each read
their past from the cache; tokens per second are those of `generate`.
"""

import math
import time
from collections.abc import Callable
from pydoc_data.topics import topics
from typing import Any

import click
import torch
from torch import Tensor
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from flashtile.integrations.transformers import register
from flashtile.integrations.transformers.cache import EightBitCache

TINY = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "vocab_size": 256}
CACHES: dict[str, Callable[[], Any]] = {
    "the model's dtype": DynamicCache,
    "float8_e4m3fn": lambda: EightBitCache(torch.float8_e4m3fn),
    "float8_e5m2": lambda: EightBitCache(torch.float8_e5m2),
    "int8": lambda: EightBitCache(torch.int8),
}


def train(model: Any, text: Tensor, steps: int, length: int) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for _ in range(steps):
        starts = torch.randint(len(text) - length, (8,)).tolist()
        batch = torch.stack([text[n : n + length] for n in starts])
        model(input_ids=batch, labels=batch, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@torch.no_grad()
def perplexity(model: Any, texts: Tensor, cache: Any, piece: int) -> float:
    """Of all tokens but the first of `texts [B, S]`."""
    losses = []
    for n in range(0, texts.shape[1] - 1, piece):
        given, wanted = texts[:, n : n + piece], texts[:, n + 1 : n + piece + 1]
        logits = model(input_ids=given[:, : wanted.shape[1]], past_key_values=cache, use_cache=True).logits
        losses.append(
            torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), wanted.flatten(), reduction="sum")
        )
    return math.exp(float(torch.stack(losses).sum()) / texts[:, 1:].numel())


def tokens_per_second(model: Any, prompt: Tensor, make_cache: Callable[[], Any], count: int) -> float:
    settings = {"max_new_tokens": count, "min_new_tokens": count, "do_sample": False, "pad_token_id": 0}
    for _ in range(2):  # the first one compiles
        start = time.perf_counter()
        written = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), past_key_values=make_cache(), **settings
        )
        written.cpu()
    return len(prompt) * count / (time.perf_counter() - start)


@click.command(help=__doc__)
@click.option("--device", default="cpu", show_default=True)
@click.option("--steps", default=150, show_default=True)
@click.option("--length", default=128, show_default=True, help="Tokens of a text.")
def main(device: str, steps: int, length: int) -> None:
    torch.manual_seed(0)
    text = torch.tensor(list("".join(topics[x] for x in sorted(topics)).encode()), device=device)
    config = LlamaConfig(**TINY, num_attention_heads=4, num_key_value_heads=2, pad_token_id=0, eos_token_id=None)
    model = LlamaForCausalLM(config).to(torch.bfloat16).to(device)
    model.set_attn_implementation(register())
    train(model, text[: -16 * length], steps, length)
    model.eval()
    texts = text[-16 * length :].view(16, length)
    for name, make_cache in CACHES.items():
        cache = make_cache()
        found = perplexity(model, texts, cache, piece=16)
        rate = tokens_per_second(model, texts[:, : length // 2], make_cache, length // 2)
        held = cache.nbytes() if isinstance(cache, EightBitCache) else nbytes(cache)
        click.echo(f"{name}: perplexity {found:.4f}, {rate:,.0f} tokens/s, cache {held / 2**20:.2f} MiB")


def nbytes(cache: Any) -> int:
    return sum(x.nbytes for layer in cache.layers for x in (layer.keys, layer.values))


if __name__ == "__main__":
    main()
