"""Time checkouts of flashtile, or archives of its kernels, on a GPU, one call of each after the other.

    python benchmarks/compare_sources.py OLD/src NEW/src [--cells WORDS] [--rounds 9] [--out FILE.csv]
    python benchmarks/compare_sources.py triton-3.6.zip triton-3.9.zip --cells hopper
    FLASHTILE_AS_ARCH=sm_80 python benchmarks/compare_sources.py OLD/src NEW/src --cells mma

Each side has a process of its own, and all hold their kernels and inputs while they wait. They measure in alternation,
so that clocks, heat and neighbors are the same for all. Speeds are in units of the first side's; that of a cell is the
median over the rounds.
"""

import csv
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import click

SAMPLE_SECONDS = 0.03


def cell(name: str, measure: str = "forward", **given: Any) -> dict[str, Any]:
    return {"name": f"{name} {measure}", "measure": measure, **given}


def both(name: str, **given: Any) -> list[dict[str, Any]]:
    return [cell(name, measure, **given) for measure in ("forward", "backward")]


CELLS = [
    *both("float32 64 512", dtype="float32", heads=16, head_dim=64, seqlen=512),
    *both("float32 64 2k", dtype="float32", heads=8, head_dim=64, seqlen=2048),
    *both("float32 64 4k causal", dtype="float32", heads=8, head_dim=64, seqlen=4096, causal=True),
    *both("float32 128 2k", dtype="float32", heads=8, head_dim=128, seqlen=2048),
    *both("float32 32 1k", dtype="float32", heads=16, head_dim=32, seqlen=1024),
    *both("float32 bias 64 1k", dtype="float32", heads=8, head_dim=64, seqlen=1024, bias=True),
    *both("float32 bias 128 1k", dtype="float32", heads=8, head_dim=128, seqlen=1024, bias=True),
    *both("float32 dropout 64 1k", dtype="float32", heads=8, head_dim=64, seqlen=1024, dropout_p=0.1),
    *(cell(f"triton {d} 4k {c}", backend="triton", head_dim=d, heads=2048 // d, seqlen=4096, causal=c == "causal")
      for d in (64, 128, 256) for c in ("full", "causal")),
    *(cell(f"triton {f} {d}", measure, backend="triton", head_dim=d, heads=2048 // d, seqlen=2048, batch=2, **{f: v})
      for f, v in (("bias", True), ("mask", True), ("slopes", True), ("dropout_p", 0.1), ("softcap", 30.0))
      for d in (64, 128) for measure in ("forward", "backward")),
    *(cell(f"append {b} x {s}", "append", batch=b, heads=32, heads_kv=8, head_dim=128, seqlen=1, seqlen_k=s)
      for b, s in ((1, 8192), (64, 4096))),
    *(cell(f"decode {b} x {s}", batch=b, heads=32, heads_kv=8, head_dim=128, seqlen=1, seqlen_k=s)
      for b, s in ((1, 8192), (1, 65536), (64, 8192))),
    *(cell(f"hopper {d} {s} {c}", head_dim=d, heads=2048 // d, seqlen=s, batch=max(1, 16384 // s), causal=c == "causal")
      for d in (64, 128) for s in (1024, 4096, 16384) for c in ("full", "causal")),
    *(cell(f"hopper {d} 4k causal", measure, head_dim=d, heads=max(8, 2048 // d), seqlen=4096, batch=4, causal=True)
      for d in (96, 192, 256) for measure in ("forward", "backward")),
    *(cell(f"hopper {d} 16384 {c}", "backward", head_dim=d, heads=2048 // d, seqlen=16384, causal=c == "causal")
      for d in (64, 128) for c in ("full", "causal")),
    *both("mma 64 4k causal", head_dim=64, heads=16, seqlen=4096, batch=2, causal=True),
    *both("mma 64 16k causal", head_dim=64, heads=8, seqlen=16384, causal=True),
    *both("mma 64 512 causal", head_dim=64, heads=8, seqlen=512, batch=8, causal=True),
    *both("mma 128 512 causal", head_dim=128, heads=8, seqlen=512, batch=8, causal=True),
    *both("mma 128 2k causal", head_dim=128, heads=16, seqlen=2048, batch=4, causal=True),
    *both("mma 128 8k causal", head_dim=128, heads=8, seqlen=8192, causal=True),
    *both("mma 64 4k causal gqa", head_dim=64, heads=32, heads_kv=8, seqlen=4096, batch=2, causal=True),
    *both("mma 128 4k causal gqa", head_dim=128, heads=32, heads_kv=8, seqlen=4096, batch=2, causal=True),
    *both("mma 128 4k window", head_dim=128, heads=16, seqlen=4096, batch=2, window=(511, 0)),
    cell("hopper softcap 128 4k", head_dim=128, heads=16, seqlen=4096, batch=4, causal=True, softcap=30.0),
    cell("hopper window 128 16k", head_dim=128, heads=16, seqlen=16384, causal=True, window=(1023, 0)),
]  # fmt: skip


def call_of(given: dict[str, Any]) -> Any:
    """A function that runs the cell once."""
    import torch

    import flashtile

    dtype, heads, seqlen = getattr(torch, given.get("dtype", "bfloat16")), given["heads"], given["seqlen"]
    batch, heads_kv, seqlen_k = given.get("batch", 1), given.get("heads_kv", heads), given.get("seqlen_k", seqlen)
    generator = torch.Generator("cuda").manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", dtype=dtype, generator=generator)

    q = draw(batch, heads, seqlen, given["head_dim"])
    k, v = (draw(batch, heads_kv, seqlen_k, given["head_dim"]) for _ in range(2))
    if given["measure"] == "append":
        lengths = torch.full((batch,), seqlen_k // 2, dtype=torch.int32, device="cuda")
        new = (draw(batch, heads_kv, seqlen, given["head_dim"]) for _ in range(2))
        appended = dict(zip("kv", new, strict=True))
        return lambda: flashtile.attention_with_kvcache(q, k, v, cache_seqlens=lengths, **appended)
    options = {name: given[name] for name in ("backend", "causal", "softcap", "dropout_p", "window") if name in given}
    if "bias" in given:
        options["bias"] = draw(1, heads, seqlen, seqlen_k)
    if "mask" in given:
        options["mask"] = torch.rand(1, 1, seqlen, seqlen_k, device="cuda", generator=generator) < 0.5
    if "slopes" in given:
        options["alibi_slopes"] = torch.linspace(0.01, 0.5, heads, device="cuda")
    if "dropout_p" in given:
        options["dropout_seed"] = 1
    if given["measure"] == "forward":
        return lambda: flashtile.attention(q, k, v, **options)
    features = [options[name] for name in ("bias", "alibi_slopes") if name in options]
    inputs = [x.requires_grad_() for x in (q, k, v, *features)]
    out = flashtile.attention(*inputs[:3], **options)
    dout = torch.randn_like(out)
    return lambda: torch.autograd.grad(out, inputs, dout, retain_graph=True)


def work() -> None:
    """Answer each line, a cell's number, with the seconds of one call."""
    import torch

    if "FLASHTILE_AS_ARCH" in os.environ:
        from flashtile.as_arch import install_inherited

        install_inherited()
    calls: dict[int, tuple[Any, int]] = {}

    def seconds(call: Any, count: int) -> float:
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        for _ in range(count):
            call()
        stop.record()
        stop.synchronize()
        return start.elapsed_time(stop) / 1e3 / count

    for line in sys.stdin:
        n = int(line)
        try:
            if n not in calls:
                calls.clear()
                call = call_of(CELLS[n])
                for _ in range(3):
                    call()
                calls[n] = call, max(3, int(SAMPLE_SECONDS / seconds(call, 3)))
            found: Any = seconds(*calls[n])
        except Exception as error:
            found = f"{type(error).__name__}: {error}"
        print(json.dumps(found), flush=True)


def tell(worker: subprocess.Popen[str], job: Any) -> None:
    assert worker.stdin is not None
    print(json.dumps(job), file=worker.stdin, flush=True)


def answer(worker: subprocess.Popen[str]) -> Any:
    assert worker.stdout is not None
    return json.loads(worker.stdout.readline())


def variables(side: Path) -> dict[str, str]:
    """The environment of a side."""
    if side.is_file():
        return {"FLASHTILE_KERNELS": str(side)}
    return {"PYTHONPATH": f"{side}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}


@click.command()
@click.argument("sides", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path))
@click.option("--cells", default="", help="Only cells whose names have one of these words, separated by commas.")
@click.option("--rounds", default=9)
@click.option("--out", type=click.Path(path_type=Path))
def main(sides: tuple[Path, ...], cells: str, rounds: int, out: Path | None) -> None:
    """SIDES are folders that hold the package `flashtile`, or archives for the one in use."""
    workers = [
        subprocess.Popen(
            [sys.executable, __file__, "--work"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | variables(side.resolve()),
        )
        for side in sides
    ]
    names = [f"{n} {side.stem}" for n, side in enumerate(sides)]
    rows = []
    for n, given in enumerate(CELLS):
        if cells and not any(word in given["name"] for word in cells.split(",")):
            continue

        for worker in workers:  # all compile at once
            tell(worker, n)
        first = [answer(worker) for worker in workers]
        if any(isinstance(x, str) for x in first):
            click.echo(f"{given['name']}: {first}")
            continue
        found = []
        for _ in range(rounds):
            found.append([])
            for worker in workers:
                tell(worker, n)
                found[-1].append(answer(worker))
        text = f"{given['name']:28}"
        for side, name in enumerate(names):
            ratios = sorted(times[0] / times[side] for times in found)
            time, ratio = statistics.median(times[side] for times in found) * 1e6, statistics.median(ratios)
            rows.append((given["name"], name, f"{time:.1f}", *(f"{x:.3f}" for x in (ratio, ratios[1], ratios[-2]))))
            text += f" {time:9.1f} us" + (f" {ratio:.3f} ({ratios[1]:.3f} to {ratios[-2]:.3f})" if side else "")
        click.echo(text)
    for worker in workers:
        worker.kill()
    if out is not None:
        with out.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(("cell", "side", "us", "speed", "low", "high"))
            writer.writerows(rows)


if __name__ == "__main__":
    work() if sys.argv[1:] == ["--work"] else main()
