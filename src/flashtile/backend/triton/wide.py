"""Which calls of wide heads leave their matrix products to PyTorch."""

import torch

from ...call.call import NO_FEATURES
from ...call.device import Device
from ...call.problem import Problem

# Head dimensions above which tiles are too small to be fast, and the pairs times features of a call from which
# PyTorch's matrix products need less time, launches included (docs/journal/2026-11-25-few-rows.md, -wide-heads.md).
WIDE_FLOAT32, MANY_FLOAT32 = 128, 2**30
WIDE_HALF, MANY_HALF = 256, 2**31
MOST_KEYS = 2**16  # of a row, which one program reads


def is_wide(problem: Problem) -> bool:
    """Whether heads are so wide, and products so many, that PyTorch's are faster than those of kernels."""
    p = problem
    width = max(p.head_dim, p.head_dim_v)
    wide, many = (WIDE_FLOAT32, MANY_FLOAT32) if p.dtype is torch.float32 else (WIDE_HALF, MANY_HALF)
    products = p.batch * p.num_heads_q * p.seqlen_q * p.seqlen_k * width
    # PyTorch's products on a GPU are not deterministic without settings in the environment.
    return p.layout == "dense" and width > wide and products >= many and not p.deterministic


def takes_products(problem: Problem, device: Device) -> bool:
    """Whether PyTorch multiplies, and this backend's kernels do the rest (`host_products`): without features, and on
    Hopper, where six products of bfloat16 numbers take less time than one of float32.
    """
    p = problem
    plain = (
        p.features == NO_FEATURES and p.window.unlimited and not (p.softcap or p.dropout or p.seqused_q or p.leftpad_k)
    )
    functions = p.score_mod is not None or p.mask_mod is not None
    whole_vectors = p.head_dim % 8 == 0 and p.head_dim_v % 8 == 0
    heads = p.num_heads_q == p.num_heads_kv and p.seqlen_k <= MOST_KEYS
    return device.arch == "sm_90" and is_wide(p) and plain and not functions and whole_vectors and heads
