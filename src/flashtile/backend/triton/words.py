"""Which problems have latent rows of 8 bits that the kernel of words reads (`kernels.latent`)."""

import torch

from ...call.problem import Problem
from .constants import MAX_HEAD_DIM, MAX_LATENT_DIM


def reads_words(problem: Problem) -> bool:
    """Whether latent rows of 8 bits are read in words (`kernels.latent`). Under float16, probabilities times scales of
    keys may be outside of its range.
    """
    p = problem
    if p.eight_bit is None or not p.latent or (p.head_dim, p.head_dim_v) != (MAX_LATENT_DIM, MAX_HEAD_DIM):
        return False
    by_key = p.eight_bit.v_by_key and p.dtype is torch.float16
    return p.dtype in (torch.float16, torch.bfloat16) and p.alignment == 16 and p.layout == "paged" and not by_key
