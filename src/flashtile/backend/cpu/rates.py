"""Measured rates of a processor, in `flashtile/rates/<cpu>.toml`, which `flashtile calibrate --device cpu` writes:
microseconds on one thread.
"""

import functools
import platform
import sys
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from ..rate_files import rate_files
from . import targets

KIND = "cpu"
OUTSIDE_OF_VECTORS = ("launch", "launch backward", "thread")
WORTH = 4  # times that it takes to start a thread, which its work takes at least


class CpuRates(defaultdict[str, float]):
    """Microseconds by name; 0 of what was not measured. `about` names the file."""

    def __init__(self, measured: Mapping[str, float], about: str):
        super().__init__(float, measured)
        self.about = about

    @property
    def work_per_thread(self) -> float:
        """Multiply-adds that are worth starting a thread for."""
        return WORTH * self["thread"] / self["rows float32 product"]

    @property
    def rows_of_a_read(self) -> float:
        """Rows whose products take as long as reading a key and its value."""
        return self["decode float32 element"] / self["decode float32 product"]


def rates_here() -> CpuRates:
    """The rates of this processor with the vectors that kernels use, or the nearest one's, scaled."""
    return _rates(processor_name(), targets.timed().width)


@functools.cache
def _rates(name: str, width: str) -> CpuRates:
    file, content = min(
        rate_files(KIND), key=lambda x: (x[1]["chip"]["name"] != name, x[1]["chip"]["vectors"] != width, x[0])
    )
    return scaled(content, name, width, file)


def scaled(content: Mapping[str, Any], name: str, width: str, about: str) -> CpuRates:
    """The rates of a file for a processor and its vectors: narrower ones take longer in proportion, and bfloat16
    without matrix tiles takes as long as float16, which vectors convert too.
    """
    chip, here = content["chip"], targets.make_target(width)
    factor = targets.make_target(chip["vectors"]).vector_bytes / here.vector_bytes
    rates = {key: x if key in OUTSIDE_OF_VECTORS else factor * x for key, x in content["rates"].items()}
    if here.tiles is None:
        rates |= {key.replace("float16", "bfloat16"): x for key, x in rates.items() if key.startswith("rows float16")}
    if (name, width) != (chip["name"], chip["vectors"]):
        about += f", of {chip['name']} with {chip['vectors']}, scaled: {1 / factor:.3g} of its vectors"
        about += "; `flashtile calibrate --device cpu` measures this one"
    return CpuRates(rates, about)


@functools.cache
def processor_name() -> str:
    """The processor's name, with family and model where Linux says them: several have the same name."""
    if sys.platform == "linux":
        with open("/proc/cpuinfo") as file:
            pairs = (line.partition(":")[::2] for line in file)
            fields = {name.strip(): value.strip() for name, value in pairs if name.strip()}
        if "model name" in fields:
            return f"{fields['model name']}, family {fields.get('cpu family')}, model {fields.get('model')}"
    return platform.processor() or platform.machine()
