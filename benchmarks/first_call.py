"""Kernels compiled ahead against kernels compiled at first use, on a GPU with Triton 3.6:

    flashtile build-kernels --out kernels-sm_90.zip --jobs 16
    python benchmarks/first_call.py --archive kernels-sm_90.zip --out results

Each way runs in fresh processes. Measured: the first call once CUDA is up, the host's time for repeated calls, whether
all results are the same bits, calls captured in CUDA graphs, and calls in threads without a context. The result is a
table, and `first_call.json` in the folder of `--out`. Exit code 1 if something differs, or Triton was imported.
"""

import argparse
import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

import flashtile
from flashtile.backend.archive import NO_ARCHIVE
from flashtile.backend.gpu import archive as archives
from flashtile.backend.gpu.archive import KERNELS_VARIABLE

AHEAD, ON_THE_SPOT = WAYS = ("archive", "triton")
FIRST_CALLS = ("forward", "decode", "training")
FIRST_CALL_TARGET = 0.15  # seconds
ROUNDS, CALLS, WARM = 15, 200, 50
PARTS = 8  # processes that compare side by side
PROCESS_SECONDS = 100  # until a process is given up
COMPILES = "flashtile.backend.gpu.triton_launch"  # a module that only kernels outside of the archive need
DEVICE: dict[str, Any] = {"device": "cuda"}

Run = Callable[[], Any]


def randn(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, generator=generator, **DEVICE).to(dtype)


def dense(
    heads: tuple[int, int], rows: tuple[int, int], dim: int, dtype: torch.dtype, batch: int = 2
) -> tuple[torch.Tensor, ...]:
    shapes = ((heads[0], rows[0]), (heads[1], rows[1]), (heads[1], rows[1]))
    return tuple(randn(batch, *shape, dim, dtype=dtype, seed=n) for n, shape in enumerate(shapes))


def training(attend: Callable[..., Any], leaves: tuple[torch.Tensor, ...], **options: Any) -> list[torch.Tensor]:
    """`out`, `lse` and gradients."""
    leaves = tuple(x.detach().requires_grad_() for x in leaves)
    out, lse = attend(*leaves, return_lse=True, **options)
    dout = randn(*out.shape, dtype=out.dtype, seed=9)
    return [out.detach(), lse.detach(), *torch.autograd.grad(out, leaves, dout)]


def cached_steps(dtype: torch.dtype, dim: int, **pages: Any) -> list[torch.Tensor]:
    """Three steps that append to a cache."""
    q, new = randn(4, 32, 1, dim, dtype=dtype), randn(4, 8, 1, dim, dtype=dtype, seed=1)
    shape = (64, 16, 8, dim) if pages else (4, 8, 256, dim)
    k, v = (randn(*shape, dtype=dtype, seed=n) for n in (2, 3))
    lengths = torch.tensor([5, 100, 30, 250], dtype=torch.int32, **DEVICE)
    outs = []
    for _ in range(3):
        call = {"cache_seqlens": lengths, "k": new, "v": new, "causal": True, **pages}
        outs.append(flashtile.attention_with_kvcache(q, k, v, **call))
        lengths += 1
    return [*outs, k, v]


def equality_calls() -> Iterator[tuple[str, Callable[[], list[torch.Tensor]]]]:
    """Calls whose results have to be the same bits both ways. Gradients are accumulated in order."""
    for dtype in (torch.bfloat16, torch.float16):
        name = str(dtype).removeprefix("torch.")
        for dim, causal in ((64, True), (128, True), (128, False), (96, True), (192, True), (256, False)):
            given = dense((4, 2), (700, 700), dim, dtype)
            options = {"causal": causal, "deterministic": True}
            yield (
                f"{name} {dim} {'causal' if causal else 'full'}",
                functools.partial(training, flashtile.attention, given, **options),
            )
        long = dense((2, 2), (4096, 4096), 64, dtype, batch=1)
        yield (
            f"{name} 64 causal long",
            functools.partial(training, flashtile.attention, long, causal=True, deterministic=True),
        )
        given = tuple(x.transpose(1, 2).flatten(0, 1) for x in dense((4, 2), (512, 512), 128, dtype))
        one = torch.tensor([0, 300, 300, 1000, 1024], dtype=torch.int32, **DEVICE)
        packed = functools.partial(flashtile.attention_varlen, cu_seqlens_q=one, cu_seqlens_k=one)
        yield (
            f"{name} packed 128",
            functools.partial(
                training, packed, given, causal=True, max_seqlen_q=700, max_seqlen_k=700, deterministic=True
            ),
        )
        given = dense((4, 2), (300, 300), 64, dtype)
        mask = torch.rand(2, 1, 1, 300, generator=torch.Generator().manual_seed(1)).cuda() < 0.9
        masked = {"mask": mask, "causal": True}
        yield f"{name} mask 64", functools.partial(training, flashtile.attention, given, **masked, deterministic=True)
        decode = dense((32, 8), (1, 8192), 128, dtype)
        yield f"{name} decode 128", lambda decode=decode: [flashtile.attention(*decode)]
        yield f"{name} cache 128", functools.partial(cached_steps, dtype, 128)
        table = torch.randperm(64, generator=torch.Generator().manual_seed(2)).view(4, 16).int().cuda()
        yield f"{name} pages 128", functools.partial(cached_steps, dtype, 128, page_table=table)


# In a fresh process ---------------------------------------------------------------------------------------------------


def first_call(name: str) -> dict[str, Any]:
    """Seconds of the first call, and the imports that it made."""
    leaf = torch.ones(64, 64, **DEVICE).requires_grad_()
    out = leaf.mm(torch.ones(64, 64, **DEVICE))  # CUDA is up
    out.backward(torch.ones_like(out))  # PyTorch's first backward pass imports SymPy
    torch.cuda.synchronize()
    rows = {"forward": (2048, 2048), "decode": (1, 2048), "training": (2048, 2048)}[name]
    given = tuple(x.requires_grad_(name == "training") for x in dense((32, 8), rows, 128, torch.bfloat16))
    torch.cuda.synchronize()
    start = time.perf_counter()
    out = flashtile.attention(*given, causal=name != "decode")
    if name == "training":
        out.backward(out.detach())
    torch.cuda.synchronize()
    return {"seconds": time.perf_counter() - start, "triton": "triton" in sys.modules}


def microseconds(run: Run, calls: int) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        run()
    seconds = time.perf_counter() - start
    torch.cuda.synchronize()
    return seconds / calls * 1e6


def host_time(_: str) -> dict[str, float]:
    """Microseconds of the host for one call, median of the rounds."""
    hopper = dense((8, 8), (128, 128), 64, torch.bfloat16, batch=1)
    decode = dense((32, 8), (1, 512), 64, torch.bfloat16, batch=1)
    leaves = tuple(x.detach().requires_grad_() for x in hopper)
    out = flashtile.attention(*leaves, causal=True)
    dout = torch.ones_like(out)
    cache = dense((32, 8), (1, 512), 128, torch.bfloat16, batch=4)
    lengths = torch.full((4,), 100, dtype=torch.int32, **DEVICE)
    long, count = randn(1, 8, 8192, 64), iter(range(1, 8192))

    def growing() -> None:
        k = long[:, :, : next(count)]
        flashtile.attention(decode[0], k, k)

    runs: dict[str, Run] = {
        "forward": lambda: flashtile.attention(*hopper, causal=True),
        "backward": lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True),
        "decode": lambda: flashtile.attention(*decode),
        "cache": lambda: flashtile.attention_with_kvcache(*cache, cache_seqlens=lengths),
        "growing": growing,  # never recorded: a new length at each call
    }
    found = {}
    for name, run in runs.items():
        calls = CALLS if name != "growing" else CALLS // 2
        with torch.set_grad_enabled(name == "backward"):
            microseconds(run, WARM)
            found[name] = statistics.median(microseconds(run, calls) for _ in range(ROUNDS))
    return found


def results(file: str) -> dict[str, Any]:
    """Save the results of every `PARTS`-th call, run three times: at once, recorded and replayed. The file's suffix is
    the number of the first.
    """
    saved: dict[str, list[torch.Tensor]] = {}
    found: dict[str, Any] = {}
    for name, run in list(equality_calls())[int(file.rsplit(".", 1)[1]) :: PARTS]:
        repeats = [run() for _ in range(3)]
        for again in repeats[1:]:
            assert all(map(same_bits, repeats[0], again)), f"{name}: a repeat differs"
        saved[name] = [x.cpu() for x in repeats[0]]
        for module in ("triton", COMPILES):
            if module in sys.modules:
                found.setdefault(module, f"by {name}, torch._dynamo: {'torch._dynamo' in sys.modules}")
    torch.save(saved, file)
    known = archives.archive_of(torch.device("cuda", torch.cuda.current_device()))
    if known is not None:
        found |= {"binaries": len(known.binaries), "of": len(known)}
    return found


def graphs(_: str) -> dict[str, Any]:
    """Captures, also of a process's first call of its kind, and calls in threads that have no context."""
    found = {}
    for name, (heads, rows, causal) in {
        "forward": ((4, 2), (256, 256), True),
        "split decode": ((32, 8), (1, 8192), False),
    }.items():
        given = dense(heads, rows, 128, torch.bfloat16, batch=1)
        torch.cuda.synchronize()
        with torch.no_grad():
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out = flashtile.attention(*given, causal=causal)  # loads its kernel inside of the capture
            for seed in (3, 4):
                for x in given:
                    x.copy_(randn(*x.shape, seed=seed))
                graph.replay()
                expected = [flashtile.attention(*given, causal=causal) for _ in range(3)]
                found[f"graph, {name}, {seed}"] = all(same_bits(out, x) for x in expected)
    given = dense((4, 2), (256, 256), 128, torch.bfloat16)
    expected = training(flashtile.attention, given, causal=True, deterministic=True)
    outcomes: list[bool] = []

    def in_thread() -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(20):
                again = training(flashtile.attention, given, causal=True, deterministic=True)
                torch.cuda.current_stream().synchronize()
                outcomes.append(all(map(same_bits, expected, again)))

    threads = [threading.Thread(target=in_thread) for _ in range(4)]
    torch.cuda.synchronize()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    words = flashtile.explain(*given, causal=True).kernels
    return found | {"threads": len(outcomes) == 80 and all(outcomes), "explain": words}


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    integer = {2: torch.int16, 4: torch.int32}[a.element_size()]
    return torch.equal(a.contiguous().view(integer), b.contiguous().view(integer))


TASKS: dict[str, Callable[[str], dict[str, Any]]] = {
    "first_call": first_call, "host_time": host_time, "results": results, "graphs": graphs,
}  # fmt: skip


# The process that starts the others -----------------------------------------------------------------------------------


def fresh(way: str, archive: Path, caches: str, task: str, argument: str = "") -> dict[str, Any]:
    """Run a task in a fresh process; `error` says why there is no result."""
    variables = {KERNELS_VARIABLE: str(archive.resolve()) if way == AHEAD else NO_ARCHIVE, "TRITON_CACHE_DIR": caches}
    command = [sys.executable, __file__, "--task", task, "--argument", argument]
    try:
        done = subprocess.run(
            command, env=os.environ | variables, capture_output=True, text=True, timeout=PROCESS_SECONDS
        )
    except subprocess.TimeoutExpired:
        return {"error": f"no result after {PROCESS_SECONDS} s"}
    if done.returncode:
        return {"error": done.stderr.strip()[-1500:]}
    return json.loads(done.stdout.splitlines()[-1])


def compare(archive: Path) -> tuple[dict[str, Any], list[str]]:
    """All measurements, and what is wrong."""
    found: dict[str, Any] = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
    wrong: list[str] = []

    def run(way: str, caches: str, task: str, argument: str = "", *, needed: bool = True) -> dict[str, Any]:
        outcome = fresh(way, archive, caches, task, argument)
        if "error" in outcome and needed:
            wrong.append(f"{task} {argument} with {way}: {outcome['error']}")
        return outcome

    with tempfile.TemporaryDirectory() as caches, tempfile.TemporaryDirectory() as saved:
        work = [(way, str(Path(saved, f"{way}.{n}"))) for way in (AHEAD, ON_THE_SPOT) for n in range(PARTS)]
        with ThreadPoolExecutor(PARTS) as pool:
            parts = list(pool.map(lambda x: run(x[0], caches, "results", x[1]), work))
        found["results"] = [x.get("binaries") for x in parts[:PARTS]]
        found["imported triton"] = [x["triton"] for x in parts[:PARTS] if "triton" in x]  # by PyTorch's compiler
        wrong += [f"a kernel was compiled {x[COMPILES]}" for x in parts[:PARTS] if COMPILES in x]
        if not wrong:
            a, b = ({k: x for w, file in work if w == way for k, x in torch.load(file).items()} for way in WAYS)
            found["equal"] = {name: all(map(same_bits, a[name], b[name])) for name in a}
            wrong += [f"{name} differs" for name, same in found["equal"].items() if not same]
        for name in FIRST_CALLS:
            cold = tempfile.mkdtemp(dir=caches)
            times = {"triton, empty cache": [run(ON_THE_SPOT, cold, "first_call", name)]}
            times["triton, warm cache"] = [run(ON_THE_SPOT, cold, "first_call", name)]
            times["archive"] = [run(AHEAD, cold, "first_call", name) for _ in range(3)]
            wrong += [f"first {name} call imported triton" for x in times["archive"] if x.get("triton")]
            found[f"first {name} call"] = {way: [x.get("seconds") for x in runs] for way, runs in times.items()}
        for way in (*WAYS, *WAYS):  # the second time, for the noise of the machine
            found.setdefault("host_time", {}).setdefault(way, []).append(run(way, caches, "host_time"))
        # Triton may be unable to load a kernel inside of a capture.
        found["graphs"] = {way: run(way, caches, "graphs", needed=way == AHEAD) for way in WAYS}
        wrong += [f"{name} with {AHEAD}" for name, right in found["graphs"][AHEAD].items() if right is False]
    return found, wrong


def show(found: dict[str, Any], wrong: list[str]) -> None:
    for name in FIRST_CALLS:
        for way, times in found[f"first {name} call"].items():
            seconds = sorted(x for x in times if x is not None)
            text = f"{seconds[len(seconds) // 2]:.3f} s ({seconds[0]:.3f} to {seconds[-1]:.3f})" if seconds else "-"
            print(f"first {name} call, {way}: {text}")
    for name in ("forward", "backward", "decode", "cache", "growing"):
        for way, runs in found["host_time"].items():
            times = ", ".join(f"{x[name]:.1f}" for x in runs if name in x)
            print(f"host time, {name}, {way}: {times} us")
    print(f"{sum(found.get('equal', {}).values())} of {len(found.get('equal', {}))} calls have the same bits both ways")
    for name in ("results", "imported triton", "graphs"):
        print(f"{name}: {found[name]}")
    print("\n".join(f"WRONG: {text}" for text in wrong) or f"all right; target of a first call {FIRST_CALL_TARGET} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--archive", type=Path)
    parser.add_argument("--out", type=Path, default=Path())
    parser.add_argument("--task", choices=TASKS)
    parser.add_argument("--argument", default="")
    options = parser.parse_args()
    if options.task:
        print(json.dumps(TASKS[options.task](options.argument)))
        return
    found, wrong = compare(options.archive)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "first_call.json").write_text(json.dumps(found | {"wrong": wrong}, indent=1) + "\n")
    show(found, wrong)
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
