"""Random calls of `scaled_dot_product_attention` against PyTorch's: all that it takes, with gradients."""

import random
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as native

from flashtile.compat.torch import scaled_dot_product_attention
from flashtile.errors import AttentionError

TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 4e-2}  # of the largest value


def drawn(seed: int) -> tuple[list[Tensor], dict[str, Any]]:
    """query, key and value, perhaps with a mask that has a gradient, and the other arguments."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    lead = [rng.choice([1, 2, 3]) for _ in range(rng.choice([-1, 0, 0, 1, 1, 1, 1, 2]) + 1)]
    rows, keys, width, width_v = (rng.choice(x) for x in ([1, 3, 5, 17], [1, 4, 9, 33], [1, 4, 8], [1, 3, 8]))
    if rng.random() < 0.08:
        rows, keys = (n * (rng.random() < 0.6) for n in (rows, keys))
    if len(lead) > 1 and rng.random() < 0.04:
        lead[0] = 0
    empty = 0 in (rows, keys, *lead)
    grouped = bool(lead) and not empty and rng.random() < 0.3
    heads = [rng.choice([1, 2, 4]), rng.choice([1, 2, 3]), rng.choice([1, 2, 3])]  # of keys, values, queries for each

    def leading(n: int) -> list[int]:
        """Leading dimensions that broadcast to the call's; those of the heads come last."""
        if empty:  # PyTorch returns query's leading dimensions then, whatever the others are
            return lead
        sizes = [size if rng.random() < 0.85 else 1 for size in lead]
        if grouped:
            same = heads[0] if rng.random() < 0.8 else heads[1]
            sizes[-1] = (heads[0] * heads[1] * heads[2], heads[0], same)[n]
        return sizes[0 if rng.random() < 0.85 else rng.randrange(len(sizes) + 1) :] if not grouped else sizes

    dtype = rng.choice([torch.float64, torch.float64, torch.float32, torch.bfloat16])
    sizes = [(rows, width), (keys, width), (keys, width_v)]
    inputs = [in_some_layout(torch.randn(*leading(n), *sizes[n]).to(dtype), rng) for n in range(3)]
    options: dict[str, Any] = {"enable_gqa": grouped, "is_causal": rng.random() < 0.3}
    # PyTorch's kernel multiplies hidden scores, -inf, by the scale (2.13): NaN for those up to 0.
    options["scale"] = rng.choice([None, 0.3] if options["is_causal"] else [None, None, 0.3, -1.0, 0.0])
    kind = rng.choice(["none", "none", "bool", "float", "float32"])
    if kind != "none":
        of_heads = inputs[0].shape[-3:-2] if lead else ()
        shape = [n if rng.random() < 0.7 else 1 for n in (*lead[:-1], *of_heads, rows, keys)]
        shape = shape[rng.choice([0, 0, 1, 2, 3]) if len(shape) > 3 else rng.randrange(len(shape)) :]
        mask = torch.randn(shape).to(dtype if kind == "float" else torch.float32)
        hidden = torch.rand(shape) < 0.2
        mask = ~hidden if kind == "bool" else mask.masked_fill(hidden, -torch.inf) if rng.random() < 0.3 else mask
        options["attn_mask"] = in_some_layout(mask, rng)
        if kind == "float" and rng.random() < 0.5:
            inputs.append(options["attn_mask"])
    return inputs, options


def in_some_layout(x: Tensor, rng: random.Random) -> Tensor:
    """The same elements at other strides."""
    order = list(range(x.dim()))
    if rng.random() < 0.4:
        rng.shuffle(order)
    back = sorted(range(x.dim()), key=order.__getitem__)
    return x.permute(order).contiguous().permute(back).requires_grad_(x.is_floating_point())


def results(function: Any, inputs: list[Tensor], options: dict[str, Any]) -> list[Tensor]:
    """The output, and gradients of a loss that is not linear in it."""
    copies = [x.detach().clone().requires_grad_() for x in inputs]
    others = {"attn_mask": copies[3]} if len(copies) > 3 else {}
    if not others and "attn_mask" in options:
        others["attn_mask"] = options["attn_mask"].detach()
    out = function(*copies[:3], **options | others)
    grads = torch.autograd.grad(out.sin().sum(), copies, allow_unused=True, materialize_grads=True)
    return [out.detach(), *grads]


def compare(seed: int) -> str:
    """What became of one call; raises an error where the facade differs from PyTorch."""
    inputs, options = drawn(seed)
    try:
        expected = results(native, inputs, options)
    except (RuntimeError, IndexError):
        try:
            results(scaled_dot_product_attention, inputs, options)
        except AttentionError:
            return "refused by both"
        return "refused by PyTorch"
    found = results(scaled_dot_product_attention, inputs, options)
    for x, y in zip(found, expected, strict=True):
        assert x.shape == y.shape
        assert x.dtype == y.dtype
        if y.numel():
            tolerance = TOLERANCES[inputs[0].dtype] * max(1.0, float(y.abs().max()))
            torch.testing.assert_close(x, y, atol=tolerance, rtol=0)
    return "equal"


@pytest.mark.parametrize("first", range(0, 40, 10))
def test_random_calls(first: int) -> None:
    """Most calls are such as PyTorch takes, and they are equal; wrong ones are refused by an error of ours."""
    found = [compare(seed) for seed in range(first, first + 10)]
    assert found.count("equal") >= 5, found
