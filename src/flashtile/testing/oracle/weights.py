"""The first factors of sums over pairs, in the sizes that the error bound needs."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import Tensor


@dataclass(frozen=True)
class Weights:
    """A number for each pair, [H, M, N] or its transpose; all 0 where the pair is not visible."""

    value: Tensor
    absolute: Tensor  # sum of the absolute values of the terms of `value`: its error is eps(acc) of it
    root: Tensor  # size of an error of eps(dtype), independent in each pair
    shared: Tensor | None = None  # size of an error of eps(dtype) that all keys of a row share
    loss: Tensor | None = None  # error of the pair if every P of its row is off by 1
    keys_dim: int = 2  # along this dimension shared errors add up, before they are squared

    def map(self, change: Callable[[Tensor], Tensor]) -> "Weights":
        """A change of elements or shape applied to every tensor."""
        return Weights(
            value=change(self.value),
            absolute=change(self.absolute),
            root=change(self.root),
            shared=None if self.shared is None else change(self.shared),
            loss=None if self.loss is None else change(self.loss),
            keys_dim=self.keys_dim,
        )

    @property
    def mT(self) -> "Weights":  # noqa: N802 (as in torch)
        return replace(self.map(lambda part: part.mT), keys_dim=3 - self.keys_dim)

    def times(self, factor: Tensor | float, absolute: Tensor | None = None) -> "Weights":
        """The product with a factor; `absolute` is the sum of the absolute values of its terms where it has several."""
        product = self.map(lambda part: part * factor)
        larger = abs(factor) if absolute is None else absolute
        return replace(product, absolute=self.absolute * larger)

    def losses(self, visible: Tensor) -> Tensor:
        """Error of a pair by its row's losses, and 1 for its own cast before a matrix product."""
        return visible.double() if self.loss is None else visible + self.loss.abs()
