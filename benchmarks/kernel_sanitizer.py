"""GPU kernels under `compute-sanitizer`: `python benchmarks/kernel_sanitizer.py --tool memcheck --out FILE`.

Each group of calls runs in a process of its own, once before, so that its kernels are compiled. memcheck looks for
accesses outside of memory, racecheck for shared memory without order. Of Hopper's kernels racecheck does not see the
order that the copy engine makes (docs/journal/2026-11-22-hopper-checks.md). No tile divides the lengths.
"""

import argparse
import itertools
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import flashtile
from flashtile.as_arch import ARCH_VARIABLE, install_inherited

OWN = "triton" if ARCH_VARIABLE in os.environ else "hopper"  # the chip's own kernels
FOUND = 9  # exit status where a tool finds something
SUMMARY = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (\d+)")
PLACE = re.compile(r" at (\w+)\+0x[0-9a-f]+(?: in (\S+))?")  # a kernel, and a line of its source if it is ours
MOST_FINDINGS = 100_000


def rows(batch: int, heads: int, seqlen: int, width: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(batch, heads, seqlen, width, device="cuda", dtype=dtype, requires_grad=True)


def attend(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> None:
    out = flashtile.attention(q, k, v, **options)
    out.backward(torch.randn_like(out))


def widths() -> None:
    for d, d_v in ((24, 24), (32, 32), (72, 72), (88, 88), (160, 160), (192, 128)):
        attend(rows(1, 2, 300, d), rows(1, 2, 333, d), rows(1, 2, 333, d_v), backend=OWN)


def groups() -> None:
    """Programs that share heads or rows of a group, in any order and in one."""
    for d, heads in ((64, 7), (128, 8)):
        for deterministic in (False, True):
            q, k, v = rows(1, heads, 2300, d), rows(1, 1, 2300, d), rows(1, 1, 2300, d)
            attend(q, k, v, causal=True, deterministic=deterministic, backend=OWN)


def features() -> None:
    """A bias by tiles, a mask tensor by lists, slopes with their gradient, a softcap, a score_mod, sinks, dropout."""
    for d in (32, 64, 128):
        q, k, v = (rows(1, 2, n, d) for n in (300, 333, 333))
        bias = torch.randn(1, 2, 300, 336, device="cuda", dtype=torch.bfloat16)[..., :333]
        mask = torch.rand(1, 1, 300, 333, device="cuda") > 0.3
        slopes, sinks = (torch.rand(2, device="cuda", requires_grad=True) for _ in range(2))
        options: list[dict[str, Any]] = [{"bias": bias}, {"mask": mask}, {"alibi_slopes": slopes}]
        options += [{"sinks": sinks, "dropout_p": 0.1}, *[{"softcap": 20.0}] * (d == 128)]
        for some in options:
            attend(q, k, v, backend=OWN, **some)
    for d, backend in ((64, OWN), (160, OWN), (64, "triton")):  # with what lse loses of a large term
        q, k, v = (rows(1, 2, n, d) for n in (300, 333, 333))
        attend(q, k, v, score_mod=lambda s, b, h, i, j: s - 0.1 * (i - j).abs(), backend=backend)
        with torch.no_grad():
            bias = torch.randn(1, 2, 300, 336, device="cuda", dtype=torch.bfloat16)[..., :333]
            flashtile.attention(q, k, v, bias=bias, num_splits=3, backend=backend)
    attend(q, k, v, bias=bias, backend="triton")


def pages() -> None:
    for size in (8, 16, 64):
        count = -(-700 // size)
        k, v = (torch.randn(2 * count, size, 2, 64, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        table = torch.randperm(2 * count, device="cuda").view(2, count).int()
        lengths = torch.tensor([700, 333], device="cuda", dtype=torch.int32)
        for n in (1, 5, 300):
            q = torch.randn(2, 8, n, 64, device="cuda", dtype=torch.bfloat16)
            flashtile.attention_with_kvcache(q, k, v, cache_seqlens=lengths, page_table=table, causal=True)


def eight_bits() -> None:
    """Caches of 8 bits, read and appended to: each format, pages and tiles of each size, and scales of both kinds."""
    e4m3, e5m2, int8 = torch.float8_e4m3fn, torch.float8_e5m2, torch.int8
    kinds = ((e4m3, 8, 1), (e4m3, 64, 40), (e5m2, 64, 1), (e5m2, 8, 5), (int8, 64, 5), (int8, 8, 40), (int8, 64, 1))
    for number, (dtype, size, n) in enumerate(kinds):
        count = -(-700 // size)
        shape = (2 * count, size, 2, 72)
        descale = torch.ones(shape[:3] if number % 2 else (2,), device="cuda")
        table = torch.randperm(2 * count, device="cuda").view(2, count).int()
        lengths = torch.tensor([650, 333], device="cuda", dtype=torch.int32)
        k_cache, v_cache = torch.randint(0, 100, (2, *shape), device="cuda", dtype=torch.uint8).view(dtype)
        q, k, v = (torch.randn(2, h, n, 72, device="cuda", dtype=torch.bfloat16) for h in (8, 2, 2))
        options: dict[str, Any] = {"cache_seqlens": lengths, "page_table": table, "causal": True}
        flashtile.attention_with_kvcache(q, k_cache, v_cache, k=k, v=v, k_descale=descale, v_descale=descale, **options)


def queries_of_eight_bits() -> None:
    """Dense and packed queries of 8 bits, one and several rows, with scales of heads and of tokens."""
    for n, (dtype, width) in itertools.product((1, 5, 300), ((torch.float8_e4m3fn, 72), (torch.float8_e5m2, 128))):
        q, k, v = (torch.randn(2, h, m, width, device="cuda") for h, m in ((8, n), (2, 333), (2, 333)))
        q8, k8, v8 = q.to(torch.float8_e4m3fn), k.to(dtype), v.to(dtype)
        of_heads = {f"{x}_descale": torch.ones(2, 2, device="cuda") for x in "qkv"}
        of_tokens = {
            f"{x}_descale": torch.ones(2, h, m, device="cuda")
            for x, h, m in (("q", 8, n), ("k", 2, 333), ("v", 2, 333))
        }
        for scales in (of_heads, of_tokens):
            flashtile.attention(q8, k8, v8, causal=True, **scales)
        rows = [x.transpose(1, 2).flatten(0, 1) for x in (q8, k8, v8)]
        ends = [torch.tensor([0, m, 2 * m], device="cuda", dtype=torch.int32) for m in (n, 333)]
        flashtile.attention_varlen(*rows, *ends, max_seqlen_k=333, causal=True, **of_heads)


def products_of_eight_bits() -> None:
    """The chip's own kernels of queries of 8 bits, of few tiles: racecheck takes long for them."""
    e4m3, e5m2 = torch.float8_e4m3fn, torch.float8_e5m2
    for width, dtype in ((64, e4m3), (128, e5m2), (256, e4m3)):
        tensors = (torch.randn(1, h, m, width, device="cuda") for h, m in ((2, 150), (1, 300), (1, 300)))
        q, k, v = (x.to(y) for x, y in zip(tensors, (e4m3, dtype, dtype), strict=True))
        scales = {f"{x}_descale": torch.ones(1, 1, device="cuda") for x in "qkv"}
        flashtile.attention(q, k, v, causal=True, backend=OWN, **scales)
        bias = torch.randn(1, 2, 150, 300, device="cuda", dtype=torch.bfloat16)
        flashtile.attention(q, k, v, bias=bias, backend=OWN, **scales)
        if width == 128:
            pages = [x[0].transpose(0, 1).view(torch.uint8)[:288].view(18, 16, 1, width).view(x.dtype) for x in (k, v)]
            table = torch.randperm(18, device="cuda").view(1, 18).int()
            lengths = torch.tensor([270], device="cuda", dtype=torch.int32)
            more: dict[str, Any] = {"cache_seqlens": lengths, "page_table": table, "causal": True, "backend": OWN}
            flashtile.attention_with_kvcache(q, *pages, **scales, **more)


def batch_invariant() -> None:
    """Decoding in parts, by caches and packed, with tiles of few and of more rows, and prefill."""
    for heads, d in ((8, 64), (32, 72)):
        caches = torch.randn(2, 3, 2, 40000, d, device="cuda", dtype=torch.bfloat16)
        lengths = torch.tensor([1, 39999, 3000], device="cuda", dtype=torch.int32)
        q = torch.randn(3, heads, 1, d, device="cuda", dtype=torch.bfloat16)
        flashtile.attention_with_kvcache(q, *caches, cache_seqlens=lengths, causal=True, batch_invariant=True)
        cu_q, cu_k = (torch.tensor(n, device="cuda", dtype=torch.int32) for n in ((0, 1, 2, 3), (0, 700, 700, 20000)))
        k, v = caches[:, 0].transpose(1, 2)[:, :20000].contiguous()
        flashtile.attention_varlen(q[:, :, 0], k, v, cu_q, cu_k, max_seqlen_q=1, batch_invariant=True)
        rows = torch.randn(300, heads, d, device="cuda", dtype=torch.bfloat16)
        cu_q, cu_k = (torch.tensor(n, device="cuda", dtype=torch.int32) for n in ((0, 101, 300), (0, 101, 333)))
        flashtile.attention_varlen(rows, k[:333], v[:333], cu_q, cu_k, causal=True, batch_invariant=True)


def latent_rows() -> None:
    """Caches of latent rows in 16 bits, 8 bits and 656 bytes, one or two tiles of rows, with and without splits."""
    table = torch.randperm(12, device="cuda").view(2, 6).int()
    lengths = torch.tensor([350, 133], device="cuda", dtype=torch.int32)
    cache = torch.randn(12, 64, 1, 576, device="cuda", dtype=torch.bfloat16)
    caches = cache, cache.to(torch.float8_e4m3fn), flashtile.pack_latent_rows(cache).rows
    for (heads, queries), splits, cache in itertools.product(((16, 1), (70, 2)), (1, 3), caches):
        q = torch.randn(2, heads, queries, 576, device="cuda", dtype=torch.bfloat16)
        flashtile.attention_with_kvcache(
            q, cache, None, v_dim=512, cache_seqlens=lengths, page_table=table, causal=True, num_splits=splits
        )


def latent_bytes() -> None:
    """Hopper's tiles of 16 rows over latent rows of 8 bits, with and without splits, and over 656 bytes."""
    over_latent_bytes(16, torch.float8_e4m3fn, 1)
    over_latent_bytes(16, torch.float8_e4m3fn, 3)
    over_latent_bytes(16, torch.uint8, 1)


def latent_bytes_in_pairs() -> None:
    """Its tiles of 32 and 64 rows, with scales of keys and of sequences."""
    over_latent_bytes(20, torch.int8, 2, by_key=True)
    over_latent_bytes(70, torch.float8_e4m3fn, 1)


def over_latent_bytes(heads: int, dtype: torch.dtype, splits: int, *, by_key: bool = False) -> None:
    table = torch.randperm(12, device="cuda").view(2, 6).int()
    lengths = torch.tensor([350, 133], device="cuda", dtype=torch.int32)
    rows = torch.randn(12, 64, 1, 576, device="cuda", dtype=torch.bfloat16)
    cache = flashtile.pack_latent_rows(rows).rows if dtype is torch.uint8 else rows.to(dtype)
    descale = None if dtype is torch.uint8 else torch.ones(rows.shape[:3] if by_key else (1,), device="cuda")
    flashtile.attention_with_kvcache(
        torch.randn(2, heads, 1, 576, device="cuda", dtype=torch.bfloat16), cache, None, v_dim=512, k_descale=descale,
        cache_seqlens=lengths, page_table=table, num_splits=splits, backend="hopper",
    )  # fmt: skip


def few_rows() -> None:
    """One kernel for all gradients: single tiles, and blocks that keep all rows or all keys."""
    shapes = ((7, 700, 16), (300, 7, 16), (49, 49, 32), (100, 333, 32), (200, 200, 32), (32, 257, 64), (16, 16, 72))
    for n, m, d in shapes:
        attend(rows(2, 3, n, d), rows(2, 3, m, d), rows(2, 3, m, d), backend="triton")
    bias = torch.randn(1, 3, 49, 49, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    attend(*(rows(4, 3, 49, 32) for _ in range(3)), bias=bias, backend="triton")
    with torch.no_grad():
        flashtile.attention(rows(1, 8, 3, 64), rows(1, 2, 4000, 64), rows(1, 2, 4000, 64), backend="triton")


def products() -> None:
    """Products of parts by kernels and by PyTorch, one TF32 product, and wide heads of 16 bits with features."""
    for precision in ("highest", "high"):
        torch.set_float32_matmul_precision(precision)
        attend(*(rows(1, 17, 1100, 40, torch.float32) for _ in range(3)))
        attend(*(rows(1, 2, 1100, 512, torch.float32) for _ in range(3)))
    attend(*(rows(1, 2, 2300, 512) for _ in range(3)))
    q, k, v = rows(1, 6, 1100, 264), rows(1, 2, 1133, 264), rows(1, 2, 1133, 512)
    mask = torch.rand(1, 1, 1, 1133, device="cuda") > 0.3
    slopes, sinks = (torch.rand(6, device="cuda", requires_grad=True) for _ in range(2))
    options: list[dict[str, Any]] = [{"causal": True, "mask": mask}, {"window": (700, 5), "softcap": 20.0}]
    options += [{"alibi_slopes": slopes, "sinks": sinks, "dropout_p": 0.1, "causal": True}]
    for some in options:
        attend(q, k, v, **some)


def wide() -> None:
    """Hopper's kernels over 256 features: grouped heads, packed, a window, a mask tensor with a softcap."""
    q, k, v = rows(1, 4, 300, 512), rows(1, 2, 333, 512), rows(1, 2, 333, 264)
    mask = torch.rand(1, 1, 300, 333, device="cuda") > 0.3
    for some in ({"causal": True}, {"window": (70, 20)}, {"mask": mask, "softcap": 20.0}):
        attend(q, k, v, backend=OWN, **some)
    cu_q, cu_k = (torch.tensor([0, 101, n], device="cuda", dtype=torch.int32) for n in (300, 333))
    tokens = [x[0].transpose(0, 1) for x in (q, k, v)]
    out = flashtile.attention_varlen(*tokens, cu_q, cu_k, causal=True, backend=OWN)
    out.backward(torch.randn_like(out))


def along(function: Callable[..., Any], *inputs: Tensor) -> None:
    torch.func.jvp(function, inputs, inputs)


def forward_mode_of_hopper() -> None:
    """Tangents behind a forward pass, dense and packed."""
    for d in (96, 128, 192, 256):
        q, k, v = (rows(1, 2, n, d).detach() for n in (300, 333, 333))
        along(lambda *x: flashtile.attention(*x, causal=True, backend="hopper"), q, k, v)
        packed = [x[0].transpose(0, 1).contiguous() for x in (q, k, v)]
        cu_q, cu_k = (torch.tensor([0, 101, n], device="cuda", dtype=torch.int32) for n in (300, 333))
        along(lambda *x: flashtile.attention_varlen(*x, cu_q, cu_k, window=(70, 20), backend="hopper"), *packed)  # noqa: B023


def forward_mode() -> None:
    """Results and tangents of one pass, plain, packed, with splits and with features."""
    for d in (64, 128, 256):
        q, k, v = (rows(1, 2, n, d).detach() for n in (300, 333, 333))
        for splits in (1, 3):
            along(lambda *x: flashtile.attention(*x, causal=True, num_splits=splits, backend="triton"), q, k, v)  # noqa: B023
    q, k, v = (rows(1, 2, n, 64).detach() for n in (300, 333, 333))
    bias, sinks = torch.randn(1, 2, 300, 333, device="cuda", dtype=torch.bfloat16), torch.rand(2, device="cuda")

    def with_features(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, sinks: Tensor) -> Any:
        options = {"bias": bias, "sinks": sinks, "softcap": 5.0, "dropout_p": 0.2, "dropout_seed": 3}
        return flashtile.attention(q, k, v, **options)

    along(with_features, q, k, v, bias, sinks)
    wide = [rows(1, 2, n, 128).detach() for n in (300, 333, 333)]
    along(lambda *x: with_features(*x, bias, sinks), *wide)
    cu = torch.tensor([0, 7, 200, 300], dtype=torch.int32, device="cuda")
    tokens = [torch.randn(300, 2, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    along(lambda *x: flashtile.attention_varlen(*x, cu, cu, causal=True), *tokens)


def second_derivatives() -> None:
    """Gradients of tangents, plain, packed and with features."""
    for d in (64, 128, 256):
        inputs = [rows(1, 2, n, d) for n in (300, 333, 333)]
        twice(lambda *x: flashtile.attention(*x, causal=True), inputs)
    inputs = [rows(1, 2, n, 64) for n in (300, 333, 333)]
    bias = torch.randn(1, 2, 300, 333, device="cuda", dtype=torch.bfloat16)
    twice(lambda *x: flashtile.attention(*x, bias=bias, dropout_p=0.2, dropout_seed=3, window=(40, 9)), inputs)
    twice(lambda *x: flashtile.attention(*x, softcap=5.0), inputs)
    wide = [rows(1, h, n, 160) for h, n in ((4, 300), (2, 333), (2, 333))]
    twice(lambda *x: flashtile.attention(*x, dropout_p=0.2, dropout_seed=3, window=(140, 9)), wide)
    cu = torch.tensor([0, 7, 200, 300], dtype=torch.int32, device="cuda")
    tokens = [torch.randn(300, 2, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    twice(lambda *x: flashtile.attention_varlen(*x, cu, cu, causal=True), tokens)


def twice(function: Callable[..., Any], inputs: list[Tensor]) -> None:
    """The second derivative by all inputs, along themselves."""
    out = function(*inputs)
    first = torch.autograd.grad(out, inputs, torch.ones_like(out), create_graph=True)
    torch.autograd.grad(first, inputs, [x.detach() for x in inputs])


GROUPS: dict[str, Callable[[], None]] = {
    x.__name__: x
    for x in (
        widths, groups, features, pages, eight_bits, queries_of_eight_bits, products_of_eight_bits, batch_invariant,
        latent_rows, latent_bytes, latent_bytes_in_pairs, few_rows, products, wide, forward_mode,
        forward_mode_of_hopper, second_derivatives,
    )
}  # fmt: skip


def checked(tool: str, group: str, sanitizer: str) -> dict[str, Any]:
    """Errors that a tool reports for a group and the lines that they name, or its words where it did not finish."""
    run = [sys.executable, __file__, "--run", group]
    subprocess.run(run, capture_output=True)
    options = ["--tool", tool, "--error-exitcode", str(FOUND), "--print-limit", str(MOST_FINDINGS)]
    done = subprocess.run([sanitizer, *options, *run], capture_output=True, text=True)
    text = done.stdout + done.stderr
    found = SUMMARY.findall(text)
    errors = int(found[-1]) if found and done.returncode in (0, FOUND) else None
    places = sorted({" ".join(filter(None, place)) for place in PLACE.findall(text)})
    words = text[:1500] + text[-1500:] if errors is None else ""
    return {"tool": tool, "group": group, "errors": errors, "places": places, "words": words}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sanitizer", default="compute-sanitizer", help="the tool's command")
    parser.add_argument("--tool", choices=("memcheck", "racecheck"), default="memcheck")
    parser.add_argument("--group", action="append", choices=GROUPS, help="may be repeated; all of them by default")
    parser.add_argument("--out", type=Path, help="a JSON file for the findings")
    parser.add_argument("--run", choices=GROUPS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    install_inherited()
    if options.run:
        GROUPS[options.run]()
        torch.cuda.synchronize()
        return 0
    found = []
    with ThreadPoolExecutor() as pool:
        for x in pool.map(lambda group: checked(options.tool, group, options.sanitizer), options.group or GROUPS):
            found.append(x)
            print(", ".join(f"{name} {value}" for name, value in x.items()), flush=True)
            if options.out:
                options.out.write_text(json.dumps(found, indent=1) + "\n")
    return 0 if all(x["errors"] == 0 for x in found) else 1


if __name__ == "__main__":
    sys.exit(main())
