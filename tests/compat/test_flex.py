"""`flex_attention` against PyTorch's, which runs the same functions by torch.vmap."""

import functools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from flash_formula import assert_same, gradients, leaves, randn
from torch import Tensor
from torch.nn.attention import flex_attention as original
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

import flashtile
from flashtile.compat.torch import AuxOutput, AuxRequest, flex, flex_attention
from flashtile.errors import ArgumentError

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile", "ignore:return_lse")
B, H, L, S, E = 2, 4, 37, 50, 8
SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625])
TABLE = randn(H, 2 * S, seed=7)
DOCUMENTS = torch.tensor([0] * 20 + [1] * 13 + [2] * 17)
PREFIX = torch.tensor([11, 30])

SCORES: dict[str, Any] = {
    "none": None,
    "alibi": lambda score, b, h, i, j: score + SLOPES[h] * (j - i),
    "softcap": lambda score, b, h, i, j: 3 * torch.tanh(score / 3),
    "relative": lambda score, b, h, i, j: score + TABLE[h, i - j + S],
    "local": lambda score, b, h, i, j: torch.where((i - j).abs() <= 9, score, -torch.inf),
}
MASKS: dict[str, Any] = {
    "none": None,
    "causal": lambda b, h, i, j: i >= j,
    "window": lambda b, h, i, j: (i >= j) & (i - j <= 9),
    "document": lambda b, h, i, j: DOCUMENTS[i] == DOCUMENTS[j],
    "prefix": lambda b, h, i, j: (j < PREFIX[b]) | (i >= j),
    "heads": lambda b, h, i, j: (i - j) % (h + 1) == 0,
    "neighborhood": lambda b, h, i, j: ((i // 7 - j // 7).abs() <= 1) & ((i % 7 - j % 7).abs() <= 2),
}


@pytest.fixture(autouse=True)
def uncompiled() -> Iterator[None]:
    """PyTorch's function has a backward pass on CPUs that only its check of devices refuses."""
    with mock.patch.object(original, "_validate_device"), torch.compiler.set_stance("force_eager"):
        yield


def inputs(heads: int = H) -> tuple[Tensor, Tensor, Tensor]:
    return randn(B, H, L, E), randn(B, heads, S, E, seed=1), randn(B, heads, S, 5, seed=2)


def created(fn: Any) -> BlockMask | None:
    return None if fn is None else create_block_mask(fn, B, H, L, S, device="cpu", BLOCK_SIZE=(16, 8))


@pytest.mark.parametrize(
    ("score", "mask"),
    [*((x, "none") for x in SCORES), *(("none", x) for x in MASKS if x != "none"), ("alibi", "document"),
     ("relative", "prefix")],
)  # fmt: skip
def test_agrees(score: str, mask: str) -> None:
    """Outputs, log-sum-exp and gradients of both. Most run in `tiled`, which compiles no kernel for a new function."""
    backend = "auto" if (score, mask) == ("alibi", "document") else "tiled"
    settings: dict[str, Any] = {"score_mod": SCORES[score], "block_mask": created(MASKS[mask]), "scale": 0.4}
    results = []
    for function in (flex_attention, original.flex_attention):
        tensors = leaves(*inputs())
        with mock.patch.object(flex, "attention", functools.partial(flashtile.attention, backend=backend)):
            out, lse = function(*tensors, **settings, return_lse=True)
        results.append([out, lse, *gradients((out * randn(*out.shape, seed=3)).sum() + lse.sum(), tensors)])
    assert_same(*zip(*results, strict=True))


def test_grouped_heads_and_one_sequence_of_keys() -> None:
    q, k, v = inputs(heads=2)
    mask = created(MASKS["prefix"])
    found, expected = (f(q, k, v, None, mask, enable_gqa=True) for f in (flex_attention, original.flex_attention))
    assert_same((found, expected))
    found, expected = (
        f(q, k[:1], v[:1], SCORES["alibi"], mask, enable_gqa=True) for f in (flex_attention, original.flex_attention)
    )
    assert_same((found, expected))


def test_auxiliary_results() -> None:
    tensors = inputs()
    mask = created(lambda b, h, i, j: (i >= 3) & (j < 20))  # rows that see nothing
    out, aux = flex_attention(*tensors, block_mask=mask, return_aux=AuxRequest(lse=True))
    expected, theirs = original.flex_attention(*tensors, block_mask=mask, return_aux=original.AuxRequest(lse=True))
    assert isinstance(aux, AuxOutput)
    assert_same((out, expected), (aux.lse, theirs.lse))
    assert aux.lse is not None
    assert aux.lse[:, :, :3].isneginf().all()
    assert flex_attention(*tensors, return_aux=AuxRequest())[1] == AuxOutput(None, None)


@pytest.mark.parametrize(("score", "mask"), [("none", "none"), ("alibi", "window"), ("relative", "heads")])
def test_largest_scores(score: str, mask: str) -> None:
    """Over several tiles, of grouped heads, against all scores; the first rows of the second sequence see nothing."""
    q, k, v = randn(B, H, 300, E), randn(B, 2, 600, E, seed=1), randn(B, 2, 600, 5, seed=2)
    score_mod, visible = SCORES[score], MASKS[mask]
    if score == "relative":
        table = randn(H, 900, seed=7)
        score_mod = lambda s, b, h, i, j: s + table[h, i - j + 599]  # noqa: E731

    def mask_mod(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (visible is None or visible(b, h, i, j)) & ((b == 0) | (i >= 4))

    block_mask = create_block_mask(mask_mod, B, H, 300, 600, device="cpu", BLOCK_SIZE=(16, 8))
    request = original.AuxRequest(max_scores=True)
    aux = flex_attention(*leaves(q, k, v), score_mod, block_mask, enable_gqa=True, return_aux=request)[1]
    index = [torch.arange(n).view(*(-1 if d == m else 1 for d in range(4))) for m, n in enumerate((B, H, 300, 600))]
    s = (q @ k.repeat_interleave(2, dim=1).mT) * E**-0.5
    s = s if score_mod is None else score_mod(s, *index)
    assert aux.lse is None
    assert not aux.max_scores.requires_grad
    assert_same((aux.max_scores, s.masked_fill(~mask_mod(*index), -torch.inf).amax(dim=-1)))
    assert aux.max_scores[1, :, :4].isneginf().all()


def test_largest_scores_in_a_graph() -> None:
    request = original.AuxRequest(max_scores=True)
    compiled = torch.compile(lambda *x: flex_attention(*x, return_aux=request), backend="eager", fullgraph=True)
    with torch.compiler.set_stance("default"), pytest.raises(Exception, match="return_aux"):
        compiled(*inputs())


def test_compiled() -> None:
    """As programs write it for PyTorch: the function compiled, and functions and lists as they are."""
    tensors, settings = inputs(), {"score_mod": SCORES["relative"], "block_mask": created(MASKS["document"])}
    expected = flex_attention(*tensors, **settings)
    with torch.compiler.set_stance("default"):
        assert torch.equal(torch.compile(flex_attention, backend="eager")(*tensors, **settings), expected)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_largest_scores_as_pytorch_has_them() -> None:
    """PyTorch has none on a CPU."""
    tensors = [x.float().cuda() for x in inputs()]
    mask = create_block_mask(MASKS["window"], B, H, L, S, device="cuda")
    request = original.AuxRequest(lse=True, max_scores=True)
    found, expected = (
        f(*tensors, None, mask, return_aux=request)[1] for f in (flex_attention, original.flex_attention)
    )
    torch.testing.assert_close(found.max_scores, expected.max_scores, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(found.lse, expected.lse, atol=1e-4, rtol=1e-4)


def test_tensors_that_a_function_reads_have_gradients() -> None:
    results = []
    for by_function in (True, False):
        q, k, v, table = leaves(*inputs(), TABLE)
        if by_function:
            out = flex_attention(q, k, v, lambda score, b, h, i, j, t=table: score + t[h, i - j + S])
        else:
            distance = torch.arange(L)[:, None] - torch.arange(S) + S
            out = ((q @ k.mT) * E**-0.5 + table[:, distance]).softmax(-1) @ v
        results.append([out, *gradients(out, (q, k, v, table))])
    assert_same(*zip(*results, strict=True))


def test_lists_count_also_without_a_function() -> None:
    """PyTorch without compilation would show every pair of such a mask."""
    counts, places = torch.tensor([[[1, 2, 0]]]), torch.tensor([[[[1, 0], [0, 1], [0, 1]]]])
    mask = BlockMask.from_kv_blocks(counts, places, BLOCK_SIZE=(16, 32), seq_lengths=(L, S))
    visible = torch.tensor([[False, True], [True, True], [False, False]])
    visible = visible[(torch.arange(L) // 16)[:, None], torch.arange(S) // 32]
    mine, theirs = leaves(*inputs()), leaves(*inputs())
    out, expected = flex_attention(*mine, block_mask=mask), flashtile.attention(*theirs, mask=visible[None, None])
    assert_same((out, expected), *zip(gradients(out, mine), gradients(expected, theirs), strict=True))


def test_compiled_with_functions_of_ours() -> None:
    score_mod, mask = flashtile.ScoreMod(SCORES["alibi"]), flashtile.BlockMask.of_flex(created(MASKS["document"]))
    tensors = inputs()

    def call(*x: Tensor) -> Any:
        return flex_attention(*x, score_mod=score_mod, block_mask=mask, return_lse=True)

    expected = call(*tensors)
    with torch.compiler.set_stance("default"):
        found = torch.compile(call, backend="aot_eager", fullgraph=True)(*tensors)
    assert_same(*zip(found, expected, strict=True))


def refused(argument: str, make: Callable[[], Any]) -> None:
    with pytest.raises(ArgumentError, match=f"`{argument}`"):
        make()


@pytest.mark.filterwarnings("ignore:attention on cpu runs in the `tiled` backend")
def test_refused() -> None:
    q, k, v = inputs()
    refused("enable_gqa", lambda: flex_attention(q, k[:, :2], v[:, :2]))
    refused("return_lse", lambda: flex_attention(q, k, v, return_lse=True, return_aux=AuxRequest()))
    refused("kernel_options", lambda: flex_attention(q, k, v, kernel_options="fast"))
    refused("query", lambda: flex_attention(q[0], k, v))
    refused("mask", lambda: flex_attention(q, k[:, :, :-9], v[:, :, :-9], block_mask=created(MASKS["causal"])))
    sliced = create_block_mask(MASKS["causal"], None, None, L, S, device="cpu", BLOCK_SIZE=(16, 8))[:, :, :3]
    with pytest.raises(ArgumentError, match="sliced BlockMask"):
        flex_attention(q, k, v, block_mask=sliced)
    flex_attention(q, k, v, kernel_options={"BLOCK_M": 64})
