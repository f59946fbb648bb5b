"""The CPU backend's entries, which the dispatcher calls."""

from .host_backward import backward, record_backward
from .host_forward import forward, record_forward

__all__ = ["backward", "forward", "record_backward", "record_forward"]
