"""The model of what our kernels move through DRAM, and the script that compares it with a GPU's counters."""

import contextlib
import importlib.util
import io
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import NamedTuple
from unittest import mock

import pytest

from flashtile_ladder import iomodel
from flashtile_ladder.iomodel import Shape, gpu
from flashtile_ladder.iomodel.gpu import Cache

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "dram_counters.py"
SMALL = Shape(1024, 1024, 64, 64, batch=2, num_heads_q=4, num_heads_kv=2, itemsize=2)


def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("dram_counters", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["dram_counters"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# The model -----------------------------------------------------------------------------------------------------------


def test_what_fits_in_the_cache_is_read_once() -> None:
    """Forward: each input read once and each result written once, which is the least that is possible."""
    work = gpu.kernel_forward(SMALL, 128)
    inputs = (8 * 1024 + 2 * 4 * 1024) * 64 * 2  # q of 8 heads, k and v of 4
    assert work.moved == iomodel.least_bytes(inputs, 8 * 1024, 64, 2)
    q_kv = 8 * 1024 * 64 * 2, 2 * 4 * 1024 * 64 * 2
    row_numbers = 8 * 1024 * 2 * 4
    backward = gpu.kernel_backward(SMALL, 128, 64)
    delta = 2 * q_kv[0] + row_numbers // 2
    assert backward.read == delta + 2 * (2 * q_kv[0] + row_numbers + q_kv[1])
    assert backward.written == row_numbers + q_kv[0] + q_kv[1]


@pytest.mark.parametrize(
    ("blocks", "heads", "streamed", "times"),
    [
        (8, 4, 100, 1),  # 2 heads in flight of 132 / 8 = 17, all 4: they fit in 400
        (8, 4, 101, 1),  # they do not fit, but all programs of a head run together
        (264, 4, 400, 1),
        (264, 4, 401, 2),
        (265, 1, 401, 3),
    ],
)
def test_passes(blocks: int, heads: int, streamed: int, times: int) -> None:
    assert gpu.passes(blocks, heads, streamed, Cache(400, 132)) == times


def test_a_small_cache_reads_more() -> None:
    plain, small = (gpu.kernel_forward(SMALL, 16, cache) for cache in (gpu.H200, Cache(1000, 32)))
    keys = 2 * 2 * 1024 * 128 * 2
    assert small.read - plain.read == 3 * keys  # 64 blocks of rows for each group, times 2 query heads, 32 at a time
    assert small.written == plain.written


# The script ----------------------------------------------------------------------------------------------------------

COUNTED = """==PROF== Connected to process 7
==PROF== Profiling "forward_kernel": 0%....100% - 1 pass
"ID","Process ID","Kernel Name","Metric Name","Metric Unit","Metric Value"
"0","7","forward_kernel","dram__bytes_read.sum","byte","1,600,000,000"
"0","7","forward_kernel","dram__bytes_write.sum","byte","500,000,000"
"1","7","combine_kernel","dram__bytes_read.sum","byte","1,000"
"2","7","forward_kernel","dram__bytes_read.sum","byte","500"
==PROF== Disconnected
"""


class Done(NamedTuple):
    status: int
    stdout: str


def run(*words: str) -> Done:
    output = io.StringIO()
    with mock.patch.object(sys, "argv", ["dram_counters.py", *words]), contextlib.redirect_stdout(output):
        return Done(script().main(), output.getvalue())


def profiler(folder: Path, output: str, status: int = 0) -> str:
    """A command that writes what ncu would."""
    path = folder / "ncu"
    path.write_text(f"#!{sys.executable}\nprint({output!r})\nraise SystemExit({status})\n")
    path.chmod(0o755)
    return str(path)


def test_dry_run() -> None:
    module = script()
    done = run("--dry-run")
    assert done.status == 0, done.stdout
    lines = done.stdout.splitlines()
    assert len(lines) == len(module.CASES)
    assert all(line.startswith(name) for line, name in zip(lines, module.CASES, strict=True))
    for case in module.CASES.values():  # nothing that the cache could hold to the end
        work = case.predicted()
        assert work.moved > 20 * gpu.H200.size


def test_counters_are_added_up_and_compared(tmp_path: Path) -> None:
    out = tmp_path / "counters.json"
    done = run("--case", "forward, 4k", "--ncu", profiler(tmp_path, COUNTED), "--out", str(out))
    assert done.status == 0, done.stdout
    (row,) = json.loads(out.read_text())
    assert (row["read"], row["written"]) == (1_600_001_500, 500_000_000)
    predicted = row["predicted_read"] + row["predicted_written"]
    assert row["difference"] == pytest.approx(predicted / 2_100_001_500 - 1)
    assert row["kernels"]["combine_kernel"] == {"dram__bytes_read.sum": 1000, "dram__bytes_write.sum": 0}
    assert f"{row['difference']:+.1%}" in done.stdout


@pytest.mark.parametrize(
    ("output", "status", "words"),
    [
        ("==ERROR== ERR_NVGPUCTRPERM - The user does not have permission", 1, "to administrators alone"),
        ("==ERROR== no such device", 1, "no such device"),
        (COUNTED.replace('"byte"', '"Mbyte"'), 0, "not in bytes"),
        ("", 0, "ended with 0"),
    ],
)
def test_a_profiler_that_does_not_count_is_not_passed_over(
    output: str, status: int, words: str, tmp_path: Path
) -> None:
    done = run("--case", "decode, 8k", "--ncu", profiler(tmp_path, output, status))
    assert done.status == 2
    assert words in done.stdout
    assert "predicted" in done.stdout


def test_without_a_profiler() -> None:
    done = run("--ncu", "no-such-command")
    assert done.status == 2
    assert "--dry-run" in done.stdout
