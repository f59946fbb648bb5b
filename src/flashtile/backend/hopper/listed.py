"""Calls whose kernels visit the blocks in a list (`block_lists`), and those for which the mask's pairs in partly
visible blocks are bits (`pair_bits`).
"""

from ...call.call import Call
from ...call.formulas import mask_formula
from ...call.problem import Problem
from ...expression import Formula
from ...expression.blocks import depends_on

LEAST_PAIRS = 2**24  # of a call: computing fewer takes about as long as their lists
LEAST_MASK_PAIRS = 2**26  # of a call with a mask that is a tensor, which takes one launch more
MOST_PAIRS = 2**41  # offsets in lists have 32 bits
MOST_BITS = 2**30  # of the mask's pairs: 128 MiB


def has_lists(call: Call) -> bool:
    """Whether a call has lists, of the blocks that mask and window show; the kernels test the window's sides in blocks
    that they cut. Others compute all pairs that the window shows. With lists, kernels run one function of
    a score_mod in partly visible blocks and one in full ones, which are made with a mask function only.
    """
    function = call.settings.mask_mod is not None
    mask = call.tensors.mask is not None and call.settings.score_mod is None
    if not (function or mask) or call.layout != "dense":
        return False
    batch, heads, seqlen_q, _ = call.tensors.q.shape
    least = LEAST_PAIRS if function else LEAST_MASK_PAIRS
    return max(least, 1) <= batch * heads * seqlen_q * call.tensors.k.shape[2] <= MOST_PAIRS


def has_pair_bits(call: Call) -> bool:
    """Whether a call has bits of pairs, too: its mask is the same for all heads, and no score_mod needs its tensors."""
    t = call.tensors
    if call.settings.score_mod is not None or not has_lists(call):
        return False
    formula = mask_formula(call)
    if formula is None:
        assert t.mask is not None
        sizes = zip(t.mask.shape[:2], t.mask.stride()[:2], strict=True)
        of_sequences, of_heads = (n > 1 and stride > 0 for n, stride in sizes)
    else:
        of_sequences, of_heads = depends_on(formula, "b"), depends_on(formula, "h")
    batch = t.q.shape[0] if of_sequences else 1
    return not of_heads and batch * t.q.shape[2] * t.k.shape[2] <= MOST_BITS


def expects_lists(problem: Problem) -> bool:
    """As `has_lists`, for the plan of several lengths."""
    p, function = problem, problem.mask_mod is not None
    if not (function or (p.features.mask is not None and p.score_mod is None)) or p.layout != "dense":
        return False
    least = LEAST_PAIRS if function else LEAST_MASK_PAIRS
    return least <= p.batch * p.num_heads_q * p.seqlen_q * p.seqlen_k <= MOST_PAIRS


def hides_keys(problem: Problem) -> bool:
    """Whether a mask hides the same keys from all rows, as padding."""
    if isinstance(problem.mask_mod, Formula):
        return not depends_on(problem.mask_mod, "q_idx")
    return problem.features.mask is not None and problem.features.mask[2]


def expects_pair_bits(problem: Problem) -> bool:
    """As `has_pair_bits`, for the plan of several lengths."""
    p, formula = problem, problem.mask_mod
    if p.score_mod is not None or not expects_lists(p):
        return False
    if isinstance(formula, Formula):
        of_sequences, of_heads = depends_on(formula, "b"), depends_on(formula, "h")
    else:
        of_sequences, of_heads, *_ = (not broadcast for broadcast in p.features.mask)
    return not of_heads and (p.batch if of_sequences else 1) * p.seqlen_q * p.seqlen_k <= MOST_BITS
