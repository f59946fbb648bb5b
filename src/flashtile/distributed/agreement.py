"""The agreement of ranks about a call: with `check=True`, shapes, arguments and checksums of the tensors that all ranks
have are exchanged before keys travel.
"""

import zlib
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..call.cache_tensors import CacheTensors
from ..call.call import FEATURES, Call, Settings
from ..call.eight_bit import DESCALES, is_by_token
from ..errors import AttentionError
from ..expression import mask_mod_formula, score_mod_formula
from .group import Grid
from .layout import Layout

Shape = tuple[int | str, ...]


class Description(NamedTuple):
    """A rank's call, without the values of its rows."""

    num_rows: int
    num_keys: int
    q: Shape  # shapes without the sequence
    k: Shape
    v: Shape
    dtype: str
    features: dict[str, Shape]
    checksums: dict[str, int]  # checksums of tensors that all ranks have, by the names of arguments
    captured: tuple[Shape, ...]
    requires_grad: tuple[bool, ...]
    layout: str | Layout
    scheme: str
    length: Any
    documents: Any
    dropout_seed: int | None
    functions: tuple[int | None, ...]  # checksums of the formulas of score_mod and mask
    settings: Settings

    @classmethod
    def of(cls, call: Call, layout: str | Layout, scheme: str, length: Any, documents: Any, seed: Any) -> "Description":
        t, s = call.tensors, call.settings
        q, k, v = ((*x.shape[:2], x.shape[3]) for x in (t.q, t.k, t.v))
        present = {name: x for name in FEATURES if (x := getattr(t, name)) is not None and name != "dropout_seed"}
        shapes = {n: shape_of(x, t.q.shape[2]) for n, x in present.items()}
        common = {n: x for n, x in present.items() if "own rows" not in shapes[n] or x.shape[2] == 1 < t.q.shape[2]}
        common |= {f"captured tensor {n}": x for n, x in enumerate(t.score_mod_tensors)}
        checksums = {f"values of {name}": checksum(x) for name, x in common.items()}
        functions = [
            None if key is None else zlib.crc32(repr(formula_of(key)).encode())
            for key, formula_of in ((s.score_mod, score_mod_formula), (s.mask_mod, mask_mod_formula))
        ]
        grads = [torch.is_grad_enabled() and x.requires_grad for x in (t.q, t.k, t.v, *present.values())]
        return cls(
            t.q.shape[2], t.k.shape[2], q, k, v, str(t.q.dtype), shapes, checksums,
            tuple(tuple(x.shape) for x in t.score_mod_tensors), tuple(grads), layout, scheme, length, documents,
            seed if s.dropout_p > 0 else None, tuple(functions),
            s._replace(score_mod=None, mask_mod=None),  # keys of functions belong to a process
        )  # fmt: skip

    @classmethod
    def of_step(cls, call: Call, cache: CacheTensors, length: int | None) -> "Description":
        """A decoding step's. All ranks have all of its tensors, but of the caches, whose positions are `num_keys`."""
        caches = {"k_cache": cache.k_cache, "v_cache": cache.v_cache}
        descales = {name: x for name in DESCALES if (x := getattr(cache, name)) is not None}
        caches |= {name: x for name, x in descales.items() if is_by_token(x, cache.k_cache)}
        common = {name: x for name, x in cache._asdict().items() if x is not None and name not in caches}
        common |= {name: x for name in FEATURES if (x := getattr(call.tensors, name)) is not None}
        shapes = {name: (*x.shape, str(x.dtype)) for name, x in common.items()}
        shapes |= {name: (*x.shape[:2], *x.shape[3:], str(x.dtype)) for name, x in caches.items()}
        checksums = {f"values of {name}": checksum(x) for name, x in ({"q": call.tensors.q} | common).items()}
        num_keys = cache.k_cache.shape[2] if cache.k_cache.dim() == 4 else 0
        return cls(
            0, num_keys, tuple(call.tensors.q.shape), (), (), str(call.tensors.q.dtype), shapes, checksums, (), (),
            "contiguous", "", length, None, None, (), call.settings,
        )  # fmt: skip

    def compared(self) -> dict[str, Any]:
        """All that ranks have in common, by the names of arguments."""
        values = self._asdict() | self.features | self.settings._asdict()
        apart = "num_rows", "num_keys", "features", "checksums", "settings"
        return {name: x for name, x in values.items() if name not in apart}


def checksum(x: Tensor) -> int:
    """A checksum of a tensor's values. Waits for its device."""
    return zlib.crc32(x.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())


def shape_of(x: Tensor, num_rows: int) -> Shape:
    """A feature's shape; rows of pairs may be the rank's, and each rank has its own number."""
    if x.dim() != 4 or x.shape[2] not in (1, num_rows):
        return tuple(x.shape)
    return *x.shape[:2], "own rows", x.shape[3]


def agree(grid: Grid, described: Description | str) -> tuple[list[int], list[int]]:
    """The numbers of rows and of keys of all ranks, whose calls agree. A string is a rank's error.

    Every rank sees the same descriptions, so all of them raise or none does, and none waits for one that has raised.
    """
    calls: list[Description] = []
    for rank, given in enumerate(grid.gather(described)):
        if isinstance(given, str):
            if described == given:
                raise AttentionError(given)
            raise AttentionError(f"rank {rank} of the mesh cannot make the call: {given}")
        calls.append(given)
    compared = [given.compared() for given in calls]
    for rank, given in enumerate(compared):
        for name in {**compared[0], **given}:
            value, first = given.get(name), compared[0].get(name)
            if value != first:
                found = f"{value} on rank {rank} of the mesh, {first} on rank 0"
                raise AttentionError(f"`{name}` differs between ranks: {found}.\n  accepted: the same on all ranks")
        for name, value in calls[rank].checksums.items():  # a rank with one row cannot tell it from a broadcast one
            if value != calls[0].checksums.get(name, value):
                found = f"`{name}` differ between ranks: those of rank {rank} of the mesh from those of rank 0"
                raise AttentionError(f"{found}.\n  accepted: the same on all ranks")
    return [given.num_rows for given in calls], [given.num_keys for given in calls]
