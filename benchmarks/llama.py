"""A Llama of 1B parameters with "tile_attention" and others: `python benchmarks/llama.py --out FILE.json`.

With random weights: a training step (forward and backward) over plain and over padded batches, `generate` with a
dynamic cache, and `generate` with a static cache, which transformers compiles and captures in a CUDA graph. Losses and
tokens are compared with those of `sdpa`. A part that fails is reported, and the run goes on; after `--seconds` no part
begins. `--tiny` runs the same program at a small size, also on a CPU.
"""

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import torch
from torch import Tensor
from transformers import CompileConfig, LlamaConfig, LlamaForCausalLM
from transformers.utils import is_flash_attn_2_available, is_flash_attn_3_available

from flashtile.bench.allocation import live_and_peak_bytes
from flashtile.integrations.transformers import register

LARGE = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32}
LARGE |= {"num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": True, "max_position_embeddings": 16384}
TINY = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
TINY |= {"num_key_value_heads": 2, "vocab_size": 256, "tie_word_embeddings": True}
Result = dict[str, Any]


def implementations() -> list[str]:
    """The names of this machine; `sdpa` is the reference."""
    names = ["sdpa", "tile_attention"]
    names += ["flash_attention_2"] * is_flash_attn_2_available() + ["flash_attention_3"] * is_flash_attn_3_available()
    return names


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def median_ms(run: Callable[[], Any], device: torch.device, rounds: int) -> float:
    times = []
    for _ in range(rounds):
        synchronize(device)
        start = time.perf_counter()
        run()
        synchronize(device)
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times)


def batch_of(model: Any, batch: int, length: int, padded: bool) -> dict[str, Tensor]:
    """Token ids with labels; padded rows have from a half of the length up, on the left."""
    ids = torch.randint(1, model.config.vocab_size, (batch, length), device=model.device)
    if not padded:
        return {"input_ids": ids, "labels": ids}
    begins = torch.linspace(0, length // 2, batch, device=model.device).long()
    visible = (torch.arange(length, device=model.device) >= begins[:, None]).long()
    return {"input_ids": ids, "attention_mask": visible, "labels": ids.masked_fill(visible == 0, -100)}


def train(model: Any, inputs: dict[str, Tensor], rounds: int) -> Result:
    """The median time of forward and backward, and what a step needs beyond weights and gradients."""
    losses = []

    def step() -> None:
        loss = model(**inputs, use_cache=False).loss
        loss.backward()
        losses.append(loss.detach())
        for x in model.parameters():
            x.grad.zero_()

    step()  # compiles kernels, makes gradients
    _, peak = live_and_peak_bytes(step, model.device)
    ms = median_ms(step, model.device, rounds)
    tokens = int(inputs["attention_mask"].sum()) if "attention_mask" in inputs else inputs["input_ids"].numel()
    return {"ms": ms, "tokens_per_s": 1e3 * tokens / ms, "peak_mib": peak / 2**20, "loss": float(losses[-1])}


@torch.no_grad()
def decode(model: Any, ids: Tensor, visible: Tensor, new: int, cache: str | None) -> Result:
    """Milliseconds for each token after the prompt, and the tokens. A static cache is compiled, with a CUDA graph."""
    options: dict[str, Any] = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    options |= {"attention_mask": visible, "cache_implementation": cache}
    if cache is not None and model.device.type != "cuda":
        options["compile_config"] = CompileConfig(backend="aot_eager", mode=None)
        options["compile_config"]._compile_all_devices = True
    start = time.perf_counter()
    long = model.generate(ids, max_new_tokens=new, **options)
    first = time.perf_counter() - start
    model.generate(ids, max_new_tokens=2, **options)  # a graph is captured in its second use
    times = [median_ms(lambda n=n: model.generate(ids, max_new_tokens=n, **options), model.device, 2) for n in (2, new)]
    tokens = long[:, ids.shape[1] :].tolist()
    return {"ms_per_token": (times[1] - times[0]) / (new - 2), "first_call_s": first, "tokens": tokens}


@click.command(context_settings={"show_default": True})
@click.option("--device", default="cuda")
@click.option("--tiny", is_flag=True)
@click.option("--seconds", type=float, default=180.0)
@click.option("--rounds", type=click.IntRange(1), default=5)
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path))
def main(device: str, tiny: bool, seconds: float, rounds: int, out: Path | None) -> None:
    """Compare and time every part; exit with 1 if a part of "tile_attention" fails or differs from `sdpa`."""
    begin = time.perf_counter()
    torch.manual_seed(0)
    register()
    with torch.device(device):
        model = LlamaForCausalLM(LlamaConfig(**TINY if tiny else LARGE, pad_token_id=0))
    model = model.to(torch.float32 if tiny else torch.bfloat16)
    for name, x in model.named_parameters():
        if "q_proj" in name or "k_proj" in name:  # scores that differ, so that tokens depend on attention
            x.data *= 3
    length, prompt, new = (64, 24, 8) if tiny else (4096, 2048, 66)
    plain, padded = batch_of(model, 2, length, False), batch_of(model, 2, length, True)
    asked = batch_of(model, 4, prompt, True)
    ids, visible = asked["input_ids"], asked["attention_mask"]
    parts: dict[str, Callable[[], Result]] = {
        f"training step, 2 x {length} tokens": lambda: train(model, plain, rounds),
        f"training step, 2 x {length} tokens, padded": lambda: train(model, padded, rounds),
        f"decode, 4 x {prompt} tokens and more": lambda: decode(model, ids, visible, new, None),
        f"decode in a CUDA graph, 4 x {prompt} tokens and more": lambda: decode(model, ids, visible, new, "static"),
    }
    results: dict[str, dict[str, Result]] = {}
    wrong = False
    for part, run in parts.items():
        results[part] = {}
        for name in implementations():
            if time.perf_counter() - begin > seconds:
                results[part][name] = {"error": f"not begun after {seconds:.0f} s"}
            else:
                model.set_attn_implementation(name)
                model.zero_grad(set_to_none=True)
                model.train("training" in part)
                try:
                    results[part][name] = run()
                except Exception as error:
                    results[part][name] = {"error": f"{type(error).__name__}: {str(error)[:2000]}"}
                torch.compiler.reset()
            wrong |= report(part, name, results[part])
            if out is not None:
                out.write_text(json.dumps(results, indent=1))
    raise SystemExit(wrong)


def report(part: str, name: str, results: dict[str, Result]) -> bool:
    """Print one result; True if it is flashtile's and wrong, or not there."""
    result, reference = results[name], results["sdpa"]
    words = ", ".join(
        f"{x} {y:.4g}" if isinstance(y, float) else f"{x} {y}" for x, y in result.items() if x != "tokens"
    )
    wrong = "error" in result
    if "loss" in result and "loss" in reference:
        wrong |= abs(result["loss"] - reference["loss"]) > 2e-3 * reference["loss"]
    if "tokens" in result and "tokens" in reference:
        pairs = [
            a == b
            for x, y in zip(result["tokens"], reference["tokens"], strict=True)
            for a, b in zip(x, y, strict=True)
        ]
        words += f", {sum(pairs)} of {len(pairs)} tokens as with sdpa"
        wrong |= not any(pairs)  # in bfloat16, near ties go either way
    click.echo(f"{part}: {name}: {words}")
    return wrong and name == "tile_attention"


if __name__ == "__main__":
    main()
