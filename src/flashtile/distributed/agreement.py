"""The agreement of ranks about a call: shapes and arguments are exchanged before keys travel."""

from typing import Any, NamedTuple

from ..call.call import Call, Settings
from ..errors import ArgumentError, AttentionError
from .group import EXAMPLE, Group
from .layout import Layout


class Description(NamedTuple):
    """A rank's call, without the values of its tensors."""

    num_rows: int
    num_keys: int
    q: tuple[int, ...]  # shapes without the sequence
    k: tuple[int, ...]
    v: tuple[int, ...]
    dtype: str
    alibi_slopes: tuple[int, ...] | None
    requires_grad: tuple[bool, ...]
    layout: str
    dropout_seed: int | None
    functions: tuple[bool, bool]
    settings: Settings

    @classmethod
    def of(cls, call: Call, layout: str, requires_grad: tuple[bool, ...], seed: int | None) -> "Description":
        t, s = call.tensors, call.settings
        q, k, v = ((*x.shape[:2], x.shape[3]) for x in (t.q, t.k, t.v))
        slopes = None if t.alibi_slopes is None else tuple(t.alibi_slopes.shape)
        functions = s.score_mod is not None, s.mask_mod is not None
        settings = s._replace(score_mod=None, mask_mod=None)  # keys of functions belong to a process
        return cls(
            t.q.shape[2], t.k.shape[2], q, k, v, str(t.q.dtype), slopes, requires_grad, layout,
            seed if s.dropout_p > 0 else None, functions, settings,
        )  # fmt: skip

    def compared(self) -> dict[str, Any]:
        """All that ranks have in common, by the names of arguments."""
        values = self._asdict() | self.settings._asdict()
        return {name: x for name, x in values.items() if name not in ("num_rows", "num_keys", "settings")}


def agree(group: Group, described: Description | str) -> tuple[Layout, Layout]:
    """Layouts of rows and keys, from all ranks' descriptions. A string is a rank's error.

    Every rank sees the same descriptions, so all of them raise or none does, and none waits for one that has raised.
    """
    calls: list[Description] = []
    for rank, given in enumerate(group.gather(described)):
        if isinstance(given, str):
            if described == given:
                raise AttentionError(given)
            raise AttentionError(f"rank {rank} of the mesh cannot make the call: {given}")
        calls.append(given)
    compared = [given.compared() for given in calls]
    for rank, given in enumerate(compared):
        for name, value in given.items():
            if value != (first := compared[0][name]):
                found = f"{value} on rank {rank} of the mesh, {first} on rank 0"
                raise AttentionError(f"`{name}` differs between ranks: {found}.\n  accepted: the same on all ranks")
    layouts = []
    for argument, field in (("q", "num_rows"), ("k", "num_keys")):
        lengths = [getattr(given, field) for given in calls]
        layout = Layout(calls[0].layout, sum(lengths), group.size)  # type: ignore[arg-type]
        expected = [layout.rows(rank) for rank in range(group.size)]
        if lengths != expected:
            raise ArgumentError(argument, f"{lengths} rows on the ranks", f"{expected}, as `shard` gives them", EXAMPLE)
        layouts.append(layout)
    return layouts[0], layouts[1]
