"""One cell of a sweep: a kind of measurement and the call that it measures, as plain data."""

from dataclasses import asdict, dataclass, fields
from typing import Any

import torch

from ..call.window import Window, visible_pairs
from .patterns import check_patterns

TIMED = ("forward", "backward", "decode")
FIRST_CALLS = ("first_call_cold", "first_call_warm")
MEMORIES = ("forward_memory", "backward_memory")
FORWARD_MODE = "tangents"  # forward mode by q, k and v, which `flashtile calibrate` times
MEASURES = (*TIMED, *FIRST_CALLS, *MEMORIES, FORWARD_MODE)
INPUTS = ("normal", "outliers", "captured")
DTYPES = ("float16", "bfloat16", "float32", "float64")


@dataclass(frozen=True)
class Cell:
    """Fields have the names of `flashtile explain`'s options. A field is an entry of a sweep's TOML file."""

    measure: str = "forward"
    batch: int = 1
    heads: int = 8
    heads_kv: int | None = None  # None: as many as query heads
    seqlen_q: int = 1024
    seqlen_k: int | None = None  # None: as seqlen_q
    head_dim: int = 64
    head_dim_v: int | None = None
    dtype: str = "float32"
    causal: bool = False
    window: tuple[int, int] | None = None  # -1 is unlimited
    softcap: float | None = None
    bias: bool = False  # [1, heads, seqlen_q, seqlen_k]
    mask: bool | str = False  # True, for nine keys in ten, or a pattern of `patterns.py`, "prefix 256" for example
    score_mod: str = ""  # a name of `patterns.SCORE_MODS`
    alibi: bool = False
    sinks: bool = False
    dropout: float = 0.0
    lengths: tuple[int, ...] = ()  # lengths of packed sequences; then batch, seqlen_q and seqlen_k are theirs
    inputs: str = "normal"
    model: str = ""  # the model and its layer that have this call
    source: str = ""  # source of its numbers
    device: str = ""  # the kind of device that measures it; empty for any

    def __post_init__(self) -> None:
        for name, allowed in (("measure", MEASURES), ("inputs", INPUTS), ("dtype", DTYPES)):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} is {getattr(self, name)!r}, should be one of {', '.join(allowed)}")
        check_patterns(self.mask, self.score_mod)
        for name in ("batch", "heads", "seqlen_q", "head_dim"):
            if not isinstance(getattr(self, name), int) or getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)!r}, should be a positive integer")
        if self.heads % self.num_heads_kv:
            raise ValueError(f"heads {self.heads} is not a multiple of heads_kv {self.heads_kv}")

    @property
    def num_heads_kv(self) -> int:
        return self.heads_kv or self.heads

    @property
    def keys(self) -> int:
        return self.seqlen_k or self.seqlen_q

    @property
    def width_v(self) -> int:
        return self.head_dim_v or self.head_dim

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    @property
    def differentiates(self) -> bool:
        return self.measure.startswith("backward")

    @property
    def moves(self) -> bool:
        """Whether it is forward mode."""
        return self.measure == FORWARD_MODE

    @property
    def belongs_to(self) -> str:
        """The group of features that decides the speed of this call: "scores", "masks", or neither."""
        if self.bias or self.alibi or self.score_mod:
            return "scores"
        return "masks" if self.mask else ""

    @property
    def is_special(self) -> bool:
        """Whether the call has other scores or masks than dense causal attention."""
        return bool(self.belongs_to or self.window or self.softcap or self.sinks or self.lengths)

    @property
    def sequences(self) -> list[tuple[int, int]]:
        """Queries and keys of each sequence."""
        return [(n, n) for n in self.lengths] or [(self.seqlen_q, self.keys)] * self.batch

    @property
    def flops(self) -> int:
        """Operations: 2 (D + Dv) for each visible pair of a row and a key, or 4 B H Sq Sk D for a full square. Two and
        a half times that backward, three times in forward mode. A `mask` is not counted: blocks that it hides in part
        are computed.
        """
        left, right = self.window or (-1, -1)
        right = (0 if right < 0 else min(right, 0)) if self.causal else right
        window = Window(None if left < 0 else left, None if right < 0 else right)
        counted = {pair: visible_pairs(window, *pair) for pair in set(self.sequences)}
        forward = 2 * (self.head_dim + self.width_v) * self.heads * sum(counted[pair] for pair in self.sequences)
        return forward * 5 // 2 if self.differentiates else 3 * forward if self.moves else forward

    @property
    def kv_bytes(self) -> int:
        """Bytes of K and V, which decoding has to read."""
        tokens = sum(keys for _, keys in self.sequences)
        return tokens * self.num_heads_kv * (self.head_dim + self.width_v) * self.torch_dtype.itemsize

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Cell":
        """The cell of `as_dict`, or of one combination in a sweep: lists become tuples."""
        known = {field.name for field in fields(cls)}
        unknown = values.keys() - known
        if unknown:
            raise ValueError(f"a cell has no field {', '.join(sorted(unknown))}; it has {', '.join(sorted(known))}")
        arguments: dict[str, Any] = {name: tuple(x) if isinstance(x, list) else x for name, x in values.items()}
        return cls(**arguments)

    def features(self) -> list[str]:
        """Features of the call, in words."""
        words = [name for name in ("causal", "bias", "alibi", "sinks") if getattr(self, name)]
        words += ["mask"] if self.mask is True else [f"mask of {self.mask}"] if self.mask else []
        words += [f"score_mod {self.score_mod}"] if self.score_mod else []
        words += [f"window {self.window[0]},{self.window[1]}"] if self.window else []
        words += [f"softcap {self.softcap:g}"] if self.softcap else []
        words += [f"dropout {self.dropout:g}"] if self.dropout else []
        words += [f"{self.inputs} inputs"] if self.inputs != "normal" else []
        return words

    def label(self) -> str:
        """The call in short: "bf16 B=4 H=32/8 S=4096 D=128 causal"."""
        dtype = self.dtype.replace("bfloat", "bf").replace("float", "fp")
        heads = f"{self.heads}/{self.heads_kv}" if self.heads_kv not in (None, self.heads) else f"{self.heads}"
        dim = f"{self.head_dim}/{self.head_dim_v}" if self.head_dim_v not in (None, self.head_dim) else self.head_dim
        lengths = f"{self.seqlen_q}" if self.keys == self.seqlen_q else f"{self.seqlen_q}x{self.keys}"
        shape = f"B={self.batch} H={heads} S={lengths} D={dim}"
        if self.lengths:
            shape = f"{len(self.lengths)} packed {min(self.lengths)}..{max(self.lengths)} H={heads} D={dim}"
        return " ".join([f"{self.model}:" if self.model else "", dtype, shape, *self.features()]).strip()
