"""benchmarks/masks.py: its cells, their masks, and a run of tiny calls."""

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
from click.testing import CliRunner

import flashtile
from flashtile.expression import mask_mod_function

FOLDER = Path(__file__).parents[2] / "benchmarks"
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def masks() -> Iterator[ModuleType]:
    with mock.patch.object(sys, "path", [str(FOLDER), *sys.path]):
        yield importlib.import_module("masks")


@pytest.fixture(scope="module")
def calls(masks: ModuleType) -> ModuleType:
    return sys.modules["mask_calls"]


def test_the_cells(calls: ModuleType, tmp_path: Path) -> None:
    cells = calls.load_cells()
    assert len({str(cell) for cell in cells}) == len(cells) == 30
    assert {cell.head_dim for cell in cells} == {32, 64, 128}
    assert {calls.name_and_numbers(cell.mask)[0] for cell in cells} == {"", *calls.MASKS}
    for text, message in (("{masks = 'causal'}", "masks"), ("{mask = 'casual'}", "casual"), ("{}", "no mask")):
        path = tmp_path / "cells.toml"
        path.write_text(f"cells = [{text}]\ndefaults = {{}}")
        with pytest.raises(ValueError, match=message):
            calls.load_cells(path)


def test_a_mask_is_the_same_for_all_libraries(calls: ModuleType) -> None:
    """Documents of the packed call, too."""
    for cell in {cell.tiny() for cell in calls.load_cells()}:
        mask = calls.mask_of(cell, CPU)
        if mask is None:
            continue
        b, h, i = torch.arange(cell.batch)[:, None, None, None], torch.zeros(1, 1, 1).long(), torch.arange(cell.seqlen)
        own = mask_mod_function(mask.own.key)(b, h, i[:, None], i, *mask.own.tensors)
        dense = calls.dense_mask(cell, mask, CPU)
        shape = (cell.batch, 1, cell.seqlen, cell.seqlen)
        assert torch.equal(own.expand(shape), dense.expand(shape)), cell
        if mask.cu_seqlens is not None and not mask.packed["causal"]:
            lengths = mask.cu_seqlens.diff().long()
            ids = torch.repeat_interleave(lengths).view(cell.batch, 1, -1)
            assert torch.equal(ids[..., None] == ids[..., None, :], dense)
            assert min(lengths) < cell.seqlen


def run(masks: ModuleType, *words: str) -> str:
    options = ("--tiny", "--device", "cpu", "--rounds", "3", "--sample-seconds", "1e-5")
    result = CliRunner().invoke(masks.main, [*options, *words], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_a_run_goes_on_where_it_ended(masks: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "store.jsonl"
    first, second = (f"--cell={name} [2, 2, 256, {n}]" for name, n in (("document", 32), ("bias with gradient", 8)))
    store = ("--store", str(path), "--provider", "flashtile", "--provider", "packed")
    run(masks, *store, first)
    path.write_text(path.read_text() + '{"cell": "bias')  # the end of a process
    assert "document" not in run(masks, *store, first, second)
    (one, _, other) = path.read_text().splitlines()
    (document, bias) = masks.stored(path)
    assert [json.loads(x) for x in (one, other)] == [document, bias]
    found = {(row["provider"], row["pass"]) for row in document["rows"]}
    assert found == {(x, y) for x in ("flashtile", "flashtile dense", "packed") for y in ("forward", "backward")}
    assert not document["failures"]
    assert all(0 < x < 1 for x in (*document["errors"].values(), *bias["errors"].values()))
    table = run(masks, "--store", str(path), "--table")
    assert table.count("\n") == 4
    assert f"| {document['cell']} |" in table


@pytest.mark.parametrize("name", ["bias with gradient", "window"])
def test_wrong_results_are_not_timed(name: str, masks: ModuleType, calls: ModuleType) -> None:
    (cell, *_) = (cell.tiny() for cell in calls.load_cells() if name in f"{cell.mask} {cell.pairs}")
    attention = flashtile.attention

    def wrong(q: Any, k: Any, v: Any, *, mask: Any = None, bias: Any = None) -> Any:
        if bias is not None:
            return attention(q, k, v, bias=bias * 1.01)
        return attention(q, k, v, mask=mask, window=(200, None))

    measurement = masks.Measurement(cell, CPU, masks.Timing(), 60.0)
    with mock.patch.object(flashtile, "attention", wrong):
        prepared = measurement.prepared(["flashtile"])
        measurement.check(prepared)
    assert not prepared
    assert "outside of its bound" in measurement.failures["flashtile"]
