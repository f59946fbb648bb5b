"""The program that type checkers read does as its types say, and both checkers are set to read it."""

import importlib.util
import tomllib
from pathlib import Path

import torch

ROOT = Path(__file__).parents[1]


def test_the_user_program_runs() -> None:
    spec = importlib.util.spec_from_file_location("user_program", ROOT / "tests" / "typed" / "user_program.py")
    assert spec is not None
    assert spec.loader is not None
    program = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(program)
    assert program.shapes(with_lse=True) == program.shapes(with_lse=False) == [torch.Size([1, 2, 4, 8])] * 2
    for function, shape in ((program.packed, (5, 2, 8)), (program.cached, (1, 2, 4, 8))):
        found, lse = function()
        assert found == shape
        assert lse.dim() == len(shape) - 1


def test_both_checkers_read_it() -> None:
    tools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    assert "tests/typed" in tools["pyright"]["include"]
    assert "tests/typed" in tools["mypy"]["files"]
    for file in (".ci/run", "Makefile"):
        commands = (ROOT / file).read_text()
        assert "bin/pyright" in commands or "$(BIN)/pyright" in commands
        assert "bin/mypy" in commands or "$(BIN)/mypy" in commands
