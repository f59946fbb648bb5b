"""Claims that do not survive measurement: each one's figure, and the page that has them all."""

import json
import math
import re
from pathlib import Path

import pytest
import torch

from flashtile_ladder.cli import long, stack
from flashtile_ladder.measure import claims, rounding
from flashtile_ladder.related import complexity, running_lse

PAGE = Path(__file__).parents[1] / "docs" / "ladder-claims.md"
MEASURED = 4  # a rounding error on another processor may be so many times smaller or larger


def test_the_page_is_what_the_claims_print() -> None:
    """Words and whole numbers are equal; fractions, which are measured, are near."""
    written = re.search(r"<!-- claims -->\n```text\n(.*?)\n```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert written is not None, "the page has no block of claims"
    report = claims.report()
    assert report.count("verdict: does not hold\n") == report.count("verdict:") - 1 == len(claims.CLAIMS) - 1
    found = report.split()
    assert len(written[1].split()) == len(found), "copy what `python -m flashtile_ladder measure.claims` prints"
    for old, new, following in zip(written[1].split(), found, [*found[1:], ""], strict=True):
        if old != new:
            assert "." in old or following == "times;", f"{old} is now {new}"
            assert 1 / MEASURED < float(new) / float(old) < MEASURED, f"{old} is now {new}"


def test_a_running_lse_is_right_but_less_accurate() -> None:
    """In float64 both are lse; in float32 the running lse loses a digit at 16,384 keys, the other form less."""
    s = torch.randn(20, 150, dtype=torch.float64)
    for lse in (running_lse.running_sum(s, 32), *(running_lse.running_lse(s, 32, x) for x in ("scores", "lse"))):
        torch.testing.assert_close(lse, torch.logsumexp(s, 1), rtol=0, atol=1e-13)
    plain, running, shifted = running_lse.errors(16384, rows=16).values()
    assert plain < 2e-6
    assert running > 5 * plain
    assert plain < shifted < running


def test_kahan_keeps_what_an_addition_loses() -> None:
    """2^24 absorbs each 1 in float32; four of them, kept aside, are not lost."""
    x = torch.tensor([[2.0**24, 1, 1, 1, 1]]).numpy()
    ones = torch.ones(5, 1).numpy()
    for fused in (False, True):
        assert rounding.product(x, ones, fused, "forward")[0, 0] == 2**24
        assert rounding.product(x, ones, fused, "kahan")[0, 0] == 2**24 + 4
    rows = {(row["scale"], row["change"]): row for row in rounding.table(128, 64)}
    for scale in (64**-0.5, 1.0):
        plain, kahan = rows[scale, "none"], rows[scale, "compensated sums (Kahan)"]
        assert all(kahan[name] < plain[name] / 1.5 for name in ("out_error", "lse_error"))


def test_the_listing_forgets_element_0() -> None:
    x = torch.tensor([[5.0, 1.0, 2.0], [-30.0, 1.0, 2.0]], dtype=torch.float64)
    sums = claims.listing(x).sum(dim=1)
    rest = math.exp(-4) + math.exp(-3)
    assert sums[0].item() == pytest.approx((1 + rest) / rest)
    assert sums[1].item() == pytest.approx(1), "with a small element 0 nothing shows"


def test_times_of_strides_are_the_recorded_ones() -> None:
    recorded = json.loads((PAGE.parents[1] / "src" / "flashtile_ladder" / "cli" / "results" / "h200.json").read_text())
    slower = {row["stride"]: round(row["slower"], 1) for row in recorded["tables"]["coalescing"]["rows"]}
    assert {stride: slower[stride] for stride in claims.MEASURED_STRIDES} == claims.MEASURED_STRIDES
    for row in recorded["tables"]["memory"]["rows"]:
        cycles, rate = claims.MEASURED_LEVELS[row["level"]]
        assert (f"{row['latency_cycles']:.3g}", f"{row['tb_per_s']:.3g}") == (f"{cycles:.3g}", f"{rate:.3g}")


def test_published_figures_are_those_of_the_tables() -> None:
    """What `claims` quotes is what the command prints beside its own."""
    columns = [stack.STACK_PUBLISHED[step] for step in ("2 scalar autograd", "2 Python floats", "3 C++ -O2")]
    assert {n: tuple(column[n] for column in columns) for n in columns[0]} == claims.PUBLISHED_MS
    assert {n: speedup for n, (speedup, _, _) in long.LONG_PUBLISHED.items()} == claims.PUBLISHED_SPEEDUPS


def test_counts_of_memory() -> None:
    assert claims.tile_bytes(64, 768, 64) == 608 * 1024
    assert claims.tile_bytes(64, 192, 64) == 176 * 1024
    assert [claims.fetched_for_used(s, 64) for s in (1, 3, 16, 32)] == [1, 3, 16, 16]
    assert torch.equal(claims.to_tf32(torch.tensor([1 + 2.0**-10, 1 + 2.0**-11])), torch.tensor([1 + 2.0**-10, 1]))


def test_operations_of_a_layer() -> None:
    for n, d, heads in ((5, 3, 2), (16, 8, 1)):
        counted = complexity.count(n, d, heads)
        assert counted == complexity.formulas(n, d, heads)
        assert sum(counted.values()) == 8 * n * (d * heads) ** 2 + 4 * n**2 * d * heads
