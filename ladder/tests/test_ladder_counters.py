"""The scripts that count bytes of strided loads and run a sanitizer read the tools' words, without a GPU."""

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from flashtile_ladder._host import cuda_compile

FOLDER = Path(__file__).parents[1] / "benchmarks"


def script(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    return module


def test_ratios_of_counters(monkeypatch: pytest.MonkeyPatch) -> None:
    """HBM in pieces of 64 bytes, L2 in sectors of 32, at a stride of 16: 32 sectors for each request."""
    coalescing = script("coalescing_counters", monkeypatch)
    used = 4 * 1024
    values = {"requests": 32, "l1_sectors": 1024, "l2_sectors": 1024, "hbm_bytes": 16 * used}
    lines = ["==PROF== Connected", '"ID","Kernel Name","Metric Name","Metric Unit","Metric Value"']
    lines += [f'"0","read_columns","{coalescing.METRICS[name]}","","{value:,}"' for name, value in values.items()]

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        assert command[-2:] == ["--run", "16"]
        return subprocess.CompletedProcess(command, 0, "\n".join(lines), "")

    monkeypatch.setattr(subprocess, "run", run)
    row = coalescing.row_of(16, coalescing.counted(16, "ncu"), used)
    assert (row["sectors_per_request"], row["l2_ratio"], row["hbm_ratio"]) == (32, 8, 16)
    assert (row["sectors_predict"], row["pieces_of_64_predict"]) == (8, 16)
    lines.pop()
    with pytest.raises(coalescing.CountersError, match="ended with 0"):
        coalescing.counted(16, "ncu")


def test_findings_of_the_sanitizer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every kernel of the ladder runs; errors are those of the tool's last line; a run that ends early is no pass."""
    sanitizer = script("ladder_sanitizer", monkeypatch)
    text = (FOLDER / "ladder_sanitizer.py").read_text()
    for file in cuda_compile.FOLDER.rglob("*.cu"):
        assert file.stem.removeprefix("step09_cuda_") in text, file
    assert (cuda_compile.FOLDER / "step09_cuda_tensor_cores.cu").read_text().count(sanitizer.BARRIER) == 1
    assert (cuda_compile.FOLDER / "step09_cuda_rows.cu").read_text().count(sanitizer.BOUND[0]) == 1
    assert {what for _, what in sanitizer.MISTAKES} | set(sanitizer.CORRECT) == set(sanitizer.RUNS)
    for installed in (None, object()):
        monkeypatch.setattr(importlib.util, "find_spec", lambda name, found=installed: found)
        names = {what for _, what in sanitizer.planned(sanitizer.runnable())}
        assert names == set(sanitizer.RUNS) - ({"numba"} if installed is None else set())
    words = {"memcheck": (0, "ERROR SUMMARY: 0 errors"), "synccheck": (1, "ERROR SUMMARY: 0 errors\nTraceback")}
    words["racecheck"] = (9, "ERROR: Race\n===== RACECHECK SUMMARY: 3 hazards displayed (3 errors, 0 warnings)")

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, *words[command[2]], "")

    monkeypatch.setattr(subprocess, "run", run)
    found = {tool: sanitizer.checked(tool, "kernels", "tool")["errors"] for tool in sanitizer.TOOLS}
    assert found == {"memcheck": 0, "racecheck": 3, "synccheck": None}


def test_parts_of_kernels_are_where_they_are_said_to_be(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each text occurs once, and what is left is a module; CUDA C++ compiles where there is a compiler."""
    parts = script("step_parts", monkeypatch)
    for change in parts.STAGES.values():
        source = parts.stages(change).source_for(128)
        assert source.text != parts.stages(()).source_for(128).text
    if cuda_compile.nvrtc() is not None or cuda_compile.nvcc() is not None:
        assert cuda_compile.cubin(source, 90)
    for step, changes in ((parts.step09_hopper, parts.HOPPER), (parts.step08_triton_backward, parts.BACKWARD)):
        for change in changes.values():
            assert callable(parts.module(step, change, tmp_path).attention)
    with pytest.raises(ValueError, match="occurs 0 times"):
        parts.changed("text", (("other", ""),))
