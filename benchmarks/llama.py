"""A Llama of 1B parameters with "tile_attention" and others: `python benchmarks/llama.py --out FILE.json`.

With random weights: a training step (forward and backward) over plain and over padded batches, `generate` with a
dynamic cache, and `generate` with a static cache, which transformers compiles and captures in a CUDA graph. Gradients
of the projections, and logits of given tokens, are compared with those of the same model in a wider dtype; ours may be
1.5 times as far from them as `sdpa`'s. A part that fails is reported, and the run goes on; after `--seconds` no part
begins, and `--only decode` leaves out the training steps. Parts without padding also run in "flash_attention_2" where
flash_attn is installed, and in FlashAttention-3's operators with `--fa3-library`. `--tiny` runs the same program at a
small size, also on a CPU.
"""

import copy
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import click
import fa3_attention
import torch
from torch import Tensor
from transformers import CompileConfig, LlamaConfig, LlamaForCausalLM, LogitsProcessor
from transformers.utils import is_flash_attn_2_available

from flashtile.bench.allocation import live_and_peak_bytes
from flashtile.integrations.transformers import register

LARGE = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32}
LARGE |= {"num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": True, "max_position_embeddings": 16384}
TINY = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
TINY |= {"num_key_value_heads": 2, "vocab_size": 256, "tie_word_embeddings": True, "initializer_range": 0.15}
FLASH_ATTENTION = "flash_attention_2"
PROJECTIONS = ("q_proj", "k_proj", "v_proj")
Result = dict[str, Any]


class Training(NamedTuple):
    """A batch, and the gradients of the projections in the wider dtype."""

    inputs: dict[str, Tensor]
    grads: dict[str, Tensor]


class Decoding(NamedTuple):
    """A prompt `[B, S]`, the tokens that follow, and their logits `[B, N, vocabulary]` in the wider dtype."""

    ids: Tensor
    visible: Tensor
    following: Tensor
    logits: Tensor


class Given(LogitsProcessor):
    """Makes `generate` write given tokens, so that logits of several runs belong to the same text."""

    def __init__(self, tokens: Tensor, prompt: int) -> None:
        self.tokens, self.prompt = tokens, prompt

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:  # pyright: ignore - types of transformers
        token = self.tokens[:, input_ids.shape[1] - self.prompt]
        return torch.full_like(scores, -torch.inf).scatter(1, token[:, None], 0.0)


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


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Root mean square of the difference, by that of the expected values."""
    return float((found.to(expected.dtype) - expected).norm() / expected.norm())


def visible_tokens(model: Any, batch: int, length: int, padded: bool) -> Tensor:
    """`[B, S]`, 0 for padding: from none to a half of a row, on the left."""
    begins = torch.linspace(0, length // 2 if padded else 0, batch, device=model.device).long()
    return (torch.arange(length, device=model.device) >= begins[:, None]).long()


def projections(model: Any) -> dict[str, Tensor]:
    return {name: x.grad for name, x in model.named_parameters() if any(word in name for word in PROJECTIONS)}


def training(model: Any, batch: int, length: int, padded: bool) -> Training:
    """A batch, and its gradients by a model of the wider dtype."""
    ids = torch.randint(1, model.config.vocab_size, (batch, length), device=model.device)
    inputs = {"input_ids": ids, "labels": ids}
    if padded:
        visible = visible_tokens(model, batch, length, padded)
        inputs |= {"attention_mask": visible, "labels": ids.masked_fill(visible == 0, -100)}
    model.zero_grad(set_to_none=True)
    model(**inputs, use_cache=False).loss.backward()
    return Training(inputs, dict(projections(model)))


@torch.no_grad()
def decoding(model: Any, batch: int, prompt: int, new: int, padded: bool) -> Decoding:
    """A prompt and a text, and its logits by a model of the wider dtype."""
    ids = torch.randint(1, model.config.vocab_size, (batch, prompt + new), device=model.device)
    visible = visible_tokens(model, batch, prompt, padded)
    whole = torch.cat((visible, visible.new_ones(batch, new)), dim=1)[:, :-1]
    positions = (whole.cumsum(1) - 1).clamp(min=0)
    logits = model(
        ids[:, :-1], attention_mask=whole, position_ids=positions, logits_to_keep=new, use_cache=False
    ).logits
    return Decoding(ids[:, :prompt], visible, ids[:, prompt:], logits)


def train(model: Any, case: Training, rounds: int) -> Result:
    """The median time of forward and backward, and what a step needs beyond weights and gradients."""

    def step() -> None:
        model(**case.inputs, use_cache=False).loss.backward()

    model.train()
    model.zero_grad(set_to_none=True)
    step()  # compiles kernels, makes gradients
    found = projections(model)
    error = max(relative_error(found[name], expected) for name, expected in case.grads.items())
    _, peak = live_and_peak_bytes(step, model.device)
    ms = median_ms(step, model.device, rounds)
    mask = case.inputs.get("attention_mask")
    tokens = case.inputs["input_ids"].numel() if mask is None else int(mask.sum())
    return {"ms": ms, "tokens_per_s": 1e3 * tokens / ms, "peak_mib": peak / 2**20, "error": error}


@torch.no_grad()
def decode(model: Any, case: Decoding, cache: str | None) -> Result:
    """Milliseconds for each token after the prompt, and memory beyond weights. A static cache is compiled, with a CUDA
    graph.
    """
    options: dict[str, Any] = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    options |= {"attention_mask": case.visible, "cache_implementation": cache}
    options["logits_processor"] = [Given(case.following, case.ids.shape[1])]
    if cache is not None and model.device.type != "cuda":
        options["compile_config"] = CompileConfig(backend="aot_eager", mode=None)
        options["compile_config"]._compile_all_devices = True
    model.eval()
    new, start = case.following.shape[1], time.perf_counter()
    long = model.generate(case.ids, max_new_tokens=new, **options, return_dict_in_generate=True, output_logits=True)
    first = time.perf_counter() - start
    error = relative_error(torch.stack(long.logits, dim=1), case.logits)
    model.generate(case.ids, max_new_tokens=2, **options)  # a graph is captured in its second use
    times = [
        median_ms(lambda n=n: model.generate(case.ids, max_new_tokens=n, **options), model.device, 2) for n in (2, new)
    ]
    _, peak = live_and_peak_bytes(lambda: model.generate(case.ids, max_new_tokens=new, **options), model.device)
    ms = (times[1] - times[0]) / (new - 2)
    speeds = {"ms_per_token": ms, "tokens_per_s": 1e3 * len(case.ids) / ms}
    return speeds | {"peak_mib": peak / 2**20, "first_call_s": first, "error": error}


@click.command(context_settings={"show_default": True})
@click.option("--device", default="cuda")
@click.option("--tiny", is_flag=True)
@click.option("--only", type=click.Choice(["training", "decode"]), help="One half of the parts.")
@click.option("--seconds", type=float, default=180.0)
@click.option("--rounds", type=click.IntRange(1), default=5)
@click.option("--fa3-library", type=click.Path(path_type=Path), help="A file with FlashAttention-3's operators.")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path))
def main(
    device: str,
    tiny: bool,
    only: str | None,
    seconds: float,
    rounds: int,
    fa3_library: Path | None,
    out: Path | None,
) -> None:
    """Compare and time every part; exit with 1 if a part of "tile_attention" fails or is less exact than `sdpa`."""
    begin = time.perf_counter()
    torch.manual_seed(0)
    names = ["sdpa", register()]
    plain = names + ([FLASH_ATTENTION] if device == "cuda" and is_flash_attn_2_available() else [])
    plain += [fa3_attention.register(fa3_library)] if fa3_library else []
    with torch.device(device):
        wide = LlamaForCausalLM(LlamaConfig(**TINY if tiny else LARGE, pad_token_id=0))
    model = copy.deepcopy(wide).to(torch.float32 if tiny else torch.bfloat16)
    wide = wide.to(torch.float64 if tiny else torch.float32)
    wide.load_state_dict(model.state_dict())  # the rounded weights
    wide.set_attn_implementation("sdpa")
    length, prompt, new = (64, 24, 8) if tiny else (4096, 2048, 66)
    steps = {padded: training(wide, 2, length, padded) for padded in (False, True) if only != "decode"}
    texts = {padded: decoding(wide, 4, prompt, new, padded) for padded in (False, True) if only != "training"}
    del wide
    parts: dict[str, tuple[list[str], Callable[[], Result]]] = {
        f"training step, 2 x {length} tokens": (plain, lambda: train(model, steps[False], rounds)),
        f"training step, 2 x {length} tokens, padded": (names, lambda: train(model, steps[True], rounds)),
        f"decode, 4 x {prompt} tokens and more": (plain, lambda: decode(model, texts[False], None)),
        f"decode in a CUDA graph, 4 x {prompt} tokens and more, padded": (
            names,
            lambda: decode(model, texts[True], "static"),
        ),
    }
    results: dict[str, dict[str, Result]] = {}
    wrong = False
    for part, (implementations, run) in parts.items():
        if only is not None and not part.startswith(only):
            continue
        results[part] = {}
        for name in implementations:
            if time.perf_counter() - begin > seconds:
                results[part][name] = {"failure": f"not begun after {seconds:.0f} s"}
            else:
                model.set_attn_implementation(name)
                model.zero_grad(set_to_none=True)
                try:
                    results[part][name] = run()
                except Exception as error:
                    results[part][name] = {"failure": f"{type(error).__name__}: {str(error)[:2000]}"}
                torch.compiler.reset()
            wrong |= report(part, name, results[part])
            if out is not None:
                out.write_text(json.dumps(results, indent=1))
    raise SystemExit(wrong)


def report(part: str, name: str, results: dict[str, Result]) -> bool:
    """Print one result; True if it is flashtile's and wrong, or not there."""
    result = results[name]
    words = ", ".join(f"{x} {y:.4g}" if isinstance(y, float) else f"{x} {y}" for x, y in result.items())
    click.echo(f"{part}: {name}: {words}")
    if name != "tile_attention":
        return False
    if "failure" in result:
        return True
    return "error" in results["sdpa"] and result["error"] > 1.5 * results["sdpa"]["error"]


if __name__ == "__main__":
    main()
