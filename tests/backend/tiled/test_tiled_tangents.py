"""Forward mode in torch operations, within the contract's bound of the fp64 oracle."""

import pytest
import torch
from checking import dense_case, features, lengths_on_the_device, tile_size
from packing import packed_case

import flashtile
from flashtile.testing.case import Case
from flashtile.testing.generate import random_case
from flashtile.testing.moving import moving
from flashtile.testing.oracle import solve
from flashtile.testing.poison import poisoned_allocation
from flashtile.testing.tolerance import compare


def failures(case: Case, backend: str = "tiled") -> list[str]:
    with poisoned_allocation():
        results = case.run(backend)
    return [str(x) for x in compare(results, case, solve(case)) if not x.ok]


@pytest.mark.parametrize("seed", [2, 6, 7, 8, 9])
def test_random_problems(seed: int) -> None:
    function = ("attention", "attention_varlen")[seed % 2]
    case = moving(random_case(seed, function=function))
    assert not failures(case), case.description


@pytest.mark.parametrize("name", features())
def test_features(name: str) -> None:
    case = moving(dense_case(**({"causal": True} | features()[name])))
    with tile_size(3, 4):
        assert not failures(case)


def test_lengths_on_the_device() -> None:
    with lengths_on_the_device(), tile_size(4, 4):
        assert not failures(moving(packed_case(causal=True)))


@pytest.mark.parametrize("name", ["q", "k", "v", "sinks"])
def test_a_wrong_tangent_is_out_of_the_bound(name: str) -> None:
    """The bound is no wider than a change of the tangents by one part in 2**13."""
    case = moving(dense_case(sinks=torch.tensor([0.5, 1.0])), (name,))
    assert not failures(case)
    expected = solve(case)
    results = case.run("tiled")
    for key in ("tout", "tlse"):
        if name == "v" and key == "tlse":
            continue  # which is 0
        changed = results | {key: results[key] * (1 + 2.0**-13)}
        assert [x for x in compare(changed, case, expected) if not x.ok], key


def test_results_are_those_of_the_kernels() -> None:
    """Out of one pass, with the same log-sum-exp as forward's."""
    case = dense_case(causal=True, forward_only=True)
    expected, found = case.run("tiled"), moving(case).run("tiled")
    assert torch.equal(found["out"], expected["out"])
    assert torch.equal(found["lse"], expected["lse"])


def test_nothing_moves() -> None:
    """An open level alone is no reason for another pass."""
    q = torch.randn(1, 1, 3, 8)
    with torch.autograd.forward_ad.dual_level(), flashtile.calls() as counts:
        flashtile.attention(q, q, q)
    assert [row.direction for row in counts.rows] == ["forward"]
