"""Mask functions: what one is given and may read, how it goes with other features, and what is refused."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from checking import BACKENDS, assert_right, dense_case, offsets, tile_size
from torch import Tensor

import flashtile
from flashtile import ArgumentError, BackendError, MaskMod, ScoreMod
from flashtile.errors import AttentionWarning
from flashtile.testing.case import Case, MaskFunction, ScoreFunction
from flashtile.testing.mask_functions import allowed_distances, documents
from flashtile.testing.score_functions import tempered_table

Q, K, V = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 7, 8), torch.randn(2, 2, 7, 6)
ALL = ("cpu", *BACKENDS)


def everywhere(fn: Callable[..., Tensor], *sizes: int) -> Tensor:
    """A mask function's results for all pairs, `[B, H, Sq, Sk]`."""
    indices = [torch.arange(n).view([-1 if d == dim else 1 for d in range(4)]) for dim, n in enumerate(sizes)]
    return fn(*indices).expand(sizes)


def of_all_indices(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return ((3 * b + 5 * h + 7 * i + 11 * j) % 13 < 6) | (j == 0)


# What a function is given --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ALL)
def test_indices(backend: str) -> None:
    """Sequence, query head (not the key's), query and key, in this order; a tile is as a part of the whole."""
    mask = everywhere(of_all_indices, 2, 4, 5, 7)
    with tile_size(2, 3, scores=12):
        found = flashtile.attention(Q, K, V, mask=of_all_indices, backend=backend)
        torch.testing.assert_close(found, flashtile.attention(Q, K, V, mask=mask, backend=backend))


@pytest.mark.parametrize("backend", ALL)
def test_indices_are_local_to_a_packed_sequence(backend: str) -> None:
    q, k, v, dout = torch.randn(5, 4, 8), torch.randn(7, 2, 8), torch.randn(7, 2, 8), torch.randn(5, 4, 8)
    cu = {"cu_seqlens_q": offsets(2, 3), "cu_seqlens_k": offsets(4, 3)}
    assert_right(Case("attention_varlen", {"q": q, "k": k, "v": v, "mask": MaskFunction(of_all_indices)} | cu, dout))


def test_parts_of_a_larger_call() -> None:
    """Indices count from the whole call's first sequence, head, row and key, as its settings say."""
    from flashtile.call.call import Call, Settings, Tensors
    from flashtile.dispatch.operators import OPERATORS

    mod, mask = MaskMod(of_all_indices), everywhere(of_all_indices, 3, 6, 7, 10)[1:, 2:, 2:, 3:]
    for backend in ALL:
        origin = Settings(scale=1.0, mask_mod=mod.key, b0=1, h0=2, i0=2, j0=3, num_heads=6, backend=backend)
        found, expected = (
            OPERATORS["dense"].forward(*OPERATORS["dense"].arguments(Call(Tensors(Q, K, V, x), settings)))
            for x, settings in ((None, origin), (mask, Settings(scale=1.0, backend=backend)))
        )
        torch.testing.assert_close(found, expected)


# With other features -------------------------------------------------------------------------------------------------

IDS, ALLOWED = torch.randint(0, 3, (24,)), torch.rand(4, 17) < 0.7
TABLES = (1 + 0.2 * torch.randn(4), torch.randn(4, 17))


MASKS = {torch.float32: MaskFunction(documents, (IDS,)), torch.float64: MaskFunction(allowed_distances, (ALLOWED,))}


@pytest.mark.parametrize(
    ("backend", "dtype"), [("cpu", torch.float32), *((x, dtype) for x in BACKENDS for dtype in MASKS)]
)
def test_with_a_score_mod_and_all_others(backend: str, dtype: torch.dtype) -> None:
    """Both have tensors; those of the score_mod get gradients."""
    others = {"bias": torch.randn(1, 4, 11, 13), "alibi_slopes": torch.rand(4), "sinks": torch.randn(4)}
    others = {name: x.to(dtype) for name, x in others.items()} | {"softcap": 2.0, "window": (9, 3)}
    others |= {"dropout_p": 0.3, "dropout_seed": 5}
    score_mod = ScoreFunction(tempered_table, tuple(x.to(dtype) for x in TABLES))
    sizes = {"num_heads_q": 4, "num_heads_kv": 2, "seqlen_q": 11, "seqlen_k": 13, "dtype": dtype}
    assert_right(dense_case(**sizes, mask=MASKS[dtype], score_mod=score_mod, **others), backend)


@pytest.mark.parametrize("backend", ALL)
def test_a_nan_in_a_hidden_key_does_not_show(backend: str) -> None:
    """In out, lse, dk and dv, although its products are computed; with a score_mod, whose derivative there is NaN."""
    clean, poisoned = K.clone(), K.clone()
    poisoned[:, :, 3] = torch.nan
    results = []
    for k in (clean, poisoned):
        leaves = [x.clone().requires_grad_() for x in (Q, k, V)]
        out, lse = flashtile.attention(
            *leaves, mask=lambda b, h, i, j: j != 3, score_mod=lambda s, b, h, i, j: s.abs() + s, return_lse=True,
            backend=backend,
        )  # fmt: skip
        gradients = torch.autograd.grad((out * torch.arange(6)).sum() + lse.sum(), leaves[1:])
        results.append((out, lse, *(torch.cat((x[:, :, :3], x[:, :, 4:]), 2) for x in gradients)))
    torch.testing.assert_close(*results)


def test_tensors_have_no_gradient() -> None:
    """Visibility is a step: its derivative is 0 or does not exist."""
    reach = torch.full((4,), 2.5, requires_grad=True)
    q = Q.clone().requires_grad_()
    for mask in (lambda b, h, i, j: i - j < reach[h], MaskMod(lambda b, h, i, j, x: i - j < x[h], (reach,))):
        flashtile.attention(q, K, V, mask=mask, backend="tiled").sum().backward()
    assert reach.grad is None
    _, tangent = torch.func.jvp(lambda q: flashtile.attention(q, K, V, mask=mask, backend="tiled"), (Q,), (Q,))
    assert tangent.any()


def test_a_tensor_that_changes_in_place() -> None:
    """The function is the same, and so is what was compiled for it."""
    lengths = torch.tensor([7, 3])
    mod = MaskMod(lambda b, h, i, j, n: j < n[b], (lengths,))
    for first in (7, 2, 4):
        lengths[0] = first
        mask = everywhere(lambda b, h, i, j: j < lengths[b], 2, 4, 5, 7)
        torch.testing.assert_close(flashtile.attention(Q, K, V, mask=mod), flashtile.attention(Q, K, V, mask=mask))


# Which functions are the same, and copies ----------------------------------------------------------------------------


def test_keys() -> None:
    def within(n: int) -> Callable[..., Tensor]:
        return lambda b, h, i, j: i - j < n

    assert MaskMod(within(2)).key == MaskMod(within(2)).key
    assert MaskMod(within(2)).key != MaskMod(within(3)).key
    assert str(MaskMod(within(2))) == "q_idx - k_idx < 2"
    assert repr(MaskMod(within(2))) == "MaskMod(q_idx - k_idx < 2)"
    assert str(MaskMod(lambda b, h, i, j: (i < 3) == (j < 3))) == "(q_idx < 3) == (k_idx < 3)"


def test_copies() -> None:
    mod = MaskMod.of(lambda b, h, i, j: IDS[i] == IDS[j])
    expected = flashtile.attention(Q, K, V, mask=mod, backend="tiled")
    for copied in (copy.copy(mod), copy.deepcopy(mod), pickle.loads(pickle.dumps(mod))):
        assert isinstance(copied, MaskMod)
        assert copied.key == mod.key
        assert torch.equal(flashtile.attention(Q, K, V, mask=copied, backend="tiled"), expected)


def test_formulas_in_other_functions() -> None:
    """A function that was traced, or comes from another process, may be called by one that is traced."""
    mask = pickle.loads(pickle.dumps(MaskMod.of(lambda b, h, i, j: (IDS[i] == IDS[j]) & (i < IDS.shape[0] - 20))))
    weight = torch.rand(4)
    score = pickle.loads(
        pickle.dumps(ScoreMod.of(lambda s, b, h, i, j: (s * weight[h - 4]).half() + (i // 2 % 3).float()))
    )

    def both(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return torch.where(mask.fn(b, h, i, j, IDS), score.fn(s, b, h, i, j, weight), s)

    mod = ScoreMod.of(both)
    assert mod.traced
    arguments = (Q, *everywhere_indices(), *mod.tensors)
    torch.testing.assert_close(mod.fn(*arguments), both(*arguments[:5]))


def everywhere_indices() -> list[Tensor]:
    sizes = Q.shape
    return [torch.arange(n).view([-1 if d == dim else 1 for d in range(4)]) for dim, n in enumerate(sizes)]


# What cannot be traced, and what is refused --------------------------------------------------------------------------


def is_in(allowed: Tensor) -> Callable[..., Tensor]:
    return lambda b, h, i, j: torch.isin(i - j, allowed)


def test_a_function_that_cannot_be_traced() -> None:
    """It runs in torch operations, with one warning."""
    allowed = torch.tensor([0, 1, 3])
    expected = flashtile.attention(Q, K, V, mask=everywhere(is_in(allowed), 2, 4, 5, 7))
    told = r"the mask function cannot be traced: line \d+, .*`isin` is not an operation that can be traced"
    with pytest.warns(AttentionWarning, match=told) as warned:
        found = [flashtile.attention(Q, K, V, mask=is_in(allowed)) for _ in range(2)]
    assert len(warned) == 1
    torch.testing.assert_close(found, [expected, expected])
    assert MaskMod.of(is_in(allowed)).tensors == (allowed,)
    assert flashtile.explain(Q, K, V, mask=is_in(allowed)).backend == "tiled"
    with pytest.raises(BackendError, match="cpu: the mask function cannot be traced"):
        flashtile.attention(Q, K, V, mask=is_in(allowed), backend="cpu")


@pytest.mark.parametrize("modify", [torch.sinh, torch.tanh], ids=["neither traced", "score_mod traced"])
def test_with_a_score_mod_if_it_cannot_be_traced(modify: Callable[[Tensor], Tensor]) -> None:
    mask = MaskFunction(lambda b, h, i, j, x: torch.isin(i - j, x), (torch.tensor([0, 1, 3]),))
    score_mod = ScoreFunction(lambda s, b, h, i, j, w: modify(s) * w[h], (torch.rand(2),))
    assert_right(dense_case(mask=mask, score_mod=score_mod))


def test_explain() -> None:
    words = str(flashtile.explain(Q, K, V, mask=lambda b, h, i, j: IDS[i] == IDS[j]))
    assert "mask tensor0[q_idx] == tensor0[k_idx]" in words


CHANGED = torch.ones(4, dtype=torch.bool)
REFUSED = [
    (lambda: True, "TypeError"),
    (lambda b, h, i: i > 0, "TypeError"),
    (lambda s, b, h, i, j: s, "TypeError"),
    (lambda b, h, i, j: 1 / 0, "ZeroDivisionError"),
    (lambda b, h, i, j: True, "returned bool"),
    (lambda b, h, i, j: i - j, "a condition: `k_idx <= q_idx`; it returned"),
    (lambda b, h, i, j: (i - j).float(), "a condition"),
    (lambda b, h, i, j: torch.ones(3, 2, dtype=torch.bool), "for a tile [1, 1, 1, 1] it returned [3, 2]"),
    (lambda b, h, i, j: torch.rand(()) < 0.5, "kept[b, h, q_idx, k_idx]"),
    (lambda b, h, i, j: i.add_(1) > j, "`k_idx + 1`, not `k_idx.add_(1)`"),
    (lambda b, h, i, j: CHANGED.logical_not_()[h], "logical_not_"),
]


@pytest.mark.parametrize(("fn", "told"), REFUSED)
@pytest.mark.parametrize("backend", ["reference", "tiled"])
def test_what_is_refused(fn: Any, told: str, backend: str) -> None:
    with pytest.raises(ArgumentError) as raised:
        flashtile.attention(Q, K, V, mask=fn, backend=backend)
    assert raised.value.argument == "mask"
    assert told in str(raised.value)
    assert "a call that works: flashtile.attention(q, k, v, mask=flashtile.MaskMod(" in str(raised.value)
    assert CHANGED.all()


@pytest.mark.parametrize("mask", [3, "causal", [True], ScoreMod(lambda s, b, h, i, j: s)])
def test_what_is_no_mask(mask: Any) -> None:
    with pytest.raises(ArgumentError, match=r"`mask` is .*\n.*a torch.Tensor, a function, a flashtile.MaskMod or None"):
        flashtile.attention(Q, K, V, mask=mask)


def test_tensors_are_checked_like_others() -> None:
    mod = MaskMod(lambda b, h, i, j, n: j < n[b], (torch.ones(2).to_sparse(),))
    with pytest.raises(ArgumentError, match=r"`mask\.tensors\[0\]` is a tensor"):
        flashtile.attention(Q, K, V, mask=mod)
    with pytest.raises(ArgumentError, match=r"`mask\.tensors` is"):
        MaskMod(lambda b, h, i, j, n: j < n[b], torch.ones(2))  # type: ignore[arg-type]
    short, score_mod = torch.ones(6, dtype=torch.bool), ScoreMod(lambda s, b, h, i, j, w: s * w[h], (torch.ones(4),))
    for backend in ALL:
        with pytest.raises(ArgumentError, match=r"`mask\.tensors\[0\]`.*\n.*at least 7 entries.*which k_idx indexes"):
            flashtile.attention(Q, K, V, score_mod=score_mod, mask=lambda b, h, i, j: short[j], backend=backend)
