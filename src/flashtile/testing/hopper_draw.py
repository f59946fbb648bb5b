"""Random problems that Hopper's kernels take: mostly of 16 bits, of the widths and layouts that TMA loads, and without
the features and gradients that the kernels lack. Of other problems they take one in nineteen.
"""

import random
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .case import Case
from .draw import RECORDED, Draw
from .layouts import lay_out
from .poison import in_larger_buffer

SHARE = 0.65  # part of problems
ROW_BYTES, PAGE_STEP = 16, 8  # that divide rows, and keys that divide pages
WITH_SLOPES, CAPPED = 128, 64  # head dimensions up to which slopes have a gradient, and above which softcaps do
DTYPES = {torch.bfloat16: 4, torch.float16: 3, torch.float32: 1}
HEAD_DIMS = {64: 8, 128: 8, 96: 4, 80: 2, 32: 3, 16: 1, 40: 1, 72: 1, 104: 1, 160: 1, 192: 2, 256: 2}
HEAD_DIMS_FLOAT32 = {128: 4, 96: 2, 80: 1, 72: 1}
LAYOUTS = {"contiguous": 8, "transposed": 4, "in larger rows": 4, "expanded": 1}
NOT_IN_PAGES = ("dropout_p", "dropout_seed", "bias", "mask", "score_mod")
Margins = list[tuple[int, int]]  # before and behind each dimension


def is_for_hopper(seed: int, dtypes: tuple[torch.dtype, ...]) -> bool:
    """Whether a seed's problem on a Hopper GPU is one of these."""
    chosen = random.Random(f"Hopper's kernels of {seed}").random() < SHARE
    return chosen and seed not in RECORDED and not DTYPES.keys().isdisjoint(dtypes)


class HopperDraw(Draw):
    """The choices of one such problem."""

    left_out = frozenset({"seqused_q", "leftpad_k", "attention_chunk", "eight bits"})
    page_sizes = tuple(PAGE_STEP * n for n in (1, 2, 2, 3, 4, 8))

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.plain |= self.dtype is torch.float32
        self.of_pages: tuple[str, Margins] | None = None  # the layout of keys, which values share

    def _dtype(self, dtypes: tuple[torch.dtype, ...]) -> torch.dtype:
        return self.pick({dtype: n for dtype, n in DTYPES.items() if dtype in dtypes})

    def _head_dim(self) -> int:
        return self.pick(HEAD_DIMS_FLOAT32 if self.dtype is torch.float32 else HEAD_DIMS)

    def seqlen(self) -> int:
        return max(1, super().seqlen())

    def operand(self, values: Tensor, expandable: tuple[int, ...] | None = None) -> Tensor:
        in_pages = expandable == ()
        chosen = self.of_pages if in_pages else None
        layout, margins = chosen or self._layout(values.ndim, in_pages)
        if in_pages:
            self.of_pages = layout, margins
        if layout != "in larger rows":
            return lay_out(values.to(self.device), layout, self.stream(), expandable)
        step = ROW_BYTES // values.element_size()
        before, behind = (step * n for n in margins[-1])
        return in_larger_buffer(values.to(self.device), [*margins[:-1], (before, behind + -values.shape[-1] % step)])

    def _layout(self, ndim: int, in_pages: bool) -> tuple[str, Margins]:
        layout = self.pick({name: n for name, n in LAYOUTS.items() if not (in_pages and name == "expanded")})
        rng = self.stream()
        return layout, [(rng.randint(0, 3), rng.randint(0, 3)) for _ in range(ndim)]


def for_hopper(case: Case) -> Case:
    """The problem without the features that the kernels lack with pages, and without the gradients that they lack."""
    arguments, constant = dict(case.arguments), ["bias"]
    paged = "page_table" in arguments or "k_cache" in arguments
    if paged:
        arguments = {name: x for name, x in arguments.items() if name not in NOT_IN_PAGES}
    width = max(arguments["q"].shape[-1], arguments["v_cache" if "v_cache" in arguments else "v"].shape[-1])
    capped = arguments.get("softcap") is not None
    if capped or width > WITH_SLOPES:
        constant.append("alibi_slopes")
    constant += [f"score_mod_{n}" for n in range(len(getattr(arguments.get("score_mod"), "tensors", ())))]
    forward_only = paged or (capped and width <= CAPPED)
    return replace(case, arguments=arguments, constant=tuple(constant), forward_only=forward_only, description="")
