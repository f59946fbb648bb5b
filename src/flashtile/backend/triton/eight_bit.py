"""Problems with tensors of 8 bits, as kernels read them: keys in pages, queries in 16 bits."""

from dataclasses import replace

import torch

from ...call.problem import Pages, Problem


def of_queries(*, v_by_key: bool) -> torch.dtype:
    """The dtype of products of queries of 8 bits. Probabilities times scales may be outside of float16's range."""
    return torch.bfloat16 if v_by_key else torch.float16


def problem_of_kernels(problem: Problem) -> Problem:
    """A problem with 8 bits as its kernels have it (`launch.eight_bit.with_numbers`)."""
    p = problem
    if p.eight_bit is None:
        return p
    if p.eight_bit.q_by_row is not None:
        p = replace(p, dtype=of_queries(v_by_key=p.eight_bit.v_by_key))
    if p.layout == "paged":
        return p
    pages = Pages(p.seqlen_k, False, True) if p.layout == "dense" else Pages(1, p.seqlen_k > 1, True)
    return replace(p, layout="paged", pages=pages, packed=p.layout == "varlen")
