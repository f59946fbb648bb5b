"""The calls whose kernels are compiled: one for each family of problems, on small CPU tensors."""

from typing import Any

import torch
from variants import VARIANTS, Variant

from flashtile.call import Call
from flashtile.explain import described_call

FAMILIES: dict[str, Variant] = VARIANTS
IN_CI = {"hdim 64 causal": ("sm_80", "sm_90", "gfx942"), "everything": ("sm_89",), "packed": ("sm_100",), "one query": ("sm_90",)}
ARCHITECTURES = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120", "gfx942")


def call_of(variant: Variant) -> Call:
    """A call of long sequences: what is compiled depends on lengths only as far as few queries have tiles of their own."""
    case = variant.case(0, "cpu", (min(257, variant.longest),))
    arguments: dict[str, Any] = dict(case.arguments)
    positional = [arguments.pop(name, None) for name in ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k")]
    return described_call(*positional, arguments)
