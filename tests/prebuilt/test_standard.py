"""The standard set has every kernel, and the kernels of the sweeps."""

import functools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from modules import PACKAGE

from flashtile.backend.hopper import tables
from flashtile.bench import inputs, sweep
from flashtile.backend.gpu.kernel import Kernel
from flashtile.bench.cell import Cell
from flashtile.prebuilt.build import PINNED, key_of_launch
from flashtile.prebuilt.launches import device_of, launches
from flashtile.prebuilt.standard import LEFT_OUT, StandardCall, standard_calls

H200 = device_of("sm_90")
SWEEPS = sorted(path for path in Path("benchmarks").glob("*.toml") if "cpu" not in path.name)
LEAST_COVERED = 0.95
NO_KERNELS = ("triton_kernel",)  # a decorator


@pytest.fixture(autouse=True, scope="module")
def planned_for_an_archive() -> Iterator[None]:
    with mock.patch.object(tables, "compiler_version", return_value=PINNED):
        yield


@functools.cache
def standard_keys() -> frozenset[tuple[str, str]]:
    """Kernels and keys of the standard set."""
    return frozenset((x.kernel.title, key_of_launch(x)) for call in standard_calls() for x in launches(call, H200))


def is_covered(call: StandardCall) -> bool:
    """Kernels that are made for a formula are in no archive."""
    made = launches(call, H200)
    return all(isinstance(x.kernel, Kernel) and (x.kernel.title, key_of_launch(x)) in standard_keys() for x in made)


def call_of(cell: Cell) -> StandardCall:
    """The call that the benchmark makes of a cell, without memory."""

    def empty(shape: Any, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    with mock.patch.multiple(torch, randn=empty, rand=empty, Generator=mock.MagicMock()):
        case = inputs.make_case(replace(cell, inputs="normal"), torch.device("meta"))
    if cell.measure != "decode":
        return StandardCall(case.function, case.arguments, cell.differentiates)
    arguments = dict(case.arguments)
    caches = {"k_cache": arguments.pop("k"), "v_cache": arguments.pop("v")}
    lengths = torch.empty(cell.batch, dtype=torch.int32, device="meta")
    return StandardCall("attention_with_kvcache", arguments | caches | {"cache_seqlens": lengths})


def test_the_sweeps_are_covered() -> None:
    cells = [cell for path in SWEEPS for cell in sweep.load(path).cells]
    assert len(cells) > 100
    missing = [cell.label() for cell in cells if not is_covered(call_of(cell))]
    covered = 1 - len(missing) / len(cells)
    print(f"{len(cells) - len(missing)} of {len(cells)} calls of the sweeps are compiled ahead; not {missing}")
    assert covered >= LEAST_COVERED, missing


def test_every_kernel_is_in_the_set_or_left_out() -> None:
    """By its name in the sources: `*_kernel` in a folder of kernels."""
    defined = set()
    for backend in ("hopper", "triton"):
        folder = PACKAGE / "backend" / backend
        for path in sorted((folder / "kernels").rglob("*.py")):
            module = ".".join(path.relative_to(folder.parent).with_suffix("").parts)
            names = [line[4 : line.index("(")] for line in path.read_text().splitlines() if line.startswith("def ")]
            defined |= {f"{module}:{name}" for name in names if name.endswith("_kernel") and name not in NO_KERNELS}
    found = {title for title, _ in standard_keys()}
    assert found <= defined
    assert defined - found == LEFT_OUT.keys()


def test_what_is_not_in_the_set() -> None:
    """So that coverage can fail."""
    q = torch.empty(1, 2, 300, 72, dtype=torch.bfloat16)
    assert not is_covered(StandardCall("attention", {"q": q, "k": q, "v": q}))
    q = torch.empty(1, 2, 300, 64, dtype=torch.bfloat16)
    assert is_covered(StandardCall("attention", {"q": q, "k": q, "v": q}))
    assert not is_covered(
        StandardCall("attention", {"q": q, "k": q, "v": q, "mask": torch.ones(1, 1, 300, 300) > 0, "softcap": 2.0})
    )
