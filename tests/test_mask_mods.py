"""Ready mask functions: the pairs that they show, and results on each backend."""

import pickle

import pytest
import torch
from checking import BACKENDS
from ready_masks import EXPECTED, KEYS, ROWS, N, assert_ready_masks

import flashtile
from flashtile import mask_mods
from flashtile.expression import mask_mod_function


@pytest.mark.parametrize("name", EXPECTED)
def test_visible_pairs(name: str) -> None:
    """Of the function, of its formula, and of a copy from another process."""
    mod, expected = EXPECTED[name]
    assert mod.traced
    copied = pickle.loads(pickle.dumps(mod))
    b, h = torch.arange(2)[:, None, None, None], torch.arange(2)[:, None, None]
    for fn in (mod.fn, mask_mod_function(mod.key), copied.fn):
        found = fn(b, h, ROWS, KEYS, *copied.tensors)
        assert torch.equal(found.expand(2, 2, N, N), expected.expand(2, 2, N, N))


@pytest.mark.parametrize("backend", ["cpu", *BACKENDS])
def test_results_and_gradients(backend: str) -> None:
    assert_ready_masks(backend)


def test_all_are_tested() -> None:
    assert {name.split()[0] for name in EXPECTED} == set(mask_mods.__all__) == set(flashtile.mask_mods.__all__)
