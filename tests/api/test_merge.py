"""merge_attention: attention over disjoint sets of keys is attention over their union."""

import itertools

import pytest
import torch
from checking import offsets
from torch import Tensor
from torch.autograd import gradcheck

import flashtile
from flashtile import ArgumentError, merge_attention

B, H, SQ, D = 2, 2, 5, 8
INF = torch.inf
Part = tuple[Tensor, Tensor]


def whole(seqlen_k: int = 12, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((B, H, SQ, D), (B, H, seqlen_k, D), (B, H, seqlen_k, D))
    return tuple(torch.randn(shape, generator=generator, dtype=dtype) for shape in shapes)  # type: ignore[return-value]


def parts_of(q: Tensor, k: Tensor, v: Tensor, sizes: tuple[int, ...], **arguments: Tensor) -> list[Part]:
    pairs = zip(k.split(sizes, dim=2), v.split(sizes, dim=2), strict=True)
    return [flashtile.attention(q, k_part, v_part, return_lse=True, **arguments) for k_part, v_part in pairs]


def merge(*parts: Part) -> Part:
    return merge_attention([out for out, _ in parts], [lse for _, lse in parts])


def assert_same(part: Part, other: Part) -> None:
    for x, y in zip(part, other, strict=True):
        torch.testing.assert_close(x, y)


@pytest.mark.parametrize("sizes", [(12,), (6, 6), (1, 0, 11), (3, 4, 5), (1,) * 12])
def test_is_attention_over_the_union(sizes: tuple[int, ...]) -> None:
    q, k, v = whole()
    assert_same(merge(*parts_of(q, k, v, sizes)), flashtile.attention(q, k, v, return_lse=True))


def test_is_associative_and_commutative() -> None:
    a, b, c = parts_of(*whole(), sizes=(3, 4, 5))
    for x, y, z in itertools.permutations((a, b, c)):
        assert_same(merge(x, y, z), merge(a, b, c))
        assert_same(merge(merge(x, y), z), merge(a, b, c))


def test_sink_in_one_part() -> None:
    """A sink is a key without a value: it belongs to one of the parts."""
    (q, k, v), sinks = whole(), torch.tensor([0.5, 2.0])
    first, _ = parts_of(q, k, v, (6, 6), sinks=sinks)
    _, second = parts_of(q, k, v, (6, 6))
    assert_same(merge(first, second), flashtile.attention(q, k, v, sinks=sinks, return_lse=True))


def test_large_differences_of_lse() -> None:
    """No overflow: a part whose lse is far smaller has no weight, however large the numbers are."""
    out = torch.ones(1, 1, 1, 2)
    for low, high in ((-1e4, 1e4), (0.0, 3e38), (-3e38, 0.0)):
        lses = [torch.full((1, 1, 1), x) for x in (low, high)]
        assert_same(merge_attention([out, 2 * out], lses), (2 * out, lses[1]))


def test_parts_that_saw_nothing() -> None:
    a, b = parts_of(*whole(), sizes=(6, 6))
    empty = torch.zeros_like(a[0]), torch.full_like(a[1], -INF)
    assert_same(merge(a, empty, b), merge(a, b))
    assert_same(merge(empty, empty), empty)


def test_infinite_lse_is_not_nan() -> None:
    """A row with a score of +inf has lse +inf: so has the merged one, as the whole call would have."""
    out, lse = torch.ones(1, 1, 1, 2), torch.zeros(1, 1, 1)
    _, merged = merge_attention([out, out], [lse + INF, lse])
    assert merged.item() == INF


def test_nan_of_one_row_stays_there() -> None:
    (a_out, a_lse), b = parts_of(*whole(), sizes=(6, 6))
    a_lse[0, 0, 0] = torch.nan
    out, lse = merge((a_out, a_lse), b)
    assert out[0, 0, 0].isnan().all()
    assert lse[0, 0, 0].isnan()
    out[0, 0, 0] = lse[0, 0, 0] = 0
    assert out.isfinite().all()
    assert lse.isfinite().all()


def test_gradients() -> None:
    """Through both results into all parts, rows that are empty in one part or in every part included."""
    generator = torch.Generator().manual_seed(1)
    outs = [torch.randn(1, 2, 3, 2, generator=generator, dtype=torch.float64) for _ in range(3)]
    lses = [torch.randn(1, 2, 3, generator=generator, dtype=torch.float64) for _ in range(3)]
    lses[0][0, 0, 0] = -INF
    everywhere = torch.tensor([False, False, True]).expand(1, 2, 3)

    def call(*tensors: Tensor) -> Part:
        given = [torch.where(everywhere, -INF, lse) for lse in tensors[3:]]
        given[0] = torch.where(lses[0] == -INF, -INF, given[0])
        out, lse = merge_attention(tensors[:3], given)
        return out, lse.masked_fill(lse == -INF, 0.0)

    finite = [torch.where(lse == -INF, 0.0, lse) for lse in lses]
    assert gradcheck(call, [x.requires_grad_() for x in (*outs, *finite)])


def test_gradients_of_the_whole_call() -> None:
    """Backward through a merge of two calls is backward of the one call."""
    leaves = [x.requires_grad_() for x in whole(dtype=torch.float64)]
    out, lse = flashtile.attention(*leaves, return_lse=True)
    expected = torch.autograd.grad(out.square().sum() + lse.square().sum(), leaves)
    out, lse = merge(*parts_of(*leaves, sizes=(5, 7)))
    found = torch.autograd.grad(out.square().sum() + lse.square().sum(), leaves)
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y)


def test_varlen() -> None:
    """`[T, H, Dv]` and `[H, T]`, the first keys of each sequence merged with the rest."""
    q, k, v = (torch.randn(9, H, D) for _ in range(3))
    cu_q, cu_k = offsets(4, 5), offsets(6, 3)
    first = torch.tensor([0, 1, 6])
    rest = torch.tensor([2, 3, 4, 5, 7, 8])
    expected = flashtile.attention_varlen(q, k, v, cu_q, cu_k, return_lse=True)
    a = flashtile.attention_varlen(q, k[first], v[first], cu_q, offsets(2, 1), return_lse=True)
    b = flashtile.attention_varlen(q, k[rest], v[rest], cu_q, offsets(4, 2), return_lse=True)
    assert_same(merge(a, b), expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_dtypes(dtype: torch.dtype) -> None:
    out, lse = merge(*parts_of(*whole(dtype=dtype), sizes=(5, 7)))
    assert out.dtype is dtype
    assert lse.dtype is (torch.float64 if dtype is torch.float64 else torch.float32)


OUT, LSE = torch.zeros(2, 2, 5, 8), torch.zeros(2, 2, 5)


@pytest.mark.parametrize(
    ("argument", "outs", "lses"),
    [
        ("lses", [], []),
        ("lses", [OUT], []),
        ("lses", [OUT], [LSE, LSE]),
        ("outs[0]", [None], [LSE]),
        ("lses[1]", [OUT, OUT], [LSE, 0.0]),
        ("outs[1]", [OUT, OUT[:1]], [LSE, LSE]),
        ("outs[1]", [OUT, OUT.half()], [LSE, LSE]),
        ("outs[1]", [OUT, OUT.to("meta")], [LSE, LSE]),
        ("lses[1]", [OUT, OUT], [LSE, LSE.double()]),
        ("lses[0]", [OUT], [LSE[..., None]]),
        ("lses[0]", [OUT], [LSE.transpose(1, 2)]),
        ("lses[0]", [OUT[0]], [LSE[0]]),
        ("lses", [OUT], LSE),
        ("outs", None, [LSE]),
        ("outs[0]", [OUT.int()], [LSE]),
        ("lses[0]", [OUT], [LSE.int()]),
        ("lses[0]", [OUT], [LSE.to("meta")]),
        ("outs[0]", [OUT.flatten()], [LSE]),
    ],
)
def test_errors(argument: str, outs: list, lses: list) -> None:
    with pytest.raises(ArgumentError) as raised:
        merge_attention(outs, lses)
    assert raised.value.argument == argument
    assert f"`{argument}` is" in str(raised.value)
    assert "accepted: " in str(raised.value)
    assert "a call that works: flashtile.merge_attention(" in str(raised.value)
