"""`flashtile soak`: short, and with what it has to find."""

import json
import random

import pytest
import torch
from commands import invoke

import flashtile
from flashtile.backend.tiled import forward
from flashtile.soak import mistakes
from flashtile.soak.calls import KINDS, Caller, Problems
from flashtile.soak.ledger import Ledger
from flashtile.soak.memory import LIMITS, growth, sample
from flashtile.testing.generate import random_case

CPU = torch.device("cpu")
FUNCTIONS = ("attention", "attention_varlen", "attention_with_kvcache")


def caller(ledger: Ledger) -> Caller:
    return Caller(Problems(range(4), ("tiled",), CPU), ledger, random.Random(0))


def test_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flashtile.soak.run.sample", lambda device: {"resident": 1})  # with garbage of other tests
    words = "soak --minutes 0.03 --threads 2 --problems 1 --seed 5 --backend tiled --json"
    result = invoke(words.split())
    found = json.loads(result.stdout)
    assert result.exit_code == 0, found
    assert found["calls"].keys() >= KINDS.keys() - {"batch_invariant"}  # which `tiled` declines
    assert found["memory"]["resident"]["ok"]


def test_a_wrong_result_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    ledger, right = Ledger(), forward.update
    caller(ledger).call_of("plain", 1, "tiled")
    assert not ledger.failures

    def wrong(*arguments):
        state = right(*arguments)
        return state._replace(acc=state.acc * 0.9)

    monkeypatch.setattr(forward, "update", wrong)
    for kind in ("plain", "checked"):
        caller(ledger).call_of(kind, 1, "tiled")
    found = {failure.kind: failure.message for failure in ledger.failures}
    assert "differ from those of the same call before" in found["plain"]
    assert "ratio" in found["checked"]
    assert ledger.counts == {"plain": 2, "checked": 1, "failed": 2}


@pytest.mark.parametrize("function", FUNCTIONS)
def test_every_mistake_is_one(function: str) -> None:
    cases = (random_case(seed, function=function) for seed in range(100))
    case = next(case for case in cases if case.arguments["q"].numel() > 0)
    rng = random.Random(0)
    found = dict(mistakes.mistaken(case.arguments, rng) for _ in range(300))
    assert len(found) >= len(mistakes.EVERYWHERE) + len(mistakes.OF_KEYS)
    for mistake, arguments in found.items():
        try:
            getattr(flashtile, function)(**arguments)
        except flashtile.AttentionError:
            continue
        pytest.fail(f"{mistake}: not refused")


def test_a_leak_is_told_from_a_cache() -> None:
    name, limit = next(iter(LIMITS.items()))
    full = [{name: min(n, 12) * limit} for n in range(40)]  # grows in the first third
    leak = [{name: n * limit // 10} for n in range(40)]
    assert growth(full)[name].ok
    assert not growth(leak)[name].ok
    assert growth(full[:5]) == {}
    before = sample(CPU)[name]
    kept = torch.ones(2**24)
    assert sample(CPU)[name] - before > 0.9 * kept.nbytes
