"""The calls of a sweep, so that an archive has the kernels of its models too."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch

from ..bench import sweep
from ..bench.cell import Cell
from ..bench.inputs import make_case
from .standard import StandardCall, empty


def sweep_calls(path: Path) -> Iterator[StandardCall]:
    """The calls of a sweep on a GPU. Kernels with a score_mod are made for its formula, so they are left out.

    Raises:
        ValueError: the file is no sweep.
    """
    for cell in sweep.load(path).on("cuda").cells:
        if not cell.score_mod:
            yield call_of(cell)


def call_of(cell: Cell) -> StandardCall:
    """The call that a benchmark makes of a cell, without memory."""
    case = make_case(replace(cell, inputs="normal"), torch.device("meta"))
    if cell.measure != "decode":
        return StandardCall(case.function, case.arguments, cell.differentiates)
    arguments = dict(case.arguments)
    caches = {"k_cache": arguments.pop("k"), "v_cache": arguments.pop("v")}
    lengths = empty(cell.batch, dtype=torch.int32)
    return StandardCall("attention_with_kvcache", arguments | caches | {"cache_seqlens": lengths})
