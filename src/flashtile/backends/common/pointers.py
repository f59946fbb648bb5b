"""What a kernel is given to read and write, by the names of its arguments."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import Tensor


class Described(NamedTuple):
    """A tensor that the copy engine of a GPU is told of, and how: `describe(base, *box)` is what Triton takes."""

    base: Tensor
    describe: Callable[..., Any]
    box: tuple[int, ...]  # rows; and columns, if not all


# Tensors; or descriptions, in Triton's form or still to be made, which need not be where one is known for an address.
Pointers = Mapping[str, Tensor | Described | Any | None]


def taken(x: Any) -> Any:
    """What Triton takes for a pointer."""
    return x.describe(x.base, *x.box) if isinstance(x, Described) else x
