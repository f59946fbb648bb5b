"""Forward mode of a case: tangents for its tensors."""

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .case import Case

APART = 2**20  # seeds between inputs and tangents; a generator on a CPU takes 32 bits


def moving(case: Case, names: Collection[str] | None = None) -> Case:
    """The case with tangents for the named differentiable tensors, or for all. A tangent is NaN where its input is: a
    call reads neither there. Expanded inputs become copies: PyTorch (2.13) refuses tangents of others.
    """
    generator = torch.Generator().manual_seed(case.seed + APART)
    arguments = {name: x.contiguous() if is_expanded(x) else x for name, x in case.arguments.items()}
    case = replace(case, arguments=arguments, dout=None, dlse=None)

    def tangent(x: Tensor) -> Tensor:
        drawn = torch.randn(x.shape, generator=generator).to(x.device, x.dtype)
        return torch.empty_like(x).copy_(drawn.masked_fill(x.isnan(), torch.nan))  # in the order of x in memory

    given = {name: tangent(x) for name, x in case.differentiable().items() if names is None or name in names}
    return replace(case, tangents=given, description="")


def is_expanded(x: Any) -> bool:
    return isinstance(x, Tensor) and any(n > 1 and stride == 0 for n, stride in zip(x.shape, x.stride(), strict=True))
