"""Ready mask functions: the pairs that they show, and results on each backend."""

import pickle

import pytest
import torch
from checking import BACKENDS
from ready_masks import EXPECTED, KEYS, ROWS, N, assert_ready_masks
from torch import Tensor

import flashtile
from flashtile import ScoreMod, mask_mods, score_mods
from flashtile.errors import ArgumentError
from flashtile.expression import mask_mod_function


@pytest.mark.parametrize("name", EXPECTED)
def test_visible_pairs(name: str) -> None:
    """The same pairs by the function, by its formula, and by a copy from another process."""
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


@pytest.mark.parametrize("backend", ["cpu", *BACKENDS])
def test_arguments_as_functions(backend: str) -> None:
    """Softcap, bias, ALiBi, causal, a window and a mask, in the order of the contract, are one score_mod and one mask
    function: the same results and gradients.
    """
    generator = torch.Generator().manual_seed(0)
    q, k, v, dout = (torch.randn(2, 2, n, 8, generator=generator) for n in (7, 12, 12, 7))
    bias, slopes = torch.randn(1, 2, 7, 12, generator=generator), torch.rand(2, generator=generator)
    mask = torch.rand(2, 1, 7, 12, generator=generator) < 0.8
    capped, biased = score_mods.softcap(2.0).fn, score_mods.alibi(slopes, 12 - 7).fn

    def modify(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor, bias: Tensor, slopes: Tensor) -> Tensor:
        return biased(capped(s, b, h, i, j) + bias[0, h, i, j], b, h, i, j, slopes)

    visible = mask_mods.and_masks(
        mask_mods.causal(12 - 7), mask_mods.window(6, 2, torch.tensor(12 - 7)), lambda b, h, i, j: mask[b, 0, i, j]
    )

    def results(*leaves: Tensor, functions: bool) -> list[Tensor]:
        *qkv, bias, slopes = leaves = [x.clone().requires_grad_() for x in leaves]
        if functions:
            arguments = {"score_mod": ScoreMod(modify, (bias, slopes)), "mask": visible}
        else:
            arguments = {"softcap": 2.0, "bias": bias, "alibi_slopes": slopes, "causal": True, "window": (6, 2)}
            arguments["mask"] = mask
        out = flashtile.attention(*qkv, **arguments, backend=backend)
        return [out, *torch.autograd.grad(out, leaves, dout)]

    found, expected = (results(q, k, v, bias, slopes, functions=x) for x in (True, False))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_flashmask_of_key_heads() -> None:
    """Each head of the columns stands for two query heads: the mask of all pairs of all heads."""
    columns = torch.randint(0, N + 1, (1, 2, N, 2), generator=torch.Generator().manual_seed(6))
    mod = mask_mods.flashmask(columns, causal=True, group=2)
    found = mask_mod_function(mod.key)(
        torch.zeros(1, 1, 1, 1).long(), torch.arange(4)[:, None, None], ROWS, KEYS, *mod.tensors
    )
    start, end = columns[0].repeat_interleave(2, 0).unbind(-1)  # [4, N]
    hidden = (start[:, None] <= ROWS) & (end[:, None] > ROWS) | (KEYS > ROWS)
    assert torch.equal(found, ~hidden)


@pytest.mark.parametrize(
    ("columns", "causal"),
    [(torch.zeros(1, 1, N, 4).int(), True), (torch.zeros(1, 1, N, 1).int(), False), (torch.zeros(1, N, 2).int(), False),
     (torch.zeros(1, 1, N, 2), True)],
)  # fmt: skip
def test_columns_that_flashmask_refuses(columns: Tensor, causal: bool) -> None:
    with pytest.raises(ArgumentError, match="startend_row_indices"):
        mask_mods.flashmask(columns, causal=causal)


def test_all_are_tested() -> None:
    assert {name.split()[0] for name in EXPECTED} == set(mask_mods.__all__) == set(flashtile.mask_mods.__all__)
