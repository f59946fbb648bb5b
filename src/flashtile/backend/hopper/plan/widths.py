"""Widths of the kernels, and the one that a head dimension takes."""

import torch

from ....call.problem import Problem

WIDTHS = (  # widths of the kernels, for (q and k, v)
    (32, 32), (64, 64), (80, 80), (96, 96), (128, 128), (192, 128), (160, 160), (192, 192), (256, 256), (512, 512),
)  # fmt: skip

FLOAT32 = WIDTHS[1:5]  # widths of float32
FUSED = WIDTHS[:5]  # with one backward kernel
SHARED_COLUMNS = WIDTHS[-1:]  # whose columns two warpgroups share
EIGHT_BIT = (64, 128, 256)  # widths of q, k and v in 8 bits
LATENT = (576, 512)  # widths of latent rows, whose first columns are the values
ONE_BOX = WIDTHS[:2]  # where exponentials take longer than products, and three warpgroups are fast with every Triton


def widths(problem: Problem) -> tuple[int, int] | None:
    """Widths of the narrowest kernels that hold the head dimensions.

    TMA fills columns past the head dimension with 0, and does not store them.
    """
    head_dims = problem.head_dim, problem.head_dim_v
    known = FLOAT32 if problem.dtype is torch.float32 else WIDTHS
    return next((pair for pair in known if all(d <= width for d, width in zip(head_dims, pair, strict=True))), None)


def is_latent(problem: Problem) -> bool:
    """Whether the kernel of latent rows has the problem's head dimensions."""
    return problem.latent and (problem.head_dim, problem.head_dim_v) == LATENT


def eight_bit_width(problem: Problem) -> int | None:
    """Width of the narrowest kernel of 8 bits that holds the head dimensions."""
    return next((width for width in EIGHT_BIT if max(problem.head_dim, problem.head_dim_v) <= width), None)
