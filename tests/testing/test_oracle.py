"""The oracle against torch's attention, scalar formulas under autograd, finite differences and published vectors."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from scalar_oracle import keep_scalar, naive, philox_scalar
from torch import Tensor

from flashtile.testing.case import Case, MaskFunction, ScoreFunction
from flashtile.testing.mask_functions import random_mask_function
from flashtile.testing.oracle import Expected, solve
from flashtile.testing.oracle.philox import keep_factors, philox4x32
from flashtile.testing.score_functions import distance_table, random_score_function
from flashtile.testing.tolerance import bound

INF, NAN = math.inf, math.nan
B, HQ, HKV, SQ, SK, D, DV = 2, 4, 2, 5, 7, 3, 2


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)), dtype=dtype)


def dense(*, seqlen_q: int = SQ, seqlen_k: int = SK, dlse: bool = True, **arguments) -> Case:
    q, k, v = randn(B, HQ, seqlen_q, D), randn(B, HKV, seqlen_k, D, seed=1), randn(B, HKV, seqlen_k, DV, seed=2)
    dout = randn(B, HQ, seqlen_q, DV, seed=3)
    return Case(
        "attention", {"q": q, "k": k, "v": v, **arguments}, dout, randn(B, HQ, seqlen_q, seed=4) if dlse else None
    )


def values(case: Case) -> dict[str, Tensor]:
    return {name: expected.reference for name, expected in solve(case).items()}


def assert_same(actual: dict[str, Tensor], expected: dict[str, Tensor], rtol: float = 1e-9) -> None:
    assert actual.keys() == expected.keys()
    for name, want in expected.items():
        torch.testing.assert_close(
            actual[name], want, rtol=rtol, atol=1e-11, equal_nan=True, msg=lambda m, n=name: f"{n}: {m}"
        )


FEATURES: dict[str, Callable[[], dict]] = {
    "plain": dict,
    "scale": lambda: {"scale": 0.7},
    "causal": lambda: {"causal": True},
    "top left": lambda: {"causal": "top_left"},
    "window": lambda: {"window": (2, 1)},
    "window open on the left": lambda: {"window": (None, 0)},
    "window open on the right": lambda: {"window": (0, -1)},
    "causal window": lambda: {"causal": True, "window": (2, 1)},
    "top left window": lambda: {"causal": "top_left", "window": (3, 0)},
    "mask": lambda: {"mask": randn(1, HQ, SQ, SK) > 0},
    "mask of keys": lambda: {"mask": randn(B, 1, 1, SK) > 0},
    "score_mod of one number": lambda: {"score_mod": ScoreFunction(lambda s, b, h, i, j, x: s * x, (randn(),))},
    **{f"mask function {n}": lambda n=n: {"mask": mask_function(n)} for n in range(6)},
    "softcap": lambda: {"softcap": 0.8},
    "bias": lambda: {"bias": randn(B, HQ, SQ, SK)},
    "bias of keys": lambda: {"bias": randn(1, HQ, 1, SK)},
    "bias of rows": lambda: {"bias": randn(B, 1, SQ, 1)},
    "one bias": lambda: {"bias": randn(1, 1, 1, 1)},
    "alibi": lambda: {"alibi_slopes": torch.tensor([0.5, 0.25, 0.125, 1.0])},
    "alibi for each sequence": lambda: {"alibi_slopes": randn(B, HQ, dtype=torch.float32)},
    "sinks": lambda: {"sinks": randn(HQ)},
    "dropout": lambda: {"dropout_p": 0.3, "dropout_seed": 2**40 + 17},
    **{f"score_mod {n}": lambda n=n: {"score_mod": score_function(n)} for n in range(6)},
    "everything": lambda: {
        "scale": 0.9,
        "causal": True,
        "window": (4, None),
        "mask": randn(B, 1, SQ, SK) > -1,
        "softcap": 1.5,
        "bias": randn(1, HQ, SQ, SK),
        "alibi_slopes": torch.rand(HQ),
        "sinks": randn(HQ),
        "dropout_p": 0.25,
        "dropout_seed": torch.tensor([11]),
        "score_mod": score_function(5),
    },
}


def mask_function(choice: int) -> MaskFunction:
    return random_mask_function(choice, B, HQ, "cpu", torch.Generator().manual_seed(9))


def score_function(choice: int) -> ScoreFunction:
    return random_score_function(choice, B, HQ, torch.float64, "cpu", torch.Generator().manual_seed(choice))


@pytest.mark.parametrize("feature", FEATURES)
def test_against_scalar_formula(feature):
    case = dense(**FEATURES[feature]())
    assert_same(values(case), naive(case))


def test_more_rows_than_keys_against_scalar_formula():
    case = dense(seqlen_q=SK, seqlen_k=SQ, causal=True, alibi_slopes=torch.rand(HQ), dlse=False)
    assert_same(values(case), naive(case))


def test_only_lse_has_a_cotangent():
    case = dense(sinks=randn(HQ), bias=randn(1, 1, 1, SK))
    case.dout = None
    assert_same(values(case), naive(case))


def test_bare_callable():
    case = dense(score_mod=lambda score, b, h, q_idx, k_idx: score * (1 + h) - 0.1 * b)
    assert_same(values(case), naive(case))


@pytest.mark.parametrize("feature", ["plain", "causal", "mask", "bias"])
def test_against_torch(feature):
    q, k, v = randn(B, HQ, 33, 16), randn(B, HQ, 33, 16, seed=1), randn(B, HQ, 33, 8, seed=2)
    mask = (randn(B, 1, 33, 33) > 0) | torch.eye(33, dtype=torch.bool)
    bias = randn(B, HQ, 33, 33)
    ours = {"plain": {}, "causal": {"causal": True}, "mask": {"mask": mask}, "bias": {"bias": bias}}[feature]
    theirs = {"causal": {"is_causal": True}, "mask": {"attn_mask": mask}, "bias": {"attn_mask": bias}}.get(feature, {})
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, **theirs)
    torch.testing.assert_close(values(Case("attention", {"q": q, "k": k, "v": v, **ours}))["out"], expected)


def test_gradients_against_finite_differences():
    case = dense(**FEATURES["everything"]())
    results, step = values(case), 1e-5

    def loss() -> float:
        shifted = values(Case(case.function, case.arguments))
        return float((shifted["out"] * case.dout).sum() + (shifted["lse"] * case.dlse)[shifted["lse"].isfinite()].sum())

    case.arguments["alibi_slopes"] = case.arguments["alibi_slopes"].double()
    for name, tensor in case.differentiable().items():
        for flat in {0, tensor.numel() // 2, tensor.numel() - 1}:
            element = tensor.view(-1)[flat : flat + 1]
            element += step
            above = loss()
            element -= 2 * step
            below = loss()
            element += step
            slope = float(results[f"d{name}"].reshape(-1)[flat])
            assert (above - below) / (2 * step) == pytest.approx(slope, rel=1e-5, abs=1e-8), name


# Packed and paged tokens.


def packed(case: Case, **arguments) -> Case:
    """The sequences of a dense case one behind the other."""
    q, k, v = (case.arguments[name].transpose(1, 2).flatten(0, 1) for name in ("q", "k", "v"))
    seqlen_q, seqlen_k = case.arguments["q"].shape[2], case.arguments["k"].shape[2]
    starts_q, starts_k = (torch.arange(B + 1, dtype=torch.int32) * n for n in (seqlen_q, seqlen_k))
    arguments = {
        **case.arguments,
        "q": q,
        "k": k,
        "v": v,
        "cu_seqlens_q": starts_q,
        "cu_seqlens_k": starts_k,
        **arguments,
    }
    assert case.dout is not None
    assert case.dlse is not None
    dout, dlse = case.dout.transpose(1, 2).flatten(0, 1), case.dlse.transpose(0, 1).flatten(1)
    return Case("attention_varlen", arguments, dout, dlse)


def in_packed_layout(results: dict[str, Tensor]) -> dict[str, Tensor]:
    tokens = {name: results[name].transpose(1, 2).flatten(0, 1) for name in ("out", "dq", "dk", "dv")}
    return {**results, **tokens, "lse": results["lse"].transpose(0, 1).flatten(1)}


@pytest.mark.parametrize(
    "feature", ["plain", "causal", "mask of keys", "bias", "alibi for each sequence", "everything"]
)
def test_packed_is_dense(feature):
    case = dense(**FEATURES[feature]())
    assert_same(values(packed(case)), in_packed_layout(values(case)))


@pytest.mark.parametrize("page_size", [1, 3, 4, 16])
def test_paged_is_packed(page_size):
    case = packed(dense(**FEATURES["everything"]()))
    want = values(case)
    pages_each = -(-SK // page_size)
    order = torch.randperm(B * pages_each + 2, generator=torch.Generator().manual_seed(0))
    table = order[: B * pages_each].view(B, pages_each).int()
    rows = torch.cat(
        [table[b].long()[torch.arange(SK) // page_size] * page_size + torch.arange(SK) % page_size for b in range(B)]
    )

    def to_pages(tokens: Tensor) -> Tensor:
        pages = torch.full((len(order) * page_size, *tokens.shape[1:]), NAN, dtype=tokens.dtype)
        pages[rows] = tokens
        return pages.unflatten(0, (-1, page_size))

    case.arguments |= {"k": to_pages(case.arguments["k"]), "v": to_pages(case.arguments["v"]), "page_table": table}
    with_offsets = values(case)
    case.arguments |= {"cu_seqlens_k": None, "seqused_k": torch.full((B,), SK, dtype=torch.int32)}
    with_lengths = values(case)
    assert_same(with_lengths, with_offsets)
    unused = torch.ones(len(order) * page_size, dtype=torch.bool)
    unused[rows] = False
    for name in ("dk", "dv"):
        tokens = with_offsets[name].flatten(0, 1)
        assert (tokens[unused] == 0).all()
        with_offsets[name] = tokens[rows]
    assert_same(with_offsets, want)


def test_shared_pages_add_up():
    case = packed(dense())
    k, v = (case.arguments[name][:8].unflatten(0, (2, 4)) for name in ("k", "v"))
    table = torch.tensor([[1, 0], [1, 0]], dtype=torch.int32)
    case.arguments |= {"k": k, "v": v, "page_table": table}
    separate = dense()
    for name, pages in (("k", k), ("v", v)):
        tokens = torch.cat([pages[1], pages[0, : SK - 4]])  # [Sk, Hkv, D]
        separate.arguments[name] = tokens.transpose(0, 1).expand(B, -1, -1, -1)
    want, got = values(separate), values(case)
    for name in ("dk", "dv"):
        tokens = want[name].sum(0).transpose(0, 1)  # both sequences
        torch.testing.assert_close(got[name][1], tokens[:4])
        torch.testing.assert_close(got[name][0, : SK - 4], tokens[4:])
    torch.testing.assert_close(got["out"], in_packed_layout(want)["out"])


def test_ragged_is_a_loop_of_dense():
    lengths_q, lengths_k, used = [4, 0, 6, 3], [5, 2, 0, 8], [5, 2, 0, 6]
    starts_q, starts_k = ([sum(lengths[:n]) for n in range(5)] for lengths in (lengths_q, lengths_k))
    q, k, v = randn(15, HQ, D), randn(17, HKV, D, seed=1), randn(17, HKV, DV, seed=2)  # two tokens too many of each
    dout, dlse = randn(15, HQ, DV, seed=3), randn(HQ, 15, seed=4)
    bias, mask, slopes, sinks = randn(4, 1, 7, 8), randn(4, HQ, 7, 8) > -1, torch.rand(4, HQ), randn(HQ)
    q[13:] = k[15:] = v[15:] = dout[13:] = dlse[:, 13:] = NAN  # of no sequence
    k[13:15] = v[13:15] = NAN  # past seqused_k
    for b in range(4):
        bias[b, :, lengths_q[b] :] = bias[b, :, :, used[b] :] = NAN
    common = {"causal": True, "sinks": sinks}
    cu_q, cu_k, seqused = (torch.tensor(n, dtype=torch.int32) for n in (starts_q, starts_k, used))
    arguments = {"q": q, "k": k, "v": v, "cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, "seqused_k": seqused, **common}
    case = Case("attention_varlen", {**arguments, "bias": bias, "mask": mask, "alibi_slopes": slopes}, dout, dlse)
    got, dsinks, dbias = values(case), torch.zeros(HQ).double(), torch.zeros_like(bias)
    for b in range(4):
        rows, keys = slice(starts_q[b], starts_q[b] + lengths_q[b]), slice(starts_k[b], starts_k[b] + used[b])
        local = {
            name: x[None, part].transpose(1, 2) for name, x, part in (("q", q, rows), ("k", k, keys), ("v", v, keys))
        }
        square = (slice(b, b + 1), slice(None), slice(lengths_q[b]), slice(used[b]))
        local |= {"bias": bias[square], "mask": mask[square], "alibi_slopes": slopes[b : b + 1]}
        want = values(Case("attention", {**local, **common}, dout[None, rows].transpose(1, 2), dlse[None, :, rows]))
        for name, part in (("out", rows), ("dq", rows), ("dk", keys), ("dv", keys)):
            torch.testing.assert_close(got[name][part], want[name][0].transpose(0, 1))
        torch.testing.assert_close(got["lse"][:, rows], want["lse"][0])
        torch.testing.assert_close(got["dalibi_slopes"][b], want["dalibi_slopes"][0])
        dsinks, dbias[square] = dsinks + want["dsinks"], want["dbias"]
    torch.testing.assert_close(got["dsinks"], dsinks)
    torch.testing.assert_close(got["dbias"], dbias)
    for name, part in (("out", slice(13, 15)), ("dq", slice(13, 15)), ("dk", slice(13, 17)), ("dv", slice(13, 17))):
        assert (got[name][part] == 0).all()
    assert (got["lse"][:, 13:] == -INF).all()


# Nothing to see, and special values.


@pytest.mark.parametrize("shape", [(0, 3, 4), (2, 0, 4), (2, 3, 0), (0, 0, 0)])
@pytest.mark.parametrize("sinks", [False, True])
def test_empty(shape, sinks):
    batch, seqlen_q, seqlen_k = shape
    q, k, v = randn(batch, HQ, seqlen_q, D), randn(batch, HKV, seqlen_k, D), randn(batch, HKV, seqlen_k, DV)
    arguments = {"q": q, "k": k, "v": v, "causal": True, "bias": randn(1, HQ, 1, 1), "alibi_slopes": torch.rand(HQ)}
    arguments |= {"sinks": randn(HQ)} if sinks else {}
    dlse = torch.ones(batch, HQ, seqlen_q)
    got = values(Case("attention", arguments, torch.ones(batch, HQ, seqlen_q, DV), dlse))
    assert got["out"].shape == (batch, HQ, seqlen_q, DV)
    assert all((got[name] == 0).all() for name in ("out", "dq", "dk", "dv", "dbias", "dalibi_slopes"))
    lse = arguments["sinks"][:, None] if sinks else torch.tensor(-INF).double()
    assert (got["lse"] == lse).all()
    if sinks:
        assert (got["dsinks"] == batch * seqlen_q).all()


@pytest.mark.parametrize("blind", ["mask", "bias", "window", "causal"])
def test_rows_that_see_nothing(blind):
    hidden = torch.zeros(B, 1, SQ, 1, dtype=torch.bool)
    hidden[:, :, 1] = True
    how = {
        "mask": {"mask": ~hidden},
        "bias": {"bias": torch.zeros(B, 1, SQ, 1).double().masked_fill(hidden, -INF)},
        "window": {"window": (0, 0), "seqlen_q": SQ, "seqlen_k": 3},  # row i sees key i - 2
        "causal": {"causal": True, "seqlen_q": SQ, "seqlen_k": 3},
    }[blind]
    for sinks in (None, torch.full((HQ,), -INF), torch.tensor([0.5, -1.0, 2.0, -3.0])):
        got = values(dense(**how, **({} if sinks is None else {"sinks": sinks})))
        lse = torch.full((HQ,), -INF) if sinks is None else sinks
        assert (got["lse"][:, :, 1] == lse).all()
        assert (got["out"][:, :, 1] == 0).all()
        assert (got["dq"][:, :, 1] == 0).all()
        assert all(x.isfinite().all() for name, x in got.items() if name != "lse")
        if sinks is not None and not sinks.isfinite().any():
            assert (got["dsinks"] == 0).all()


def test_nan_for_a_row_that_sees_nothing_leaves_finite_bounds():
    mask = (torch.arange(SQ) != 1)[None, None, :, None]
    case = dense(mask=mask, sinks=torch.tensor([0.5, -INF, 2.0, -INF]))
    clean = values(case)
    case.dout[:, :, 1] = NAN
    for name, expected in solve(case).items():
        assert bound(expected, case.dtype).isfinite()[clean[name].isfinite()].all(), name
        torch.testing.assert_close(expected.reference, clean[name], msg=name)


def test_infinite_sink_takes_everything():
    got = values(dense(sinks=torch.full((HQ,), INF)))
    assert (got["lse"] == INF).all()
    assert all((got[name] == 0).all() for name in ("out", "dq", "dk", "dv"))


def test_nan_in_a_key_reaches_the_rows_that_see_it():
    case = dense(seqlen_q=SK, causal=True)
    clean = values(case)
    case.arguments["k"][0, 1, 4, 0] = NAN
    got = values(case)
    reached = torch.zeros(B, HQ, SK, dtype=torch.bool)
    reached[0, 2:, 4:] = True
    for name in ("out", "lse"):
        assert got[name][reached].isnan().all()
        torch.testing.assert_close(got[name][~reached], clean[name][~reached])
    for name in ("dq", "dk", "dv"):  # other sequences and heads
        torch.testing.assert_close(got[name][1], clean[name][1])
        torch.testing.assert_close(got[name][0, :1], clean[name][0, :1])


def test_nan_in_a_query_reaches_its_row():
    case = dense()
    clean = values(case)
    case.arguments["q"][1, 0, 2, 1] = NAN
    got = values(case)
    assert got["out"][1, 0, 2].isnan().all()
    assert got["lse"][1, 0, 2].isnan()
    for name in ("out", "lse"):
        got[name][1, 0, 2] = clean[name][1, 0, 2]
        torch.testing.assert_close(got[name], clean[name])


def test_nan_that_nobody_sees_is_harmless():
    case = dense(mask=torch.arange(SK) != 3, bias=randn(1, 1, SQ, SK), score_mod=score_function(5))
    case.arguments["mask"] = case.arguments["mask"].view(1, 1, 1, SK)
    clean = values(case)
    case.arguments["k"][:, :, 3] = case.arguments["v"][:, :, 3] = case.arguments["bias"][..., 3] = NAN
    assert_same(values(case), clean)


def test_nan_in_a_value_may_reach_rows_that_do_not_see_it():
    case = dense(seqlen_q=SK, causal=True)
    clean = solve(case)["out"].reference
    case.arguments["v"][0, 1, 4, 0] = NAN
    got = solve(case)["out"]
    seen = torch.zeros(B, HQ, SK, DV, dtype=torch.bool)
    seen[0, 2:, 4:, 0] = True
    assert got.reference[seen].isnan().all()
    torch.testing.assert_close(got.reference[~seen], clean[~seen])
    assert got.loose is not None
    assert got.loose[0, 2:].all()
    assert not got.loose[1].any()
    assert not got.loose[0, :2].any()


def test_infinities_follow_ieee():
    case = dense(bias=torch.zeros(1, 1, SQ, SK).double())
    case.arguments["bias"][0, 0, 0, 2], case.arguments["bias"][0, 0, 1, 2] = INF, -INF
    got = values(case)
    assert (got["lse"][:, :, 0] == INF).all()
    assert got["out"][:, :, 0].isnan().all()  # exp(inf - inf)
    assert got["out"][:, :, 1:].isfinite().all()


# Dropout.


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0, 0, 0, 0), (0, 0), "5f6fb709 0d893f64 4f121f81 4f730a48"),
        ((2**32 - 1,) * 4, (2**32 - 1,) * 2, "5207ddc2 45165e59 4d8ee751 8c52f662"),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            "4dfccaba 190a87f0 c47362ba b6b5242a",
        ),
    ],
)
def test_philox_known_answers(counter, key, words):
    result = philox4x32(tuple(np.array([word], dtype=np.uint64) for word in counter), key)
    assert " ".join(f"{int(word[0]):08x}" for word in result) == words
    assert " ".join(f"{word:08x}" for word in philox_scalar(list(counter), list(key))) == words


@pytest.mark.parametrize("seed", [0, 2**31 + 5, 2**40 + 3, 2**63 - 1, -1])
def test_counter_layout(seed):
    p, num_heads_q, batch = 0.4, 3, 2
    got = keep_factors(p, seed, batch, num_heads_q, 4, 21)
    for h in range(num_heads_q):
        for i in range(4):
            assert got[h, i].tolist() == [keep_scalar(p, seed, batch, h, num_heads_q, i, j) for j in range(21)]


def test_counter_layout_vector():
    # seed 0x0123456789abcdef, p 0.5, sequence 1 of 4 heads: head 2, row 3, keys 0 to 23; 1 is kept.
    kept = keep_factors(0.5, 0x0123456789ABCDEF, 1, 4, 4, 24)[2, 3] > 0
    assert "".join(str(int(keep)) for keep in kept) == "111010011110101010001111"


@pytest.mark.parametrize(("p", "factor"), [(0.5, 2.0), (0.1, 65536 / (65536 - 6554)), (1e-6, 1.0), (0.999999, None)])
def test_keep_factor(p, factor):
    got = np.unique(keep_factors(p, 1, 0, 2, 40, 80))
    assert got.tolist() == sorted({0.0, factor} if factor and factor > 1 else {factor or 0.0})


# The ingredients of the bound.


def test_ingredients_by_definition():
    case = dense(causal=True, dropout_p=0.3, dropout_seed=3)
    results = solve(case)
    q, k, v = (case.arguments[name] for name in ("q", "k", "v"))
    b, h, i, d = 1, 3, 2, 1  # keys 0 to 4 are visible, of key head 1
    scale = D**-0.5
    scores = [scale * float(q[b, h, i] @ k[b, 1, j]) for j in range(5)]
    p = [math.exp(s - float(results["lse"].reference[b, h, i])) for s in scores]
    terms = [keep_scalar(0.3, 3, b, h, HQ, i, j) * p[j] * float(v[b, 1, j, d]) for j in range(5)]
    out = results["out"]
    assert float(at(out, "reference", b, h, i, d)) == pytest.approx(sum(terms))
    assert float(at(out, "C", b, h, i, d)) == pytest.approx(sum(abs(t) for t in terms))
    assert float(at(out, "R", b, h, i, d)) == pytest.approx(math.sqrt(sum(t * t for t in terms)))
    A = [
        [scale * float(q[b, r, row].abs() @ k[b, 1, j].abs()) for j in range(row + 3)]
        for r in (2, 3)
        for row in range(SQ)
    ]
    largest = [max(row) for row in A]  # of heads 2 and 3
    assert float(at(out, "A", b, h, i, d)) == pytest.approx(largest[SQ + i])
    assert float(results["lse"].A[b, h, i]) == pytest.approx(largest[SQ + i])
    # Key 5 is seen by rows 3 and 4 of both heads that read it.
    contributing = max(largest[3], largest[4], largest[SQ + 3], largest[SQ + 4])
    assert float(at(results["dk"], "A", b, 1, 5, 0)) == pytest.approx(contributing)


def at(expected: Expected, name: str, *index: int) -> Tensor:
    return getattr(expected, name)[index]


def test_score_function_reads_one_element_for_a_score():
    case = dense(score_mod=ScoreFunction(distance_table, (randn(HQ, 17),)))
    results = solve(case)
    table = results["dscore_mod_0"]
    assert table.C is not None
    assert table.R is not None
    assert (table.reference.abs() - 1e-12 <= table.C).all()
    assert (table.C[:, 8] > 0).all()  # distance 0
    assert (table.C[:, :2] == 0).all()  # row i and key i + 8 do not exist
