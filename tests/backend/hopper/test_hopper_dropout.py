"""Dropout in the Hopper kernels: pair by pair the mask of the contract, in forward and backward."""

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from gluon_emulation.backend import emulated

import flashtile
from flashtile.api.explain import described_call
from flashtile.dispatch.autograd import attend
from flashtile.testing.oracle.philox import keep_factors

pytestmark = pytest.mark.usefixtures("one_thread")
P, SEED = 0.3, -0x123456789ABCDEF
B, H = 2, 3


def expected_mask(rows: int, keys: int) -> Tensor:
    return torch.stack([torch.from_numpy(keep_factors(P, SEED, b, H, rows, keys)) for b in range(B)]) > 0


def unit_columns(n: int, first: int, width: int) -> Tensor:
    """Columns of the unit matrix, from `first` on, that many or zeros."""
    columns = torch.eye(n)[:, first : first + width]
    return torch.nn.functional.pad(columns, (0, width - columns.shape[1])).to(torch.float16).expand(B, H, n, width)


@pytest.mark.parametrize(("dim", "rows", "keys"), [(64, 70, 150), (128, 150, 70), (256, 20, 130)])
def test_the_mask_is_that_of_the_contract(dim: int, rows: int, keys: int) -> None:
    """With equal scores and unit vectors as values, out is above 0 where a pair is kept; with unit dout, so is dv."""
    q, k = torch.zeros(B, H, rows, dim, dtype=torch.float16), torch.zeros(B, H, keys, dim, dtype=torch.float16)
    found, found_backward = [], []
    with emulated():
        for first in range(0, max(rows, keys), dim):
            v = unit_columns(keys, first, dim).contiguous().requires_grad_()
            out = flashtile.attention(q, k, v, dropout_p=P, dropout_seed=SEED, backend="hopper")
            found.append(out > 0)
            found_backward.append(torch.autograd.grad(out, v, unit_columns(rows, first, dim))[0] > 0)
    expected = expected_mask(rows, keys)
    assert torch.equal(torch.cat(found, -1)[..., :keys], expected)
    assert torch.equal(torch.cat(found_backward, -1)[..., :rows], expected.mT)


@pytest.mark.parametrize("origin", [{"b0": 1}, {"h0": 1}, {"i0": 37}, {"j0": 24}])
def test_parts_of_a_call_count_from_its_origin(origin: dict[str, int]) -> None:
    """The mask of a part is that part of the whole mask."""
    [(name, start)] = origin.items()
    q = torch.zeros(B, H, 70, 64, dtype=torch.float16)
    k, v = torch.zeros(B, H, 64, 64, dtype=torch.float16), unit_columns(64, 0, 64)
    call = described_call(q, k, v, None, None, {"dropout_p": P, "dropout_seed": SEED})
    part = call._replace(settings=call.settings._replace(backend="hopper", num_heads=H + 1, **origin))
    with emulated():
        found = attend(part)[0] > 0
    whole = [torch.from_numpy(keep_factors(P, SEED, b, H + 1, 110, 90)) > 0 for b in range(B + 1)]
    places = {"b0": (0, B), "h0": (0, H), "i0": (0, 70), "j0": (0, 64)} | {name: (start, None)}
    sizes = (B, H, 70, 64)
    b, h, i, j = (slice(first, first + n) for (first, _), n in zip(places.values(), sizes, strict=True))
    assert torch.equal(found, torch.stack(whole)[b, h, i, j])
