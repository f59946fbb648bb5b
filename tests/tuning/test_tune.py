"""`flashtile tune` without a GPU: the search with made-up times, the file, the saved configurations, the command."""

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
from calls import dense_call
from commands import invoke

from flashtile.backend.triton import configs, support, tuned
from flashtile.backend.triton.tile_config import KernelConfig
from flashtile.call.call import Features
from flashtile.call.device import Device
from flashtile.call.problem import Pages, Problem
from flashtile.errors import AttentionWarning
from flashtile.tuning.search import LEAST_GAIN, TuningError, neighbors, search

H200 = Device("cuda", "NVIDIA H200", "sm_90", 132)
SHIPPED = KernelConfig(128, 128, 8, 3)


class MadeUp:
    """A trial whose times are a function of the tile; it refuses tiles in `wrong`."""

    def __init__(self, seconds: dict[KernelConfig, float], wrong: Sequence[KernelConfig] = (), otherwise: float = 2.0):
        self.known, self.wrong, self.otherwise = seconds, wrong, otherwise
        self.checked: list[KernelConfig] = []

    def refuses(self, launch: KernelConfig) -> str | None:
        self.checked.append(launch)
        return "wrong" if launch in self.wrong else None

    def seconds(self, launches: Sequence[KernelConfig]) -> list[float]:
        assert set(launches) <= set(self.checked)  # nothing is timed before it is checked
        assert not set(launches) & set(self.wrong)
        return [self.known.get(launch, self.otherwise) for launch in launches]


class Ticking:
    """A clock that advances by a second with each reading."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1
        return self.now


# The search ----------------------------------------------------------------------------------------------------------


def test_it_goes_from_neighbour_to_neighbour() -> None:
    """The best tile is two steps away; the one between is better than the shipped one."""
    times = {SHIPPED: 1.0, KernelConfig(128, 128, 8, 2): 0.9, KernelConfig(128, 64, 8, 2): 0.7}
    found = search(SHIPPED, MadeUp(times), 100, lambda: 0.0)
    assert found.best == KernelConfig(128, 64, 8, 2)
    assert found.gain == pytest.approx(0.3)
    assert found.seconds == (1.0, 0.7)
    assert found.finished
    assert {x.launch for x in found.tried} >= set(neighbors(found.best)) - {SHIPPED}


def test_a_wrong_tile_is_no_candidate() -> None:
    fast = KernelConfig(128, 128, 8, 2)
    found = search(SHIPPED, MadeUp({SHIPPED: 1.0, fast: 0.1}, wrong=[fast]), 100, lambda: 0.0)
    assert found.best == SHIPPED
    assert [x.refused for x in found.tried if x.launch == fast] == ["wrong"]


def test_what_is_hardly_faster_is_not_faster() -> None:
    times = {SHIPPED: 1.0} | dict.fromkeys(neighbors(SHIPPED), 1 - LEAST_GAIN / 2)
    found = search(SHIPPED, MadeUp(times), 100, lambda: 0.0)
    assert (found.best, found.gain) == (SHIPPED, 0.0)


def test_luck_does_not_last() -> None:
    """A tile that is faster at first, but not when both are timed again at the end."""
    lucky = KernelConfig(128, 128, 8, 2)
    trial = MadeUp({SHIPPED: 1.0, lucky: 0.5})
    once = trial.seconds

    def second_time(launches: Sequence[KernelConfig]) -> list[float]:
        return [1.0, 1.0] if tuple(launches) == (SHIPPED, lucky) and trial.known[lucky] == 0.6 else once(launches)

    def first_time(launches: Sequence[KernelConfig]) -> list[float]:
        found = second_time(launches)
        if tuple(launches) == (SHIPPED, lucky):
            trial.known[lucky] = 0.6
        return found

    trial.seconds = first_time  # type: ignore[method-assign]
    assert search(SHIPPED, trial, 100, lambda: 0.0).best == SHIPPED


def test_time_is_kept() -> None:
    found = search(SHIPPED, MadeUp({SHIPPED: 1.0}), 3.5, Ticking())
    assert len(found.tried) == 3
    assert not found.finished


def test_a_machine_on_which_the_shipped_tile_is_wrong() -> None:
    with pytest.raises(TuningError, match=r"128 x 128.*wrong"):
        search(SHIPPED, MadeUp({}, wrong=[SHIPPED]), 100)


def test_neighbors_are_tiles() -> None:
    for launch in (SHIPPED, KernelConfig(16, 16, 1, 1), KernelConfig(256, 256, 8, 7)):
        found = list(neighbors(launch))
        assert launch not in found
        for m, n, warps, stages, of_a_file, *_ in found:
            assert m in tuned.BLOCKS and n in tuned.BLOCKS and warps in tuned.WARPS and stages in tuned.STAGES  # noqa: PT018
            assert not of_a_file


# The file ------------------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("FLASHTILE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(tuned, "triton_version", lambda: (3, 6))
    tuned.entries.cache_clear()
    yield tmp_path
    tuned.entries.cache_clear()


def entry(
    kernel: str = "forward", launch: tuple[int, int, int, int] = (64, 64, 4, 2), **changes: object
) -> tuned.Entry:
    given = tuned.Entry("NVIDIA H200", "sm_90", "3.6", "half", 128, kernel, launch, {"ms": 1.5})
    return given._replace(**changes)  # type: ignore[arg-type]


def test_saved_and_read() -> None:
    assert tuned.launches(H200, "half", 128) == {}
    file = tuned.save(entry())
    tuned.save(entry("dq", (32, 64, 4, 1)))
    tuned.save(entry("forward", (64, 128, 8, 2)))  # in the place of the first
    assert file == tuned.path()
    assert tuned.launches(H200, "half", 128) == {"dq": (32, 64, 4, 1), "forward": (64, 128, 8, 2)}
    assert [x.name for x in file.parent.iterdir()] == [file.name]


@pytest.mark.parametrize(
    "changes",
    [{"device": "NVIDIA H100"}, {"arch": "sm_80"}, {"triton": "3.7"}, {"family": "single"}, {"width": 64}],
)
def test_entries_of_others_are_left_alone(changes: dict[str, object]) -> None:
    tuned.save(entry(**changes))  # type: ignore[arg-type]
    assert tuned.launches(H200, "half", 128) == {}
    tuned.save(entry())
    assert len(json.loads(tuned.path().read_text())["entries"]) == 2


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "{}",
        '{"format": 2, "entries": []}',
        '{"format": 1}',
        '{"format": 1, "entries": [{}]}',
        json.dumps({"format": 1, "entries": [entry()._asdict() | {"launch": [64, 64, 4]}]}),
        json.dumps({"format": 1, "entries": [entry()._asdict() | {"launch": [64, 64, 4, 99]}]}),
        json.dumps({"format": 1, "entries": [entry()._asdict() | {"launch": [48, 64, 4, 2]}]}),
        json.dumps({"format": 1, "entries": [entry()._asdict() | {"kernel": "sideways"}]}),
        json.dumps({"format": 1, "entries": [entry()._asdict() | {"colour": "red"}]}),
    ],
)
def test_a_file_that_is_none(text: str) -> None:
    """One warning; the file is ignored, and replaced by the next search."""
    tuned.path().write_text(text)
    with pytest.warns(AttentionWarning, match="is not used"):
        assert tuned.launches(H200, "half", 128) == {}
    assert tuned.launches(H200, "half", 128) == {}  # a second warning would be an error, by pytest's settings
    tuned.save(entry())
    assert tuned.launches(H200, "half", 128) == {"forward": (64, 64, 4, 2)}


def test_a_directory_that_cannot_be_read() -> None:
    tuned.path().mkdir()
    with pytest.warns(AttentionWarning, match="is not used"):
        assert tuned.launches(H200, "half", 128) == {}


# The tables ----------------------------------------------------------------------------------------------------------


def problem(**changes: object) -> Problem:
    plain = replace(Problem.describe(dense_call(torch.bfloat16)), head_dim=128, head_dim_v=128, alignment=16)
    return replace(plain, seqlen_q=4096, seqlen_k=4096, **changes)  # type: ignore[arg-type]


def test_plain_problems_take_what_was_found() -> None:
    before = configs.tile(problem(), H200)
    tuned.save(entry("forward", (64, 64, 4, 2)))
    after = configs.tile(problem(), H200)
    assert after == before._replace(forward=KernelConfig(64, 64, 4, 2, tuned=True))
    assert str(after.forward) == "64 x 64 (4 warps, 2 stages, tuned on this machine)"
    assert configs.tile(problem(head_dim=96, head_dim_v=80), H200).forward.tuned
    assert not configs.tile(problem(head_dim=64, head_dim_v=64), H200).forward.tuned
    assert not configs.tile(problem(dtype=torch.float32), H200).forward.tuned
    assert not configs.tile(problem(), H200._replace(name="NVIDIA H100")).forward.tuned


@pytest.mark.parametrize(
    "changes",
    [
        {"features": Features(bias=(True,) * 4)}, {"features": Features(mask=(True, True, False, False))},
        {"features": Features(alibi_slopes=True)}, {"dropout": True}, {"alignment": 2},
        {"pages": Pages(16, True, True)}, {"seqlen_q": 1},
    ],
)  # fmt: skip
def test_problems_that_need_room_keep_the_shipped_tiles(changes: dict[str, object]) -> None:
    given = replace(problem(), **changes)  # type: ignore[arg-type]
    before = configs.tile(given, H200)
    for kernel in tuned.KERNELS:
        tuned.save(entry(kernel, (256, 256, 8, 7)))
    assert configs.tile(given, H200) == before


# The command ---------------------------------------------------------------------------------------------------------


def test_without_a_gpu_it_says_so() -> None:
    with mock.patch.object(support, "unusable", return_value="no GPU that PyTorch can use"):
        result = invoke(["tune"])
    assert result.exit_code == 2
    assert result.output.strip().splitlines()[-1] == (
        "Error: tiles are searched on a GPU that runs Triton's kernels: no GPU that PyTorch can use"
    )
    assert invoke(["tune", "--help"]).exit_code == 0


@pytest.mark.skipif(sys.platform != "linux", reason="needs triton")
@pytest.mark.parametrize("dry_run", [False, True])
def test_it_saves_what_is_faster(dry_run: bool) -> None:
    pytest.importorskip("triton")
    fast = KernelConfig(64, 128, 8, 3)
    times = {configs.HALF[227][1].forward: 1.0, fast: 0.5}
    module = "flashtile.tuning.trial"
    with (
        mock.patch.object(support, "unusable", return_value=None),
        mock.patch(f"{module}.GpuTrial", return_value=MadeUp(times)),
        mock.patch(f"{module}.describe_device", return_value=H200),
        mock.patch("flashtile.cli.tune.describe_device", return_value=H200),
    ):
        words = ["tune", "--device", "cpu", "--pass", "forward", "--json", *["--dry-run"] * dry_run]
        result = invoke(words)
    assert result.exit_code == 0, result.output
    (found,) = json.loads(result.output)["found"]
    assert found["gain"] == pytest.approx(0.5)
    expected = {} if dry_run else {"forward": tuple(fast[:4])}
    assert tuned.launches(H200, "half", 128) == expected
    assert found["saved"] == (None if dry_run else str(tuned.path()))
