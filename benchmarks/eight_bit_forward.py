"""Forward in float8_e4m3fn on a GPU: errors against exact attention, and TFLOP/s beside bfloat16.

python benchmarks/eight_bit_forward.py --errors
python benchmarks/eight_bit_forward.py --time 128,16384,full
python benchmarks/eight_bit_forward.py --time 128,16384,full --spread 4
python benchmarks/eight_bit_forward.py --time 128,16384,full --kernels FOLDER    # other sources of kernels/eight_bit
python benchmarks/eight_bit_forward.py --caches 128
python benchmarks/eight_bit_forward.py --features 128
python benchmarks/eight_bit_forward.py --rates 128
python benchmarks/eight_bit_forward.py --rotation 128    # without a GPU

Errors and times of FlashAttention-3 appear where it is installed, or `--fa3-library FILE` names its compiled operators.
"""

import argparse
import importlib
import json
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import flashtile
from flashtile.api.explain import described_call
from flashtile.backend.gpu import kernel
from flashtile.backend.gpu.rates import PARTS
from flashtile.backend.hopper.plan import candidates, cost, tables
from flashtile.bench.providers.flash_attn_3 import FlashAttention3
from flashtile.call.device import describe_device
from flashtile.call.problem import Problem
from flashtile.dispatch import fast_path

FP8 = torch.float8_e4m3fn
HEADS = {64: 32, 128: 16, 256: 8}
TOKENS = 16384


KEPT: list[Any] = []  # entries whose kernels a CUDA graph may still launch


@contextmanager
def configured(changes: dict[str, Any]) -> Iterator[None]:
    """Tables whose configurations of 8 bits have other fields."""
    kept = dict(tables.EIGHT_BIT)
    try:
        tables.EIGHT_BIT.update({width: replace(config, **changes) for width, config in kept.items()})
        forget()
        yield
    finally:
        tables.EIGHT_BIT.update(kept)
        forget()


def forget() -> None:
    """Drop all plans and entries, but keep what they refer to."""
    KEPT.append((fast_path.table.recent, fast_path.table.older))
    fast_path.forget()


@contextmanager
def kernels_of(folder: Path | None) -> Iterator[None]:
    """Kernels of 8 bits whose modules are those in this folder, as far as it has them."""
    if folder is None:
        yield
        return
    package = importlib.import_module("flashtile.backend.hopper.kernels.eight_bit")
    kept = list(package.__path__)
    try:
        package.__path__[:] = [str(folder), *kept]
        load_again(package)
        yield
    finally:
        package.__path__[:] = kept
        load_again(package)


def load_again(package: Any) -> None:
    """Drop all modules of a package, and what has been made of their kernels."""
    for name in [x for x in sys.modules if x.startswith(f"{package.__name__}.")]:
        KEPT.append(sys.modules.pop(name))
        vars(package).pop(name.removeprefix(f"{package.__name__}."), None)
    kernel.function_of.cache_clear()
    forget()


def exact(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """`out`, `lse` in float64, and for each row the largest sum of absolute products."""
    outs, lses, sums = [], [], []
    keys, group = k.shape[2], q.shape[1] // k.shape[1]
    k, v = (x.double().repeat_interleave(group, 1) for x in (k, v))
    for first in range(0, q.shape[2], 512):
        rows = q[:, :, first : first + 512].double()
        s = rows @ k.mT * scale
        if causal:
            i = torch.arange(first, first + rows.shape[2], device=q.device)[:, None] + keys - q.shape[2]
            s = s.masked_fill(torch.arange(keys, device=q.device) > i, -math.inf)
        lse = s.logsumexp(-1)
        outs.append(torch.exp(s - lse[..., None]) @ v)
        lses.append(lse)
        sums.append((rows.abs() @ k.abs().mT * scale).amax(-1))
    return torch.cat(outs, 2), torch.cat(lses, 2), torch.cat(sums, 2)


CASES = {
    "normal": ((1, 2, 2, 300, 700), "normal"),
    "outliers": ((1, 2, 2, 256, 4096), "outliers"),
    "grouped": ((2, 4, 2, 193, 321), "normal"),
    "129 keys": ((1, 2, 2, 129, 129), "normal"),
    "one row": ((1, 2, 2, 1, 5000), "normal"),
    "ones": ((1, 1, 1, 128, 131072), "ones"),
    "ones large": ((1, 1, 1, 128, 131072), "ones large"),
    "tail": ((1, 1, 1, 128, 131072), "tail"),
    "equal": ((1, 1, 1, 128, 131072), "equal"),
}


def inputs(shape: tuple[int, ...], kind: str, width: int) -> tuple[Tensor, Tensor, Tensor]:
    batch, heads, heads_kv, rows, keys = shape
    make = torch.Generator("cuda").manual_seed(0)
    q, k, v = (
        torch.randn(batch, h, n, width, device="cuda", generator=make)
        for h, n in ((heads, rows), (heads_kv, keys), (heads_kv, keys))
    )
    if kind == "outliers":
        q, k, v = (
            torch.where(torch.rand(x.shape, device="cuda", generator=make) < 0.001, x + 10 * torch.randn_like(x), x)
            for x in (q, k, v)
        )
    if kind.startswith("ones"):
        v = torch.ones_like(v)
    if kind == "ones large":
        q = q * 4
    if kind == "tail":  # the first key has half of the weight
        k = torch.zeros_like(k)
        k[:, :, 0] = math.log(keys) / math.sqrt(width)
        q = torch.ones_like(q)
    if kind == "equal":
        q = torch.zeros_like(q)
    return q, k, v


def quantized(x: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """Numbers of 8 bits, and scales `[B, heads]` of groups of heads."""
    of_heads = x.abs().amax((2, 3)).view(x.shape[0], heads, -1).amax(-1).clamp(min=1e-6) / 448
    return (x / over_heads(of_heads, x)).to(FP8), of_heads


def over_heads(scale: Tensor, x: Tensor) -> Tensor:
    """Scales `[B, Hkv]`, repeated for all query heads: `[B, H, 1, 1]`."""
    return scale.repeat_interleave(x.shape[1] // scale.shape[1], 1)[:, :, None, None]


def rmse(x: Tensor, expected: Tensor) -> float:
    return float((x - expected).double().square().mean().sqrt())


def flash_attention_3(
    library: Path | None, numbers: list[Tensor], scales: list[Tensor], causal: bool
) -> Callable[[], Tensor] | None:
    """FlashAttention-3's call; `None` without it, or if it was built without kernels of 8 bits."""
    provider = FlashAttention3(library)
    if provider.unusable(numbers[0].device) is not None:
        return None
    rows = [x.transpose(1, 2).contiguous() for x in numbers]
    named = dict(zip(("q_descale", "k_descale", "v_descale"), scales, strict=False))

    def run() -> Tensor:
        return provider.operators().fwd(*rows, is_causal=causal, num_splits=1, **named)[0].transpose(1, 2)

    try:
        run()
    except RuntimeError as error:
        if "does not support FP8" in str(error):
            return None
        raise
    return run


def report_errors(width: int, names: list[str], library: Path | None) -> None:
    """Print errors of 8 bits against exact attention of their numbers, and errors of 8 and of 16 bits against exact
    attention of the numbers before.
    """
    for name in names:
        shape, kind = CASES[name]
        for causal in (False, True):
            before = inputs(shape, kind, width)
            pairs = [quantized(x, shape[2]) for x in before]
            numbers, scales = [x for x, _ in pairs], [x for _, x in pairs]
            given = [x.double() * over_heads(scale, x) for x, scale in pairs]
            more: dict[str, Any] = {"causal": causal, "return_lse": True, "out_dtype": torch.float32}
            more |= dict(zip(("q_descale", "k_descale", "v_descale"), scales, strict=True))
            out, lse = flashtile.attention(*numbers, backend="hopper", **more)  # type: ignore[misc]
            expected, expected_lse, sums = exact(given[0], given[1], given[2], causal, width**-0.5)
            exact_before, _, _ = exact(*before, causal, width**-0.5)
            in_16_bits = flashtile.attention(*(x.bfloat16() for x in before), causal=causal, backend="hopper")
            other = flash_attention_3(library, numbers, scales, causal)
            error = (out - expected).abs()
            of_lse = (lse - expected_lse).abs()
            print(json.dumps({
                "width": width, "case": name, "causal": causal, "max": float(error.max()),
                "rmse": rmse(out, expected), "of": float(expected.square().mean().sqrt()),
                "whole rmse": rmse(out, exact_before), "bf16 rmse": rmse(in_16_bits, exact_before),
                "flash-attention 3 rmse": None if other is None else rmse(other(), exact_before),
                "lse": float(of_lse.max()), "lse mean": float((lse - expected_lse).mean()), "A": float(sums.max()),
                "lse/A": float((of_lse / sums.clamp(min=1e-6)).max()), "nan": bool(out.isnan().any()),
            }), flush=True)  # fmt: skip


def report_rotation(width: int) -> None:
    """Print what quantizing q and k to 8 bits, with scales of heads, changes in exact attention, as they are and after
    `flashtile.hadamard`. Outliers are 0.1% of all elements, N(0, 100), or two features, 8 times as large in q and k.
    """
    make = torch.Generator().manual_seed(0)
    for kind in ("normal", "outliers", "two features"):
        q, k, v = torch.randn(3, 1, 4, 1024, width, generator=make, dtype=torch.float64)
        if kind == "outliers":
            more = 10 * torch.randn(2, 1, 4, 1024, width, generator=make, dtype=torch.float64)
            hit = torch.rand(more.shape, generator=make) < 0.001
            q, k = torch.stack((q, k)) + more * hit
        if kind == "two features":
            q[..., :2] *= 2
            q[..., 2:] /= 4
            k[..., :2] *= 8
        expected, _, _ = exact(q, k, v, False, width**-0.5)
        errors = []
        for x in ((q, k), (flashtile.hadamard(q), flashtile.hadamard(k))):
            pairs = [quantized(y, 4) for y in x]
            given = [y.double() * over_heads(scale, y) for y, scale in pairs]
            out, _, _ = exact(given[0], given[1], v, False, width**-0.5)
            errors.append(rmse(out, expected) / float(expected.square().mean().sqrt()))
        found = {"width": width, "inputs": kind, "rmse": errors[0], "rotated": errors[1]}
        print(json.dumps(found | {"gain": round(errors[0] / errors[1], 2)}), flush=True)


def graph_of(function: Any, repeats: int) -> torch.cuda.CUDAGraph:
    function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            function()
    return graph


def interleaved(graphs: dict[str, torch.cuda.CUDAGraph], repeats: int, rounds: int) -> dict[str, float]:
    """Milliseconds of a call of each graph, the median over rounds in which they take turns."""
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for n in range(rounds + 2):
        for name, graph in graphs.items():
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            stop.record()
            torch.cuda.synchronize()
            if n > 1:
                times[name].append(start.elapsed_time(stop) / repeats)
    return {name: sorted(x)[len(x) // 2] for name, x in times.items()}


def report_times(
    width: int, rows: int, causal: bool, given: argparse.Namespace, variants: list[str], kernels: list[Path]
) -> float:
    """Print the speed of each variant, of it with other kernels, of bfloat16 and of FlashAttention-3; return the first
    one's milliseconds.
    """
    heads, batch = HEADS[width], TOKENS // rows
    q, k, v = (torch.randn(batch, heads, rows, width, device="cuda") for _ in range(3))
    q *= given.spread
    flops = 4 * batch * heads * rows * rows * width * (0.5 if causal else 1.0)
    repeats = max(1, int(0.004 * 6e14 / flops))
    graphs = {}
    numbers = {dtype: [t.to(dtype) for t in (q, k, v)] for dtype in (torch.bfloat16, FP8)}  # graphs read them
    options: dict[str, Any] = {"causal": causal, "backend": "hopper"}
    for name in variants:
        for folder in (None, *kernels):
            with configured(json.loads(name)), kernels_of(folder):
                title = name if folder is None else f"{name} {folder}"
                graphs[title] = graph_of(partial(flashtile.attention, *numbers[FP8], **options), repeats)
    graphs["bf16"] = graph_of(partial(flashtile.attention, *numbers[torch.bfloat16], **options), repeats)
    for dtype, title in ((FP8, "fa3"), (torch.bfloat16, "fa3 bf16")):
        if (run := flash_attention_3(given.fa3_library, numbers[dtype], [], causal)) is not None:
            graphs[title] = graph_of(run, repeats)
    medians = interleaved(graphs, repeats, given.rounds)
    for name, time in medians.items():
        found = {"width": width, "rows": rows, "causal": causal, "spread": given.spread, "variant": name}
        print(json.dumps(found | {"ms": round(time, 4), "TFLOP/s": round(flops / time / 1e9, 1)}), flush=True)
    return medians[variants[0]]


# Calls over caches: sequences, query heads, key heads, rows, keys, keys of a page.
CACHES = (
    (64, 32, 8, 1, 8192, 16), (8, 32, 8, 1, 8192, 16), (1, 32, 8, 1, 131072, 16), (8, 32, 8, 1, 32768, 64),
    (64, 32, 8, 4, 8192, 64), (1, 8, 8, 128, 131072, 64), (1, 8, 8, 1024, 131072, 64), (1, 16, 16, 16384, 16384, 16),
)  # fmt: skip


def report_caches(width: int, rounds: int) -> None:
    """Print microseconds of causal calls over pages: queries of 8 bits by Hopper's kernel and by the backend that is
    chosen, and queries in bfloat16 over pages of 8 bits and in bfloat16.
    """
    for batch, heads, heads_kv, rows, keys, size in CACHES:
        pages = batch * keys // size
        q = torch.randn(batch, heads, rows, width, device="cuda")
        k, v = (torch.randn(pages, size, heads_kv, width, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        numbers = {dtype: [x.to(dtype) for x in (q, k, v)] for dtype in (torch.bfloat16, FP8)}
        wide, small = numbers[torch.bfloat16], numbers[FP8]
        scales = {f"{x}_descale": torch.ones(batch, heads_kv, device="cuda") for x in "qkv"}
        of_keys = {name: x for name, x in scales.items() if name != "q_descale"}
        table = torch.randperm(pages, device="cuda").view(batch, -1).int()
        lengths = torch.full((batch,), keys, device="cuda", dtype=torch.int32)
        options: dict[str, Any] = {"cache_seqlens": lengths, "page_table": table, "causal": True}
        calls: dict[str, tuple[list[Tensor], dict[str, Any]]] = {
            "fp8 hopper": (small, scales | {"backend": "hopper"}), "fp8": (small, scales), "bf16": (wide, {}),
            "bf16, fp8 keys": ([wide[0], *small[1:]], of_keys),
        }  # fmt: skip
        flops = 4 * batch * heads * rows * (keys - (rows - 1) / 2) * width
        repeats = max(1, min(50, int(0.002 / (flops / 6e14 + 4 * batch * heads_kv * keys * width / 4e12))))
        graphs = {}
        for name, (tensors, more) in calls.items():
            run = partial(flashtile.attention_with_kvcache, *tensors, **options, **more)
            graphs[name] = graph_of(run, repeats)
        found = {"width": width, "batch": batch, "heads": f"{heads}/{heads_kv}", "rows": rows, "keys": keys}
        times = {name: round(1000 * x, 1) for name, x in interleaved(graphs, repeats, rounds).items()}
        print(json.dumps(found | {"page_size": size, "us": times}), flush=True)


def report_features(width: int, rounds: int) -> None:
    """Print microseconds of causal calls that change scores, 4 times 4096 tokens: in 8 bits by Hopper's kernel and by
    Triton's, and in bfloat16 by the backend that is chosen.
    """
    batch, rows, heads = 4, 4096, HEADS[width]
    wide = [torch.randn(batch, heads, rows, width, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    small = [x.to(FP8) for x in wide]
    rate = torch.rand(heads, device="cuda")
    features: dict[str, dict[str, Any]] = {
        "none": {}, "softcap": {"softcap": 30.0}, "slopes": {"alibi_slopes": rate},
        "bias": {"bias": torch.randn(1, heads, rows, rows, device="cuda", dtype=torch.bfloat16)},
        "score_mod": {"score_mod": flashtile.ScoreMod(lambda s, b, h, i, j, rate: s - rate[h] * (i - j), (rate,))},
    }  # fmt: skip
    for name, more in features.items():
        calls = {"fp8 hopper": (small, {"backend": "hopper"}), "fp8 triton": (small, {"backend": "triton"})}
        graphs = {}
        for title, (tensors, options) in (calls | {"bf16": (wide, {})}).items():
            graphs[title] = graph_of(partial(flashtile.attention, *tensors, causal=True, **more, **options), 4)
        times = {title: round(1000 * x, 1) for title, x in interleaved(graphs, 4, rounds).items()}
        print(json.dumps({"width": width, "feature": name, "us": times}), flush=True)


def report_rates(width: int, given: argparse.Namespace, variant: str) -> None:
    """Print the rates of a width's kernel, as `rates/` has them, that fit its times best."""
    device = describe_device(torch.device("cuda"))
    counted, times = [], []
    for rows, causal in ((16384, False), (16384, True), (4096, False), (4096, True), (1024, False), (1024, True)):
        times.append(1000 * report_times(width, rows, causal, given, [variant], []))
        q = torch.empty(TOKENS // rows, HEADS[width], rows, width, device="cuda").to(FP8)
        problem = Problem.describe(described_call(q, q, q, None, None, {"causal": causal})).bucketed()
        config = next(iter(candidates.forward(problem, device)))[0]
        counts = cost.forward(problem, device, config).counts
        kernel = next(name.removesuffix(" step") for name in counts if name.endswith(" step"))
        counted.append([counts[f"{kernel} {part}"] for part in PARTS])
    matrix, weights = np.array(counted), 1 / np.array(times)
    kept = [n for n in range(len(PARTS)) if matrix[:, n].any()]
    while True:  # no part takes less than nothing
        x, *_ = np.linalg.lstsq(matrix[:, kept] * weights[:, None], np.ones(len(times)), rcond=None)
        if (x >= 0).all():
            break
        del kept[int(x.argmin())]
    rates = {part: round(float(x[kept.index(n)]), 4) if n in kept else 0 for n, part in enumerate(PARTS)}
    error = np.abs(matrix[:, kept] @ x * weights - 1).max()
    print(json.dumps({"width": width, "kernel": kernel, **rates, "largest error": round(float(error), 3)}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--errors", action="store_true")
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--time", action="append", default=[], help="width,rows,full|causal")
    parser.add_argument("--spread", type=float, default=1.0, help="standard deviation of the scores that are timed")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--caches", action="append", type=int, default=[], help="width")
    parser.add_argument("--features", action="append", type=int, default=[], help="width")
    parser.add_argument("--kernels", action="append", type=Path, default=[], help="folder of other kernel sources")
    parser.add_argument("--fa3-library", type=Path, help="compiled operators of FlashAttention-3")
    parser.add_argument("--set", action="append", default=[], help="fields of a configuration; timed beside each other")
    parser.add_argument("--rotation", action="append", type=int, default=[], help="width")
    parser.add_argument("--rates", action="append", type=int, default=[], help="width")
    given = parser.parse_args()
    variants = given.set or ["{}"]
    if given.errors:
        with configured(json.loads(variants[0])):
            report_errors(given.width, given.cases.split(","), given.fa3_library)
    for case in given.time:
        width, rows, form = case.split(",")
        report_times(int(width), int(rows), form == "causal", given, variants, given.kernels)
    for width in given.rotation:
        report_rotation(width)
    for width in given.caches:
        report_caches(width, given.rounds)
    for width in given.features:
        report_features(width, given.rounds)
    for width in given.rates:
        report_rates(width, given, variants[0])


if __name__ == "__main__":
    main()
