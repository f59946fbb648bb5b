"""Rates that are fitted to made-up times, their file, and the store of measured calls."""

import os
import random
import subprocess
import sys
import tomllib
from collections import Counter
from pathlib import Path

import pytest

from flashtile.backend.gpu.cost import Cost
from flashtile.backend.gpu.rates import Rates, scaled
from flashtile.bench.cell import Cell
from flashtile.calibrate.calls import drawn, standard
from flashtile.calibrate.fit import fit
from flashtile.calibrate.run import divided
from flashtile.calibrate.store import Row, read, sources_of
from flashtile.calibrate.written import write
from flashtile.call.device import Device

TRUE = {
    "launch": 5.0, "byte": 3e-7, "forward 64 128x128 tile": 1.5, "forward 64 128x128 step": 1.1,
    "forward 64 64x64 tile": 0.4, "forward 64 64x64 step": 0.3,
}  # fmt: skip
RATES = Path(__file__).parents[2] / "src" / "flashtile" / "rates"
H100 = Device("cuda", "NVIDIA H100 80GB HBM3", "sm_90", 132, 1980.0, 3.35e6)


def costs(count: int) -> list[Cost]:
    rng = random.Random(1)
    found = []
    for _ in range(count):
        kernel, tiles = rng.choice(["forward 64 128x128", "forward 64 64x64"]), rng.randint(1, 50)
        counts = Counter({"launch": 1, f"{kernel} tile": tiles, f"{kernel} step": tiles * rng.randint(1, 64)})
        found.append(Cost(counts, {"byte": 10 ** rng.uniform(5, 9)}))
    return found


def test_rates_are_found_again() -> None:
    given = costs(400)
    found = fit(given, [cost.time(TRUE) for cost in given])
    assert abs(found.errors).max() < 0.02
    assert found.rates == pytest.approx(TRUE, rel=0.05)


def test_outliers_count_little() -> None:
    given = costs(400)
    times = [cost.time(TRUE) * (5 if n % 40 == 0 else 1) for n, cost in enumerate(given)]
    assert fit(given, times).rates == pytest.approx(TRUE, rel=0.15)


def test_a_kernel_without_rates_takes_as_long_as_others_for_its_products() -> None:
    rates = Rates({"forward 64 128x128 step": 1.0, "forward 128 128x128 step": 2.2}, "made up")
    assert rates["forward 96 64x128 step"] == pytest.approx(1.05 * 96 / 64 * 0.5)
    assert rates["forward 96 64x128 edge"] < rates["forward 96 64x128 step"]
    assert rates["launch never seen"] == 0
    assert "backward 64 64x64 step" not in rates


def test_other_chips_are_scaled() -> None:
    file = {
        "chip": {"name": "A", "arch": "sm_90", "cores": 132, "clock": 2000.0, "bandwidth": 3e6},
        "rates": {"launch": 4.0, "byte": 3e-7, "forward 64 128x128": {"step": 1.0}},
    }
    slow = scaled(file, Device("cuda", "B", "sm_90", 78, 1000.0, 6e6), "a.toml")
    assert (slow["launch"], slow["byte"], slow["forward 64 128x128 step"]) == (8.0, 1.5e-7, 2.0)
    assert "scaled" in slow.about
    same = scaled(file, Device("cuda", "A", "sm_90", 132, 1000.0, 6e6), "a.toml")
    assert (same["launch"], same.about) == (4.0, "a.toml")


def test_written_rates_are_read_again(tmp_path: Path) -> None:
    cells = [Cell(heads=16, seqlen_q=n, head_dim=64, dtype="bfloat16") for n in (512, 1024, 4096)]
    rows = [Row(cell, H100.name, "3.6.0", {}, {"triton 64x64x4x3 splits 1": [9.0 * n, 8.0, 10.0]}, {})
            for n, cell in enumerate(cells, 1)]  # fmt: skip
    found = write(tmp_path / "chip.toml", rows, H100)
    read_again = scaled(tomllib.loads((tmp_path / "chip.toml").read_text()), H100, "chip.toml")
    assert dict(read_again) == pytest.approx(found.rates, rel=1e-3)


def test_kernels_that_were_not_measured_have_the_scaled_rates_of_a_like_chip(tmp_path: Path) -> None:
    cell = Cell(heads=16, seqlen_q=512, head_dim=64, dtype="bfloat16")
    other = H100._replace(name="another", clock=990.0)
    write(
        tmp_path / "chip.toml",
        [Row(cell, other.name, "3.6.0", {}, {"triton 64x64x4x3 splits 1": [9.0] * 3}, {})],
        other,
    )
    found, known = (tomllib.loads(x.read_text())["rates"] for x in (tmp_path / "chip.toml", RATES / "h100.toml"))
    name = "hopper forward 128 128x128"
    assert found[name]["step"] == pytest.approx(2 * known[name]["step"], rel=1e-3)


def test_rates_of_forward_mode(tmp_path: Path) -> None:
    """Both backends have rates of their own, in place of those of kernels alike."""
    cells = [Cell(measure="tangents", heads=16, seqlen_q=n, head_dim=128, dtype="bfloat16") for n in (1000, 3000, 8000)]
    times = {"hopper tangents 128x64x8 heads 1 splits 1": 4.0, "triton tangents 128x32x8x3 splits 1": 6.0}
    rows = [
        Row(x, H100.name, "3.6.0", {}, {name: [t * x.flops / 1e9] * 3 for name, t in times.items()}, {}) for x in cells
    ]
    found = write(tmp_path / "chip.toml", rows, H100)
    assert {"hopper tangents 128 128x64 step", "triton tangents 128 128x32x8x3 step"} <= found.rates.keys()
    assert abs(found.errors).max() < 0.2


def test_rows_are_stored_and_become_stale(tmp_path: Path) -> None:
    cell = Cell(measure="backward", heads=4, window=(3, 0), lengths=(5, 6))
    row = Row(
        cell, "GPU", "3.6.0", sources_of(cell, ("hopper", "triton")), {"triton": [1.0, 0.9, 1.1]}, {"hopper": "why"}
    )
    file = tmp_path / "store.jsonl"
    file.write_text(f"{row.to_json()}\n{row._replace(sources={'triton': 'other'}).to_json()}\n")
    assert next(read(file)) == row
    assert [x.stale for x in read(file)] == [False, True]
    assert list(read(tmp_path / "missing.jsonl")) == []


def test_calls_are_drawn_alike_and_divided() -> None:
    cells = standard([])
    assert cells == standard([])
    assert len(cells) == len(drawn(110, 7)) + 60
    assert sum(cell.moves for cell in cells) == 60
    shares = divided(cells, 5)
    assert sorted(repr(cell) for share in shares for cell in share) == sorted(map(repr, cells))
    assert max(map(len, shares)) < 3 * min(map(len, shares))


def test_rates_of_forward_mode_are_those_of_measured_calls() -> None:
    """The lines of the shipped file, until a calibration replaces them."""
    root = Path(__file__).parents[2]
    made = root / "benchmarks" / "results" / "h200-forward-mode-candidates.csv"
    printed = subprocess.run(
        [sys.executable, root / "benchmarks" / "tangent_rates.py", made],
        capture_output=True, text=True, check=True, env=os.environ | {"PYTHONPATH": str(root / "src")},
    )  # fmt: skip
    lines = printed.stdout.splitlines()
    assert len(lines) == 7
    assert set(lines) <= set((root / "src" / "flashtile" / "rates" / "h100.toml").read_text().splitlines())
