"""The queue of tiles of rows of Hopper's forward pass."""

from collections import Counter
from typing import Any
from unittest import mock

import pytest
import torch
from windowed import WINDOWS, visible_blocks

from flashtile.api.explain import described_call
from flashtile.backend.hopper import scheduler_args
from flashtile.backend.hopper.row_queue import key_steps
from flashtile.backend.hopper.scheduler_args import l2_swizzle
from flashtile.call.call import Settings
from flashtile.call.device import Device

M, N = 64, 128


@pytest.mark.parametrize("sides", WINDOWS, ids=str)
@pytest.mark.parametrize(("rows", "keys"), [(300, 300), (130, 400), (257, 60)])
def test_steps_are_the_blocks_with_visible_pairs(sides: dict[str, Any], rows: int, keys: int) -> None:
    settings = Settings(1.0, **sides)
    counts = Counter(row_block for row_block, _ in visible_blocks(settings, rows, keys, M, N))
    assert key_steps(settings, rows, keys, M, N) == [counts[n] for n in range(-(-rows // M))]


@pytest.mark.parametrize(
    ("heads", "seqlen", "head_dim", "tile", "expected"),
    [
        ((5, 5), 16000, 128, (128, 128), 5),  # 10% faster than two at once, whose third group begins as others end
        ((25, 25), 5000, 80, (192, 64), 25),  # 4%
        ((64, 64), 2048, 96, (128, 128), 16),  # a long queue
        ((32, 8), 4096, 128, (128, 128), 32),  # groups of four
    ],
)
def test_forward_heads_at_once(
    heads: tuple[int, int], seqlen: int, head_dim: int, tile: tuple[int, int], expected: int
) -> None:
    q, k = (torch.empty(1, h, seqlen, head_dim, dtype=torch.bfloat16, device="meta") for h in heads)
    call = described_call(q, k, k, None, None, {"causal": True})
    with mock.patch.object(scheduler_args, "describe_device", return_value=Device("cuda", "", "sm_90", 132)):
        assert l2_swizzle(call, *tile, 1) == expected
