"""Locks that a forked child does not inherit locked, and that signal handlers may take while their thread has them."""

import os
import threading


def process_lock() -> "threading.RLock":  # type: ignore[valid-type]
    """A lock for good, of a module: `os.fork` waits for it, so that what it guards is whole in the child."""
    lock = threading.RLock()
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(before=lock.acquire, after_in_parent=lock.release, after_in_child=lock.release)
    return lock
