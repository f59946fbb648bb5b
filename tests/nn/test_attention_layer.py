"""`flashtile.nn.Attention` against torch operations, with and without a cache."""

from typing import Any

import pytest
import torch
from formula import dense_formula
from torch import Tensor
from torch.func import functional_call

from flashtile.errors import ArgumentError, AttentionError
from flashtile.nn import Attention
from flashtile.nn.rotary import rotary_tables, rotate

F64 = torch.float64


def by_formula(layer: Attention, x: Tensor, context: Tensor | None = None, **keywords: Any) -> Tensor:
    """The layer's result from the definition of each of its parts."""

    def heads(weights: torch.nn.Linear, source: Tensor) -> Tensor:
        y = torch.einsum("bsi,oi->bso", source, weights.weight)
        y = y if weights.bias is None else y + weights.bias
        return y.reshape(*source.shape[:2], -1, layer.head_dim).permute(0, 2, 1, 3)

    source = x if context is None else context
    q, k, v = heads(layer.q_proj, x), heads(layer.k_proj, source), heads(layer.v_proj, source)
    if layer.rotary_dim:
        q, k = by_complex_numbers(layer, q), by_complex_numbers(layer, k)
    out = dense_formula(q, k, v, **keywords, sinks=layer.sinks)[0].permute(0, 2, 1, 3).reshape(*x.shape[:2], -1)
    return layer.out_proj(out)


def by_complex_numbers(layer: Attention, x: Tensor) -> Tensor:
    """Rotary embeddings as products with `exp(i * position * frequency)`."""
    half = layer.rotary_dim // 2
    angle = torch.arange(x.shape[2])[:, None] * layer.rotary_base ** -(torch.arange(half, dtype=F64) / half)
    turned = torch.complex(x[..., :half], x[..., half : 2 * half]) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat([turned.real, turned.imag, x[..., 2 * half :]], dim=-1)


LAYERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "grouped": {"num_kv_heads": 2, "bias": True},
    "causal": {"causal": True, "sinks": True, "head_dim": 12},
    "window": {"window": (3, 0), "softcap": 2.0},
    "rotary": {"causal": True, "rotary_dim": 8, "num_kv_heads": 1},
    "all of a head": {"causal": True, "rotary_dim": 16, "rotary_base": 100.0},
}


def drawn(name: str, **more: Any) -> Attention:
    torch.manual_seed(0)
    layer = Attention(64, 4, **LAYERS[name] | more, dtype=F64)
    if layer.sinks is not None:
        torch.nn.init.normal_(layer.sinks)
    return layer


def contract(name: str) -> dict[str, Any]:
    return {x: LAYERS[name][x] for x in ("causal", "window", "softcap") if x in LAYERS[name]}


@pytest.mark.parametrize("name", LAYERS)
def test_results_and_gradients(name: str) -> None:
    layer, x = drawn(name), torch.randn(2, 9, 64, dtype=F64, requires_grad=True)
    # float32 holds the tables of angles
    tolerance = {"atol": 1e-6, "rtol": 1e-6} if layer.rotary_dim else {"atol": 1e-12, "rtol": 1e-10}
    found, expected = layer(x), by_formula(layer, x, **contract(name))
    torch.testing.assert_close(found, expected, **tolerance)
    weight, leaves = torch.randn_like(found), [x, *layer.parameters()]
    ours = torch.autograd.grad((found * weight).sum(), leaves)
    for a, b in zip(ours, torch.autograd.grad((expected * weight).sum(), leaves), strict=True):
        torch.testing.assert_close(a, b, **{n: 10 * y for n, y in tolerance.items()})


@pytest.mark.parametrize("name", [name for name in LAYERS if name != "plain"])
def test_a_cache_continues_the_sequence(name: str) -> None:
    """In steps of several lengths, the result is that of one call; the sequences may be of different lengths."""
    layer, x = drawn(name, causal=True), torch.randn(2, 12, 64, dtype=F64)
    expected = layer(x).detach()
    cache, outs, done = layer.new_cache(batch=2, length=20), [], 0
    with torch.no_grad():
        for rows in (5, 1, 4, 2):
            outs.append(layer(x[:, done : done + rows], cache=cache))
            done += rows
        torch.testing.assert_close(torch.cat(outs, dim=1), expected, atol=1e-6, rtol=1e-6)
        assert cache.lengths.tolist() == [12, 12]
        cache.lengths[0] = 0
        again = layer(torch.stack([x[0, :1], x[1, 11:]]), cache=cache)
    torch.testing.assert_close(again[0, 0], expected[0, 0], atol=1e-6, rtol=1e-6)
    assert cache.lengths.tolist() == [1, 13]


def test_context_mask_and_bias() -> None:
    layer, x, context = drawn("grouped"), torch.randn(2, 9, 64, dtype=F64), torch.randn(2, 5, 64, dtype=F64)
    torch.testing.assert_close(layer(x, context), by_formula(layer, x, context))
    mask, bias = torch.rand(2, 1, 9, 5) < 0.7, torch.randn(1, 4, 9, 5, dtype=F64)
    expected = by_formula(layer, x, context, mask=mask, bias=bias)
    torch.testing.assert_close(layer(x, context, mask=mask, attn_bias=bias), expected)


def test_dropout_is_for_training() -> None:
    layer, x = drawn("plain", dropout_p=0.5), torch.randn(2, 9, 64, dtype=F64)
    assert not torch.equal(layer(x), layer(x))
    layer.eval()
    torch.testing.assert_close(layer(x), by_formula(layer, x))


def test_bfloat16_is_turned_in_float32() -> None:
    x = torch.randn(1, 2, 300, 16, dtype=torch.bfloat16)
    tables = rotary_tables(300, 16, 10000.0, x.device)
    assert torch.equal(rotate(x, *tables), rotate(x.float(), *tables).bfloat16())


def test_compiled_and_functional() -> None:
    layer, x = drawn("rotary"), torch.randn(2, 9, 64, dtype=F64)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), layer(x))
    weights = {name: torch.zeros_like(value) for name, value in layer.named_parameters()}
    assert functional_call(layer, weights, (x,)).abs().max() == 0


@pytest.mark.parametrize(
    ("name", "how"),
    [("causal", "gradient"), ("grouped", "plain"), ("rotary", "checkpoint"), ("window", "compile")],
)
def test_forward_mode(name: str, how: str) -> None:
    """By tokens and parameters, and the gradient of a loss that has the tangent in it."""
    layer, x = drawn(name), torch.randn(2, 7, 64, dtype=F64)
    parameters = {key: value.detach() for key, value in layer.named_parameters()}
    moving = {key: torch.randn_like(value) for key, value in parameters.items()}
    run = torch.compile(layer, backend="aot_eager") if how == "compile" else layer
    prefix = "_orig_mod." if how == "compile" else ""

    def fused(x: Tensor, **of: Tensor) -> Tensor:
        call = lambda x: functional_call(run, {prefix + key: value for key, value in of.items()}, (x,))  # noqa: E731
        return torch.utils.checkpoint.checkpoint(call, x, use_reentrant=False) if how == "checkpoint" else call(x)  # type: ignore[no-any-return]

    def formula(x: Tensor, **of: Tensor) -> Tensor:
        return functional_call(Formula(layer, contract(name)), {"layer." + key: value for key, value in of.items()}, x)  # type: ignore[no-any-return]

    def along(f: Any, x: Tensor) -> Any:
        return torch.func.jvp(lambda x, of: f(x, **of), (x, parameters), (x.sin(), moving))

    found, expected = (along(f, x) for f in (fused, formula))
    torch.testing.assert_close(found, expected)
    if how == "gradient":

        def loss(f: Any, x: Tensor) -> Tensor:
            out, dout = along(f, x)
            return (out - dout.detach()).square().sum() + dout.square().sum()  # type: ignore[no-any-return]

        torch.testing.assert_close(*(torch.func.grad(lambda x: loss(f, x))(x) for f in (fused, formula)))  # noqa: B023


class Formula(torch.nn.Module):
    """A layer by its definition, for `functional_call`."""

    def __init__(self, layer: Attention, keywords: dict[str, Any]):
        super().__init__()
        self.layer, self.keywords = layer, keywords

    def forward(self, x: Tensor) -> Tensor:
        return by_formula(self.layer, x, **self.keywords)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"num_kv_heads": 3}, "num_kv_heads"),
        ({"num_kv_heads": 0}, "num_kv_heads"),
        ({"rotary_dim": 7}, "rotary_dim"),
        ({"rotary_dim": 18}, "rotary_dim"),
        ({"embed_dim": 66}, "head_dim"),
    ],
)
def test_numbers_that_do_not_fit(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ArgumentError, match=f"`{words}`.*\n.*accepted"):
        Attention(**{"embed_dim": 64, "num_heads": 4} | arguments)


def test_wrong_calls() -> None:
    layer, x = drawn("rotary"), torch.randn(2, 9, 64, dtype=F64)
    with pytest.raises(ArgumentError, match="`context`"):
        layer(x, x)
    with pytest.raises(AttentionError, match="gradient"):
        layer(x, cache=layer.new_cache(2, 20))
    with torch.no_grad(), pytest.raises(ArgumentError, match="cache"):
        layer(x, cache=layer.new_cache(2, 8))


def test_repr() -> None:
    assert "num_heads=4, num_kv_heads=1, head_dim=16, causal=True, rotary_dim=8" in repr(drawn("rotary"))


@pytest.mark.parametrize("weights", [torch.float32, F64])
def test_a_cache_under_autocast(weights: torch.dtype) -> None:
    """It has the dtype of the projected tokens: autocast's for float32 weights, float64 for float64."""
    layer = Attention(32, 4, causal=True, rotary_dim=8, dtype=weights)
    x, expected = torch.randn(2, 5, 32, dtype=weights), torch.bfloat16 if weights == torch.float32 else weights
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        cache = layer.new_cache(2, 8)
        found = torch.cat([layer(x[:, :3], cache=cache), layer(x[:, 3:], cache=cache)], dim=1)
        assert cache.k.dtype == cache.v.dtype == expected
        torch.testing.assert_close(found, layer(x), atol=2e-2, rtol=0)


def test_a_cache_of_another_dtype_is_refused_by_its_name() -> None:
    layer, x = Attention(32, 4, causal=True), torch.randn(2, 5, 32)
    cache = layer.new_cache(2, 8)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        with pytest.raises(ArgumentError, match=r"`cache`(?s:.)*new_cache\(batch, length, dtype=torch\.bfloat16\)"):
            layer(x, cache=cache)
        assert layer(x, cache=layer.new_cache(2, 8, dtype=torch.bfloat16)).shape == x.shape
