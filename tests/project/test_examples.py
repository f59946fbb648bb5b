"""The examples run, learn, and compute the derivatives that they claim to."""

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest
import torch
from click.testing import CliRunner
from formula import dense_formula
from torch import Tensor

import flashtile

EXAMPLES = Path(__file__).parents[2] / "examples"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# Short programs ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "prints"),
    [
        ("varlen", ["5 tokens: as in a call of their own, gradient [5, 8, 64]", "120 tokens", "37 tokens"]),
        ("pages", ["[52, 52] keys in pages [[0, 1, 2, 4], [0, 1, 3, 5]], out [2, 8, 1, 64]"]),
        ("score_mod", ["rates [", "the target's are [0.0, 0.1, 0.2, 0.4]"]),
        ("switch", ["3 calls of flashtile", "0 calls of flashtile", "3 of 3 attention layers run flashtile"]),
        ("learned_bias", ["the bias is largest at distance 3"]),
        ("sinks_and_windows", ["4096 tokens, window (127, 0): ", "it learns like any weight"]),
        ("block_masks", ["documents, each causal: 17% of the pairs", "  ····▒████▒······"]),
    ],
)
def test_short_programs(name: str, prints: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    seen = vars(load(name))
    output = capsys.readouterr().out
    for words in prints:
        assert words in output
    assert 10 <= len((EXAMPLES / f"{name}.py").read_text().splitlines()) <= 32
    if name == "pages":  # the last step sees all keys of its sequence, and no others
        table, n = seen["page_table"].long(), int(seen["lengths"][0])
        k, v = (seen[x][table].flatten(1, 2)[:, :n].transpose(1, 2) for x in ("k_pages", "v_pages"))
        torch.testing.assert_close(seen["out"], dense_formula(seen["q"], k, v)[0])
    if name == "switch":
        assert abs(seen["losses"]["tile_attention"] - seen["losses"]["sdpa"]) < 1e-5
    if name == "score_mod":
        torch.testing.assert_close(seen["rate"], seen["goal"], atol=0.03, rtol=0)


def test_a_force_field_learns() -> None:
    result = CliRunner().invoke(load("force_field").main, ["--steps", "40", "--compare", "24"])
    assert result.exit_code == 0, result.output
    first, last = map(float, re.findall(r"(\d\.\d+) at the", result.output))
    assert last < first
    assert result.output.count("a step of 24 atoms") == 2


def test_eigenvalues_of_a_hessian_are_those_of_dense_attention() -> None:
    options = ["--steps", "3", "--train", "2", "--tokens", "40"]
    result = CliRunner().invoke(load("hessian_eigenvalues").main, options)
    assert result.exit_code == 0, result.output
    own, dense = re.findall(r"parameters (.*)", result.output)
    for x, y in zip(re.findall(r"-?\d+\.\d+", own), re.findall(r"-?\d+\.\d+", dense), strict=True):
        assert abs(float(x) - float(y)) < 0.02 * max(1, abs(float(y)))


# The MeanFlow model ------------------------------------------------------------------------------------------------


def run(*options: str) -> str:
    result = CliRunner().invoke(load("meanflow_toy").main, ["--compare", "0", *options])
    assert result.exit_code == 0, result.output
    return result.output


def test_meanflow_learns(tmp_path: Path) -> None:
    """A hundred steps bring the samples closer to the data; with matplotlib there is a picture."""
    picture = tmp_path / "moons.png"
    output = run("--steps", "100", "--out", str(picture))
    first, last = map(float, re.findall(r"(\d\.\d+) at the", output))
    assert last < first
    before, after, same = map(float, re.findall(r"(\d\.\d+) (?:before|after|for)", output))
    assert after < before / 1.5
    assert same < after
    assert picture.exists() == (importlib.util.find_spec("matplotlib") is not None)


def test_meanflow_prints_the_cost_of_both_ways() -> None:
    output = run("--steps", "1", "--out", "", "--compare", "40")
    costs = re.findall(r"40 points and tokens, (flashtile|dense attention): \d+ ms, peak memory \d+ MiB", output)
    assert costs == ["flashtile", "dense attention"]


def test_meanflow_repeats() -> None:
    first, again, other = (run("--steps", "2", "--seed", seed, "--out", "") for seed in ("3", "3", "4"))
    assert first == again != other


def test_meanflow_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It says so and goes on."""
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *_: None if name == "matplotlib" else found(name))
    output = run("--steps", "1", "--out", str(tmp_path / "moons.png"))
    assert "flashtile[plot]" in output
    assert not list(tmp_path.iterdir())


def test_meanflow_loss_has_the_gradient_of_the_formula(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss contains a tangent of attention: both are compared with attention from its formula, in float64."""
    example = load("meanflow_toy")
    torch.set_default_dtype(torch.float64)
    try:
        network = example.MeanVelocity()

        def loss_and_gradients() -> list[Tensor]:
            torch.manual_seed(1)
            loss = example.loss_of(network, example.two_moons(40))
            return [loss, *torch.autograd.grad(loss, list(network.parameters()))]

        found = loss_and_gradients()
        monkeypatch.setattr(flashtile, "attention", lambda q, k, v: dense_formula(q, k, v)[0])
        expected = loss_and_gradients()
    finally:
        torch.set_default_dtype(torch.float32)
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y)
