"""What attention takes at least: operations, bytes between the big and the small memory, and a roofline.

The big memory is a GPU's HBM or a CPU's DRAM. Sources: Dao et al., "FlashAttention", 2022; Williams et al., "Roofline",
2009.
"""

from typing import NamedTuple


def forward_flops(pairs: int, head_dim: int, head_dim_v: int) -> int:
    """Two products: q k and p v. A multiplication and an addition are two operations."""
    return 2 * pairs * (head_dim + head_dim_v)


def backward_flops(pairs: int, head_dim: int, head_dim_v: int) -> int:
    """Five products, with S recomputed: q k, ds k and ds q with head_dim; dout v and p dout with head_dim_v."""
    return 2 * pairs * (3 * head_dim + 2 * head_dim_v)


def tangent_flops(pairs: int, head_dim: int, head_dim_v: int, of_scores: int, of_values: int) -> int:
    """Forward's two products, and the tangents' products: `of_scores` of dq k and q dk, `of_values` of (p ds) v and
    p dv. With all four they are three forward passes.
    """
    return 2 * pairs * ((1 + of_scores) * head_dim + (1 + of_values) * head_dim_v)


def second_flops(pairs: int, head_dim: int, head_dim_v: int) -> int:
    """A second derivative along q, k and v: forward with tangents, then for rows and for keys the scores, their
    tangents and the products with values again, with two gradients by q, two by k and one by v.
    """
    return 2 * pairs * ((3 + 5 + 5) * head_dim + (3 + 2 + 3) * head_dim_v)


def least_bytes(inputs: int, rows: int, head_dim_v: int, itemsize: int) -> int:
    """Bytes of a forward that reads each input once (`inputs` bytes in total), and writes out `[rows, head_dim_v]` and
    lse `[rows]` once. Statistics are float32, or float64 for float64.
    """
    return inputs + rows * (head_dim_v * itemsize + max(itemsize, 4))


class Machine(NamedTuple):
    """Measured rates; above the intensity `ridge`, arithmetic is the limit, below it memory."""

    flops_per_second: float
    bytes_per_second: float

    @property
    def ridge(self) -> float:
        return self.flops_per_second / self.bytes_per_second


class Roofline(NamedTuple):
    limit: str  # "compute" or "memory"
    seconds: float  # no run takes less


def roofline(flops: float, moved: float, machine: Machine) -> Roofline:
    """The larger of the times that operations and bytes take alone (Williams et al., 2009)."""
    compute, memory = flops / machine.flops_per_second, moved / machine.bytes_per_second
    return Roofline("compute" if compute > memory else "memory", max(compute, memory))
