"""Forward mode of a case: tangents for its tensors."""

from collections.abc import Collection
from dataclasses import replace

import torch
from torch import Tensor

from .case import Case


def moving(case: Case, names: Collection[str] | None = None) -> Case:
    """The case with tangents for the named differentiable tensors, or for all. A tangent is NaN where its input is: a
    call reads neither there.
    """
    generator = torch.Generator().manual_seed(case.seed)

    def tangent(x: Tensor) -> Tensor:
        drawn = torch.randn(x.shape, generator=generator).to(x.device, x.dtype)
        drawn = drawn.masked_fill(x.isnan(), torch.nan)
        expanded = any(n > 1 and stride == 0 for n, stride in zip(x.shape, x.stride(), strict=True))
        return drawn if expanded else torch.empty_like(x).copy_(drawn)  # in the order of x in memory

    given = {name: tangent(x) for name, x in case.differentiable().items() if names is None or name in names}
    return replace(case, tangents=given, dout=None, dlse=None, description="")
