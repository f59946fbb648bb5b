"""The example and the benchmark that need no large model, at small sizes."""

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest
from click.testing import CliRunner

ROOT = Path(__file__).parents[2]


def load(path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(path: str, *options: str) -> str:
    result = CliRunner().invoke(load(path).main, options)
    assert result.exit_code == 0, result.output
    return result.output


def test_finetune() -> None:
    """Both implementations have the same losses, which fall."""
    pytest.importorskip("transformers", minversion="5.0", reason="needs the extra `transformers`")
    output = run("examples/finetune.py", "--steps", "6", "--batch", "4", "--longest", "48")
    (ours, first, last), (sdpa, *others) = re.findall(r"(\w+): loss (\S+), after 6 steps (\S+);", output)
    assert (ours, sdpa) == ("tile_attention", "sdpa")
    assert [float(first), float(last)] == pytest.approx([float(x) for x in others], abs=2e-3)
    assert float(last) < float(first)
    assert len(re.findall(r"[\d,]+ tokens/s, peak \d+\.\d MiB", output)) == 2


def test_serving(monkeypatch: pytest.MonkeyPatch) -> None:
    """And a call that reads one key less than there is fails."""
    options = (
        "--device",
        "cpu",
        "--batch",
        "3",
        "--longest",
        "50",
        "--page-size",
        "16",
        "--layers",
        "1",
        "--rounds",
        "1",
    )
    assert "3 sequences, pages of 16, 1 layers: eager" in run("benchmarks/serving.py", *options)
    module = load("benchmarks/serving.py")
    right = module.attend
    monkeypatch.setattr(module, "attend", lambda server: right(server._replace(lengths=server.lengths - 1)))
    assert CliRunner().invoke(module.main, options).exit_code == 1
