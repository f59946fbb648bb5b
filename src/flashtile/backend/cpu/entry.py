"""The CPU backend's entries, which the dispatcher calls."""

from .host_backward import backward, record_backward
from .host_cache import record_attend_with_cache
from .host_forward import forward, record_forward

__all__ = ["backward", "forward", "record_attend_with_cache", "record_backward", "record_forward"]
