"""Skip this file when you learn: the steps' check of shapes."""

from typing import Any


def one_shape(*tensors: Any) -> tuple[int, int]:
    """N and d of q, k, v (and further) `[N, d]`, tensors or lists of rows.

    Raises:
        ValueError: they are not of one shape. A loop over N rows of k would leave out the rows that k has beyond.
    """
    shapes = [tuple(x.shape) if hasattr(x, "shape") else (len(x), len(x[0])) for x in tensors]
    if len(set(shapes)) != 1 or len(shapes[0]) != 2:
        raise ValueError(
            f"q, k, v are {shapes}; the course's steps take one shape [N, d] for all. PyTorch's "
            "scaled_dot_product_attention and flashtile.attention take keys of another sequence"
        )
    return shapes[0]


def two_lengths(q: Any, k: Any, v: Any, *, largest_d: int, dtypes: tuple[Any, ...], causal: bool) -> None:
    """Refuse what a kernel for q `[Nq, d]` and k, v `[Nk, d]` does not take.

    Raises:
        ValueError: shapes or dtypes outside the kernel's limits, or causal with other lengths of q and k.
    """
    shapes, found = [tuple(x.shape) for x in (q, k, v)], {x.dtype for x in (q, k, v)}
    if q.ndim != 2 or k.ndim != 2 or k.shape != v.shape or q.shape[1] != k.shape[1] or 0 in (*q.shape, *k.shape):
        raise ValueError(f"q, k, v are {shapes}; this kernel takes q [Nq, d], and k and v of one shape [Nk, d]")
    if q.shape[1] > largest_d or (causal and len(q) != len(k)) or len(found) != 1 or q.dtype not in dtypes:
        limits = f"d to {largest_d}, one N if causal, and one of {dtypes}"
        raise ValueError(f"q, k, v are {shapes}, {found}; this kernel takes {limits}")
