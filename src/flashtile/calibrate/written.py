"""A chip's file of rates (`backend.gpu.rates`), from measured calls."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from ..backend.gpu.rates import PARTS, rates_of_like
from ..call.device import Device, meta_tensors_on
from .candidates import Subject, cost_of, plans
from .fit import Fit, fit
from .store import Row

HEAD = """\
# Microseconds on one chip, fitted by `flashtile calibrate` to measured times. A kernel's name has its widths and its
# tile of rows and keys; `tile`, `step` and `edge` are those of its busiest core (`flashtile.backend.gpu.cost`).
"""


def fitted(rows: Sequence[Row], device: Device) -> Fit:
    """The rates of a device. Packed calls and sparse masks do not count: a plan does not know how much they hide."""
    costs, times = [], []
    for row in rows:
        if row.cell.lengths or (row.cell.mask and row.cell.mask is not True):
            continue
        with meta_tensors_on(device):
            subject = Subject.of(row.cell, torch.device("meta"))
            for name, plan in plans(subject, every=True):
                if name in row.times:
                    costs.append(cost_of(plan, subject, device))
                    times.append(row.times[name][0])
    return fit(costs, times, device.bandwidth)


def write(path: Path, rows: Sequence[Row], device: Device) -> Fit:
    """Fit the rates of a device, and write them; kernels that no call ran keep a like chip's rates, scaled."""
    found = fitted(rows, device)
    found = found._replace(rates={**rates_of_like(device), **found.rates})
    errors = np.abs(found.errors)
    lines = [
        HEAD, "[chip]", f'name = "{device.name}"', f'arch = "{device.arch}"', f"cores = {device.cores}",
        f"clock = {device.clock:g}  # MHz", f"bandwidth = {device.bandwidth:g}  # bytes in a microsecond", "",
        "[fit]", f'triton = "{rows[0].triton}"', f"calls = {len(rows)}", f"plans = {len(errors)}",
        f"median_error = {np.median(errors):.3f}  # of a plan's time", f"ninth_decile = {np.quantile(errors, 0.9):.3f}",
        "", "[rates]",
    ]  # fmt: skip
    kernels: dict[str, dict[str, float]] = {}
    for name, value in sorted(found.rates.items()):
        kernel, _, part = name.rpartition(" ")
        if part in PARTS:
            kernels.setdefault(kernel, {})[part] = value
        else:
            lines.append(f'"{name}" = {value:.4g}')
    for kernel, parts in kernels.items():
        values = ", ".join(f"{part} = {parts[part]:.4g}" for part in PARTS if part in parts)
        lines.append(f'"{kernel}" = {{ {values} }}')
    path.write_text("\n".join(lines) + "\n")
    return found
