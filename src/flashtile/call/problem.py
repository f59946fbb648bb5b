"""The description of a call without its tensors: frozen, hashable, and all that a plan may depend on."""

from dataclasses import dataclass, field, replace
from typing import NamedTuple, overload

import torch

from ..expression import Formula, Untraced, mask_mod_formula, score_mod_formula
from . import check, eight_bit
from .call import Call, Features, Needs
from .device import Device
from .eight_bit import EightBit
from .memory import address
from .window import Window

OCTET = 8  # keys of a row that share a counter of dropout's random numbers
FEW_ROWS = 16  # rows of calls whose time follows from keys, which grow, and from how heads and sequences fill cores
FINE = 32  # rows and keys of other calls that one plan serves at least: their time depends on numbers of tiles
PARTS = 32  # parts of a power of two; lengths are rounded to one
STEPS = 8  # steps of the batch of few rows from one power of two to the next
LONGEST = 2**30  # for kernels whose positions are 32-bit integers, and sums of two of them must be


class Pages(NamedTuple):
    """Pages of keys and values."""

    size: int  # keys
    several: bool  # a sequence may have several; a dense cache has one page for each
    in_rows: bool  # they begin whole numbers of rows apart, alike for k and v, and fewer than LONGEST in all

    @classmethod
    def describe(cls, k: torch.Tensor, v: torch.Tensor, table: torch.Tensor) -> "Pages":
        """Pages `[P, size, H, D]` and a table `[B, columns]`."""
        rows = rows_of_page(k)
        in_rows = rows is not None and rows == rows_of_page(v) and 0 < k.shape[0] * max(rows, 1) < LONGEST
        return cls(k.shape[1], table.shape[1] > 1, in_rows)


def rows_of_page(x: torch.Tensor) -> int | None:
    """Rows from page to page of `[P, size, H, D]`; `None` if that is no whole number. 0 for a single page."""
    num_pages, size = x.shape[:2]
    if num_pages <= 1:
        return 0
    if size == 1:
        return 1
    page, row = x.stride()[:2]
    return page // row if row > 0 and page % row == 0 else None


class Counts(NamedTuple):
    """Numbers that tiles are counted by."""

    batch: int
    rows: int
    keys: int


@dataclass(frozen=True, slots=True)
class Problem:
    """The meaning of one call. Two calls with equal problems on equal devices run the same way."""

    layout: str  # "dense", "varlen" or "paged"
    dtype: torch.dtype
    batch: int
    num_heads_q: int
    num_heads_kv: int
    seqlen_q: int  # the longest sequence's, as far as the host knows it
    seqlen_k: int
    head_dim: int
    head_dim_v: int
    pages: Pages | None
    window: Window
    seqused_q: bool  # some rows of the sequences are not in use
    leftpad_k: bool  # positions at the front of a cache hold no key
    softcap: bool
    features: Features  # tensors that change scores or visibility
    score_mod: Formula | Untraced | None = field(repr=False)  # long; a backend that declines it says why
    mask_mod: Formula | Untraced | None = field(repr=False)
    dropout: bool
    deterministic: bool
    alignment: int  # bytes that divide every stride and base address of q, k and v, at most 16
    octet_start: int = 0  # with dropout: the first key's place among the eight that share a counter
    eight_bit: EightBit | None = None  # keys and values of 8 bits, and perhaps queries
    out_dtype: torch.dtype | None = None  # the result's, of queries of 8 bits
    latent: bool = False  # v is the first columns of k
    packed: bool = False  # queries are packed, over keys in pages
    batch_invariant: bool = False  # a plan depends neither on the batch nor on lengths
    fine: Counts | None = None  # counts of a bucket: rounded less than the others

    @classmethod
    def describe(cls, call: Call) -> "Problem":
        """The problem of a call.

        Raises:
            ArgumentError: shapes, dtypes, devices or values do not fit together. CPU tensors of lengths and pages are
                read; nothing is read back from another device.
        """
        if call.entry is None or not call.is_plain_eager:  # or else the key of its entry tells
            check.memory(check.named(call), call.layout)
        check.strided(call)
        check.tensors(call)
        t, s = call.tensors, call.settings
        layout = call.layout
        if layout == "dense":
            batch, seqlen_q, seqlen_k = t.q.shape[0], t.q.shape[2], t.k.shape[2]
            num_heads_kv = t.k.shape[1]
        else:
            batch, seqlen_q, seqlen_k = check.varlen_bounds(call)
            num_heads_kv = t.k.shape[-2]
        check.broadcasts(call, batch, seqlen_q, seqlen_k)
        descales = check.descales(call, batch)
        score_mod = None if s.score_mod is None else score_mod_formula(s.score_mod)
        mask_mod = None if s.mask_mod is None else mask_mod_formula(s.mask_mod)
        for formula in (score_mod, mask_mod):
            if isinstance(formula, Formula):
                check.captured(call, formula, batch, (seqlen_q, seqlen_k) if layout == "dense" else (0, 0))
        check.functions(call)
        return cls(
            layout=layout,
            dtype=t.q.dtype,
            batch=batch,
            num_heads_q=t.q.shape[1],
            num_heads_kv=num_heads_kv,
            seqlen_q=least_rows(call, seqlen_q),
            seqlen_k=seqlen_k,
            head_dim=t.q.shape[-1],
            head_dim_v=t.v.shape[-1],
            pages=None if t.page_table is None else Pages.describe(t.k, t.v, t.page_table),
            window=s.window,
            seqused_q=t.seqused_q is not None,
            leftpad_k=t.leftpad_k is not None,
            softcap=s.softcap is not None,
            features=Features.of(t),
            score_mod=score_mod,
            mask_mod=mask_mod,
            dropout=s.dropout_p > 0,
            deterministic=s.deterministic,
            alignment=alignment(t.q, t.k, t.v),
            octet_start=s.j0 % OCTET if s.dropout_p > 0 else 0,
            eight_bit=eight_bit.describe(t.q, t.k, *descales) if t.k.dtype.itemsize == 1 else None,
            out_dtype=call.out_dtype if t.q.dtype is eight_bit.QUERIES else None,
            latent=s.v_dim is not None,
            packed=layout == "paged" and t.cu_seqlens_q is not None,
            batch_invariant=s.batch_invariant,
        )

    @property
    def decodes(self) -> bool:
        """Whether a batch-invariant call has one query for each sequence, which its arguments say: `Sq`, or
        `max_seqlen_q` of packed queries. Such calls have kernels of their own.
        """
        return self.batch_invariant and self.seqlen_q <= 1

    @property
    def counts(self) -> Counts:
        """The numbers that tiles are counted by, as exact as they are known."""
        return self.fine or Counts(self.batch, self.seqlen_q, self.seqlen_k)

    @property
    def untraced(self) -> str | None:
        """Why no kernel can be made of the call's functions; `None` if it can."""
        for name, formula in (("score_mod", self.score_mod), ("mask function", self.mask_mod)):
            if isinstance(formula, Untraced):
                return f"the {name} cannot be traced: {formula.reason}"
        return None

    def bucketed(self) -> "Problem":
        """The problem with lengths and batch rounded up to a power of two: a plan serves the whole bucket, so that a
        growing sequence neither replans nor recompiles. In dense calls of more than a few rows, `fine` tells more; with
        few rows, the batch is rounded less. A band of earlier or later keys alone keeps its sides: rounded ones may be
        a much narrower band.
        """
        window = self.window._replace(chunk=power_of_two(self.window.chunk))
        if min(window.left or 0, window.right or 0) >= 0:
            window = window._replace(left=power_of_two(window.left), right=power_of_two(window.right))
        rows, keys = (rounded(n, PARTS, FINE) for n in (self.seqlen_q, self.seqlen_k))
        is_fine = self.layout == "dense" and self.seqlen_q > FEW_ROWS
        return replace(
            self,
            fine=Counts(rounded(self.batch, PARTS), rows, keys) if is_fine else None,
            batch=rounded(self.batch, STEPS) if self.seqlen_q <= FEW_ROWS else power_of_two(self.batch),
            seqlen_q=power_of_two(self.seqlen_q),
            seqlen_k=power_of_two(self.seqlen_k),
            window=window,
        )


def least_rows(call: Call, seqlen_q: int) -> int:
    """The longest sequence's rows as a plan counts them. Of a batch-invariant packed call without `max_seqlen_q`, one
    token in all says nothing about other batches.
    """
    unknown = call.tensors.cu_seqlens_q is not None and call.settings.max_seqlen_q is None
    return max(seqlen_q, 2) if unknown and call.settings.batch_invariant else seqlen_q


def too_long(problem: Problem) -> str | None:
    """Why kernels that count in 32 bits decline a problem."""
    if max(problem.seqlen_q, problem.seqlen_k) > LONGEST:
        return f"sequences go up to {LONGEST} positions"
    return None


def declines_second(problem: Problem, device: Device, moves: Needs, needs: Needs) -> str | None:
    """Why kernels of second derivatives along inputs that move decline a problem."""
    for named, what in ((moves, "directions"), (needs, "gradients")):
        if any((named.bias, named.alibi_slopes, *named.score_mod_tensors)):
            return f"its second derivatives have {what} of q, k, v and sinks alone"
    if problem.score_mod is not None:
        return "its second derivatives have no score function"
    if problem.layout == "paged":
        return "its second derivatives have no pages"
    return None


@overload
def power_of_two(n: int) -> int: ...
@overload
def power_of_two(n: int | None) -> int | None: ...


def power_of_two(n: int | None) -> int | None:
    """The smallest power of two that is at least `n`; 0, 1 and `None` stay themselves."""
    return n if n is None or n <= 1 else 1 << (n - 1).bit_length()


def rounded(n: int, parts: int, least: int = 1) -> int:
    """`n` rounded up to a multiple of one of so many parts of the power of two that it is above, or of `least` if that
    is more: by eight parts exact up to 16, then 18, 20, ..., 32, 36, ...
    """
    step = max(least, power_of_two(n) // 2 // parts)
    return -(-n // step) * step


def alignment(*tensors: torch.Tensor) -> int:
    """The largest power of two up to 16 that divides every stride and base address in bytes."""
    bits = 16
    for x in tensors:
        bits |= address(x)
        for stride, n in zip(x.stride()[:-1], x.shape[:-1], strict=True):
            if n > 1:
                bits |= stride * x.element_size()
    return bits & -bits


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of scores, softmax statistics and accumulators: fp64 for fp64 inputs, else fp32."""
    return torch.float64 if dtype is torch.float64 else torch.float32
