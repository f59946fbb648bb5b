"""Parts of sharded calls have each visible pair once."""

import itertools
import random
from itertools import accumulate

import pytest
import torch
from torch import Tensor

from flashtile.call.call import Settings
from flashtile.call.window import Window
from flashtile.distributed import parts, visible
from flashtile.distributed.layout import Layout, Piece, Placement
from flashtile.distributed.packed import packed_parts
from flashtile.distributed.parts import Part, Whole
from flashtile.distributed.visible import Document, needed_keys

WINDOWS = {
    "full": Window(), "causal": Window(right=0), "top-left": Window(top_left=True), "window": Window(7, 3),
    "sliding": Window(6, 0), "left": Window(5), "far": Window(20, -3), "chunk": Window(right=0, chunk=9),
}  # fmt: skip


def whole_call(window: Window, ranks: int, kind: str, rows: int, keys: int, *, packed: bool, positions: bool) -> Whole:
    settings = Settings(1.0, None, window.left, window.right, window.top_left, window.chunk)
    documents = [Document(Piece(0, rows), Piece(0, keys))]
    if packed:
        cuts = [sorted(random.Random(rows).sample(range(n + 1), 2)) for n in (rows, keys)]
        bounds = [[0, *cut, n] for cut, n in zip(cuts, (rows, keys), strict=True)]
        documents = [
            Document(Piece(*r), Piece(*k))
            for r, k in zip(itertools.pairwise(bounds[0]), itertools.pairwise(bounds[1]), strict=True)
        ]
    placements = [Placement.of(Layout(kind, n, ranks)) for n in (rows, keys)]  # type: ignore[arg-type]
    return Whole(settings, *placements, tuple(documents), packed, positions)


def sees(window: Window, rows: Tensor, keys: Tensor, diagonal: int) -> Tensor:
    """The visible pairs `[rows, keys]` of places in a sequence."""
    i, j = rows[:, None], keys[None, :]
    found = torch.ones(len(rows), len(keys), dtype=torch.bool)
    if window.left is not None:
        found &= j >= i + diagonal - window.left
    if window.right is not None:
        found &= j <= i + diagonal + window.right
    if window.top_left:
        found &= j <= i
    if window.chunk is not None:
        found &= (i + diagonal).div(window.chunk, rounding_mode="floor") == j.div(window.chunk, rounding_mode="floor")
    return found


def expected(whole: Whole) -> Tensor:
    """The visible pairs of the whole call."""
    found = torch.zeros(whole.rows.length, whole.keys.length, dtype=torch.int64)
    for document in whole.documents:
        i, j = (torch.arange(piece.length) for piece in document)
        found[slice(*document.rows), slice(*document.keys)] = sees(
            whole.settings.window, i, j, document.diagonal
        ).long()
    return found


def places(pieces: tuple[Piece, ...]) -> Tensor:
    """The place in the whole of each row of a rank."""
    return torch.cat([torch.arange(*piece) for piece in pieces] or [torch.empty(0, dtype=torch.int64)])


def pairs_of(part: Part) -> Tensor:
    """The visible pairs of a part, as a backend computes them from its settings."""
    s, rows, keys = part.settings, part.rows.stop - part.rows.start, part.keys.stop - part.keys.start
    i, j = torch.arange(rows) + s.i0, torch.arange(keys) + s.j0
    return sees(s.window, i, j, s.diagonal + keys - rows)


def covered(whole: Whole, by_owner: dict[int, Placement], rank: int) -> Tensor:
    """Count the parts of a rank that have each pair; the owners' tensors have the keys of `by_owner`."""
    count = torch.zeros(whole.rows.length, whole.keys.length, dtype=torch.int64)
    rows = places(whole.rows.by_rank[rank])
    for owner, keys in by_owner.items():
        at = places(keys.by_rank[owner])
        for part in parts.parts(whole._replace(keys=keys), rank, owner):
            count[rows[part.rows, None], at[part.keys]] += pairs_of(part).long()
    return count


@pytest.mark.parametrize("kind", ["contiguous", "zigzag"])
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("positions", [False, True])
def test_each_visible_pair_is_in_one_part(
    window: str, kind: str, packed: bool, positions: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(visible, "BLOCK", 4)
    parts.parts.cache_clear()
    needed_keys.cache_clear()
    for ranks, (rows, keys) in itertools.product((2, 3, 4), ((48, 48), (53, 41), (2, 30), (30, 2))):
        whole = whole_call(WINDOWS[window], ranks, kind, rows, keys, packed=packed, positions=positions)
        needed = needed_keys(whole.settings.window, whole.documents, whole.rows, keys).keys
        for rank in range(ranks):
            own = places(whole.rows.by_rank[rank])
            for by_owner in (dict.fromkeys(range(ranks), whole.keys), {rank: needed}):  # the ring's, and gather's
                assert torch.equal(covered(whole, by_owner, rank)[own], expected(whole)[own])
    parts.parts.cache_clear()
    needed_keys.cache_clear()


@pytest.mark.parametrize("kind", ["contiguous", "zigzag"])
@pytest.mark.parametrize("window", ["full", "causal", "sliding"])
def test_one_packed_call_has_the_pairs_of_its_parts(window: str, kind: str) -> None:
    ones = 0
    for ranks, rows, rank in itertools.product((2, 3, 4), (48, 53), range(4)):
        whole = whole_call(WINDOWS[window], ranks, kind, rows, rows, packed=True, positions=False)
        needed = needed_keys(whole.settings.window, whole.documents, whole.rows, rows).keys
        if rank >= ranks or (found := packed_parts(whole._replace(keys=needed), rank, rank)) is None:
            continue
        own, count = places(whole.rows.by_rank[rank]), torch.zeros(rows, rows, dtype=torch.int64)
        of_rows = torch.cat([own[run.here] for run in found.rows])
        of_keys = torch.cat([places(needed.by_rank[rank])[run.here] for run in found.keys])
        for r, k in zip(itertools.pairwise(found.cu_seqlens_q), itertools.pairwise(found.cu_seqlens_k), strict=True):
            of_q, of_k = torch.arange(r[1] - r[0]), torch.arange(k[1] - k[0])
            pairs = sees(found.settings.window, of_q, of_k, len(of_k) - len(of_q))
            count[of_rows[slice(*r), None], of_keys[slice(*k)]] += pairs.long()
        assert torch.equal(count[own], expected(whole)[own])
        ones += 1
    assert ones > 0


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_a_causal_ring_has_one_part_in_each_step(ranks: int) -> None:
    """As long as nothing but the window depends on positions."""
    whole = whole_call(WINDOWS["causal"], ranks, "zigzag", 4096, 4096, packed=False, positions=False)
    counts = [len(parts.parts(whole, rank, owner)) for rank in range(ranks) for owner in range(ranks)]
    assert counts == [1] * ranks**2
    assert len(parts.parts(whole._replace(positions=True), 0, 0)) == 3


def test_needed_keys_of_a_window_are_a_rank_s_own_and_a_few_more() -> None:
    whole = whole_call(Window(255, 0), 4, "contiguous", 4096, 4096, packed=False, positions=True)
    needed, once = needed_keys(whole.settings.window, whole.documents, whole.rows, 4096)
    starts = [0, *(1024 * n - 256 for n in range(1, 4))]
    assert needed.by_rank == tuple(
        (Piece(start, stop),) for start, stop in zip(starts, accumulate([1024] * 4), strict=True)
    )
    assert once
