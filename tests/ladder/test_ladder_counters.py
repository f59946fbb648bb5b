"""The script that counts the bytes of strided loads reads ncu's table, without a GPU."""

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    spec = importlib.util.spec_from_file_location("coalescing_counters", FOLDER / "coalescing_counters.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "coalescing_counters", module)
    spec.loader.exec_module(module)
    return module


def test_ratios_of_counters(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """HBM in pieces of 64 bytes, L2 in sectors of 32, at a stride of 16: 32 sectors for each request."""
    used = 4 * 1024
    values = {"requests": 32, "l1_sectors": 1024, "l2_sectors": 1024, "hbm_bytes": 16 * used}
    lines = ["==PROF== Connected", '"ID","Kernel Name","Metric Name","Metric Unit","Metric Value"']
    lines += [f'"0","read_columns","{script.METRICS[name]}","","{value:,}"' for name, value in values.items()]

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        assert command[-2:] == ["--run", "16"]
        return subprocess.CompletedProcess(command, 0, "\n".join(lines), "")

    monkeypatch.setattr(subprocess, "run", run)
    row = script.row_of(16, script.counted(16, "ncu"), used)
    assert (row["sectors_per_request"], row["l2_ratio"], row["hbm_ratio"]) == (32, 8, 16)
    assert (row["sectors_predict"], row["pieces_of_64_predict"]) == (8, 16)
    lines.pop()
    with pytest.raises(script.CountersError, match="ended with 0"):
        script.counted(16, "ncu")
