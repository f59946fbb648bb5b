"""The table of a score_mod's term of distances, which kernels read in place of computing it for each pair."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ....call.call import Call
from ....call.formulas import traced
from ....expression import score_mod_formula
from ....expression.tabulated import tabulated
from ...gpu.captured import needs_wide_offsets
from ...gpu.kernel import Kernel
from ...gpu.replay import Recorder
from ..tile_config import Constexpr
from . import KERNELS
from .formulas import launch_with, pair_function

DISTANCE_TABLE = Kernel(f"{KERNELS}.distance_table", "distance_table_kernel")


@dataclass(frozen=True)
class DistanceTableConfig(Constexpr):
    """Kernel for the table of a score_mod's term: `block` distances a program, one for each thread."""

    block: int
    score_mod: Any = None


CONFIG = DistanceTableConfig(block=128)


def with_distance_table(recorder: Recorder, call: Call) -> Call:
    """The call whose score_mod reads a table, which a launch computes; the call itself if it has no such term. Its
    tensors belong to the recorder.
    """
    if call.settings.score_mod is None:
        return call
    found = tabulated(traced(score_mod_formula(call.settings.score_mod)))
    if found is None:
        return call
    t, own = call.tensors, call.num_score_tensors
    heads, width = call.settings.h0 + t.q.shape[1], 2 * found.reach + 1
    table: Tensor = recorder.new(t.q.new_empty((heads, width), dtype=torch.float32))
    function = pair_function(found.term, any(needs_wide_offsets(x) for x in t.score_mod_tensors[:own]))
    blocks = -(-width // CONFIG.block)
    scalars = {"num_blocks": blocks, "reach": found.reach, "CONFIG": CONFIG, "num_warps": CONFIG.block // 32}
    launch_with(recorder, call, DISTANCE_TABLE, {"distance_table": table}, heads * blocks, scalars, function)
    tensors = (*t.score_mod_tensors[:own], table, *t.score_mod_tensors[own:])
    return call._replace(
        tensors=t._replace(score_mod_tensors=tensors), settings=call.settings._replace(score_mod=found.formula.key)
    )
