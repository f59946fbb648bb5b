"""The CPU backend: the contract on every vector width, tails, panels, strides, and rows that see nothing."""

import importlib
import itertools
import random
from typing import Any

import pytest
import torch
from blind import BLIND
from checking import assert_right, dense_case, features, groups_of_features, offsets
from cpu_widths import WIDTHS, request_width
from hypothesis import given, settings
from hypothesis import strategies as st

import flashtile
from flashtile import BackendError
from flashtile.backend.cpu import arguments, targets
from flashtile.call.call import Call, Settings, Tensors
from flashtile.testing.case import Case
from flashtile.testing.generate import random_case
from flashtile.testing.inputs import KINDS
from flashtile.testing.layouts import LAYOUTS, lay_out
from flashtile.testing.poison import poisoned_allocation
from flashtile.testing.tolerance import compare

support = importlib.import_module("flashtile.backend.cpu.support")
FEATURES = features()
INF, NAN = torch.inf, torch.nan


@pytest.fixture(params=WIDTHS)
def width(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    request_width(request.param, monkeypatch)
    return request.param


def right(case: Case) -> None:
    assert_right(case, "cpu")


def right_or_declined(case: Case) -> None:
    widths = [x.shape[-1] for name, x in case.arguments.items() if name in ("q", "v", "v_cache")]
    if max(widths) > support.MAX_HEAD_DIM:
        with pytest.raises(BackendError, match="head dimensions"):
            case.run("cpu")
    else:
        right(case)


@settings(max_examples=8)  # as each compiles kernels; `flashtile report`, a part of the checks, takes twenty more
@given(seed=st.integers(0, 2**32 - 1), function=st.sampled_from(["attention", "attention_varlen"]))
def test_random_calls(seed: int, function: str) -> None:
    right_or_declined(random_case(seed, function=function))


@settings(max_examples=10)
@given(seed=st.integers(0, 2**32 - 1))
def test_random_calls_with_a_cache(seed: int) -> None:
    right_or_declined(random_case(seed, function="attention_with_kvcache"))


# In pairs without mask functions, as a formula compiles slowly.
GROUPS = groups_of_features({name: x for name, x in FEATURES.items() if name != "mask function"}, size=6)


@pytest.mark.parametrize("names", [*((name,) for name in FEATURES), *GROUPS], ids=", ".join)
def test_feature_alone_and_with_every_other(names: tuple[str, ...]) -> None:
    """Each pair of features is in one of the groups, whose kernels take a third of the time of those of all pairs."""
    right(dense_case(**{key: x for name in names for key, x in FEATURES[name].items()}))


# float32 on every width, float16 with instructions that convert it and without, and each other dtype on one.
DTYPES_OF_WIDTHS = [
    *(("avx512", x) for x in (torch.float32, torch.bfloat16)),
    *(("avx2", x) for x in (torch.float32, torch.float16)),
    *(("baseline", x) for x in (torch.float32, torch.float16, torch.float64)),
]


@pytest.mark.parametrize(("width", "dtype"), DTYPES_OF_WIDTHS, indirect=["width"], ids=str)
def test_dtypes_and_inputs_on_every_width(dtype: torch.dtype, width: str) -> None:
    patterns = [("normal", 0), ("outliers", 1), *(("adversarial", seed) for seed in range(6))]
    assert {kind for kind, _ in patterns} == {*KINDS}
    for kind, seed in patterns:
        right(dense_case(seqlen_q=70, seqlen_k=101, head_dim=33, dtype=dtype, kind=kind, seed=seed, causal=True))


def test_every_feature_on_every_width(width: str) -> None:
    """All features in one call, with full, partly visible and hidden blocks, in float32 and a half precision."""
    half = (torch.float16, 1) if width == "avx2" else (torch.bfloat16, 150)
    for dtype, vectors in ((torch.float32, 150), half):
        given = {
            "window": (40, 30),
            "mask": torch.rand(2, 1, vectors, 230) < 0.7,
            "bias": torch.randn(1, 4, vectors, 230).to(dtype),
            "alibi_slopes": torch.rand(2, 4),
            "sinks": torch.randn(4),
            "softcap": 2.0,
            "dropout_p": 0.3,
            "dropout_seed": 7,
        }
        shape = {"num_heads_q": 4, "num_heads_kv": 2, "seqlen_q": vectors, "seqlen_k": 230}
        right(dense_case(**shape, head_dim=40, head_dim_v=24, dtype=dtype, **given))


@pytest.mark.parametrize("visibility", [{}, {"causal": True}, {"window": (5, 3)}], ids=str)
def test_tails(visibility: dict[str, Any]) -> None:
    """Every remainder of rows, keys and head dimensions modulo a vector, and of keys and features modulo the height of
    a microkernel.
    """
    for n in range(1, 34):
        right(dense_case(batch=1, seqlen_q=n, seqlen_k=97 + n, head_dim=n, head_dim_v=34 - n, **visibility))


@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(16, 32), (24, 48), (32, 24)])
def test_panels_of_every_width(head_dim: int, head_dim_v: int) -> None:
    """The last rows of a sequence in one vector, in two and in more, beside none, one and two full panels of 64 rows,
    with vectors of 4, 8 and 16 lanes; products with lanes of features and of rows; a bias whose gradient is a sum over
    rows.
    """
    for rows, bias in ((3, True), (17, False), (41, True), (80, False), (105, True), (133, True)):
        given = {"bias": torch.randn(1, 1, 1, 99)} if bias else {"causal": True}
        right(dense_case(num_heads_kv=2, seqlen_q=rows, seqlen_k=99, head_dim=head_dim, head_dim_v=head_dim_v, **given))


def test_head_dimensions() -> None:
    for head_dim, head_dim_v in ((1, 512), (512, 1), (256, 128)):
        right(dense_case(seqlen_q=70, seqlen_k=100, head_dim=head_dim, head_dim_v=head_dim_v, causal=True))


@pytest.mark.parametrize("head_dim", [128, 256, 512])
def test_scores_whose_terms_are_all_alike(head_dim: int) -> None:
    """Forward and backward add them in different orders. Long sums of equal terms round in one direction."""
    for value in (3.0, 6.0, 7.3):
        q, k = torch.full((1, 6, 2, head_dim), value), torch.full((1, 3, 2, head_dim), value)
        slopes = torch.linspace(0.1, 0.9, 6)
        arguments = {"q": q, "k": k, "v": torch.randn(1, 3, 2, head_dim), "causal": True, "alibi_slopes": slopes}
        dout, dlse = torch.randn(1, 6, 2, head_dim), torch.randn(1, 6, 2)
        case = Case("attention", arguments, dout, dlse, 0)
        assert all(deviation.ok for deviation in compare(case.run("cpu"), case))


def test_strides() -> None:
    for name, layout, dtype in itertools.product("qkv", LAYOUTS, (torch.float32, torch.bfloat16)):
        case = dense_case(dtype=dtype)
        case.arguments[name] = lay_out(case.arguments[name], layout, random.Random(layout))
        right(case)


@pytest.mark.parametrize("which", ["mask", "bias"])
def test_every_broadcast_and_stride_of_mask_and_bias(which: str) -> None:
    for kept, turned in itertools.product(itertools.product((False, True), repeat=4), (False, True)):
        shape = [n if keep else 1 for n, keep in zip((2, 2, 20, 40), kept, strict=True)]
        given = torch.randn(shape[::-1]).permute(3, 2, 1, 0) if turned else torch.randn(shape)
        right(dense_case(seqlen_q=20, seqlen_k=40, **{which: given > -0.7 if which == "mask" else given}))


def test_gradients_of_shared_tensors() -> None:
    """Biases with every set of broadcast dimensions, with split keys where elements are not shared; batched slopes."""
    for kept in itertools.product((False, True), repeat=4):
        shape = [n if keep else 1 for n, keep in zip((2, 4, 70, 800), kept, strict=True)]
        given = {"bias": torch.randn(shape), "alibi_slopes": torch.rand(2, 4) * 0.1}
        shape = {"num_heads_q": 4, "num_heads_kv": 2, "seqlen_q": 70, "seqlen_k": 800, "head_dim": 20}
        right(dense_case(**shape, **given, softcap=3.0, sinks=torch.randn(4)))


def test_only_the_gradients_that_are_asked_for() -> None:
    case = dense_case(**FEATURES["bias"] | FEATURES["sinks"] | FEATURES["alibi_slopes"], seqlen_q=7, seqlen_k=9)
    every = case.run("cpu")
    for name in ("q", "k", "v", "bias", "sinks", "alibi_slopes"):
        leaf = case.arguments[name].detach().requires_grad_()
        out, lse = flashtile.attention(**case.arguments | {name: leaf}, return_lse=True, backend="cpu")
        (found,) = torch.autograd.grad((out, lse), leaf, (case.dout, case.dlse))
        assert torch.equal(found, every[f"d{name}"])


def test_gradients_of_results_that_differ_in_strides_alone() -> None:
    """A cached launch serves calls of the same strides only."""
    leaves = [torch.randn(2, 4, 33, 16, requires_grad=True) for _ in range(3)]
    for seen in (lambda x: x, lambda x: x.transpose(1, 2).contiguous().transpose(1, 2)):
        out = flashtile.attention(*(seen(x) for x in leaves), causal=True, backend="cpu")
        dout = torch.randn(2, 1, 1, 16).expand(out.shape)
        douts = dout, dout.contiguous(), dout.transpose(1, 3).contiguous().transpose(1, 3)
        first, *others = (torch.autograd.grad(out, leaves, dout, retain_graph=True) for dout in douts)
        assert all(torch.equal(x, y) for other in others for x, y in zip(first, other, strict=True))


def test_pages_that_sequences_share() -> None:
    pages = {"k": torch.randn(5, 4, 2, 8), "v": torch.randn(5, 4, 2, 8), "cu_seqlens_k": None}
    table = torch.tensor([[0, 3, 1], [3, 4, 0]], dtype=torch.int32)
    given = {"q": torch.randn(9, 4, 8), "cu_seqlens_q": offsets(4, 5), "page_table": table}
    given |= pages | {"seqused_k": torch.tensor([11, 7], dtype=torch.int32), "causal": True}
    right(Case("attention_varlen", given, torch.randn(9, 4, 8), torch.randn(4, 9)))


def test_long_sequences() -> None:
    """Several panels in a task, several key blocks, hidden blocks between visible ones."""
    for visibility in ({}, {"causal": True}, {"window": (100, 50)}, {"causal": "top_left"}):
        right(dense_case(batch=1, seqlen_q=1100, seqlen_k=900, head_dim=16, **visibility))


def test_few_rows_split_the_keys() -> None:
    for sinks, dtype in itertools.product((None, torch.tensor([1.0, -INF, INF, 9.0])), (torch.float32, torch.bfloat16)):
        shape = {"batch": 1, "num_heads_q": 4, "num_heads_kv": 2, "seqlen_q": 3, "seqlen_k": 5000}
        right(dense_case(**shape, dtype=dtype, causal=True, **({} if sinks is None else {"sinks": sinks})))


@pytest.mark.parametrize(
    ("width", "dtype"), [x for x in DTYPES_OF_WIDTHS if x[1] is not torch.float16], indirect=["width"], ids=str
)
def test_few_rows_of_several_blocks(dtype: torch.dtype, width: str) -> None:
    """The decode kernel's packed scores: heads with sinks, or positions whose first and last blocks are not packed;
    maxima that change between blocks, infinities, numbers of rows and keys that fill no vector; features that fill
    narrower vectors than the processor's.
    """
    for rows, bad in itertools.product(range(1, 6), (None, INF)):
        sinks = torch.linspace(-9, 9, rows)
        heads = {"num_heads_q": rows, "seqlen_q": 1, "seqlen_k": 290 - rows, "sinks": sinks}
        positions = {"num_heads_q": 1, "seqlen_q": rows, "seqlen_k": 290 - rows, "window": (200, 20)}
        for shape in (heads, positions):
            head_dim = 24 if rows in (1, 3) else 16
            case = dense_case(**shape, batch=1, head_dim=head_dim, dtype=dtype, seed=rows, forward_only=True)
            case.arguments["k"] *= torch.linspace(-3, 3, 290 - rows)[:, None].to(dtype)
            if bad is not None:
                case.arguments["k"][:, :, 150, 3] = bad
            right(case)


def test_decoding_has_vectors_that_features_fill(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets, "host", lambda: targets.make_target("avx512"))

    def width(head_dim: int, rows: int, dtype: torch.dtype = torch.float32) -> int | None:
        q, k = torch.empty(1, rows, 1, head_dim, dtype=dtype), torch.empty(1, 1, 9, head_dim, dtype=dtype)
        tile = support.TileConfig(rows, 96, decodes=True)
        target = arguments.decode_target(Call(Tensors(q, k, k), Settings(scale=1.0)), tile)
        return None if target is None else target.vector_bytes

    assert [width(64, rows) for rows in (1, 8, 9)] == [64, 64, None]
    assert [width(40, rows) for rows in (1, 4, 5)] == [32, 32, None]
    assert [width(20, rows) for rows in (2, 3)] == [16, None]
    assert width(30, 1) is None
    assert width(20, 2, torch.float64) == 32


@pytest.mark.parametrize("sinks", [None, (0.5, -INF)], ids=["no sinks", "sinks"])
@pytest.mark.parametrize("cause", BLIND)
def test_rows_that_see_nothing(cause: str, sinks: tuple | None) -> None:
    right(dense_case(**BLIND[cause] | ({} if sinks is None else {"sinks": torch.tensor(sinks)})))


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_nan_and_infinities(name: str, width: str) -> None:
    for bad, (row, feature) in itertools.product((NAN, INF, -INF), ((0, 0), (5, 3), (6, 7))):
        case = dense_case(seqlen_q=7, seqlen_k=9, causal=True, forward_only=True)
        case.arguments[name][:, 0, row, feature] = bad
        right(case)


def test_extreme_scores_and_sinks() -> None:
    """Infinite biases and sinks, and `finfo.min`, a common bias for hidden pairs."""
    lowest = torch.finfo(torch.float32).min
    for value, sink in itertools.product((INF, -INF, lowest, NAN), (None, INF, -INF)):
        bias = torch.randn(1, 1, 7, 9)
        bias[..., 2, 3], bias[..., 4, :] = value, value
        sinks = {} if sink is None else {"sinks": torch.tensor([sink, 0.0])}
        right(dense_case(bias=bias, forward_only=True, **sinks))


def test_results_do_not_depend_on_what_memory_held() -> None:
    given = FEATURES["window"] | FEATURES["dropout"]
    for sizes in (
        {"seqlen_q": 7, "seqlen_k": 9} | FEATURES["mask"],
        {"seqlen_q": 0},
        {"seqlen_q": 300, "head_dim": 13},
        {"seqlen_q": 69, "head_dim": 32, "bias": torch.randn(1, 1, 1, 1100)},
    ):
        case = dense_case(**{"seqlen_k": 1100} | given | sizes)
        clean = case.run("cpu")
        with poisoned_allocation():
            poisoned = case.run("cpu")
        assert all(torch.equal(clean[name], x) for name, x in poisoned.items())


def test_packed_sequences_and_tokens_of_none() -> None:
    cu_q, cu_k = offsets(100, 0, 3, 70), offsets(90, 5, 0, 130)
    q, k, v = torch.randn(180, 4, 40), torch.randn(230, 2, 40), torch.randn(230, 2, 24)
    given = {"q": q, "k": k, "v": v, "cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, "causal": True}
    right(Case("attention_varlen", given, torch.randn(180, 4, 24), torch.randn(4, 180)))
