"""Random choices from a seed and a variation. Variations of a seed share the constants of compiled kernels."""

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch

T = TypeVar("T")


class Choices:
    """Choices that all variations of a seed share (`keep`, `chance`, `pick`, `choice`), and a stream `rng` and a
    `generator` for lengths and values, which differ.

    In variation 0 everything comes from one stream. The others replay its shared choices, passed as `kept`. So the
    order of the calls must not depend on lengths or values.
    """

    def __init__(self, seed: int, variation: int = 0, kept: Sequence[Any] = ()) -> None:
        self.seed, self.variation = seed, variation
        self.rng = random.Random(seed if variation == 0 else f"variation {variation} of {seed}")
        self.generator = torch.Generator().manual_seed(seed if variation == 0 else self.rng.getrandbits(63))
        self.kept: list[Any] = []
        self._replayed = iter(kept)

    def keep(self, choose: Callable[[], T]) -> T:
        """The value of `choose` in variation 0."""
        chosen: T
        if self.variation > 0:
            chosen = next(self._replayed)
            return chosen
        position = len(self.kept)
        chosen = choose()
        self.kept[position:] = [chosen]  # in place of the choices inside `choose`
        return chosen

    def chance(self, p: float) -> bool:
        return self.keep(lambda: self.rng.random() < p)

    def pick(self, weights: Mapping[T, float]) -> T:
        return self.keep(lambda: weighted(self.rng, weights))

    def choice(self, options: Sequence[T]) -> T:
        return self.keep(lambda: self.rng.choice(options))

    def stream(self) -> random.Random:
        """`rng` in its state of variation 0: for a fixed number of choices that variations share."""
        state = self.keep(self.rng.getstate)
        if self.variation == 0:
            return self.rng
        stream = random.Random()
        stream.setstate(state)
        return stream


def weighted(rng: random.Random, weights: Mapping[T, float]) -> T:
    return rng.choices(list(weights), list(weights.values()))[0]
