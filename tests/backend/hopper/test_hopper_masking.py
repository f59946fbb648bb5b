"""Block ranges of the Hopper kernels, checked pair by pair: the device functions run as plain Python."""

import random
from types import SimpleNamespace
from unittest import mock

import pytest

pytest.importorskip("triton.experimental.gluon")

from flashtile.backend.hopper import support
from flashtile.backend.hopper.kernels.shared import masking
from flashtile.backend.hopper.kernels.shared.masking import MaskBounds

pytestmark = pytest.mark.skipif(support.unsupported() is not None, reason=f"{support.unsupported()}")
PLAIN = SimpleNamespace(minimum=min, maximum=max, cdiv=lambda a, b: -(-a // b))
BLOCK_N = 128


def random_bounds(rng: random.Random) -> tuple[MaskBounds, int, int, int]:
    """Random bounds, lengths and a shift, of a sharded call or not."""
    seqlen_q, seqlen_k = rng.randint(1, 700), rng.randint(1, 700)
    sides = [rng.choice((None, rng.randint(0, 400))) for _ in range(2)]
    top_left = rng.choice((None, None, rng.randint(-200, 200)))
    shift = seqlen_k - seqlen_q + rng.choice((0, rng.randint(-300, 300)))
    return MaskBounds(*sides, top_left), seqlen_q, seqlen_k, shift


def visible(bounds: MaskBounds, row: int, key: int, shift: int) -> bool:
    left = bounds.window_left is None or key >= row + shift - bounds.window_left
    right = bounds.window_right is None or key <= row + shift + bounds.window_right
    return left and right and (bounds.top_left is None or key <= row + bounds.top_left)


@pytest.mark.parametrize("block_m", [64, 128])
@pytest.mark.parametrize("seed", range(12))
def test_rows_of_a_block_of_keys(seed: int, block_m: int) -> None:
    """Every visible pair is visited, blocks without masks are fully visible, and each block of rows counts exactly the
    blocks of keys that visit it.
    """
    rng = random.Random(seed)
    with mock.patch.object(masking, "gl", PLAIN):
        bounds, seqlen_q, seqlen_k, shift = random_bounds(rng)
        visits: dict[int, list[int]] = {m: [] for m in range(-(-seqlen_q // block_m))}
        for n in range(-(-seqlen_k // BLOCK_N)):
            keys = range(n * BLOCK_N, min((n + 1) * BLOCK_N, seqlen_k))
            rows = masking.m_block_range.fn(bounds, keys[0], keys[-1], shift, seqlen_q, block_m)
            for m in visits:
                in_block = range(m * block_m, (m + 1) * block_m)
                if rows.lo <= m < rows.hi:
                    visits[m].append(n)
                pairs = [visible(bounds, i, j, shift) for i in in_block if i < seqlen_q for j in keys]
                assert rows.lo <= m < rows.hi or not any(pairs)
                if rows.lo <= m < rows.hi and rows.full_lo <= m < rows.full_hi:
                    assert all(pairs)
                    assert in_block[-1] < seqlen_q
        for m, visiting in visits.items():
            counted = masking.contributing_n_blocks.fn(bounds, m * block_m, shift, seqlen_k, block_m, BLOCK_N)
            assert visiting == list(range(counted.lo, counted.hi))[: len(visiting)]
            assert not visiting or visiting[-1] == counted.hi - 1
