"""Calls whose kernels visit the blocks in a list (`block_lists`), and those for which the mask's pairs in partly
visible blocks are bits (`pair_bits`).
"""

from typing import NamedTuple

from torch import Tensor

from ....call.call import Call
from ....call.formulas import mask_formula
from ....call.problem import Problem
from ....expression import Formula
from ....expression.blocks import depends_on

LEAST_PAIRS = 2**24  # pairs of a call: computing fewer takes about as long as their lists
LEAST_MASK_PAIRS = 2**26  # pairs of a call with a mask that is a tensor, which takes one launch more
MOST_PAIRS = 2**41  # offsets in lists have 32 bits
MOST_BITS = 2**30  # bits of the mask's pairs: 128 MiB


class Masked(NamedTuple):
    """All of a mask and its call that lists and bits depend on: of a call, or of the plan for several lengths. Without
    a function, the mask is a tensor that differs between `dims` of sequences, heads and rows.
    """

    function: Formula | None
    dims: tuple[bool, ...]
    with_score_mod: bool
    sizes: tuple[int, int, int, int]  # sequences, heads, rows and keys

    @classmethod
    def of_call(cls, call: Call) -> "Masked | None":
        """`None` without a mask, or if the call is not dense."""
        t, s = call.tensors, call.settings
        if call.layout != "dense" or (s.mask_mod is None and t.mask is None):
            return None
        dims = () if t.mask is None or s.mask_mod is not None else differing(t.mask)
        batch, heads, rows, _ = t.q.shape
        return cls(mask_formula(call), dims, s.score_mod is not None, (batch, heads, rows, t.k.shape[2]))

    @classmethod
    def of_problem(cls, p: Problem) -> "Masked | None":
        """As `of_call`; `None` too for a function that cannot be traced."""
        function = p.mask_mod if isinstance(p.mask_mod, Formula) else None
        if p.layout != "dense" or (function is None and p.features.mask is None):
            return None
        dims = () if p.features.mask is None else tuple(not broadcast for broadcast in p.features.mask)
        return cls(function, dims, p.score_mod is not None, (p.batch, p.num_heads_q, p.seqlen_q, p.seqlen_k))

    def has_lists(self) -> bool:
        """Whether there are lists, of the blocks that mask and window show; the kernels test the window's sides in
        blocks that they cut. Other calls compute all pairs that the window shows. With lists, kernels run one function
        of a score_mod in partly visible blocks and one in full ones, which are made with a mask function only.
        """
        if self.function is None and self.with_score_mod:
            return False
        batch, heads, rows, keys = self.sizes
        least = LEAST_MASK_PAIRS if self.function is None else LEAST_PAIRS
        return max(least, 1) <= batch * heads * rows * keys <= MOST_PAIRS

    def has_pair_bits(self) -> bool:
        """Whether there are bits of pairs, too: the mask is the same for all heads, and no score_mod needs its
        tensors.
        """
        batch, _, rows, keys = self.sizes
        if self.with_score_mod or not self.has_lists() or self.depends_on("h"):
            return False
        return (batch if self.depends_on("b") else 1) * rows * keys <= MOST_BITS

    def hides_keys(self) -> bool:
        """Whether the mask hides the same keys from all rows, as padding."""
        return not self.depends_on("q_idx")

    def depends_on(self, name: str) -> bool:
        """Whether the mask depends on the sequence, the head or the row."""
        return self.dims[("b", "h", "q_idx").index(name)] if self.function is None else depends_on(self.function, name)


def differing(mask: Tensor) -> tuple[bool, ...]:
    """The dimensions of a mask along which it may differ: neither broadcast nor expanded."""
    return tuple(n > 1 and stride > 0 for n, stride in zip(mask.shape, mask.stride(), strict=True))


def has_lists(call: Call) -> bool:
    """Whether a call has lists."""
    masked = Masked.of_call(call)
    return masked is not None and masked.has_lists()


def has_pair_bits(call: Call) -> bool:
    """Whether a call has lists and bits of pairs."""
    masked = Masked.of_call(call)
    return masked is not None and masked.has_pair_bits()


def expects_lists(problem: Problem) -> bool:
    """Whether calls of a plan have lists, which is decided for each by its own lengths."""
    masked = Masked.of_problem(problem)
    return masked is not None and masked.has_lists()


def is_padded(problem: Problem) -> bool:
    """Whether calls of a plan have a mask that hides the same keys from all rows, by bits of pairs: their blocks take
    as long as without it.
    """
    masked = Masked.of_problem(problem)
    return masked is not None and masked.hides_keys() and masked.has_pair_bits()
