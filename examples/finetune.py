"""Fine-tune a language model of transformers, with flashtile and with PyTorch's attention.

    pip install 'flashtile[transformers]'
    python examples/finetune.py                                      # a tiny Llama of bytes, half a minute on two cores
    python examples/finetune.py --model FOLDER --device cuda         # weights of your own

Texts are Python's help topics, of different lengths, padded on the right. Both implementations begin with the same
weights and see the same batches; each prints its losses, tokens per second and the peak of memory in a step.
"""

import time
from pydoc_data.topics import topics
from typing import Any

import click
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from flashtile.bench.allocation import live_and_peak_bytes
from flashtile.integrations.transformers import register

TINY = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "vocab_size": 257, "pad_token_id": 256}


def model_and_texts(name: str | None, dtype: torch.dtype) -> tuple[Any, list[Tensor]]:
    """A model with its tokens of each help topic; without a name, tokens are bytes."""
    texts = [topics[topic] for topic in sorted(topics)]
    if name is None:
        config = LlamaConfig(**TINY, num_attention_heads=4, num_key_value_heads=2)
        return LlamaForCausalLM(config).to(dtype), [torch.tensor(list(text.encode())) for text in texts]
    tokenizer = AutoTokenizer.from_pretrained(name)
    model = AutoModelForCausalLM.from_pretrained(name, dtype=dtype)
    return model, [tokenizer(text, return_tensors="pt").input_ids[0] for text in texts]


def batch_of(texts: list[Tensor], size: int, longest: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Texts of random lengths, padded on the right; padding has no label."""
    chosen = torch.randint(len(texts), (size,), generator=generator).tolist()
    limits = torch.randint(longest // 4, longest + 1, (size,), generator=generator).tolist()
    rows = [texts[n][:limit] for n, limit in zip(chosen, limits, strict=True)]
    pad = torch.nn.utils.rnn.pad_sequence
    ids, visible = pad(rows, batch_first=True), pad([torch.ones_like(row) for row in rows], batch_first=True)
    return {"input_ids": ids, "attention_mask": visible, "labels": ids.masked_fill(visible == 0, -100)}


def fine_tune(model: Any, batches: list[dict[str, Tensor]], device: torch.device) -> tuple[list[float], float, float]:
    """Losses, tokens per second from the second step on, and the peak of a step's memory in MiB."""
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-3), []

    def step(batch: dict[str, Tensor]) -> None:
        loss = model(**batch, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())

    step(batches[0])  # which also compiles kernels
    start, tokens = time.perf_counter(), 0
    for batch in batches[1:]:
        step(batch)
        tokens += int(batch["attention_mask"].sum())
    seconds = time.perf_counter() - start
    _, peak = live_and_peak_bytes(lambda: step(batches[-1]), device)
    return losses[:-1], tokens / seconds, peak / 2**20


@click.command(context_settings={"show_default": True})
@click.option("--model", "name", help="A folder or name for from_pretrained; a tiny Llama by default.")
@click.option("--device", default="cpu")
@click.option("--dtype", type=click.Choice(("float32", "bfloat16")), default="float32")
@click.option("--steps", type=click.IntRange(2), default=20)
@click.option("--batch", type=click.IntRange(1), default=8)
@click.option("--longest", type=click.IntRange(8), default=256)
@click.option("--seed", type=int, default=0)
def main(name: str | None, device: str, dtype: str, steps: int, batch: int, longest: int, seed: int) -> None:
    """Fine-tune on Python's help topics with each implementation of attention."""
    torch.manual_seed(seed)
    register()
    model, texts = model_and_texts(name, getattr(torch, dtype))
    model.to(device).train()
    generator = torch.Generator().manual_seed(seed)
    batches = [batch_of(texts, batch, longest, generator) for _ in range(steps)]
    batches = [{key: x.to(device) for key, x in inputs.items()} for inputs in batches]
    first = {key: x.clone() for key, x in model.state_dict().items()}
    for implementation in ("tile_attention", "sdpa"):
        model.load_state_dict(first)
        model.set_attn_implementation(implementation)
        losses, rate, peak = fine_tune(model, batches, torch.device(device))
        click.echo(
            f"{implementation}: loss {losses[0]:.4f}, after {steps} steps {losses[-1]:.4f}; {rate:,.0f} tokens/s, "
            f"peak {peak:.1f} MiB"
        )


if __name__ == "__main__":
    main()
