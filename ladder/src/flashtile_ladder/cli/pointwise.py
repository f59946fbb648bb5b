"""The table `pointwise` of `flashtile-ladder`: operations of standard attention one by one, and two of them fused."""

import torch

from .measure import Measurement, Run, Table, timed

POINTWISE_LENGTH, WIDTH = 4096, 64
ON_A_GPU = 4  # times as long: S of 1 GiB, far more than L2, and a pass that takes longer than its launch
ITEM = 4  # bytes of float32


def pointwise(device: torch.device) -> Measurement:
    """Each operation on S `[N, N]` into a kept buffer, with a copy of S and the product that makes it."""
    n, d = POINTWISE_LENGTH * (ON_A_GPU if device.type == "cuda" else 1), WIDTH
    table = Table("pointwise", f"One operation at a time: S [N, N] in float32, N = {n}; the product has d = {d}")
    table.see = (
        "All but the product move more bytes than they compute: two in one pass save half of the accesses and a launch."
    )
    copied = None
    for name, (run, accesses, operations) in operations_on_scores(n, d, device).items():
        yield name
        row = table.add({"operation": name, "accesses": accesses}, lambda run=run: timed(run, device))
        row["gb_per_s"] = accesses * n * n * ITEM / row["ms"] / 1e6
        copied = copied or row["gb_per_s"]
        row["percent_of_copy"] = 100 * row["gb_per_s"] / copied
        row["gflops"] = operations * n * n / row["ms"] / 1e6
        row["operations_for_a_byte"] = operations / (accesses * ITEM)
    table.notes.append(
        "Accesses: reads and writes of HBM for each score. Buffers are made before, so that the allocator "
        "has no part. A softmax is five operations for each score."
    )
    return table


def operations_on_scores(n: int, d: int, device: torch.device) -> dict[str, tuple[Run, float, float]]:
    """By name: a call, its accesses and its operations for each score."""
    q, k = (torch.randn((n, d), device=device) for _ in range(2))
    s, kept = torch.randn((n, n), device=device), torch.rand((n, n), device=device).gt_(0.1)
    hidden = torch.ones((n, n), dtype=torch.bool, device=device).triu_(1)
    out, bias = torch.empty_like(s), torch.randn((n,), device=device)

    def two_passes() -> None:
        torch.mul(s, 0.125, out=out)
        torch.add(out, bias, out=out)

    return {
        "copy": (lambda: out.copy_(s), 2, 0),
        "scale": (lambda: torch.mul(s, 0.125, out=out), 2, 1),
        "mask, in place": (lambda: out.masked_fill_(hidden, -1e9), 2.25, 1),  # the mask has one byte
        "softmax": (lambda: torch.softmax(s, -1, out=out), 2, 5),
        "dropout": (lambda: torch.mul(s, kept, out=out), 3, 1),
        "scale, then bias": (two_passes, 4, 2),
        "scale and bias in one": (lambda: torch.add(bias, s, alpha=0.125, out=out), 2, 2),
        "S = Q Kᵀ": (lambda: torch.mm(q, k.mT, out=out), 1 + 2 * d / n, 2 * d),
    }
