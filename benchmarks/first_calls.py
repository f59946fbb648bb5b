"""Waiting for compilers: first calls and calls of random lengths, in processes from nothing.

    python benchmarks/first_calls.py --out results
    python benchmarks/first_calls.py --device cuda --archive kernels-sm_90.zip --fa3 flash_attn_interface --out results

Five workloads, each in processes of its own: with empty caches, then with those that the first process has filled,
and with `--archive` with empty caches and compiled kernels. PyTorch's SDPA is measured too and, on a GPU, FlexAttention
under `torch.compile` and FlashAttention-3, if `--fa3` names its module. A process makes a first forward and backward
call, then calls of random lengths. Each call is made twice, and the time that the first one takes more is lost. The
result is a table, and `first-calls-DEVICE.json` in the folder of `--out`.
"""

import argparse
import functools
import importlib
import itertools
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.nn.functional import scaled_dot_product_attention

import flashtile
from flashtile.backend import compiling
from flashtile.backend.archive import NO_ARCHIVE
from flashtile.backend.gpu.archive import KERNELS_VARIABLE
from flashtile.backend.user_files import CACHE_VARIABLE

WAIT = 0.2  # seconds lost that a person notices
SHORTEST = 16  # keys
STATES = EMPTY, FULL, ARCHIVE = "empty cache", "full cache", "archive"
CACHES = (CACHE_VARIABLE, "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")
Tensors = dict[str, torch.Tensor]
Forward = Callable[[], torch.Tensor]


class Workload(NamedTuple):
    """Calls of random lengths and batches up to `longest` and `batch`; `kind` is what `inputs` makes of them."""

    kind: str  # "dense", "padded", "decode" or "packed"
    heads: int
    heads_kv: int
    head_dim: int
    causal: bool
    longest: int
    batch: int

    @property
    def training(self) -> bool:
        return self.kind != "decode"


WORKLOADS = {
    "causal GQA, training": Workload("dense", 32, 8, 128, True, 6000, 1),
    "padded encoder, training": Workload("padded", 12, 12, 64, False, 512, 16),
    "images of 80 features, training": Workload("dense", 16, 16, 80, False, 2500, 4),
    "decoding with a cache": Workload("decode", 32, 8, 128, True, 8192, 32),
    "packed sequences, training": Workload("packed", 16, 16, 64, True, 2048, 8),
}


# In a process of its own ----------------------------------------------------------------------------------------------


def inputs(workload: Workload, draw: random.Random, device: str, longest: int) -> Tensors:
    """Tensors of one call. A packed call has as many sequences as others have in a batch."""
    length, batch = draw.randint(SHORTEST, min(longest, workload.longest)), draw.randint(1, workload.batch)
    lengths = torch.tensor([draw.randint(1, length) for _ in range(batch)], dtype=torch.int32)
    lengths[0] = length
    h, hkv, d = workload[1:4]
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    rows = 1 if workload.kind == "decode" else length
    shapes = ((batch, h, rows, d), (batch, hkv, length, d), (batch, hkv, length, d))
    if workload.kind == "packed":
        shapes = tuple((int(lengths.sum()), n, d) for n in (h, hkv, hkv))  # type: ignore[assignment]
    x = {name: torch.randn(s, device=device, dtype=dtype) for name, s in zip("qkv", shapes, strict=True)}
    if workload.training:
        x = {name: y.requires_grad_() for name, y in x.items()}
    x["lengths"] = lengths.to(device)
    x["offsets"] = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int().to(device)
    x["mask"] = (torch.arange(length)[None] < lengths[:, None])[:, None, None].to(device)
    return x


def by_flashtile(workload: Workload, x: Tensors, longest: int) -> Forward:
    q, k, v = x["q"], x["k"], x["v"]
    if workload.kind == "packed":
        return lambda: flashtile.attention_varlen(
            q, k, v, x["offsets"], x["offsets"], max_seqlen_q=longest, max_seqlen_k=longest, causal=workload.causal
        )
    if workload.kind == "decode":
        return lambda: flashtile.attention_with_kvcache(q, k, v, cache_seqlens=x["lengths"], causal=True)
    mask = x["mask"] if workload.kind == "padded" else None
    return lambda: flashtile.attention(q, k, v, mask=mask, causal=workload.causal)


def by_sdpa(workload: Workload, x: Tensors, _: int) -> Forward:
    """Packed sequences are calls of their own: SDPA has no packed layout."""
    q, k, v = x["q"], x["k"], x["v"]
    attend = functools.partial(scaled_dot_product_attention, enable_gqa=workload.heads != workload.heads_kv)
    if workload.kind == "packed":
        ends = x["offsets"].tolist()

        def one_by_one() -> torch.Tensor:
            parts = []
            for a, b in itertools.pairwise(ends):
                of_one = (y[a:b].transpose(0, 1)[None] for y in (q, k, v))
                parts.append(attend(*of_one, is_causal=True)[0].transpose(0, 1))  # type: ignore[arg-type]
            return torch.cat(parts)

        return one_by_one
    if workload.kind in ("decode", "padded"):
        return lambda: attend(q, k, v, attn_mask=x["mask"])
    return lambda: attend(q, k, v, is_causal=workload.causal)


@functools.cache
def compiled_flex() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention)


def by_flex(workload: Workload, x: Tensors, _: int) -> Forward:
    from torch.nn.attention.flex_attention import create_block_mask

    q, k, v = x["q"], x["k"], x["v"]
    lengths, functions = x["lengths"], {}
    if workload.kind == "packed":
        rows = torch.arange(q.shape[0], device=q.device, dtype=torch.int32)
        document = torch.searchsorted(x["offsets"][1:], rows, right=True)
        q, k, v = (y.transpose(0, 1)[None] for y in (q, k, v))
        functions["packed"] = lambda b, h, i, j: (document[i] == document[j]) & (i >= j)
    functions["padded"] = functions["decode"] = lambda b, h, i, j: j < lengths[b]
    functions["dense"] = (lambda b, h, i, j: i >= j) if workload.causal else None
    function = functions[workload.kind]
    shape = (q.shape[0] if workload.kind in ("padded", "decode") else None, None, q.shape[2], k.shape[2])
    gqa = workload.heads != workload.heads_kv

    def forward() -> torch.Tensor:
        mask = None if function is None else create_block_mask(function, *shape, device=str(q.device))
        return compiled_flex()(q, k, v, block_mask=mask, enable_gqa=gqa)

    return forward


def by_fa3(module: str, workload: Workload, x: Tensors, longest: int) -> Forward:
    """FlashAttention-3 has no masks of padding: a padded batch is not run."""
    fa3 = importlib.import_module(module)
    q, k, v = x["q"], x["k"], x["v"]
    if workload.kind == "packed":
        at = (x["offsets"], x["offsets"], longest, longest)
        return lambda: first(fa3.flash_attn_varlen_func(q, k, v, *at, causal=True))
    if workload.kind == "padded":
        raise NotImplementedError("it has no masks")
    q, k, v = (y.transpose(1, 2) for y in (q, k, v))
    if workload.kind == "decode":
        return lambda: first(fa3.flash_attn_with_kvcache(q, k, v, cache_seqlens=x["lengths"], causal=True))
    return lambda: first(fa3.flash_attn_func(q, k, v, causal=workload.causal))


def first(results: Any) -> torch.Tensor:
    return results[0] if isinstance(results, tuple) else results


def measured(workload: Workload, provider: Callable[..., Forward], options: argparse.Namespace) -> dict[str, Any]:
    """Seconds of first calls, and what calls of random lengths lose."""
    device, longest, draw = options.device, options.longest, random.Random(0)
    leaf = torch.ones(64, 64, device=device, requires_grad=True)
    out = leaf.mm(leaf)
    out.backward(torch.ones_like(out))  # the device is up, and PyTorch has imported SymPy for its first backward pass
    first_forward = first_backward = None
    lost: list[float] = []
    for n in range(options.lengths + 1):
        x = inputs(workload, draw, device, longest)
        forward = provider(workload, x, longest)
        times = [passes(forward, x, workload.training, device) for _ in range(2)]
        if n == 0:
            first_forward, first_backward = times[0][0], times[0][1] if workload.training else None
        lost.append(max(0.0, sum(times[0]) - sum(times[1])))
    waits = [seconds for seconds in lost if seconds > WAIT]
    return {
        "first forward": first_forward,
        "first backward": first_backward,
        "lost": sum(lost),
        "waits": len(waits),
        "longest wait": max(lost),
        "kernels": compiling.compiled if provider is by_flashtile else None,
    }


def passes(forward: Forward, x: Tensors, training: bool, device: str) -> tuple[float, float]:
    """Seconds of forward and of backward."""
    start = time.perf_counter()
    with torch.set_grad_enabled(training):
        out = forward()
    wait_for(device)
    middle = time.perf_counter()
    if training:
        torch.autograd.grad(out, [x[name] for name in "qkv"], torch.ones_like(out))
        wait_for(device)
    return middle - start, time.perf_counter() - middle


def wait_for(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


# The process that starts the others -----------------------------------------------------------------------------------


def providers(options: argparse.Namespace) -> dict[str, Callable[..., Forward]]:
    found: dict[str, Callable[..., Forward]] = {"flashtile": by_flashtile, "SDPA": by_sdpa}
    if options.device == "cuda":
        found["FlexAttention"] = by_flex
        if options.fa3:
            found["FlashAttention-3"] = functools.partial(by_fa3, options.fa3)
    return found


def row(name: str, provider: str, options: argparse.Namespace, end: float) -> dict[str, dict[str, Any]]:
    """The measurements of one workload and provider, by the state of the caches."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for state in STATES:
            if state not in options.states:
                continue
            if (state == ARCHIVE and (options.archive is None or provider != "flashtile")) or (
                state == FULL and provider not in ("flashtile", "FlexAttention")
            ):
                continue  # others have no cache on disk
            caches = {x: os.path.join(folder, "archive" if state == ARCHIVE else "", x) for x in CACHES}
            kernels = str(Path(options.archive or "").resolve()) if state == ARCHIVE else NO_ARCHIVE
            found[state] = fresh(name, provider, options, caches | {KERNELS_VARIABLE: kernels}, end)
    return found


def fresh(name: str, provider: str, options: argparse.Namespace, env: dict[str, str], end: float) -> dict[str, Any]:
    """A measurement in a new process; `error` says why there is none."""
    left = end - time.monotonic()
    if left < 1:
        return {"error": "no time was left"}
    words = ["--device", options.device, "--longest", str(options.longest), "--lengths", str(options.lengths)]
    words += ["--fa3", options.fa3] if options.fa3 else []
    command = [sys.executable, __file__, *words, "--task", name, "--provider", provider]
    for folder in CACHES:
        os.makedirs(env[folder], mode=0o700, exist_ok=True)
    try:
        done = subprocess.run(command, env=os.environ | env, capture_output=True, text=True, timeout=left)
    except subprocess.TimeoutExpired:
        return {"error": f"not ready after {left:.0f} s"}
    if done.returncode:
        return {"error": (done.stderr.strip().splitlines() or ["no output"])[-1]}
    return json.loads(done.stdout.splitlines()[-1])


def table(found: dict[str, Any]) -> str:
    lines = ["| workload | library, caches | first forward, s | backward, s | lost, s | waits | longest, s | kernels |"]
    lines.append("|---" * 8 + "|")
    for name, by_provider in found["workloads"].items():
        for provider, states in by_provider.items():
            for state, x in states.items():
                facts = [x["error"]] if "error" in x else [in_words(value) for value in x.values()]
                lines.append(f"| {name} | {provider}, {state} | {' | '.join(facts)} |")
    return "\n".join(lines)


def in_words(value: float | int | None) -> str:
    return "" if value is None else f"{value:.2f}" if isinstance(value, float) else str(value)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--archive", type=Path, help="of GPU kernels, from `flashtile build-kernels`")
    parser.add_argument("--fa3", help="the module of FlashAttention-3")
    parser.add_argument("--lengths", type=int, default=60, help="random lengths of a workload")
    parser.add_argument("--longest", type=int, help="keys at most; by default the workload's, on a CPU 600")
    parser.add_argument("--states", nargs="*", choices=STATES, default=STATES, help="of caches")
    parser.add_argument("--providers", nargs="*", help="libraries; by default all")
    parser.add_argument("--only", default="", help="workloads whose name contains this")
    parser.add_argument("--seconds", type=float, default=290, help="for everything")
    parser.add_argument("--jobs", type=int, help="processes at once; by default 4 on a GPU, 1 on a CPU")
    parser.add_argument("--out", type=Path, default=Path())
    parser.add_argument("--task", choices=WORKLOADS, help=argparse.SUPPRESS)
    parser.add_argument("--provider", help=argparse.SUPPRESS)
    options = parser.parse_args()
    on_gpu = options.device == "cuda"
    options.longest = options.longest or (max(x.longest for x in WORKLOADS.values()) if on_gpu else 600)
    if options.task:
        print(json.dumps(measured(WORKLOADS[options.task], providers(options)[options.provider], options)))
        return
    end, names = time.monotonic() + options.seconds, [name for name in WORKLOADS if options.only in name]
    chosen = options.providers or [*providers(options)]
    pairs = [(name, provider) for provider in chosen for name in names]
    with ThreadPoolExecutor(options.jobs or (4 if on_gpu else 1)) as pool:
        rows = [*pool.map(lambda pair: row(pair[0], pair[1], options, end), pairs)]
    found: dict[str, Any] = {"device": torch.cuda.get_device_name() if on_gpu else "cpu", "torch": torch.__version__}
    found["workloads"] = {name: {} for name in names}
    for (name, provider), states in zip(pairs, rows, strict=True):
        found["workloads"][name][provider] = states
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / f"first-calls-{options.device}.json").write_text(json.dumps(found, indent=1) + "\n")
    print(table(found))


if __name__ == "__main__":
    main()
