"""The CPU backend's entries, which the dispatcher calls."""

from .host_backward import backward
from .host_forward import forward

__all__ = ["backward", "forward"]
