"""Forward mode and second derivatives beside dense attention: `python benchmarks/derivatives.py --device cuda`.

Milliseconds, medians of rounds in alternation. `forward` is attention itself, `jvp` is `torch.func.jvp` of it by q, k
and v. `double backward` is the backward pass of the three gradients, `hvp` all three passes of a Hessian-vector
product. Dense attention is `softmax(q @ k.T) @ v` in the inputs' dtype, and SDPA's math backend. With `--memory`, peak
memory instead: on a GPU, MiB that the derivative allocates beyond its inputs and results, over lengths; dense up to
4096 tokens.

With `--sweep benchmarks/derivatives.toml`, on a GPU: device time of `torch.func.jvp` of the kernel, of dense attention
and of the forward pass alone, for each cell of the file, with TFLOP/s counted as three forward passes, and peak MiB
beyond inputs and results. `--tiles 64x64x4x2,...` times Triton's kernel with other tiles of rows, keys, warps and
stages, and with `m` before them the one of mma.sync; `--candidates` times all kernels of both backends that could have
a width, on one long call each; most of its time compiles them.
"""

import contextlib
import csv
import os
import statistics
import sys
import time
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO
from unittest import mock

import click
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import flashtile
from flashtile.as_arch import ARCHITECTURES, install
from flashtile.backend.hopper.plan import tables
from flashtile.backend.hopper.tile_config import TangentsConfig
from flashtile.backend.triton.plan import candidates
from flashtile.backend.triton.tile_config import KernelConfig
from flashtile.bench.allocation import live_and_peak_bytes
from flashtile.bench.clocks.cuda import CudaClock
from flashtile.dispatch import fast_path
from flashtile.dispatch.planner import BACKEND_VARIABLE
from flashtile.iomodel import forward_flops

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
Inputs = tuple[Tensor, ...]
LENGTHS = (1024, 4096, 16384)  # of the memory table
LONGEST_DENSE = 4096
TILES = {  # of Triton's kernel, by head dimension
    64: ("64x64x4x2", "128x64x8x2", "64x64x4x3", "128x64x8x3", "128x32x8x3"),
    128: ("128x32x8x3", "128x64x8x2", "64x32x4x3", "64x64x4x2", "64x32x8x2"),
    256: ("32x32x4x2", "32x32x8x2", "64x32x8x2"),
}
OF_HOPPER = {  # configurations of Hopper's kernel
    64: (TangentsConfig(tables.D64, tables.D64, 8), TangentsConfig(tables.D64, tables.D64, 8, block_n=128)),
    128: (
        TangentsConfig(tables.D128, tables.D128, 8),
        TangentsConfig(tables.D128, tables.D128, 8, early_values=False),
        TangentsConfig(tables.D128, tables.D128, 5, block_n=128, early_values=False),
    ),
    256: (
        TangentsConfig(tables.D256, tables.D256, 3),
        TangentsConfig(tables.D256, tables.D256, 3, early_values=False),
    ),
}


def providers(causal: bool) -> dict[str, Attention]:
    def dense(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        s = (q * q.shape[-1] ** -0.5) @ k.mT
        if causal:
            s = s.masked_fill(torch.ones(s.shape[-2:], dtype=torch.bool, device=s.device).triu(1), -torch.inf)
        return s.softmax(-1) @ v

    def sdpa_math(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return scaled_dot_product_attention(q, k, v, is_causal=causal)

    def flash(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flashtile.attention(q, k, v, causal=causal)  # type: ignore[return-value]

    return {"flashtile": flash, "dense": dense, "sdpa math": sdpa_math}


def derivatives(attention: Attention, inputs: Inputs, others: Inputs) -> dict[str, Callable[[], Any]]:
    """The timed functions, by name, with everything before them done."""
    leaves = [x.clone().requires_grad_() for x in inputs]

    def gradients() -> Inputs:
        return torch.autograd.grad(attention(*leaves), leaves, others[0], create_graph=True)

    first = gradients()
    return {
        "forward": lambda: attention(*inputs),
        "jvp": lambda: torch.func.jvp(attention, inputs, others),
        "double backward": lambda: torch.autograd.grad(first, leaves, others, retain_graph=True),
        "hvp": lambda: torch.autograd.grad(gradients(), leaves, others),
    }


def milliseconds(function: Callable[[], Any], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    function()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - start) * 1e3


def random_inputs(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> tuple[Inputs, Inputs]:
    """q, k and v, and three tangents or cotangents."""
    torch.manual_seed(0)
    tensors = tuple(torch.randn(shape, dtype=dtype, device=device) for _ in range(6))
    return tensors[:3], tensors[3:]


def times(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    causal: bool,
    rounds: int,
    wanted: tuple[str, ...] = (),
) -> dict[str, dict[str, float]]:
    """Medians by derivative and provider, of all or of the wanted derivatives."""
    inputs, others = random_inputs(shape, dtype, device)
    functions = {name: derivatives(attention, inputs, others) for name, attention in providers(causal).items()}
    samples: dict[str, dict[str, list[float]]] = {
        what: {name: [] for name in functions} for what in wanted or functions["flashtile"]
    }
    for n in range(rounds + 1):
        for what, of_providers in samples.items():
            for name, found in of_providers.items():
                sample = milliseconds(functions[name][what], device)
                if n > 0:  # the first round warms up
                    found.append(sample)
    return {what: {name: statistics.median(x) for name, x in found.items()} for what, found in samples.items()}


def peaks(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, causal: bool
) -> dict[str, dict[str, float | None]]:
    """MiB beyond inputs and results by derivative and provider; `None` where dense is not measured."""
    inputs, others = random_inputs(shape, dtype, device)
    result: dict[str, dict[str, float | None]] = {"jvp": {}, "double backward": {}}
    for name, attention in providers(causal).items():
        for what in result:
            result[what][name] = None
            if name != "flashtile" and shape[2] > LONGEST_DENSE:
                continue
            run = derivatives(attention, inputs, others)[what]
            left, peak = live_and_peak_bytes(run, device)
            result[what][name] = (peak - left) / 2**20
    return result


def name_of(cell: dict[str, Any]) -> str:
    batch, heads, tokens, dim = cell["shape"]
    kv, keys, packed = (cell.get(name) for name in ("heads_kv", "keys", "packed"))
    name = f"{batch}x{heads}{f'/{kv}' if kv else ''}x{tokens}{f'/{keys}' if keys else ''}x{dim}"
    words = ["causal"] * cell.get("causal", False) + [f"packed {packed}"] * bool(packed) + [cell.get("dtype", "")]
    return " ".join(filter(None, [name, *words]))


class Cell:
    """Calls of one cell of a sweep: ours along tangents, ours alone, and dense."""

    def __init__(self, cell: dict[str, Any], dtype: torch.dtype, longest_dense: int):
        batch, heads, tokens, dim = cell["shape"]
        kv, self.causal, packed = cell.get("heads_kv", heads), cell.get("causal", False), cell.get("packed")
        keys = cell.get("keys", tokens)
        self.name = name_of(cell)
        torch.manual_seed(0)
        shapes = [(batch, h, n, dim) for h, n in ((heads, tokens), (kv, keys), (kv, keys)) * 2]
        tensors = [torch.randn(x, dtype=dtype, device="cuda") for x in shapes]
        pairs = batch * heads * tokens * keys
        if packed is None:
            self.attention: Attention = lambda q, k, v: flashtile.attention(q, k, v, causal=self.causal)  # type: ignore[assignment,return-value]
        else:
            assert batch == 1
            tensors = [x[0].transpose(0, 1).contiguous() for x in tensors]
            cu = torch.arange(0, tokens + 1, packed, dtype=torch.int32, device="cuda")
            longest = {"max_seqlen_q": packed, "max_seqlen_k": packed}
            self.attention = lambda q, k, v: flashtile.attention_varlen(  # type: ignore[assignment,return-value]
                q, k, v, cu, cu, causal=self.causal, **longest
            )
            pairs = heads * (tokens // packed) * packed**2
        self.inputs, self.tangents = tuple(tensors[:3]), tuple(tensors[3:])
        self.flops = 3 * forward_flops(pairs, dim, dim) // (2 if self.causal else 1)
        self.group = heads // kv
        self.has_dense = packed is None and keys <= longest_dense

    def along(self) -> Any:
        return torch.func.jvp(self.attention, self.inputs, self.tangents)[1]

    def dense(self) -> Any:
        def grouped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return providers(self.causal)["dense"](q, *(x.repeat_interleave(self.group, 1) for x in (k, v)))

        return torch.func.jvp(grouped, self.inputs, self.tangents)[1]


def device_time(run: Callable[[], Any], rounds: int) -> float:
    """Median device milliseconds of a call."""
    clock = CudaClock(torch.device("cuda"))
    run()
    first = clock.seconds(run, 1)
    calls = max(1, min(20, int(0.02 / max(first, 1e-5))))
    return 1e3 * statistics.median(clock.seconds(run, calls) for _ in range(rounds if first < 0.05 else 2))


@contextlib.contextmanager
def forced(way: str | TangentsConfig) -> Iterator[None]:
    """Forward mode by a tile of Triton's kernel, a configuration of Hopper's, or as planned (an empty text)."""
    if way == "":
        yield
        return
    backend = "triton" if isinstance(way, str) else "hopper"
    fast_path.forget()
    with contextlib.ExitStack() as patches:
        patches.enter_context(mock.patch.dict(os.environ, {BACKEND_VARIABLE: backend}))
        if isinstance(way, str):
            sizes = (int(n) for n in way.removeprefix("m").split("x"))
            tile = KernelConfig(*sizes, mma=way.startswith("m"))  # type: ignore[arg-type]
            patches.enter_context(mock.patch.object(candidates, "tangent_tiles", return_value=(tile,)))
        else:
            widths = way.head_dim.width, way.head_dim_v.width
            patches.enter_context(mock.patch.dict(tables.TANGENTS, {widths: (way,)}))
        yield
    fast_path.forget()


def one_of_each_width(cells: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A long call without a mask for each head dimension."""
    found: dict[int, dict[str, Any]] = {}
    for cell in cells:
        _, _, tokens, dim = cell["shape"]
        if tokens >= LONGEST_DENSE and cell.keys() == {"shape"}:
            found.setdefault(dim, cell)
    return list(found.values())


def label_of(way: str | TangentsConfig) -> str:
    return way if isinstance(way, str) else f"{way}{', early values' * way.early_values}"


def forward_mode(sweep: Path, names: tuple[str, ...], tiles: list[str], every: bool, rounds: int, out: TextIO) -> None:
    """Time the cells of a sweep, or those whose names contain one of `names`: by the plan, by tiles, or by `every`
    candidate.
    """
    settings = tomllib.loads(sweep.read_text())
    settings["cells"] = [x for x in settings["cells"] if not names or any(name in name_of(x) for name in names)]
    writer = csv.writer(out)
    columns = ["forward ms", "dense ms", "times forward", "times faster than dense", "TFLOP/s", "MiB"]
    writer.writerow(["cell", "backend, tile", "jvp ms", *columns])
    for given in one_of_each_width(settings["cells"]) if every else settings["cells"]:
        cell = Cell(given, getattr(torch, given.get("dtype", settings["dtype"])), settings["longest_dense"])
        with torch.no_grad():
            forward = device_time(lambda: cell.attention(*cell.inputs), rounds)  # noqa: B023
            dense = None
            with contextlib.suppress(torch.OutOfMemoryError):
                dense = device_time(cell.dense, 2) if cell.has_dense and not every else None
            width = given["shape"][-1]
            ways: list[str | TangentsConfig] = [*TILES[width], *OF_HOPPER[width]] if every else [*tiles] or [""]
            for way in ways:
                try:
                    with forced(way), flashtile.calls() as counts:
                        cell.along()
                    with forced(way):
                        own = device_time(cell.along, rounds)
                        left, peak = live_and_peak_bytes(cell.along, torch.device("cuda"))
                except Exception as error:  # a tile that is too large for the chip's memory
                    if not every:
                        raise
                    writer.writerow([cell.name, label_of(way), str(error)[:80]])
                    continue
                backend = next(row.backend for row in counts.rows if row.direction == "tangents")
                figures = [own, forward, dense, own / forward, dense and dense / own, cell.flops / own / 1e9]
                words = ["" if x is None else f"{x:.4g}" for x in figures]
                writer.writerow(
                    [cell.name, f"{backend} {label_of(way)}".strip(), *words, f"{(peak - left) / 2**20:.1f}"]
                )
                out.flush()
        torch.cuda.empty_cache()


@click.command(help=__doc__)
@click.option("--device", default="cpu")
@click.option("--dtype", default="float32", help="One of torch's.")
@click.option("--shape", default="2,16,1024,64", help="Batch, heads, tokens, head dimension.")
@click.option("--causal", is_flag=True)
@click.option("--rounds", default=7)
@click.option("--only", multiple=True, help="A derivative, by its name in the table; any number of them.")
@click.option("--memory", is_flag=True, help="Peak memory at 1k, 4k and 16k tokens instead of times.")
@click.option("--sweep", type=click.Path(exists=True, path_type=Path), help="A file of cells for forward mode.")
@click.option("--cell", "names", multiple=True, help="With --sweep: a part of a cell's name; any number of them.")
@click.option("--tiles", default="", help="With --sweep: tiles of the kernel in place of the plan's.")
@click.option("--candidates", "every", is_flag=True, help="With --sweep: all kernels that could have a width.")
@click.option("--as-arch", type=click.Choice(ARCHITECTURES), help="Compile our kernels as for an older chip.")
@click.option("--out", type=click.File("a"), default=sys.stdout, help="CSV file to append to.")
def main(
    device: str, dtype: str, shape: str, causal: bool, rounds: int, only: tuple[str, ...], memory: bool,
    sweep: Path | None, names: tuple[str, ...], tiles: str, every: bool, as_arch: str | None, out: TextIO,
) -> None:  # fmt: skip
    if as_arch is not None:
        install(as_arch)
    if sweep is not None:
        forward_mode(sweep, names, [x for x in tiles.split(",") if x], every, rounds, out)
        return
    batch, heads, tokens, dim = (int(n) for n in shape.split(","))
    of, on = getattr(torch, dtype), torch.device(device)
    writer = csv.writer(out)
    writer.writerow(["unit", "device", "dtype", "shape", "causal", "derivative", *providers(causal)])
    for length in LENGTHS if memory else (tokens,):
        sizes = (batch, heads, length, dim)
        table = peaks(sizes, of, on, causal) if memory else times(sizes, of, on, causal, rounds, only)
        for what, row in table.items():
            figures = ["" if x is None else f"{x:.2f}" for x in row.values()]
            name = "x".join(str(n) for n in sizes)
            writer.writerow(["MiB" if memory else "ms", device, dtype, name, causal, what, *figures])
            out.flush()


if __name__ == "__main__":
    main()
