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
