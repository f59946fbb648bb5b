"""What backends are: whether they can run on this machine, and how they round."""

from typing import NamedTuple

from .planner import AUTO, SUPPORT, optional


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


def rounds_to_eight_bits(backend: str) -> bool:
    """Whether a backend, or one that `auto` may take, rounds P to 8 bits under queries of 8 bits, and to float16 over
    latent rows of 8 bits: it says so by a constant, and docs/contract.md has wider bounds of its results.
    """
    names = AUTO if backend == "auto" else (backend,)
    return any(getattr(SUPPORT[name], "ROUNDS_TO_EIGHT_BITS", False) for name in names)
