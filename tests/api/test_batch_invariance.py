"""`batch_invariant=True` on a CPU: bits of rows among other neighbors, cut elsewhere, in pages and when decoding."""

from typing import Any

import pytest
import torch
from neighbors import Sequence, decoded, neighborhoods, packed, same_bits

import flashtile
from flashtile.backend.cpu import targets

FLOAT32, BFLOAT16 = torch.float32, torch.bfloat16
LENGTH = 1620  # keys of more than one recent sum of the CPU's kernels
CUTS = ((0, 16), (16, 400), (400, 1600), (1520, 1536), (1500, 1620))
WINDOW = {"window": (700, 0)}
WIDTHS = (None, *(x for x in ("amx-emulated",) if x in targets.usable_widths()))
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": WINDOW,
    "features": {"softcap": 5.0, "sinks": torch.tensor([0.5, -1.0, 0.0, 2.0]), "window": (40, None)},
    "chunks": {"attention_chunk": 300},
    "score_mod": {"score_mod": lambda score, b, h, i, j: score + 0.1 * h},
}


@pytest.fixture(params=WIDTHS, ids=str)
def width(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str | None:
    if request.param is not None:
        monkeypatch.setenv(targets.VECTORS_VARIABLE, request.param)
    return request.param  # type: ignore[no-any-return]


def differing_cuts(sequence: Sequence, options: dict[str, Any], page_size: int | None = None) -> list[tuple[int, int]]:
    """The cuts whose rows have other bits than in one call with all of them."""
    out, lse = packed(sequence, 0, LENGTH, [], **options)
    found = []
    for n, (start, stop) in enumerate(CUTS):
        around = neighborhoods(3, 5, n)[n % 3]
        rows = packed(sequence, start, stop, around, page_size if n % 2 else None, **options)
        if not same_bits(rows, (out[start:stop], lse[:, start:stop])):
            found.append((start, stop))
    return found


@pytest.mark.parametrize(("features", "dtype"), [("plain", BFLOAT16), ("window", FLOAT32), ("window", BFLOAT16)])
def test_cuts(features: str, dtype: torch.dtype, width: str | None) -> None:
    assert differing_cuts(Sequence.random(LENGTH, (2, 1), 16, dtype), FEATURES[features], page_size=48) == []


@pytest.mark.parametrize("features", ["features", "chunks", "score_mod"])
def test_cuts_with_features(features: str) -> None:
    assert differing_cuts(Sequence.random(LENGTH, (4, 2), 12, FLOAT32), FEATURES[features], page_size=20) == []


def decoded_everywhere(sequence: Sequence, position: int, options: dict[str, Any]) -> list[Any]:
    """The row at a position from caches of several batches and capacities, from pages, and from dense tensors."""
    rows = [decoded(sequence, position, lengths, capacity, **options) for lengths, capacity in BATCHES]
    around = [(1, 9), (1, 1900)]
    for page_size in (None, 48):
        call = {"max_seqlen_q": 1} | options
        rows.append(packed(sequence, position, position + 1, around, page_size, **call))
    q, k, v = (x[:n].transpose(0, 1)[None] for x, n in zip(sequence, (None, position + 1, position + 1), strict=True))
    given = {"batch_invariant": True, "causal": True} | options
    out, lse = flashtile.attention(q[:, :, [position]], k, v, return_lse=True, **given)
    return [*rows, (out[0].transpose(0, 1), lse[0])]


BATCHES: tuple[tuple[list[int], int], ...] = (([], 1700), ([1, 129], 1800), ([2000], 2100), ([7] * 63, 1700))


@pytest.mark.parametrize(
    ("features", "dtype", "position"),
    [("plain", BFLOAT16, 5), ("plain", FLOAT32, 767), ("features", FLOAT32, 1600), ("score_mod", BFLOAT16, 1600)],
)
def test_decoding(position: int, features: str, dtype: torch.dtype) -> None:
    sequence = Sequence.random(LENGTH, (4, 2), 16, dtype)
    first, *others = decoded_everywhere(sequence, position, FEATURES[features])
    assert [same_bits(x, first) for x in others] == [True] * len(others)


def test_bits_change_without_it() -> None:
    """The same comparison finds other bits in a batch of another size."""
    sequence = Sequence.random(LENGTH, (4, 2), 32, FLOAT32)
    first, *others = decoded_everywhere(sequence, 1600, {"batch_invariant": False})
    assert not all(same_bits(x, first) for x in others)


def test_one_token_without_max_seqlen_q() -> None:
    """Other batches of such calls have more tokens: it is no decoding."""
    sequence = Sequence.random(200, (2, 1), 32, FLOAT32)
    out, lse = packed(sequence, 0, 200, [])
    assert same_bits(packed(sequence, 150, 151, []), (out[150:151], lse[:, 150:151]))


def test_repeated_calls_of_a_growing_cache() -> None:
    """A recorded launch has the splits of the lengths at hand."""
    sequence = Sequence.random(LENGTH, (2, 2), 32, FLOAT32)
    for position in (700, 1600, 30):
        found = [decoded(sequence, position, [], 1700) for _ in range(3)]
        assert all(same_bits(x, decoded(sequence, position, [1650], 1660)) for x in found)


def test_backends_that_decline() -> None:
    q = torch.randn(1, 2, 20, 16)
    for backend in ("tiled", "reference"):
        with pytest.raises(flashtile.BackendError, match="PyTorch multiplies"):
            flashtile.attention(q, q, q, batch_invariant=True, backend=backend)
    with pytest.raises(flashtile.BackendError, match="forward mode"):
        torch.func.jvp(lambda x: flashtile.attention(x, q, q, batch_invariant=True), (q,), (q,))


def test_explanation() -> None:
    q = torch.empty(1, 2, 20, 16)
    found = flashtile.explain(q, q, q, batch_invariant=True, num_splits=4)
    assert "batch_invariant" in found.problem
    assert found.unsplit == "with batch_invariant, positions alone split the keys"
    assert found.tangents == "none"


def test_compiled() -> None:
    sequence = Sequence.random(300, (2, 1), 32, FLOAT32)
    q, k, v = (x.transpose(0, 1)[None] for x in sequence)

    @torch.compile(fullgraph=True, backend="eager")
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return flashtile.attention(q, k, v, causal=True, batch_invariant=True)

    assert torch.equal(attend(q, k, v), packed(sequence, 0, 300, [])[0].transpose(0, 1)[None])
