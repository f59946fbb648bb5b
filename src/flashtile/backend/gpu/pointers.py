"""What a kernel is given to read and write, by the names of its arguments."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor


class Described(NamedTuple):
    """A tensor that a kernel takes as `describe(base, given)`: in another dtype, or as a GPU's copy engine knows it."""

    base: Tensor
    describe: Callable[[Tensor, Any], Any]
    given: Any


Pointers = Mapping[str, Tensor | Described | None]


class Place(NamedTuple):
    """Where a pass keeps a tensor, and how a kernel takes it."""

    number: int
    describe: Callable[[Tensor, Any], Any] | None = None
    given: Any = None

    def taken(self, tensors: Sequence[Tensor | None]) -> Any:
        """What Triton takes for the pointer."""
        x: Any = tensors[self.number]
        return x if self.describe is None else self.describe(x, self.given)


Places = Mapping[str, Place | None]
