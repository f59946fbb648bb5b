"""The program that type checkers read does as its types say, and both checkers are set to read it."""

import importlib.util
import inspect
import tomllib
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import torch

import flashtile
from flashtile.api.signatures import CacheKeywords, Keywords, VarlenKeywords
from flashtile.call.call import FEATURES
from flashtile.call.features import CACHE, DENSE, VARLEN

ROOT = Path(__file__).parents[2]


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
    assert program.named_as_elsewhere() == [(1, 4, 2, 8), (1, 4, 2, 8), (1, 2, 4)]


@pytest.mark.parametrize(
    ("function", "keywords"),
    [
        (flashtile.attention, Keywords),
        (flashtile.attention_varlen, VarlenKeywords),
        (flashtile.attention_with_kvcache, CacheKeywords),
    ],
)
def test_checkers_and_python_see_the_same_keywords(function: Any, keywords: Any) -> None:
    kinds = inspect.signature(function).parameters.values()
    named = {x.name for x in kinds if x.kind is inspect.Parameter.KEYWORD_ONLY}
    types = get_type_hints(function)
    assert types["return"] == torch.Tensor | tuple[torch.Tensor, torch.Tensor]  # as `help` shows it
    assert get_type_hints(keywords) == {name: types[name] for name in named - {"return_lse"}}


@pytest.mark.parametrize(
    ("function", "layout"),
    [(flashtile.attention, DENSE), (flashtile.attention_varlen, VARLEN), (flashtile.attention_with_kvcache, CACHE)],
)
def test_every_feature_of_the_table_is_an_argument(function: Any, layout: str) -> None:
    """And reaches the call, which refuses by name what is no tensor."""
    x, lengths = torch.randn(1, 1, 4, 8), torch.tensor([4])
    packed, offsets = x[0].transpose(0, 1), torch.tensor([0, 4])
    given: dict[str, Any] = {
        DENSE: {"q": x, "k": x, "v": x},
        VARLEN: {"q": packed, "k": packed, "v": packed, "cu_seqlens_q": offsets, "cu_seqlens_k": offsets},
        CACHE: {"q": x, "k_cache": x.clone(), "v_cache": x.clone(), "cache_seqlens": lengths},
    }[layout]
    function(**given)
    for name in (name for name, feature in FEATURES.items() if feature.public and layout in feature.layouts):
        with pytest.raises(flashtile.ArgumentError, match=name):
            function(**given | {name: "no tensor"})


def test_both_checkers_read_it() -> None:
    tools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    assert "tests/typed" in tools["pyright"]["include"]
    assert "tests/typed" in tools["mypy"]["files"]
    for file in (".ci/run", "Makefile"):
        commands = (ROOT / file).read_text()
        assert "bin/pyright" in commands or "$(BIN)/pyright" in commands
        assert "bin/mypy" in commands or "$(BIN)/mypy" in commands
