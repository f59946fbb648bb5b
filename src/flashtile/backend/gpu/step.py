"""The type of a recording's steps."""

from collections.abc import Callable

from torch import Tensor

Step = Callable[[list[Tensor | None]], None]  # on the tensors of a recording
