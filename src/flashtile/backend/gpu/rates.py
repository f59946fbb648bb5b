"""Measured rates of a chip, in `flashtile/rates/<chip>.toml`, which `flashtile calibrate` writes."""

import functools
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from ...call.device import Device
from ...call.problem import FEW_ROWS
from ..rate_files import rate_files
from .chips import unlike

KERNEL = re.compile(r"(?P<kernel>.+?) (?P<d>\d+)(/(?P<dv>\d+))? (?P<m>\d+)x(?P<n>\d+)(x\d+x\d+)?(?P<variant> .+)?")
PARTS = ("tile", "step", "edge")
ESTIMATED = {"tile": 1.5, "step": 1.0, "edge": 0.3}  # times of a kernel without rates, in steps


class Rates(dict[str, float]):
    """Microseconds of a chip by name: of a kernel's tile, step and step at an edge, of a launch, of a byte, ...

    A kernel that was not measured takes as long for its products as others of its kind do, or of any kind.
    """

    def __init__(self, measured: Mapping[str, float], about: str):
        super().__init__(measured)
        self.about = about
        by_kernel: defaultdict[str, list[float]] = defaultdict(list)
        for name, time in measured.items():
            kernel, _, part = name.rpartition(" ")
            if part == "step" and time > 0 and (found := KERNEL.fullmatch(kernel)) is not None:
                by_kernel[found["kernel"]].append(time / products(found))
        self.by_product = {kernel: median(times) for kernel, times in by_kernel.items()}

    def __missing__(self, name: str) -> float:
        kernel, _, part = name.rpartition(" ")
        found = KERNEL.fullmatch(kernel) if part in PARTS else None
        if found is None:
            return 0.0
        of_any = median(self.by_product.values()) if self.by_product else 1e-6
        self[name] = ESTIMATED[part] * products(found) * self.by_product.get(found["kernel"], of_any)
        return self[name]


def products(kernel: re.Match[str]) -> int:
    """Products of a step."""
    return int(kernel["m"]) * int(kernel["n"]) * (int(kernel["d"]) + int(kernel["dv"] or kernel["d"]))


@functools.cache
def rates_of(device: Device) -> Rates:
    """The rates of a device: its chip's, or the scaled rates of the nearest chip that was measured."""
    return nearest(rate_files(), device)


def rates_of_like(device: Device) -> Rates:
    """The scaled rates of the nearest other chip of the same architecture; none if there is none."""
    others = [file for file in rate_files() if distance(file[1]["chip"], device)[:2] == (True, 0)]
    return nearest(others, device) if others else Rates({}, "")


def nearest(some: Sequence[tuple[str, Mapping[str, Any]]], device: Device) -> Rates:
    """The scaled rates of the file whose chip is nearest."""
    name, chosen = min(some, key=lambda file: distance(file[1]["chip"], device))
    return scaled(chosen, device, name)


def distance(chip: Mapping[str, Any], device: Device) -> tuple[bool, int, int]:
    """How far a chip is from a device: another one, of another architecture, of another number of cores."""
    return chip["name"] != device.name, unlike(chip["arch"], device.arch), abs(chip["cores"] - device.cores)


def scaled(file: Mapping[str, Any], device: Device, name: str) -> Rates:
    """The rates of a file for a device: kernels by the clock, bytes and kernels of few rows by the bandwidth of memory,
    where these are known.
    Cores are counted by `waves`.
    """
    chip, about = file["chip"], name
    clock = chip["clock"] / device.clock if device.clock else 1.0
    memory = chip["bandwidth"] / device.bandwidth if device.bandwidth else 1.0
    if chip["name"] == device.name:
        clock = memory = 1.0
    else:
        about = f"{name}, of {chip['name']}, scaled: clock {1 / clock:.3g}, bandwidth {1 / memory:.3g}"
        if chip["arch"] != device.arch:
            about += f"; none were measured for {device.arch}, which `flashtile calibrate` does"
    found: dict[str, float] = {}
    for key, value in file["rates"].items():
        if isinstance(value, Mapping):
            kernel = KERNEL.fullmatch(key)
            loads = kernel is not None and int(kernel["m"]) <= FEW_ROWS  # which is all the work of so few rows
            found |= {f"{key} {part}": (memory if loads else clock) * x for part, x in value.items()}
        else:
            found[key] = (memory if key.endswith("byte") else clock) * value
    return Rates(found, about)
