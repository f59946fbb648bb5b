"""The tables `tiles` and `widths` of `flashtile-ladder`: bytes and time by the size of tiles and by head dimension."""

import torch

from .. import iomodel, step05_flash1, step06_flash2
from ..iomodel import Shape
from .library import NAME, one_head
from .measure import Measurement, Table, inputs, timed

TILES_LENGTH = 2048


def tiles(device: torch.device) -> Measurement:
    n, d = TILES_LENGTH, 64
    table = Table(
        "tiles", f"Tiles against bytes and time: FlashAttention-1 against -2, one head, N = {n}, d = {d}, float32"
    )
    table.see = (
        "FlashAttention-1 writes less, the larger its tiles; FlashAttention-2 writes its output once at any size."
    )
    shape, (q, k, v) = Shape.square(n, d), inputs(n, d, device)
    for name, memory in on_chip_sizes().items():
        rows, keys = iomodel.block_sizes(memory, d)
        yield f"tiles for {name}"
        one, two = iomodel.flash1_forward(shape, memory), iomodel.flash2_forward(shape, rows, keys)
        run_one = lambda memory=memory: step05_flash1.attention(q, k, v, memory=memory // 4)  # noqa: E731
        run_two = lambda rows=rows, keys=keys: step06_flash2.attention(q, k, v, block_m=rows, block_n=keys)  # noqa: E731
        row = {"flash1_mb_read": one.read / 1e6, "flash1_mb_written": one.written / 1e6}
        row |= {"flash2_mb_read": two.read / 1e6, "flash2_mb_written": two.written / 1e6}
        table.add(
            {"on_chip": name, "tile": f"{rows} x {keys}"},
            lambda row=row, run_one=run_one, run_two=run_two: (
                row | timed(run_one, device, prefix="flash1_") | timed(run_two, device, prefix="flash2_")
            ),
        )
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


# Head dimensions ------------------------------------------------------------------------------------------------------

WIDTHS, WIDTHS_LENGTH = (16, 32, 64, 128, 256), 1024


def widths(device: torch.device) -> Measurement:
    """Time for each multiplication as heads get wider, with the SRAM of an A100 for all."""
    n, memory = WIDTHS_LENGTH, iomodel.ON_CHIP_BYTES["A100"]
    table = Table("widths", f"Head dimensions: one head, N = {n}, float32, FlashAttention-1's tiles for 192 KB")
    table.see = (
        "Wider heads leave room for fewer keys, so O comes and goes more often, and more bytes move for an operation."
    )
    for d in WIDTHS:
        yield f"d = {d}"
        q, k, v = inputs(n, d, device)
        work = iomodel.flash1_forward(Shape.square(n, d), memory)
        rows, keys = iomodel.block_sizes(memory, d)
        row = {"mb_moved": work.moved / 1e6, "bytes_for_1000_flops": 1e3 * work.moved / work.flops}
        table.add(
            {"head_dim": d, "tile": f"{rows} x {keys}"},
            lambda row=row, q=q, k=k, v=v, flops=work.flops: (
                row
                | rated(timed(lambda: step05_flash1.attention(q, k, v), device, prefix="flash1_"), flops, "flash1")
                | rated(timed(lambda: one_head(q, k, v), device, prefix="product_"), flops, "product")
            ),
        )
    table.notes.append(f"Bytes are from the model; product: {NAME}, with tiles of its own.")
    return table


def rated(times: dict[str, float], flops: int, prefix: str) -> dict[str, float]:
    """Times, and operations for each of the fastest one's nanoseconds."""
    return times | {f"{prefix}_gflops": flops / times[f"{prefix}_ms"] / 1e6}
