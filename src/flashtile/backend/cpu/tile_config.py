"""Tiles of the CPU backend as values."""

from typing import NamedTuple


class TileConfig(NamedTuple):
    """Packed query rows of a task, and keys of a block. Few rows have lanes over features, in the kernel of decoding,
    unless that is slower: `decodes`. A batch-invariant call has `queries`, "one" for each sequence or "several": the
    kernel of decoding and its parts of `INVARIANT_KEYS`, or the other kernel and whole rows.
    """

    rows: int
    keys: int
    queries: str | None = None
    decodes: bool = False
