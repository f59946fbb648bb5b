"""Which backends can run on this machine."""

from typing import NamedTuple

from .planner import SUPPORT, optional


class BackendStatus(NamedTuple):
    """One backend on this machine.

    Attributes:
        name: what `backend=` takes.
        usable: whether it can run here.
        reason: why it cannot, or `None`.
        summary: one line about it.
    """

    name: str
    usable: bool
    reason: str | None
    summary: str


def backends() -> tuple[BackendStatus, ...]:
    """Every backend, as a rule the fastest first: whether it is usable on this machine, and why not.

    A usable backend may still decline a call; `flashtile.explain` says so for the call at hand.

    Example:
        >>> [status.name for status in flashtile.backends()]
        ['hopper', 'triton', 'cpu', 'tiled', 'reference']

    Returns:
        One `BackendStatus` for each.
    """
    return tuple(
        BackendStatus(
            name, (reason := support.unusable() or optional(support, "misconfigured")) is None, reason, support.SUMMARY
        )
        for name, support in SUPPORT.items()
    )
