"""The byte-level GPT: training does not depend on who computes attention, the cache gives what training computed, and
its tensors are inputs of `verify` and `bench`.
"""

import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from commands import invoke

from flashtile.bench import captured as captured_module
from flashtile.bench.byte_gpt import (
    ATTENTIONS,
    Attend,
    ByteGPT,
    Cache,
    flashtile_attention,
    new_model,
    rotary_tables,
    sdpa_attention,
    text,
    train,
)
from flashtile.bench.captured import HEAD_DIM, HEADS, Source, captured
from flashtile.bench.cell import Cell
from flashtile.bench.inputs import make_case

ROOT = Path(__file__).parents[2]
STEPS = 12


def losses(attend: Attend, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.tensor(list(train(new_model(dtype=dtype), attend, STEPS, batch=2, seqlen=32)), dtype=torch.float64)


@pytest.fixture(scope="module")
def model() -> ByteGPT:
    """A model that is trained less, so that tests are quick."""
    model = new_model()
    for _ in train(model, sdpa_attention, STEPS, batch=2, seqlen=32):
        pass
    return model


@pytest.fixture
def few_steps(model: ByteGPT, monkeypatch: pytest.MonkeyPatch) -> None:
    """Capture from this model."""
    monkeypatch.setattr(captured_module, "trained", [model])


def test_losses_agree_step_by_step() -> None:
    """Within rounding: fp32 sums in another order. A mistake of one part in a thousand is far outside."""
    own, peer = (losses(ATTENTIONS[name]) for name in ("flashtile", "sdpa"))
    assert (own - peer).abs().max() < 5e-6
    assert own[-3:].mean() < own[0] - 1
    wrong = losses(lambda q, k, v: flashtile_attention(q, k, v) * 1.001)
    assert (wrong - peer).abs().max() > 5e-5


def test_losses_in_float64_agree_to_its_rounding() -> None:
    """So the difference in float32 is rounding, which training amplifies from step to step, and nothing else."""
    own, peer = (losses(ATTENTIONS[name], torch.float64) for name in ("flashtile", "sdpa"))
    assert 0 < (own - peer).abs().max() < 1e-12


def test_a_seed_gives_one_model_and_leaves_the_generator_alone() -> None:
    before = torch.random.get_rng_state()
    first, second = (new_model(3).embedding.weight for _ in range(2))
    assert torch.equal(first, second)
    assert not torch.equal(first, new_model(4).embedding.weight)
    assert torch.equal(before, torch.random.get_rng_state())


def test_the_cache_gives_the_logits_of_the_whole() -> None:
    """A prompt of 20 bytes at once, then one byte at a time."""
    model = new_model()
    tokens = text()[None, 1000:1040].long()
    whole = model(tokens, sdpa_attention)
    caches = [Cache(1, 40, model.shape, whole) for _ in model.blocks]
    tables = rotary_tables(40, HEAD_DIM, whole)
    lengths, parts = torch.zeros(1, dtype=torch.int32), []
    with torch.no_grad():
        for piece in (tokens[:, :20], *tokens[:, 20:].split(1, 1)):
            parts.append(model.step(piece, caches, lengths, *tables))
            lengths += piece.shape[1]
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-4, atol=1e-4)


def test_generation_repeats() -> None:
    first, second = (bytes(new_model().generate(b"ab", 20, seed=5)) for _ in range(2))
    assert first == second
    assert len(first) == 20


@pytest.mark.usefixtures("few_steps")
def test_captured_tensors() -> None:
    q, k, v = captured(2, 100)
    assert q.shape == k.shape == v.shape == (2, HEADS, 100, HEAD_DIM)
    assert not q.requires_grad
    assert all(torch.equal(x, y) for x, y in zip((q, k, v), captured(2, 100), strict=True))
    assert not torch.equal(q, captured(2, 100, seed=1)[0])
    untrained = captured(2, 100, model=new_model())
    assert not torch.equal(q, untrained[0])


def test_the_model_is_trained_where_nothing_else_needs_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(captured_module, "trained", [])
    with torch.inference_mode():
        model = captured_module.trained_model(1)
    assert all(x.grad is not None for x in model.parameters())


@pytest.mark.usefixtures("few_steps")
def test_captured_tensors_are_inputs_of_bench() -> None:
    cell = Cell(heads=4, seqlen_q=96, head_dim=HEAD_DIM, inputs="captured", dtype="bfloat16")
    case = make_case(cell, torch.device("cpu"))
    assert torch.equal(case.arguments["q"], captured(1, 96)[0][:, :4].bfloat16())
    with pytest.raises(ValueError, match="captured inputs"):
        make_case(Cell(heads=4, seqlen_q=96, head_dim=128, inputs="captured"), torch.device("cpu"))


def test_values_for_problems_of_any_shape() -> None:
    source = Source(tuple(torch.randn(2, HEADS, 50, HEAD_DIM) for _ in range(3)))
    shapes = ((2, 3, 70, 80), (2, 1, 9, 80), (2, 1, 0, 5))
    found = source(shapes, torch.float16, random.Random(0))
    assert tuple(x.shape for x in found) == shapes
    known = set(source.tensors[0].half().flatten().tolist())
    assert set(found[0].flatten().tolist()) <= known
    again = source(shapes, torch.float16, random.Random(0))
    assert all(torch.equal(x, y) for x, y in zip(found, again, strict=True))


@pytest.mark.usefixtures("few_steps")
def test_captured_tensors_are_inputs_of_verify(monkeypatch: pytest.MonkeyPatch) -> None:
    result = invoke(["verify", "--cases", "4", "--long", "0", "--inputs", "captured"])
    assert result.exit_code == 0, result.output

    def no_values(self: Source, *arguments: object) -> None:
        raise RuntimeError("values are asked for")

    monkeypatch.setattr(Source, "__call__", no_values)
    result = invoke(["verify", "--cases", "1", "--long", "0", "--inputs", "captured"])
    assert result.exit_code == 1
    assert "values are asked for" in result.output
    assert "--inputs captured" in result.output


def test_the_example(tmp_path: Path) -> None:
    words = [
        "--steps",
        "3",
        "--batch",
        "2",
        "--seqlen",
        "16",
        "--sample",
        "5",
        "--losses",
        str(tmp_path / "losses.csv"),
    ]
    command = [sys.executable, str(ROOT / "examples/train_bytes.py"), *words]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "tokens/s in training" in done.stdout
    assert "The statement " in done.stdout
    rows = (tmp_path / "losses.csv").read_text().splitlines()
    assert rows[0] == "step,loss"
    assert re.fullmatch(r"3,\d\.\d+", rows[3])
