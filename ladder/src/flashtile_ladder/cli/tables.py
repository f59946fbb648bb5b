"""All tables of `flashtile-ladder`, by name."""

from collections.abc import Callable

import torch

from .approximate import approximate
from .dtypes import blocks, dtypes
from .features import backward, features
from .gpu import banks, coalescing, cuda, memory, shared
from .large import large
from .lite import lite
from .long import long
from .measure import Measurement
from .model import intensity, layers
from .pointwise import pointwise
from .rounding import rounding
from .stack import stack
from .tiles import tiles, widths

TABLES: dict[str, Callable[[torch.device], Measurement]] = {
    "stack": stack,
    "long": long,
    "backward": backward,
    "features": features,
    "lite": lite,
    "intensity": intensity,
    "tiles": tiles,
    "widths": widths,
    "pointwise": pointwise,
    "layers": layers,
    "approximate": approximate,
    "rounding": rounding,
    "cuda": cuda,
    "large": large,
    "shared": shared,
    "memory": memory,
    "coalescing": coalescing,
    "banks": banks,
    "dtypes": dtypes,
    "blocks": blocks,
}
