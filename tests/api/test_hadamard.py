"""The rotation of heads before they are quantized."""

import pytest
import torch

import flashtile
from flashtile.errors import ArgumentError


@pytest.mark.parametrize("features", [2, 64, 80, 128, 0])
def test_products_are_what_they_were(features: int) -> None:
    q, k = torch.randn(2, 3, 10, features, dtype=torch.float64)
    rotated = [flashtile.hadamard(x, seed=3) for x in (q, k)]
    assert [x.dtype for x in rotated] == [torch.float64] * 2
    torch.testing.assert_close(rotated[0] @ rotated[1].mT, q @ k.mT)


def test_outliers_are_spread() -> None:
    x = torch.zeros(1, 128)
    x[0, 5] = 128.0
    rotated = flashtile.hadamard(x)
    torch.testing.assert_close(rotated.abs(), torch.full((1, 128), 128.0 / 128**0.5))
    assert 40 < (rotated > 0).sum() < 90
    x[0] = torch.arange(128)
    first, again, other = (flashtile.hadamard(x.bfloat16(), seed=n) for n in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_attention_in_8_bits_has_a_smaller_error_with_outliers() -> None:
    """Of the same two features of q and k; without outliers it is the same."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, 300, 128, generator=generator)
    numbers = v.to(torch.float8_e4m3fn)
    for outliers, least, most in ((1.0, 0.9, 1.1), (8.0, 2.5, 9.0)):
        scale = torch.ones(128)
        scale[[3, 77]] = outliers
        before = q * scale / max(1.0, outliers / 2), k * scale
        expected = flashtile.attention(*before, numbers.float(), backend="reference")
        errors = []
        for x in (before, [flashtile.hadamard(y) for y in before]):
            (q8, q_descale, _), (k8, k_descale, _) = (flashtile.quantize_kv(y, per="head") for y in x)
            descales = {"q_descale": q_descale, "k_descale": k_descale, "out_dtype": torch.float32}
            out = flashtile.attention(q8, k8, numbers, **descales)
            errors.append((out - expected).square().mean().sqrt())
        assert least < errors[0] / errors[1] < most


def test_wrong_arguments() -> None:
    for x in (torch.zeros(3, 5), torch.zeros(4, dtype=torch.int32), torch.zeros(4).to(torch.float8_e4m3fn)):
        with pytest.raises(ArgumentError, match="`x`"):
            flashtile.hadamard(x)
