"""explain: the plan of a call in words and numbers, and nothing run."""

import json
import os
import random
import subprocess
import sys
import time
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from checking import dense_case, offsets
from hypothesis import given
from hypothesis import strategies as st

import flashtile
from flashtile import ArgumentError, BackendError
from flashtile.api.explain import described_call, expected, expected_along
from flashtile.api.mask_blocks import mask_blocks
from flashtile.backend import rates
from flashtile.backend.gpu.rates import rates_of
from flashtile.call.device import Device, meta_tensors_on
from flashtile.call.problem import Problem
from flashtile.call.window import Window, visible_pairs
from flashtile.dispatch.planner import SUPPORT

ARGUMENTS = dense_case().arguments  # 2 sequences, 2 heads on 1, 7 rows, 9 keys, head_dim 8


def test_runs_nothing() -> None:
    with mock.patch("flashtile.backend.tiled.forward.forward_rows", side_effect=AssertionError("it ran")):
        flashtile.explain(**ARGUMENTS)


@pytest.mark.parametrize(
    ("arguments", "pairs"),
    [
        ({}, 2 * 2 * 7 * 9),
        ({"causal": True}, 2 * 2 * (3 + 4 + 5 + 6 + 7 + 8 + 9)),
        ({"causal": "top_left"}, 2 * 2 * (1 + 2 + 3 + 4 + 5 + 6 + 7)),
        ({"window": (1, 0)}, 2 * 2 * 7 * 2),
    ],
)
def test_work(arguments: dict[str, Any], pairs: int) -> None:
    """4 * visible pairs * head_dim operations forward, 2.5 times that backward; inputs and results move once."""
    found = flashtile.explain(**ARGUMENTS, **arguments)
    assert found.visible_pairs == pairs
    assert found.flops_forward == 4 * pairs * 8
    assert found.flops_backward == 10 * pairs * 8
    q, k = 2 * 2 * 7 * 8, 2 * 9 * 8
    assert found.bytes_forward == 4 * (q + 2 * k + q + 2 * 2 * 7)
    assert found.intensity == found.flops_forward / found.bytes_forward
    assert found.limit in ("compute", "memory")


@pytest.mark.parametrize(("backend", "unused"), [("tiled", True), ("cpu", False)])
def test_a_number_of_splits(backend: str, unused: bool) -> None:
    found = flashtile.explain(**ARGUMENTS, num_splits=2, backend=backend)
    assert ("num_splits is not used: tiled takes keys in order" in str(found)) == unused


def test_work_of_packed_sequences() -> None:
    q, k = torch.randn(7, 2, 8), torch.randn(9, 1, 8)
    found = flashtile.explain(q, k, k, offsets(3, 4), offsets(4, 5), causal=True)
    assert found.visible_pairs == 2 * ((2 + 3 + 4) + (2 + 3 + 4 + 5))


def test_words() -> None:
    found = flashtile.explain(**ARGUMENTS, softcap=5.0, window=(4, None), backend="reference")
    assert found.backend == "reference"
    for word in ("dense float32", "batch 2", "heads 2/1", "seqlen 7 x 9", "head_dim 8", "softcap", "window (4, None)"):
        assert word in found.problem
        assert word in str(found)
    assert json.loads(json.dumps(found.as_dict()))["backend"] == "reference"


def test_expected_times_of_a_gpu() -> None:
    """The five best ways, of both backends, and the file of rates."""
    h100 = Device("cuda", "NVIDIA H100 80GB HBM3", "sm_90", 132)
    usable = [mock.patch.object(SUPPORT[name], "unusable", return_value=None) for name in ("hopper", "triton")]
    with usable[0], usable[1], meta_tensors_on(h100):
        q = torch.empty(1, 8, 300, 64, dtype=torch.bfloat16, device="meta")
        call = described_call(q, q, q, None, None, {})
        found = expected(call, Problem.describe(call), h100)
    assert len(found) == 5
    assert list(found.values()) == sorted(found.values())
    assert {way.split(",")[0] for way in found} == {"hopper", "triton"}
    assert rates_of(h100).about == "rates/h100.toml"


def test_refuses_what_the_call_would_refuse() -> None:
    with pytest.raises(ArgumentError, match="`scale` is"):
        flashtile.explain(**ARGUMENTS, scale="large")
    with pytest.raises(ArgumentError, match="`k` is"):
        flashtile.explain(**ARGUMENTS | {"k": torch.randn(2, 1, 9, 7)})
    with pytest.raises(BackendError):
        flashtile.explain(**ARGUMENTS, backend="cuda")
    with pytest.raises(TypeError, match="max_seqlen_q"):
        flashtile.explain(**ARGUMENTS, max_seqlen_q=3)


def test_forward_mode_and_second_derivatives() -> None:
    """Their backends, and why none before them, where those are not forward's."""
    found = flashtile.explain(**ARGUMENTS, backend="reference")
    assert (found.backend, found.tangents) == ("reference", "tiled")
    assert found.tangents_why_not == {"reference": "it has no kernel of forward mode"}
    assert f"forward mode: backend tiled, {found.tangents_tile}\n  not reference: it has no kernel" in str(found)
    assert found.second == "tiled"
    assert "second derivative: backend tiled\n  not reference: it has no kernel of a second derivative" in str(found)
    words = str(flashtile.explain(**ARGUMENTS, backend="tiled"))
    assert "forward mode" not in words
    assert "second derivative" not in words


def test_expected_times_of_forward_mode() -> None:
    """Of both backends with a kernel, and of splits."""
    q, k = (torch.empty(1, 8, n, 128, dtype=torch.bfloat16) for n in (64, 2**16))
    h100 = Device("cuda", "H100", "sm_90", 132)
    with (
        mock.patch.multiple(SUPPORT["triton"], unusable=lambda: None),
        mock.patch.multiple(SUPPORT["hopper"], unusable=lambda: None),
    ):
        problems = [Problem.describe(described_call(x, k, k, None, None, {})) for x in (q, k)]
        few, many = (expected_along(problem, h100) for problem in problems)
    assert list(few.values()) == sorted(few.values())
    assert next(iter(few)).startswith("triton, tangents ")
    assert next(iter(few)).endswith(" splits")
    assert next(iter(many)).startswith("hopper, tangents ")
    found = replace(flashtile.explain(*(torch.ones(1, 1, 4, 8),) * 3), tangents_candidates=few)
    assert f"forward mode: backend {found.tangents}, {found.tangents_tile}\n  not " in str(found)
    assert f"\n  {next(iter(few.values())):.4g} us: triton, tangents" in str(found)


def test_at_least_holds_on_a_busy_machine() -> None:
    """The limit is measured while other processes take the processors; the call then has them for itself."""
    q, k, v = (torch.randn(1, 4, 1024, 64) for _ in range(3))
    rates._machine.cache_clear()
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(os.cpu_count() or 1)]
    try:
        with mock.patch.object(rates, "SECONDS", 1.0):  # time to find a moment with all threads at once
            found = flashtile.explain(q, k, v)
    finally:
        for other in others:
            other.kill()
            other.wait()
    assert f"at least {found.seconds_at_limit * 1e3:.3g} ms" in str(found)
    seconds = []
    for _ in range(20):
        start = time.perf_counter()
        flashtile.attention(q, k, v)
        seconds.append(time.perf_counter() - start)
    assert min(seconds) >= found.seconds_at_limit


sides = st.none() | st.integers(-6, 12)
chunks = st.none() | st.integers(1, 6)


windows = st.builds(Window, sides, sides, st.booleans(), chunks)


@given(window=windows, seqlen_q=st.integers(0, 12), seqlen_k=st.integers(0, 12))
def test_visible_pairs(window: Window, seqlen_q: int, seqlen_k: int) -> None:
    diagonal = seqlen_k - seqlen_q
    counted = sum(
        (window.left is None or j >= i + diagonal - window.left)
        and (window.right is None or j <= i + diagonal + window.right)
        and (not window.top_left or j <= i)
        and (window.chunk is None or (i + diagonal) // window.chunk == j // window.chunk)
        for i in range(seqlen_q)
        for j in range(seqlen_k)
    )
    assert visible_pairs(window, seqlen_q, seqlen_k) == counted


def test_blocks_of_a_mask() -> None:
    """The numbers of blocks, over sequences and heads, also where the mask is the same for all."""
    q, k = torch.randn(2, 3, 300, 8), torch.randn(2, 3, 500, 8)
    for mask, numbers in (
        (flashtile.mask_mods.causal(), (3 + 2 + 1, 3, 2 + 1)),
        (flashtile.mask_mods.prefix(torch.tensor([256, 256])), (2 + 2 + 1, 1, 6)),
        (torch.arange(300)[:, None] // 256 == torch.arange(500) // 256, (4 + 2, 0, 4 + 2)),
        (torch.arange(500) < 200, (3 * 2, 3, 3)),
    ):
        mask = mask if isinstance(mask, flashtile.MaskMod) else mask.view(1, 1, -1, 500)
        found = flashtile.explain(q, k, k, mask=mask)
        assert found.mask_blocks == dict(zip(("hidden", "partial", "full"), (6 * n for n in numbers), strict=True))
        assert f"{6 * numbers[0]} hidden, {6 * numbers[1]} partial, {6 * numbers[2]} full" in str(found)
    assert flashtile.explain(q, k, k).mask_blocks is None
    assert flashtile.explain(q[:, :, :0], k, k, mask=torch.ones(1, 1, 0, 500).bool()).mask_blocks is None


@pytest.mark.parametrize("seed", range(16))
def test_blocks_of_a_window(seed: int) -> None:
    """As counted from pairs, also where both sides together hide all, and with a mask that hides none."""
    draw = random.Random(seed)
    rows, keys = (draw.choice([1, 128, 129, 300, 513]) for _ in range(2))
    left = draw.choice([None, draw.randint(-200, 300)])
    right = draw.choice([None, draw.randint(-200, 300), -1 - (left or 0)])
    q, k = (torch.empty(1, 2, n, 8) for n in (rows, keys))
    call = described_call(q, k, k, None, None, {
        "window": flashtile.ExactWindow(left, right),
        "causal": draw.choice([False, True, "top_left"]),
        "mask": draw.choice([None, torch.ones(1, 1, rows, keys, dtype=torch.bool)]),
    })  # fmt: skip
    window, distance = Problem.describe(call).window, torch.arange(keys) - torch.arange(rows)[:, None]
    visible = torch.ones(rows, keys, dtype=torch.bool)
    visible &= True if window.left is None else distance >= keys - rows - window.left
    visible &= True if window.right is None else distance <= keys - rows + window.right
    visible &= distance <= 0 if window.top_left else True
    blocks = [y for x in visible.split(128) for y in x.split(128, 1)]
    hidden, full = (2 * sum(bool(x.all()) for x in found) for found in ([~y for y in blocks], blocks))
    numbers = {"hidden": hidden, "partial": 2 * len(blocks) - hidden - full, "full": full}
    unlimited = window.unlimited and call.tensors.mask is None
    assert mask_blocks(call, Problem.describe(call)) == (None if unlimited else numbers)
