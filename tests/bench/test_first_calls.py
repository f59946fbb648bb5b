"""`benchmarks/first_calls.py`: libraries compute the same, and what is lost is counted."""

import argparse
import importlib
import json
import random
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

FOLDER = Path(__file__).parents[2] / "benchmarks"
with mock.patch.object(sys, "path", [str(FOLDER), *sys.path]):
    first_calls: Any = importlib.import_module("first_calls")
OPTIONS = argparse.Namespace(device="cpu", longest=48, lengths=2, fa3=None, archive=None)


@pytest.mark.parametrize("name", first_calls.WORKLOADS)
def test_libraries_compute_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.nn.attention.flex_attention import flex_attention

    monkeypatch.setattr(first_calls, "compiled_flex", lambda: flex_attention)
    workload = first_calls.WORKLOADS[name]
    x = {name: y.detach() for name, y in first_calls.inputs(workload, random.Random(3), "cpu", 24).items()}
    with torch.no_grad():
        expected = first_calls.by_sdpa(workload, x, 24)()
        torch.testing.assert_close(first_calls.by_flashtile(workload, x, 24)(), expected, atol=1e-5, rtol=1e-5)
        flex = first_calls.by_flex(workload, x, 24)()
        flex = flex[0].transpose(0, 1) if workload.kind == "packed" else flex
        torch.testing.assert_close(flex, expected, atol=1e-5, rtol=1e-5)


def test_what_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first of two calls less the second, where it takes longer."""
    times = iter([(1.0, 2.0), (0.5, 0.5), (0.25, 0.25), (0.125, 0.125), (1.0, 1.0), (2.0, 2.0)])
    monkeypatch.setattr(first_calls, "passes", lambda *_: next(times))
    found = first_calls.measured(first_calls.WORKLOADS["padded encoder, training"], first_calls.by_flashtile, OPTIONS)
    assert (found["first forward"], found["first backward"]) == (1.0, 2.0)
    assert (found["lost"], found["waits"], found["longest wait"]) == (2.25, 2, 2.0)


def test_processes_from_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """The second process has the caches of the first one; a process without time left says so."""
    seen: list[Any] = []

    def run(command: list[str], *, env: dict[str, str], **_: Any) -> Any:
        seen.append((command[command.index("--provider") + 1], env[first_calls.CACHES[0]]))
        ended = {"stdout": '{"lost": 1.5, "waits": 1}\n', "stderr": "no\nreason\n"}
        return argparse.Namespace(returncode=len(seen) == 3, **ended)

    monkeypatch.setattr(first_calls.subprocess, "run", run)
    words = ["first_calls.py", "--device", "cpu", "--only", "decoding", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", words)
    first_calls.main()
    assert [provider for provider, _ in seen] == ["flashtile", "flashtile", "SDPA"]
    assert seen[0][1] == seen[1][1] != seen[2][1]
    found = json.loads((tmp_path / "first-calls-cpu.json").read_text())["workloads"]["decoding with a cache"]
    assert found["flashtile"]["full cache"]["lost"] == 1.5
    assert found["SDPA"] == {"empty cache": {"error": "reason"}}
    assert "| decoding with a cache | flashtile, full cache | 1.50 | 1 |" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", [*words, "--seconds", "0"])
    first_calls.main()
    assert "no time was left" in (tmp_path / "first-calls-cpu.json").read_text()
