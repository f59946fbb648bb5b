"""out, lse and every gradient of both backends against the fp64 oracle, within the contract's error bound."""

import itertools
import random

import pytest
import torch
from checking import BACKENDS, assert_right, dense_case, features, groups_of_features, tile_size
from hypothesis import given
from hypothesis import strategies as st

from flashtile.testing.case import Case
from flashtile.testing.generate import DTYPES, random_case
from flashtile.testing.inputs import KINDS
from flashtile.testing.layouts import LAYOUTS, expanded_cotangent, lay_out

FEATURES = features()
seeds = st.integers(0, 2**32 - 1)


@given(seed=seeds)
def test_random_calls(seed: int) -> None:
    assert_right(random_case(seed))


@given(seed=seeds, block_m=st.integers(8, 48), block_n=st.integers(8, 48), scores=st.sampled_from([1, 2000, 2**20]))
def test_random_calls_in_small_tiles(seed: int, block_m: int, block_n: int, scores: int) -> None:
    with tile_size(block_m, block_n, scores):
        assert_right(random_case(seed), "tiled")


@pytest.mark.parametrize("names", [*((name,) for name in FEATURES), *groups_of_features(FEATURES)], ids=", ".join)
def test_feature_alone_and_with_every_other(names: tuple[str, ...]) -> None:
    """Small tiles, so that each feature meets block boundaries; a pair shows features that forget one another."""
    with tile_size(4, 4, scores=16):
        assert_right(dense_case(**{key: x for name in names for key, x in FEATURES[name].items()}))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes_and_inputs(dtype: torch.dtype, kind: str, backend: str) -> None:
    for seed in range(6):  # the adversarial kind has six patterns
        assert_right(dense_case(seqlen_q=70, seqlen_k=90, head_dim=32, dtype=dtype, kind=kind, seed=seed), backend)


@pytest.mark.parametrize(
    "visibility",
    [{}, {"causal": True}, {"causal": "top_left"}, {"window": (5, 3)}, {"causal": True, "window": (4, None)}],
    ids=str,
)
def test_lengths_around_tile_boundaries(visibility: dict) -> None:
    """Tiles of 8 x 8: none, one less, exact, one more; more queries than keys as well as fewer."""
    lengths = (0, 1, 7, 8, 9, 16, 17)
    with tile_size(8, 8):
        for seqlen_q, seqlen_k in itertools.product(lengths, lengths):
            assert_right(dense_case(seqlen_q=seqlen_q, seqlen_k=seqlen_k, batch=1, head_dim=4, **visibility), "tiled")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("empty", ["batch", "seqlen_q", "seqlen_k"])
def test_empty_dimensions(empty: str, backend: str) -> None:
    for name in ("causal", "window", "softcap", "sinks", "alibi_slopes", "dropout"):
        assert_right(dense_case(**{empty: 0} | FEATURES[name]), backend)


@pytest.mark.parametrize(("num_heads_q", "num_heads_kv"), [(1, 1), (6, 2), (6, 6), (6, 1)])
def test_query_heads_share_key_heads(num_heads_q: int, num_heads_kv: int) -> None:
    with tile_size(4, 4, scores=100):
        assert_right(dense_case(num_heads_q=num_heads_q, num_heads_kv=num_heads_kv))


@pytest.mark.parametrize("head_dim", [1, 3, 33, 256, 1024])
def test_head_dimensions(head_dim: int) -> None:
    assert_right(dense_case(head_dim=head_dim, head_dim_v=max(head_dim // 2, 1)))


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_strides(name: str) -> None:
    """Any strides of an input, its cotangents too; results do not depend on them."""
    for layout, dtype in itertools.product(LAYOUTS, (torch.float32, torch.bfloat16)):
        case = dense_case(dtype=dtype)
        case.arguments[name] = lay_out(case.arguments[name], layout, random.Random(layout))
        case.dout = lay_out(case.dout, layout, random.Random(layout))
        case.dlse = lay_out(case.dlse, layout, random.Random(layout))
        assert_right(case)


def test_cotangent_of_a_sum() -> None:
    """`out.sum().backward()` hands a dout with stride 0 in every dimension."""
    case = dense_case()
    case.dout = expanded_cotangent(case.dout.shape, 1.0, torch.float32, "cpu")
    assert_right(case)


@pytest.mark.parametrize("which", ["mask", "bias"])
def test_every_broadcast_of_mask_and_bias(which: str) -> None:
    """Each of the four dimensions may be 1, in the tensor and so in its gradient."""
    full = (2, 2, 7, 9)
    with tile_size(4, 4, scores=16):
        for kept in itertools.product((False, True), repeat=4):
            shape = [n if keep else 1 for n, keep in zip(full, kept, strict=True)]
            given = torch.randn(shape)
            assert_right(dense_case(**{which: given > -0.7 if which == "mask" else given}))


@pytest.mark.parametrize("name", ["bias", "alibi_slopes", "sinks"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_features_in_fp32_with_half_precision(name: str, dtype: torch.dtype) -> None:
    """Bias, slopes and sinks in q's dtype or fp32; the gradient comes back in their own."""
    for own in (dtype, torch.float32):
        assert_right(dense_case(dtype=dtype, **{name: FEATURES[name][name].to(own)}))


def test_slopes_for_each_sequence() -> None:
    assert_right(dense_case(alibi_slopes=torch.tensor([[0.1, 0.2], [0.3, 0.0]])))


def test_default_scale() -> None:
    """`head_dim ** -0.5`, of q's and not of v's head dimension."""
    case = dense_case(head_dim=16, head_dim_v=4)
    explicit = Case("attention", case.arguments | {"scale": 16**-0.5}, case.dout, case.dlse)
    for name, result in case.run("tiled").items():
        assert torch.equal(result, explicit.run("tiled")[name])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("deterministic", [True, None])
def test_same_call_same_bits(backend: str, deterministic: bool | None) -> None:
    arguments = FEATURES["bias"] | FEATURES["sinks"] | FEATURES["dropout"]
    first, second = (dense_case(**arguments).run(backend, deterministic=deterministic) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_auto_is_the_cpu_backend() -> None:
    auto, cpu = dense_case().run("auto"), dense_case().run("cpu")
    assert all(torch.equal(auto[name], cpu[name]) for name in auto)
