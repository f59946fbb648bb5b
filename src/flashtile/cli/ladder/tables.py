"""All tables of `flashtile ladder`, and here those of lite against online, intensity and tiles."""

import json
import os
from collections.abc import Callable

import torch

from ... import explain as explain_call
from ... import iomodel, processes
from ...backend.rates import machine
from ...iomodel import Shape, Work, roofline
from ...ladder import step05_flash1, step06_flash2, step08_triton_lite, step08_triton_online, triton_or_not
from .gpu import banks, coalescing, cuda
from .long import long
from .measure import Measurement, Table, error_of, inputs, milliseconds
from .rounding import rounding
from .stack import stack

# Lite against online --------------------------------------------------------------------------------------------------

LITE_PUBLISHED = {64: 0.002, 128: 0.761, 256: 1.292, 512: 2.287, 1024: 3.491}
ONLINE_PUBLISHED = "0.001 to 0.002"


def lite(device: torch.device) -> Measurement:
    where = "on the GPU" if device.type == "cuda" else "in Triton's interpreter"
    table = Table("lite", f"Triton, lite against online: largest error of an element, d = 64, {where}")
    if not triton_or_not.INSTALLED:
        table.notes.append("Not measured: " + str(triton_or_not.unavailable(None, device)))
        return table
    yield where
    measure = lite_errors if device.type == "cuda" else interpreted_lite_errors
    try:
        errors = measure(device, tuple(LITE_PUBLISHED))
    except InterpreterError as error:
        table.notes.append(f"Not measured: {error}")
        return table
    for n, (of_lite, of_online) in errors.items():
        published = {"published_lite": LITE_PUBLISHED[n], "published_online": ONLINE_PUBLISHED}
        table.rows.append(
            {"n": n, "tiles": n // step08_triton_lite.BLOCK_N, "lite": of_lite, "online": of_online} | published
        )
    return table


def lite_errors(device: torch.device, lengths: tuple[int, ...]) -> dict[int, tuple[float, float]]:
    """For each N the errors of lite and of online."""
    found = {}
    for n in lengths:
        q, k, v = inputs(n, 64, device)
        of_lite, of_online = (
            error_of(step.attention(q, k, v)[0], q, k, v) for step in (step08_triton_lite, step08_triton_online)
        )
        found[n] = of_lite, of_online
    return found


class InterpreterError(RuntimeError):
    """Triton's interpreter failed; the message has what it wrote."""


def interpreted_lite_errors(device: torch.device, lengths: tuple[int, ...]) -> dict[int, tuple[float, float]]:
    """The same in another process: the interpreter has to be switched on before Triton is imported."""
    code = "import json, torch; from flashtile.cli.ladder.tables import lite_errors; "
    code += f"print(json.dumps(lite_errors(torch.device({str(device)!r}), {lengths})))"
    result = processes.run_python(code, env=os.environ | {"TRITON_INTERPRET": "1"})
    if result.returncode != 0:
        raise InterpreterError(f"step 8 failed in Triton's interpreter:\n{result.stderr}")
    return {int(n): tuple(errors) for n, errors in json.loads(result.stdout.splitlines()[-1]).items()}


# Arithmetic intensity -------------------------------------------------------------------------------------------------

INTENSITY_PUBLISHED = {1024: {"standard": 15.4, "fused": 261.0}, 4096: {"standard": 16.1, "fused": 1044.0}}


def intensity(device: torch.device) -> Measurement:
    yield "the rates of this machine"
    rates = machine(device, torch.float32)
    table = Table(
        "intensity",
        "Arithmetic intensity from the model: float32, d = 64, operations for each byte of the big memory",
        notes=[
            f"Here float32 arithmetic reaches {rates.flops_per_second / 1e9:.4g} GFLOP/s and memory "
            f"{rates.bytes_per_second / 1e9:.4g} GB/s: the ridge is at {rates.ridge:.3g} operations for each byte."
        ],
    )
    for n, published in INTENSITY_PUBLISHED.items():
        for name, work in algorithms(n, device).items():
            bound = roofline(work.flops, work.moved, rates)
            row = {"n": n, "algorithm": name, "mb_moved": work.moved / 1e6, "intensity": work.intensity}
            row["published"] = published.get({"standard": "standard", "each matrix once": "fused"}.get(name, ""))
            table.rows.append(row | {"limit": bound.limit, "bound_ms": bound.seconds * 1e3})
    return table


def algorithms(n: int, device: torch.device) -> dict[str, Work]:
    shape = Shape.square(n, 64)
    q = torch.empty((1, 1, n, 64), device=device)
    found = {"standard": iomodel.standard_forward(shape)}
    found["FlashAttention-1, 192 KB"] = iomodel.flash1_forward(shape, iomodel.ON_CHIP_BYTES["A100"])
    found["FlashAttention-2, 128 x 128"] = iomodel.flash2_forward(shape, 128, 128)
    explanation = explain_call(q, q, q, backend="tiled")
    tile = [int(word.split()[-1]) for word in explanation.tile.split(", ")]
    found[f"tiled, {tile[0]} x {tile[1]}"] = iomodel.tiled_forward(shape, *tile)
    found["each matrix once"] = iomodel.flash2_forward(shape, n, n)
    return found


# Tiles against bytes and time -----------------------------------------------------------------------------------------

TILES_LENGTH = 2048


def tiles(device: torch.device) -> Measurement:
    n, d = TILES_LENGTH, 64
    table = Table(
        "tiles", f"Tiles against bytes and time: FlashAttention-1 against -2, one head, N = {n}, d = {d}, float32"
    )
    shape, (q, k, v) = Shape.square(n, d), inputs(n, d, device)
    for name, memory in on_chip_sizes().items():
        rows, keys = iomodel.block_sizes(memory, d)
        yield f"tiles for {name}"
        one, two = iomodel.flash1_forward(shape, memory), iomodel.flash2_forward(shape, rows, keys)
        run_one = lambda memory=memory: step05_flash1.attention(q, k, v, memory=memory // 4)  # noqa: E731
        run_two = lambda rows=rows, keys=keys: step06_flash2.attention(q, k, v, block_m=rows, block_n=keys)  # noqa: E731
        row = {"on_chip": name, "tile": f"{rows} x {keys}"}
        row |= {"flash1_mb_read": one.read / 1e6, "flash1_mb_written": one.written / 1e6}
        row |= {"flash2_mb_read": two.read / 1e6, "flash2_mb_written": two.written / 1e6}
        row |= {"flash1_ms": milliseconds(run_one, device), "flash2_ms": milliseconds(run_two, device)}
        table.rows.append(row)
    table.notes.append(
        "Bytes are those that the steps' own slices move (the tests count them). Times are of loops of torch "
        "operations, where the number of calls decides, not the bytes."
    )
    return table


def on_chip_sizes() -> dict[str, int]:
    sizes = {"32 KB": 32 * 1024, "64 KB": 64 * 1024, "A100: 192 KB": iomodel.ON_CHIP_BYTES["A100"]}
    sizes["H100, H200: 228 KB"] = iomodel.ON_CHIP_BYTES["H200"]
    l2 = iomodel.cpu_l2_bytes()
    return sizes | ({f"this CPU's L2: {l2 // 1024} KB": l2} if l2 else {})


TABLES: dict[str, Callable[[torch.device], Measurement]] = {
    "stack": stack,
    "long": long,
    "lite": lite,
    "intensity": intensity,
    "tiles": tiles,
    "rounding": rounding,
    "cuda": cuda,
    "coalescing": coalescing,
    "banks": banks,
}
