"""PyTorch's names, against PyTorch: the functions, and PyTorch's own functions while flashtile is active."""

import functools
import inspect
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from flash_formula import assert_gradients_agree, assert_same, formula, gradients, leaves, randn
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.nn.functional import scaled_dot_product_attention as native

import flashtile
import flashtile.compat.torch as names
from flashtile import private_torch
from flashtile.compat.torch import (
    AuxRequest,
    kernels,
    registration,
    scaled_dot_product_attention,
    varlen_attn,
    varlen_attn_out,
)
from flashtile.errors import ArgumentError, AttentionError

H, L, S, E = 4, 5, 7, 6
MASK = torch.rand(2, 1, L, S, generator=torch.Generator().manual_seed(0)) < 0.7
MASK[..., 0] = True  # no row without keys, for which PyTorch's versions differ
SHAPES: dict[str, tuple[tuple[int, ...], ...]] = {
    "4": ((2, H, L, E), (2, H, S, E), (2, H, S, 3)),
    "2": ((L, E), (S, E), (S, 3)),
    "3": ((H, L, E), (H, S, E), (H, S, 3)),
    "5": ((3, 2, H, L, E), (3, 2, H, S, E), (3, 2, H, S, 3)),
    "broadcast": ((3, 1, H, L, E), (2, 1, S, E), (1, 2, H, S, 3)),
    "batch of keys": ((2, H, L, E), (1, H, S, E), (1, H, S, 3)),
    "head of keys": ((2, H, L, E), (2, 1, S, E), (2, 1, S, 3)),
    "head of values": ((2, H, L, E), (2, H, S, E), (2, 1, S, 3)),
}
MASKS: dict[str, Any] = {
    "none": {},
    "causal": {"is_causal": True},
    "scale": {"scale": 0.7},
    "bool": {"attn_mask": MASK[0, 0]},
    "lower right": {"attn_mask": causal_lower_right(L, S)},
    "upper left": {"attn_mask": causal_upper_left(L, S)},
    "bool of batch": {"attn_mask": MASK},
    "float": {"attn_mask": randn(L, S)},
    "float of heads": {"attn_mask": randn(H, L, S)},
}


@pytest.mark.parametrize("options", MASKS)
@pytest.mark.parametrize("shapes", SHAPES)
def test_sdpa(shapes: str, options: str) -> None:
    settings = dict(MASKS[options])
    if (
        shapes in ("2", "3")
        and options in ("bool of batch", "float of heads")
        and shapes + options != "3float of heads"
    ):
        return
    inputs = [randn(*shape, seed=n) for n, shape in enumerate(SHAPES[shapes])]
    if options.startswith("float"):
        inputs.append(settings.pop("attn_mask"))
    mine, theirs = leaves(*inputs), leaves(*inputs)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        reference = native(*theirs, **settings)
    out = scaled_dot_product_attention(*mine, **settings)
    assert_gradients_agree((out, mine), (reference, theirs))


def test_sdpa_of_grouped_heads() -> None:
    q, k = randn(2, H, L, E), randn(2, 2, S, E)
    out = scaled_dot_product_attention(q, k, k, MASK, enable_gqa=True)
    assert_same((out, native(q, k, k, MASK, enable_gqa=True)))
    q, k = randn(3, 2, H, L, E), randn(3, 2, 2, S, E)
    mask = torch.rand(3, 1, H, L, S) < 0.8
    assert_same((scaled_dot_product_attention(q, k, k, mask, enable_gqa=True).nan_to_num(),
                 native(q, k, k, mask, enable_gqa=True).nan_to_num()))  # fmt: skip


@pytest.mark.parametrize("heads", [(2, 1), (1, 4), (4, 2)])
def test_sdpa_of_keys_and_values_with_other_heads(heads: tuple[int, int]) -> None:
    inputs = randn(2, H, L, E), randn(2, heads[0], S, E), randn(2, heads[1], S, 3)
    mine, theirs = leaves(*inputs), leaves(*inputs)
    out = scaled_dot_product_attention(*mine, MASK, enable_gqa=True)
    assert_gradients_agree((out, mine), (native(*theirs, MASK, enable_gqa=True), theirs))


@pytest.mark.parametrize("mask", [MASK, randn(2, 1, L, S)])
def test_sdpa_with_a_mask_and_is_causal(mask: Tensor) -> None:
    """Both hold, as in PyTorch's fused kernel; its other implementation refuses them together."""
    q, k = randn(2, H, L, E), randn(2, H, S, E)
    assert_same((scaled_dot_product_attention(q, k, k, mask, is_causal=True), native(q, k, k, mask, is_causal=True)))


@pytest.mark.parametrize("bias", [causal_lower_right(L, S), causal_upper_left(L, S), causal_lower_right(S, S)])
def test_compiled_sdpa_with_causal_bias(bias: Any) -> None:
    q, k = randn(2, H, L, E), randn(2, H, S, E)
    compiled = torch.compile(scaled_dot_product_attention, backend="aot_eager", fullgraph=True)
    assert_same((compiled(q, k, k, bias), native(q, k, k, bias)))


def test_sdpa_with_dropout() -> None:
    """A mean over many masks is the output without dropout; the seed is torch's."""
    q = randn(1, 1, 4, E).expand(20_000, 1, 4, E)
    torch.manual_seed(3)
    out = scaled_dot_product_attention(q, q, q, None, 0.5)
    torch.testing.assert_close(out.mean(0), native(q[0], q[0], q[0]), atol=0.05, rtol=0)
    torch.manual_seed(3)
    assert torch.equal(scaled_dot_product_attention(q, q, q, None, 0.5), out)


def test_sdpa_declines() -> None:
    q, k = randn(2, H, L, E), randn(2, 2, S, E)
    with pytest.raises(ArgumentError, match="`is_causal`"):
        scaled_dot_product_attention(q, q, q, causal_upper_left(L, L), is_causal=True)
    with pytest.raises(ArgumentError, match=r"`attn_mask` is a CausalBias(?s:.)*causal_lower_right\(5, 5\)"):
        scaled_dot_product_attention(q, q, q, causal_lower_right(L, S))
    with pytest.raises(ArgumentError, match=r"`enable_gqa`(?s:.)*enable_gqa=True\)$"):
        scaled_dot_product_attention(q, k, k)
    with pytest.raises(ArgumentError, match="`query`"):
        scaled_dot_product_attention(q[0, 0, 0], k, k)


# varlen_attn ---------------------------------------------------------------------------------------------------------

CU_Q, CU_K = torch.tensor([0, 3, 3, 8]), torch.tensor([0, 5, 7, 9])
BOUNDS = [((0, 3), (0, 5)), ((3, 3), (5, 7)), ((3, 8), (7, 9))]


def packed_formula(q: Tensor, k: Tensor, v: Tensor, **settings: Any) -> tuple[Tensor, Tensor]:
    parts = [formula(q[None, a:b], k[None, c:d], v[None, c:d], **settings) for (a, b), (c, d) in BOUNDS]
    lse = torch.cat([x[1][0] for x in parts], dim=1)
    return torch.cat([x[0][0] for x in parts]), lse.masked_fill(lse == torch.inf, -torch.inf)


@pytest.mark.parametrize("window_size", [(-1, -1), (-1, 0), (2, 0), (1, 1)])
def test_varlen(window_size: tuple[int, int]) -> None:
    tensors = randn(8, H, E), randn(9, 2, E, seed=1), randn(9, 2, E, seed=2)
    mine, theirs = leaves(*tensors), leaves(*tensors)
    out, lse = varlen_attn(
        *mine, CU_Q, CU_K, 5, 5, return_aux=AuxRequest(lse=True), scale=0.6, window_size=window_size, enable_gqa=True
    )
    reference, reference_lse = packed_formula(*theirs, scale=0.6, window_size=window_size)
    assert_same((lse, reference_lse))
    assert_gradients_agree((out, mine), (reference, theirs))
    written = torch.empty_like(out)
    settings: dict[str, Any] = {"scale": 0.6, "window_size": window_size, "enable_gqa": True}
    with torch.no_grad():
        assert varlen_attn_out(written, *tensors, CU_Q, CU_K, 5, 5, **settings, num_splits=2) is written
    assert_same((written, out))


def test_varlen_declines() -> None:
    q, k = randn(8, H, E), randn(8, 2, E)
    with pytest.raises(ArgumentError, match=r"`enable_gqa`(?s:.)*enable_gqa=True\)$"):
        varlen_attn(q, k, k, CU_Q, CU_Q, 5, 5)
    with pytest.raises(ArgumentError, match="`num_splits`"):
        varlen_attn(q, q, q, CU_Q, CU_Q, 5, 5, num_splits=0)
    with pytest.raises(ArgumentError, match="`out`"):
        varlen_attn_out(q[:2], q, q, q, CU_Q, CU_Q, 5, 5)
    with pytest.raises(ArgumentError, match="`out`"):
        varlen_attn_out(torch.empty_like(q), *leaves(q, q, q), CU_Q, CU_Q, 5, 5)


# PyTorch's own functions ---------------------------------------------------------------------------------------------


def skip_without_registry() -> None:
    if not registration.HAS_REGISTRY:
        pytest.skip("activate needs PyTorch 2.11")


@pytest.fixture
def calls() -> Iterator[list[str]]:
    """Names of PyTorch's operators that run in flashtile, as they are called."""
    skip_without_registry()
    seen: list[str] = []

    def noting(name: str, function: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            seen.append(name)
            return function(*arguments, **options)

        return call

    noted = {key: {name: noting(name, f) for name, f in group.items()} for key, group in kernels.OPERATORS.items()}
    with mock.patch.object(kernels, "OPERATORS", noted):
        yield seen


@pytest.mark.parametrize("options", [x for x in MASKS if not x.startswith("float")] + ["float mask"])
def test_activated_sdpa(calls: list[str], options: str) -> None:
    settings = {"attn_mask": randn(2, 1, L, S)} if options == "float mask" else MASKS[options]
    settings = settings | {"enable_gqa": True}
    inputs = randn(2, H, L, E), randn(2, 2, S, E, seed=1), randn(2, 2, S, E, seed=2)
    mine, theirs = leaves(*inputs), leaves(*inputs)
    reference = native(*theirs, **settings)
    expected = gradients(reference, theirs)
    with names.activate():
        out = native(*mine, **settings)
        found = gradients(out, mine)
    operator = "_scaled_dot_product_flash_attention_for_cpu"
    assert calls == [operator, f"{operator}_backward"]
    assert_same((out, reference), *zip(found, expected, strict=True))
    assert out.stride() == reference.stride()
    assert [x.stride() for x in found] == [x.stride() for x in expected]
    again = native(*theirs, **settings)
    assert len(calls) == 2
    assert torch.equal(again, reference)


def test_activated_varlen(calls: list[str]) -> None:
    """On a CPU, where PyTorch has no kernel of its own."""
    varlen = pytest.importorskip("torch.nn.attention.varlen")
    tensors = randn(8, H, E), randn(9, 2, E, seed=1), randn(9, 2, E, seed=2)
    mine, theirs = leaves(*tensors), leaves(*tensors)
    settings: dict[str, Any] = {"window_size": (2, 0), "enable_gqa": True}
    if "enable_gqa" not in inspect.signature(varlen.varlen_attn).parameters:  # PyTorch 2.11
        del settings["enable_gqa"]
    with names.activate():
        out = varlen.varlen_attn(*mine, CU_Q, CU_K, 5, 5, **settings)
        reference, _ = packed_formula(*theirs, window_size=(2, 0))
        assert_gradients_agree((out, mine), (reference, theirs))
        if hasattr(varlen, "varlen_attn_out"):
            written = torch.empty_like(tensors[0])
            varlen.varlen_attn_out(written, *tensors, CU_Q, CU_K, 5, 5, **settings)
            assert torch.equal(written, out)
    assert calls[:2] == ["_flash_attention_forward", "_flash_attention_backward"]
    with pytest.raises(NotImplementedError):
        varlen.varlen_attn(*tensors, CU_Q, CU_K, 5, 5, **settings)


def test_activated_attention_in_8_bits(calls: list[str]) -> None:
    """Scales reach the operator alone on a CPU, where PyTorch's function refuses them."""
    skip_without_registry()
    if registration.overload_of("_scaled_dot_product_flash_attention.quantized") is None:  # in PyTorch 2.11
        return
    experimental = pytest.importorskip("torch.nn.attention.experimental._scaled_dot_product_attention_quantized")
    q, k, v = (randn(2, h, 9, 16, seed=h).to(torch.float8_e4m3fn) for h in (4, 2, 2))
    scales: dict[str, Any] = {f"{x}_descale": torch.rand(2, 2) + 0.5 for x in "qkv"}
    with names.activate():
        run = functools.partial(experimental._scaled_dot_product_attention_quantized, q, k, v, True, 0.3)
        out, compiled = run(), torch.compile(run, fullgraph=True, backend="aot_eager")()
        operator = torch.ops.aten._scaled_dot_product_flash_attention.quantized
        scaled, lse, *_ = operator(q, k, v, *scales.values(), 0.0, True, scale=0.3)
    assert calls == ["_scaled_dot_product_flash_attention.quantized"] * 3
    assert torch.equal(out, flashtile.attention(q, k, v, causal=True, scale=0.3))
    assert torch.equal(compiled, out)
    expected = flashtile.attention(q, k, v, causal=True, scale=0.3, return_lse=True, **scales)
    assert all(torch.equal(x, y) for x, y in zip((scaled, lse), expected, strict=True))


def test_an_older_torch_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch 2.10 has a registry, but cannot undo an activation."""
    monkeypatch.setattr(registration, "HAS_REGISTRY", False)
    with pytest.raises(AttentionError, match=r"PyTorch 2\.11 or newer"):
        names.activate()
    names.restore()  # changes nothing


def test_activation_is_undone() -> None:
    skip_without_registry()
    attention = torch.nn.attention
    assert "flashtile" in attention.list_flash_attention_impls()
    assert attention.current_flash_attention_impl() is None
    with names.activate():
        assert attention.current_flash_attention_impl() == "flashtile"
        names.activate()
    assert attention.current_flash_attention_impl() is None
    names.restore()  # changes nothing
    other = mock.Mock()
    attention.register_flash_attention_impl("other", register_fn=lambda: other)
    attention.activate_flash_attention_impl("other")
    names.restore()
    assert attention.current_flash_attention_impl() == "other"
    with names.activate():
        pass
    assert attention.current_flash_attention_impl() == "other"
    attention.restore_flash_attention_impl()
    torch.nn.attention._registry._FLASH_ATTENTION_IMPLS.pop("other")


def test_activation_repeats_where_a_second_kernel_from_python_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As by PyTorch 2.11."""
    skip_without_registry()
    impl = functools.partialmethod(torch.library.Library.impl, allow_override=False)
    monkeypatch.setattr(torch.library.Library, "impl", impl)
    for _ in range(2):
        with names.activate():
            pass


CUDNN_FIRST = [3, 1, 2, 0, 4]


@pytest.fixture
def priority() -> Iterator[Any]:
    """Getter and setter of PyTorch's order of implementations, which is put back after the test."""
    skip_without_registry()
    get, put = private_torch.get_sdp_priority_order, private_torch.set_sdp_priority_order
    before = get()
    yield get, put
    put(before)


def test_flash_attention_comes_first_while_active(priority: Any) -> None:
    """On Hopper, where the first choice of an implementation on CUDA puts cuDNN in front, here by a mock."""
    get, put = priority
    before = get()
    choice = mock.Mock(side_effect=lambda *_: put(CUDNN_FIRST))
    changed = mock.patch.object(private_torch, "fused_sdp_choice", choice)
    with mock.patch.object(torch.cuda, "is_available", return_value=True), mock.patch.object(torch, "zeros"), changed:
        active = names.activate()
    with active:
        assert choice.call_count == 1
        assert get() == [1, 3, 2, 0, 4]
    assert get() == CUDNN_FIRST
    put(before)
    with names.activate():
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH, set_priority=True):
            assert get()[0] == 0
        assert get()[0] == 1
        put(CUDNN_FIRST)  # the program's own
    assert get() == CUDNN_FIRST


@pytest.mark.parametrize("successes", [0, 1, 3])
def test_a_failed_activation_changes_nothing(
    successes: int, priority: Any, calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    get, put = priority
    put(CUDNN_FIRST)
    attention, other, x = torch.nn.attention, mock.Mock(), randn(2, H, L, E)
    monkeypatch.setitem(attention._registry._FLASH_ATTENTION_IMPLS, "other", lambda: other)
    attention.activate_flash_attention_impl("other")
    impl, results = torch.library.Library.impl, iter([True] * successes)

    def failing(*given: Any) -> None:
        if not next(results, False):
            raise RuntimeError("refused")
        impl(*given)

    with mock.patch.object(torch.library.Library, "impl", failing), pytest.raises(RuntimeError, match="refused"):
        names.activate()
    assert attention.current_flash_attention_impl() == "other"
    attention.restore_flash_attention_impl()
    assert get() == CUDNN_FIRST
    native(x, x, x)
    assert calls == []
    with names.activate():
        native(x, x, x)
    assert len(calls) == 1


def test_a_torch_without_an_order_is_left_as_it_is(priority: Any) -> None:
    get, put = priority
    put(CUDNN_FIRST)
    with mock.patch.object(private_torch, "set_sdp_priority_order", None), names.activate():
        assert get() == CUDNN_FIRST
    assert get() == CUDNN_FIRST


REACHING = {  # calls on a CPU, and whether PyTorch gives them to flash attention
    "plain": ({}, True),
    "causal": ({"is_causal": True}, True),
    "mask": ({"attn_mask": torch.ones(L, L).tril().bool()}, True),
    "mask of three dimensions": ({"attn_mask": torch.ones(H, L, L).tril().bool()}, False),
    "mask with a gradient": ({"attn_mask": randn(L, L).requires_grad_()}, False),
    "dropout": ({"dropout_p": 0.5}, False),
    "three dimensions": ({"query": randn(H, L, E)}, torch.__version__ >= (2, 14)),  # type: ignore[operator]
    "another head_dim_v": ({"value": randn(2, H, L, 5)}, False),
    "strided": ({"query": randn(2, H, E, L).mT}, False),
    "float64": ({"query": randn(2, H, L, E).double()}, True),
    "wide": ({"query": randn(2, H, L, 300)}, True),
}


@pytest.mark.parametrize("kind", REACHING)
def test_calls_that_reach_flashtile(kind: str, calls: list[str]) -> None:
    """The table of docs/switching.md, for CPUs."""
    options, reaches = REACHING[kind]
    options = dict(options)
    query = options.pop("query", randn(2, H, L, E))
    value = options.pop("value", query)
    with names.activate():
        native(query, query, value, **options)
    assert len(calls) == reaches


def test_activated_and_compiled() -> None:
    """Strides and dtypes of results are those that a trace expects."""
    skip_without_registry()
    mine, theirs = leaves(randn(1, 2, L, 8)), leaves(randn(1, 2, L, 8))
    compiled = torch.compile(lambda x: native(x, x, x, is_causal=True), backend="aot_eager")
    with names.activate():
        out = compiled(*mine)
        assert_gradients_agree((out, mine), (native(*theirs * 3, is_causal=True), theirs))
