"""Ready score modifications against the formulas of their sources."""

import math
from collections.abc import Callable

import pytest
import torch
from checking import assert_right, dense_case
from torch import Tensor

import flashtile
from flashtile import score_mods
from flashtile.expression import ScoreMod, score_mod_function
from flashtile.testing.case import ScoreFunction

H, N = 4, 40
ROWS, KEYS = torch.arange(N)[:, None], torch.arange(N)
HEAD = torch.linspace(0.1, 0.9, H)
TABLE, BUCKETS = torch.randn(H, 11), torch.randn(32, H)


def bucket(distance: int, near: int, buckets: int, longest: int) -> int:
    """The bucket of a distance of at least 0 (Raffel et al., "T5", 2020, section 2.1)."""
    if distance < near:
        return distance
    return min(buckets - 1, near + int(math.log(distance / near) / math.log(longest / near) * (buckets - near) + 1e-6))


def t5(bidirectional: bool) -> Tensor:
    """The biases `[H, N, N]` of the buckets."""

    def row(i: int, j: int) -> int:
        return bucket(abs(i - j), 8, 16, 20) + 16 * (j > i) if bidirectional else bucket(max(i - j, 0), 16, 32, 20)

    return torch.stack([torch.stack([BUCKETS[row(i, j)] for j in range(N)], -1) for i in range(N)], -2)


EXPECTED: dict[str, tuple[ScoreMod, Callable[[Tensor], Tensor]]] = {
    "alibi": (score_mods.alibi(HEAD), lambda s: s - HEAD[:, None, None] * (ROWS - KEYS).abs()),
    "decay": (score_mods.decay(HEAD), lambda s: s + HEAD.log()[:, None, None] * (ROWS - KEYS).abs()),
    "relative_table": (score_mods.relative_table(TABLE), lambda s: s + TABLE[:, (ROWS - KEYS).clamp(-5, 5) + 5]),
    "softcap": (score_mods.softcap(3.0), lambda s: 3 * torch.tanh(s / 3)),
    "t5_buckets": (score_mods.t5_buckets(BUCKETS, 20), lambda s: s + t5(True)),
    "t5_buckets of the past": (score_mods.t5_buckets(BUCKETS, 20, False), lambda s: s + t5(False)),
    "tanh_gate": (score_mods.tanh_gate(HEAD), lambda s: s * HEAD.tanh()[:, None, None]),
    "temperature": (score_mods.temperature(HEAD), lambda s: s / HEAD[:, None, None]),
}


@pytest.mark.parametrize("name", EXPECTED)
def test_formula(name: str) -> None:
    mod, expected = EXPECTED[name]
    score, zero = torch.randn(1, H, N, N), torch.zeros(1, 1, 1, 1, dtype=torch.int64)
    found = score_mod_function(mod.key)(score, zero, torch.arange(H)[None, :, None, None], ROWS, KEYS, *mod.tensors)
    torch.testing.assert_close(found, expected(score))
    assert mod.traced


@pytest.mark.parametrize("name", EXPECTED)
def test_results_and_gradients(name: str) -> None:
    """On each backend, against the oracle, which runs the function itself."""
    mod, _ = EXPECTED[name]
    assert_right(dense_case(score_mod=ScoreFunction(mod.fn, mod.tensors)))


def test_all_are_tested() -> None:
    assert {name.split()[0] for name in EXPECTED} == set(score_mods.__all__) == set(flashtile.score_mods.__all__)
