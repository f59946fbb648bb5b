"""Arguments that change where results go and what dtypes and lengths are given as, but no formula: `out`, `num_splits`,
dtypes of what is added to the scores, lengths as ints, `cache_batch_idx` with pages.
"""

from typing import Any
from unittest import mock

import pytest
import torch
from checking import BACKENDS, assert_right, dense_case, features
from packing import packed_case
from torch import Tensor

import flashtile
from flashtile.errors import ArgumentError
from flashtile.testing.case import ExactSides

FEATURES = features()
Q, K, V = torch.randn(2, 4, 7, 8), torch.randn(2, 2, 9, 8), torch.randn(2, 2, 9, 4)
CU = torch.tensor([0, 3, 7], dtype=torch.int32)
EVERY = ("cpu", *BACKENDS)


def places() -> dict[str, Tensor]:
    """Tensors of the result's shape in several layouts; the last ones cannot be written by kernels."""
    larger = torch.full((2, 4, 9, 12), torch.nan)
    shared = torch.empty(2 * 4 * 7 * 4 + 1)
    return {
        "contiguous": torch.empty(2, 4, 7, 4),
        "heads last": torch.empty(2, 7, 4, 4).transpose(1, 2),
        "in a larger tensor": larger[:, :, 1:8, 4:8],
        "features apart": torch.empty(2, 4, 4, 7).mT,
        "unaligned": shared[1:].view(2, 4, 7, 4),
    }


@pytest.mark.parametrize("backend", EVERY)
@pytest.mark.parametrize("place", places())
def test_out(place: str, backend: str) -> None:
    """The result is in `out`, also of repeated calls, and nothing else is written."""
    for factor in (1, 2, 3):  # planned, recorded, replayed
        expected, lse = flashtile.attention(Q * factor, K, V, causal=True, return_lse=True, backend=backend)
        out = places()[place].fill_(-7)
        whole = None if out._base is None else out._base.clone()
        found = flashtile.attention(Q * factor, K, V, causal=True, return_lse=True, out=out, backend=backend)
        assert found[0] is out
        assert torch.equal(out, expected)
        assert torch.equal(found[1], lse)
        if whole is not None and place == "in a larger tensor":
            whole[:, :, 1:8, 4:8] = expected
            assert torch.equal(out._base.nan_to_num(), whole.nan_to_num())


def test_kernels_write_into_out() -> None:
    """Without a copy, where rows are aligned."""
    out = torch.empty(2, 4, 7, 4)
    with mock.patch.object(Tensor, "copy_", side_effect=AssertionError("copied")):
        for _ in range(3):
            flashtile.attention(Q, K, V, out=out, backend="cpu")


@pytest.mark.parametrize("used", [None, torch.tensor([1, 4], dtype=torch.int32)])
def test_out_of_packed_sequences(used: Tensor | None) -> None:
    q, k, v = (torch.randn(9, 2, 8) for _ in range(3))
    for _ in range(3):
        out = torch.full((9, 2, 8), torch.nan)
        expected = flashtile.attention_varlen(q, k, v, CU, CU, seqused_q=used)
        assert flashtile.attention_varlen(q, k, v, CU, CU, seqused_q=used, out=out) is out
        assert torch.equal(out, expected)
        assert not out[7:].any()


def test_out_that_shares_storage_with_an_input() -> None:
    """As if it did not: the result is copied."""
    for first in (0, 1):  # q itself, and what lies between its rows
        memory, k = torch.randn(2, 4, 2 * 9, 8), torch.randn(2, 4, 30, 8)
        q, out = memory[:, :, ::2], memory[:, :, first::2]
        expected = flashtile.attention(q.clone(), k, k)
        assert flashtile.attention(q, k, k, out=out) is out
        assert torch.equal(out, expected)


@pytest.mark.parametrize("dense", [True, False])
def test_out_of_a_step(dense: bool) -> None:
    cache, lengths = torch.randn(2, 2, 9, 8), torch.tensor([4, 7], dtype=torch.int32)
    q = torch.randn(2, 4, 1, 8) if dense else torch.randn(2, 4, 8)
    more: dict[str, Any] = {} if dense else {"cu_seqlens_q": torch.tensor([0, 1, 2], dtype=torch.int32)}
    for _ in range(3):
        out = torch.empty_like(q)
        expected = flashtile.attention_with_kvcache(q, cache, cache, cache_seqlens=lengths, **more)
        assert flashtile.attention_with_kvcache(q, cache, cache, cache_seqlens=lengths, out=out, **more) is out
        assert torch.equal(out, expected)


@pytest.mark.parametrize(
    "out",
    [torch.empty(2, 4, 7, 8), torch.empty(2, 4, 7, 4).half(), torch.empty(1, 4, 7, 4).expand(2, -1, -1, -1), "here"],
    ids=["shape", "dtype", "overlap", "str"],
)
def test_out_that_does_not_fit(out: Any) -> None:
    with pytest.raises(ArgumentError, match="`out`"):
        flashtile.attention(Q, K, V, out=out)


def test_out_would_lose_a_derivative() -> None:
    out, q = torch.empty(2, 4, 7, 4), Q.clone().requires_grad_()
    with pytest.raises(ArgumentError, match="`out`"):
        flashtile.attention(q, K, V, out=out)
    with torch.no_grad():
        assert flashtile.attention(q, K, V, out=out) is out


def test_out_compiled() -> None:
    out = torch.empty(2, 4, 7, 4)

    def step(q: Tensor, out: Tensor) -> Tensor:
        return flashtile.attention(q * 2, K, V, attention_chunk=4, out=out) + 1

    found = torch.compile(step, fullgraph=True, backend="aot_eager")(Q, out)
    torch.testing.assert_close(found, step(Q, torch.empty_like(out)))
    torch.testing.assert_close(out, found - 1)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", ["bias", "alibi_slopes", "sinks"])
def test_dtypes_of_what_is_added(name: str, dtype: torch.dtype) -> None:
    """Any, with queries of any; the gradient comes back in it."""
    for of_q in (torch.float16, torch.float32, torch.float64):
        case = dense_case(dtype=of_q, **{name: FEATURES[name][name].to(dtype)})
        assert_right(case, *EVERY)
        for _ in range(2):
            assert case.run("cpu")[f"d{name}"].dtype is dtype


@pytest.mark.parametrize("num_splits", [1, 2, 5, 10**9])
@pytest.mark.parametrize("backend", EVERY)
def test_num_splits(backend: str, num_splits: int) -> None:
    assert_right(dense_case(causal=True, seqlen_k=200, num_splits=num_splits), backend)
    assert_right(packed_case(causal=True, num_splits=num_splits), backend)


@pytest.mark.parametrize("backend", EVERY)
@pytest.mark.parametrize("chunk", [1, 3, 8, 100])
def test_chunks_around_tiles(chunk: int, backend: str) -> None:
    """More rows than keys too: positions before all keys see none."""
    for seqlen_q, seqlen_k in ((9, 17), (17, 9), (8, 8)):
        for causal in (False, True):
            case = dense_case(seqlen_q=seqlen_q, seqlen_k=seqlen_k, causal=causal, attention_chunk=chunk)
            assert_right(case, backend)


@pytest.mark.parametrize("backend", EVERY)
@pytest.mark.parametrize("sides", [(-1, None), (None, -1), (-3, 6), (6, -3), (-4, 3), (-200, None), (0, 0)], ids=str)
def test_windows_on_one_side_of_the_own_key(sides: tuple[int | None, int | None], backend: str) -> None:
    for seqlen_q, seqlen_k in ((9, 17), (17, 9)):
        assert_right(dense_case(seqlen_q=seqlen_q, seqlen_k=seqlen_k, window=ExactSides(sides)), backend)


def test_minus_one_is_unlimited_unless_exact() -> None:
    def attend(window: Any, **more: Any) -> Tensor:
        return flashtile.attention(Q, K, V, window=window, **more)

    assert torch.equal(attend((-1, -1)), attend(None))
    assert torch.equal(attend((-2, 5)), attend(flashtile.ExactWindow(-2, 5)))
    assert torch.equal(attend((3, -2), causal=True), attend((3, -2)))  # causal hides no more
    assert not torch.equal(attend((3, -1)), attend(flashtile.ExactWindow(3, -1)))


@pytest.mark.parametrize("backend", EVERY)
def test_rows_that_are_not_in_use(backend: str) -> None:
    """They are not read, give 0 and -inf also with sinks, and pass no gradient on."""
    used = torch.tensor([2, 0, 3, 5], dtype=torch.int32)
    case = packed_case(seqused_q=used, causal=True, sinks=torch.randn(4), alibi_slopes=torch.rand(4, 4))
    unused = torch.ones(case.arguments["q"].shape[0], dtype=torch.bool)
    for start, n in zip(case.arguments["cu_seqlens_q"].tolist(), used.tolist(), strict=False):
        unused[start : start + n] = False
    for x in (case.arguments["q"], case.dout):
        x[unused] = torch.nan
    case.dlse[:, unused] = torch.nan
    assert_right(case, backend)
    results = case.run(backend)
    assert not results["out"][unused].any()
    assert (results["lse"][:, unused] == -torch.inf).all()
    assert not results["dq"][unused].any()


def test_derivatives_of_rows_that_are_not_in_use() -> None:
    """Forward mode and second derivatives, which have an assembly of their own."""
    case = packed_case(seqused_q=torch.tensor([2, 0, 3, 5], dtype=torch.int32))
    given = {name: x for name, x in case.arguments.items() if name != "q"}
    q = case.arguments["q"].double().requires_grad_()
    given |= {name: given[name].double() for name in ("k", "v")}

    def attend(q: Tensor) -> Tensor:
        return flashtile.attention_varlen(q, **given)

    _, tangent = torch.func.jvp(attend, (q.detach(),), (torch.ones_like(q),))
    step = 1e-6
    torch.testing.assert_close(tangent, (attend(q + step) - attend(q - step)) / (2 * step), atol=1e-8, rtol=1e-6)
    (dq,) = torch.autograd.grad(attend(q).square().sum(), q, create_graph=True)
    (second,) = torch.autograd.grad(dq.sum(), q)
    moved = [torch.autograd.grad(attend(x).square().sum(), x)[0] for x in (q + step, q - step)]
    torch.testing.assert_close(second, (moved[0] - moved[1]) / (2 * step), atol=1e-7, rtol=1e-5)


@pytest.mark.parametrize(
    ("used", "accepted"), [([3, 0, 3, 10], "0 to"), ([1, 2, 3], "first dimension 4"), ([-1, 0, 0, 0], "0 to")]
)
def test_wrong_numbers_of_rows(used: list[int], accepted: str) -> None:
    with pytest.raises(ArgumentError, match=accepted) as error:
        packed_case(seqused_q=torch.tensor(used, dtype=torch.int32)).run()
    assert error.value.argument == "seqused_q"


def test_one_length_for_all_sequences() -> None:
    cache, q = torch.randn(2, 2, 9, 8), torch.randn(2, 4, 1, 8)
    lengths = torch.tensor([5, 5], dtype=torch.int32)
    found, expected = (flashtile.attention_with_kvcache(q, cache, cache, cache_seqlens=n) for n in (5, lengths))
    assert torch.equal(found, expected)
    for wrong in (-1, 10, True, 2**31, 2.0):
        with pytest.raises(ArgumentError, match="`cache_seqlens`"):
            flashtile.attention_with_kvcache(q, cache, cache, cache_seqlens=wrong)


@pytest.mark.parametrize("backend", EVERY)
@pytest.mark.parametrize("softcap", [1e-45, 1e-40, 1e-38, 2.4e38, 3.4e38])
def test_ends_of_softcap(softcap: float, backend: str) -> None:
    """A cap that changes nothing, and one that leaves no score."""
    q, k, v = (torch.randn(1, 2, n, 8) for n in (3, 5, 5))
    out = flashtile.attention(q, k, v, softcap=softcap, backend=backend)
    expected = flashtile.attention(q, k, v, scale=0.0 if softcap < 1 else None, backend="reference")
    torch.testing.assert_close(out, expected)
