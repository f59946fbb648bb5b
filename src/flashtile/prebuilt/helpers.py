"""Processes that compile kernels for this one, into the cache that they share."""

import json
import os
import tempfile
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from ..backend import compiling
from ..call.device import Device
from ..call.record import Record
from ..errors import AttentionWarning
from ..processes import importing_alike, run_python
from .needed import compile_kernel, kernels_of_record

CODE = "import sys; from flashtile.prebuilt import helpers; helpers.main(sys.argv[1])"
MOST = 16  # processes, each of which imports PyTorch
WORK, CLAIMED = "work.json", "claimed-"  # files in a folder of this process


def default_jobs() -> int:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, MOST)


def compiled_by_helpers(records: dict[str, Record], device: Device, jobs: int) -> int:
    """Compile kernels, given by their keys and by calls that need them, in `jobs` processes. Returns how many were
    compiled; the others were there. Warns of a process that fails: what it leaves is compiled later.
    """
    calls = [*{json.dumps(record): record for record in records.values()}.values()]
    with tempfile.TemporaryDirectory() as folder:
        work = {"calls": calls, "keys": [*records], "device": device, "target": target_of(device)}
        Path(folder, WORK).write_text(json.dumps(work))
        with ThreadPoolExecutor(jobs) as pool:
            outcomes = [*pool.map(lambda _: outcome(folder), range(jobs))]
    for _, error in outcomes:
        if error:
            warnings.warn(f"a process that compiles kernels failed: {error}", AttentionWarning, stacklevel=2)
            break
    return sum(count for count, _ in outcomes)


def outcome(folder: str) -> tuple[int, str]:
    """What one process has compiled, and its error."""
    try:
        ended = run_python(CODE, folder, env=importing_alike())
        return int(ended.stdout.splitlines()[-1]), ""
    except OSError as error:  # no process can be started here
        return 0, str(error)
    except (IndexError, ValueError):
        return 0, (ended.stderr.strip().splitlines() or ["no output"])[-1]


def target_of(device: Device) -> list[Any] | None:
    """What Triton compiles for; `None` for a CPU."""
    if device.type != "cuda":
        return None
    if device.arch.startswith("sm_"):
        return ["cuda", int(device.arch.removeprefix("sm_")), 32]
    return ["hip", device.arch, 64]


# In a helper ----------------------------------------------------------------------------------------------------------


class TargetDriver:
    """A driver for Triton that knows what to compile for, and no GPU: no context is made."""

    def __init__(self, target: Any):
        self.target = target

    def get_current_target(self) -> Any:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def main(folder: str) -> None:
    """Compile the kernels that no other helper has claimed; print their number."""
    work = json.loads(Path(folder, WORK).read_text())
    device, keys = Device(*work["device"]), {key: n for n, key in enumerate(work["keys"])}
    if work["target"] is not None:
        from triton.backends.compiler import GPUTarget  # pyright: ignore[reportMissingImports]
        from triton.runtime import driver  # pyright: ignore[reportMissingImports]

        active: Any = TargetDriver(GPUTarget(*work["target"]))
        driver.set_active(active)
    for record in work["calls"]:
        for key, kernel in kernels_of_record(record, device).items():
            if key in keys and claimed(folder, keys[key]):
                compile_kernel(kernel, load=False)
    print(compiling.compiled)


def claimed(folder: str, number: int) -> bool:
    """Claim a kernel."""
    try:
        os.close(os.open(Path(folder, f"{CLAIMED}{number}"), os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True
