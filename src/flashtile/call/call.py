"""One attention call as it passes through an operator: its tensors, its settings, its results.

The operators' schemas are generated from these tuples, so that an argument is written down once.
"""

from collections import namedtuple
from collections.abc import Hashable, Sequence
from typing import Annotated, Any, NamedTuple

import torch
from torch import Tensor

from . import device
from .eight_bit import is_eight_bit
from .features import (
    BOOL,
    DENSE,
    DESCALE,
    INDEX,
    OF_KEYS,
    OF_ROWS,
    PACKED,
    PAIRS,
    PER_HEAD,
    PER_SEQUENCE_AND_HEAD,
    SCORES,
    SEED,
    VARLEN,
    Feature,
    fields_of,
)
from .memory import freed
from .window import Window

OF_A_PART = Feature(layouts=(DENSE, VARLEN), public=False)


class Tensors(NamedTuple):
    """The tensors of a call. Dense `q [B, Hq, Sq, D]`, `k [B, Hkv, Sk, D]`, `v [B, Hkv, Sk, Dv]`; varlen
    `q [Tq, Hq, D]`, `k [Tk, Hkv, D]`, `v [Tk, Hkv, Dv]`; paged `k [num_pages, page_size, Hkv, D]`, `v` alike.

    A dense KV cache is paged too, with pages as long as the cache.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Annotated[Tensor | None, Feature((PAIRS,), BOOL, advice="; an additive mask is a `bias`")] = None
    bias: Annotated[
        Tensor | None,
        Feature((PAIRS,), SCORES, gradient=True, advice="; a bool one is a `mask`", score_term=True),
    ] = None
    alibi_slopes: Annotated[
        Tensor | None,
        Feature((PER_HEAD, PER_SEQUENCE_AND_HEAD), SCORES, gradient=True, score_term=True, symbol="slopes"),
    ] = None
    sinks: Annotated[Tensor | None, Feature((PER_HEAD,), SCORES, gradient=True)] = None
    dropout_seed: Annotated[Tensor | None, Feature((("1",),), SEED, public=False)] = None  # an int becomes a tensor
    cu_seqlens_q: Annotated[Tensor | None, Feature((("B+1",),), INDEX, layouts=PACKED)] = None  # iff q is packed
    cu_seqlens_k: Annotated[Tensor | None, Feature((("B+1",),), INDEX, layouts=(VARLEN,))] = None
    seqused_q: Annotated[Tensor | None, Feature((("B",),), INDEX, layouts=(VARLEN,))] = None
    seqused_k: Annotated[Tensor | None, Feature((("B",),), INDEX, layouts=(VARLEN,))] = None
    page_table: Annotated[Tensor | None, Feature((("B", "max_pages"),), INDEX, layouts=(VARLEN,))] = None
    leftpad_k: Annotated[Tensor | None, Feature((("B",),), INDEX, layouts=(), public=False)] = None  # a cache's
    # Scales of 8 bits (`eight_bit.key_scales`). Those of a KV cache are views `[B|1, num_pages|1, page_size|1, Hkv]`.
    q_descale: Annotated[Tensor | None, Feature(OF_ROWS, DESCALE)] = None
    k_descale: Annotated[Tensor | None, Feature(OF_KEYS, DESCALE, layouts=(DENSE, VARLEN))] = None
    v_descale: Annotated[Tensor | None, Feature(OF_KEYS, DESCALE, layouts=(DENSE, VARLEN))] = None
    # Preallocated, in the result's dtype, for calls that bypass the operators; unrounded in the accumulation dtype.
    out: Annotated[Tensor | None, Feature(layouts=(), public=False)] = None
    score_mod_tensors: Sequence[Tensor] = ()  # all that are captured: those of score_mod, then those of a mask function

    def flat(self) -> tuple[Tensor | None, ...]:
        return (*self[:-1], *self.score_mod_tensors)

    @classmethod
    def from_flat(cls, flat: Sequence[Tensor | None]) -> "Tensors":
        named = len(cls._fields) - 1
        return cls._make((*flat[:named], tuple(flat[named:])))


class Settings(NamedTuple):
    """The scalars of a call, normalized by `api`: causal has become a window, absent means `None`."""

    scale: float
    softcap: float | None = None
    window_left: int | None = None
    window_right: int | None = None
    top_left: bool = False
    attention_chunk: int | None = None
    dropout_p: float = 0.0
    score_mod: str | None = None  # key of a registered function
    mask_mod: Annotated[str | None, Feature(public=False)] = None  # key of a mask function
    num_mask_tensors: Annotated[int, Feature(public=False)] = 0  # the last ones of `score_mod_tensors` are the mask's
    max_seqlen_q: Annotated[int | None, Feature(layouts=(VARLEN,))] = None
    max_seqlen_k: Annotated[int | None, Feature(layouts=(VARLEN,))] = None
    num_splits: int | None = None
    v_dim: int | None = None  # v is the first columns of k, as many
    deterministic: Annotated[bool, Feature(layouts=(DENSE, VARLEN))] = False
    batch_invariant: bool = False  # bits of a row depend on its own sequence alone
    out_dtype: str | None = None  # the result's, of queries of 8 bits; None is bfloat16
    backend: str = "auto"
    # Where this call lies in a larger, sharded one. Positions, masks, ALiBi, dropout and score_mod count from here.
    b0: Annotated[int, OF_A_PART] = 0
    h0: Annotated[int, OF_A_PART] = 0
    i0: Annotated[int, OF_A_PART] = 0
    j0: Annotated[int, OF_A_PART] = 0
    diagonal: Annotated[int, OF_A_PART] = 0  # what Sk - Sq of the whole exceeds Sk - Sq of this part by
    num_heads: Annotated[int | None, OF_A_PART] = None  # query heads of the whole; None: those of q

    @property
    def requested_splits(self) -> int | None:
        """`num_splits`, which a batch-invariant call does not use: positions alone split its keys."""
        return None if self.batch_invariant else self.num_splits

    @property
    def window(self) -> Window:
        return Window(self.window_left, self.window_right, self.top_left, self.attention_chunk)


class Call:
    """One call: its tensors and its settings."""

    __slots__ = ("entry", "is_differentiated", "is_plain_eager", "kept", "settings", "tensors")
    kind = "forward"  # the function of a backend that runs it

    def __init__(self, tensors: Tensors, settings: Settings, entry: Any = None, *, is_plain_eager: bool = False):
        self.tensors, self.settings = tensors, settings
        self.entry = entry  # what the fast path knows of calls like this one
        self.is_plain_eager = is_plain_eager
        self.is_differentiated = False  # whether autograd may ask for a backward pass
        self.kept: Tensor | None = None  # what a forward pass leaves for backward (`keep`)

    def keep(self, results: Sequence[Tensor | None]) -> tuple[Tensor, Tensor]:
        """`out` and `lse` of a forward pass. A third result is kept for the backward pass of an eager call: the states
        of its mask's blocks (`expression.blocks.dense.SUMMARY_BLOCK`).
        """
        out, lse, *kept = results
        self.kept = kept[0] if kept else None
        return out, lse  # type: ignore[return-value]

    def _replace(self, *, tensors: Tensors | None = None, settings: Settings | None = None) -> "Call":
        return Call(tensors or self.tensors, settings or self.settings)

    @property
    def inputs(self) -> tuple[Tensor | None, ...]:
        """All tensors that kernels may read."""
        return self.tensors.flat()

    @property
    def key(self) -> Hashable:
        """Identity of the operation, without its tensors."""
        return self.kind, self.settings

    @property
    def layout(self) -> str:
        """Layout of the keys. "paged" has pages, with packed queries or, for a KV cache, dense ones."""
        if self.tensors.page_table is not None:
            return "paged"
        return "dense" if self.tensors.cu_seqlens_q is None else "varlen"

    def with_own_indices(self) -> "Call":
        """The call with copies of its indices, where those are checked by value: what is checked then is what kernels
        read, although another thread may write into the caller's tensors meanwhile.
        """
        if self.tensors.cu_seqlens_q is None or not device.host_readable(self.tensors.q):
            return self
        tensors = with_copies(self.tensors, INDICES)
        return Call(tensors, self.settings, self.entry, is_plain_eager=self.is_plain_eager)

    def attention(self) -> "Call":
        """The call that a plan is for: this one, unless its keys are in a cache."""
        return self

    @property
    def keeps_residual(self) -> bool:
        """Whether forward leaves the residual of lse for backward: what rounding takes from `m + log(l)`. Next to a
        large number that is added to all scores of a row, as for a padded query, that is all of `log(l)`.
        """
        return self.tensors.bias is not None or self.settings.score_mod is not None

    @property
    def num_score_tensors(self) -> int:
        """Number of captured tensors that belong to the score_mod; the others belong to the mask function."""
        return len(self.tensors.score_mod_tensors) - self.settings.num_mask_tensors

    @property
    def out_dtype(self) -> torch.dtype:
        """The dtype of `out`: a preallocated tensor's, or q's; of queries of 8 bits, the requested one."""
        t = self.tensors
        if t.out is not None:
            return t.out.dtype
        if self.settings.out_dtype is not None:
            return getattr(torch, self.settings.out_dtype)  # type: ignore[no-any-return]
        return torch.bfloat16 if is_eight_bit(t.q) else t.q.dtype

    @property
    def num_heads(self) -> int:
        """Query heads of the whole call, which the dropout counter runs over."""
        return self.settings.num_heads or self.tensors.q.shape[1]


TENSORS, SETTINGS = fields_of(Tensors), fields_of(Settings)
FEATURES = {field.name: field.feature for field in TENSORS if field.feature is not None}
DIFFERENTIABLE = ("q", "k", "v", *(name for name, feature in FEATURES.items() if feature.gradient))
DESCRIBED = tuple(name for name, feature in FEATURES.items() if feature.dtype in (SCORES, BOOL))
SCORE_TERMS = tuple(name for name, feature in FEATURES.items() if feature.score_term)
# Score terms with a value for each head: their symbols, and their places in `Tensors`.
HEAD_TERMS = {
    FEATURES[name].symbol or name: Tensors._fields.index(name)
    for name in SCORE_TERMS
    if PER_HEAD in FEATURES[name].shapes
}
POSITIONS = tuple(Tensors._fields.index(name) for name in DIFFERENTIABLE)


class Features(namedtuple("Features", DESCRIBED, defaults=[None] * len(DESCRIBED))):
    """Tensors that change a call's scores or visibility: for each `True` or, of pairs, which dimensions are broadcast;
    `None` if it is absent.
    """

    __slots__ = ()

    @classmethod
    def of(cls, tensors: Tensors) -> "Features":
        present = {name: x for name in DESCRIBED if (x := getattr(tensors, name)) is not None}
        if not present:
            return NO_FEATURES
        pairs = {name: tuple(n == 1 for n in x.shape) for name, x in present.items() if FEATURES[name].broadcasts}
        return cls(**dict.fromkeys(present, True) | pairs)

    @property
    def score_terms(self) -> bool:
        """Whether anything is added to the scores."""
        return any(getattr(self, name) is not None for name in SCORE_TERMS)


NO_FEATURES = Features()


class Needs(namedtuple("Needs", (*DIFFERENTIABLE, "score_mod_tensors"), defaults=(*[False] * len(DIFFERENTIABLE), ()))):
    """The requested gradients or, in forward mode, the inputs that have a tangent: a bool for each differentiable
    tensor, a tuple of them for `score_mod_tensors`.
    """

    __slots__ = ()

    def flat(self) -> tuple[bool, ...]:
        return (*self[:-1], *self.score_mod_tensors)

    @property
    def changes_scores(self) -> bool:
        """Whether any of these inputs changes the scores of keys."""
        return any((self.q, self.k, *self.of_score_tensors().flat()))

    def of_score_tensors(self) -> "Needs":
        """The gradients of tensors that change scores, which every pair adds to."""
        none = dict.fromkeys((name for name in DIFFERENTIABLE if name not in SCORE_TERMS), False)
        return self._replace(**none)

    def of_rows(self) -> "Needs":
        """The other gradients: of q, k, v and sinks."""
        return self._replace(**dict.fromkeys(SCORE_TERMS, False), score_mod_tensors=(False,) * len(self[-1]))

    @classmethod
    def from_flat(cls, flat: Sequence[bool]) -> "Needs":
        named = len(cls._fields) - 1
        return cls._make((*flat[:named], tuple(flat[named:])))


class Gradients(namedtuple("Gradients", Needs._fields, defaults=(*[None] * len(DIFFERENTIABLE), ()))):
    """Results of backward, as `Needs`: a tensor, or `None` where none was requested."""

    __slots__ = ()

    def flat(self) -> tuple[Tensor | None, ...]:
        return (*self[:-1], *self.score_mod_tensors)

    @classmethod
    def from_flat(cls, flat: Sequence[Tensor | None]) -> "Gradients":
        named = len(cls._fields) - 1
        return cls._make((*flat[:named], tuple(flat[named:])))


class Tangents(Gradients):
    """Tangents of inputs, as `Needs`: a tensor like the input, or `None` for an input that stands still."""

    __slots__ = ()

    @classmethod
    def from_flat(cls, flat: Sequence[Tensor | None]) -> "Tangents":
        return cls._make(Gradients.from_flat(flat))

    @property
    def moves(self) -> Needs:
        return Needs.from_flat([x is not None for x in self.flat()])


def differentiable_positions(num_flat: int) -> tuple[int, ...]:
    """Indices into `Tensors.flat()` of what can have a gradient, in the order of `Needs.flat()`."""
    named = len(Tensors._fields) - 1
    return (*POSITIONS, *range(named, num_flat)) if num_flat > named else POSITIONS


INDICES = slice(Tensors._fields.index("cu_seqlens_q"), Tensors._fields.index("leftpad_k") + 1)


def with_copies(tensors: Any, which: slice) -> Any:
    """Copy some fields of a NamedTuple of tensors. Freed tensors stay: they are refused later, by name."""
    selected = tensors[which]
    copies = {id(x): x.clone() for x in selected if x is not None and not freed(x)}  # q and k often share their offsets
    return tensors._make((*tensors[: which.start], *[copies.get(id(x), x) for x in selected], *tensors[which.stop :]))


def lse_shape(q: Tensor) -> tuple[int, ...]:
    """`[B, H, S]` of dense queries, `[H, T]` of packed ones."""
    return tuple(q.shape[:-1]) if q.dim() == 4 else (q.shape[1], q.shape[0])


def row_stats_shape(call: Call) -> tuple[int, ...]:
    """The shape of the `lse` that a forward pass leaves: `[2, ...]` with its residual, where that is kept."""
    shape = lse_shape(call.tensors.q)
    return (2, *shape) if call.keeps_residual else shape


def split_row_stats(q: Tensor, row_stats: Tensor) -> tuple[Tensor, Tensor | None]:
    """lse, and its residual if it is kept."""
    return (row_stats[0], row_stats[1]) if row_stats.dim() == q.dim() else (row_stats, None)


def public_lse(call: Call, results: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """`out` and `lse` of a forward pass, for its caller."""
    out, row_stats = results
    return out, split_row_stats(call.tensors.q, row_stats)[0]


def new_rows(like: Tensor, heads: int, width: int, dtype: torch.dtype) -> Tensor:
    """An uninitialized result with the rows of `like`: `[B, heads, S, width]` or `[T, heads, width]`.

    A dense result keeps the order of heads and positions that `like` has in memory, so that the output of
    `[B, S, H, D]` data seen through a transpose flattens to `[B, S, H * D]` without a copy. `like` is the call's own
    tensor, not a copy with contiguous features that a kernel reads: a compiler that plans strides sees no copies.
    """
    if like.dim() == 3:
        return like.new_empty((like.shape[0], heads, width), dtype=dtype)
    batch, _, seqlen, _ = like.shape
    head, row = (width, heads * width) if like.stride(1) < like.stride(2) else (seqlen * width, width)
    strides = (heads * seqlen * width, head, row, 1)
    return like.new_empty_strided((batch, heads, seqlen, width), strides, dtype=dtype)
