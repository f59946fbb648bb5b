"""Problems of few query rows: decoding, which packs the query heads of a group into one tile and splits the keys."""

from ...call.problem import Problem

MAX_ROWS, MAX_GROUP = 64, 128  # query rows of a group that become one tile; those of a single position


def group_of(problem: Problem) -> int:
    """Query heads for each key head."""
    return problem.num_heads_q // max(problem.num_heads_kv, 1)


def packed_rows(problem: Problem) -> int:
    """Query rows of a group."""
    return max(problem.seqlen_q, 1) * group_of(problem)


def is_decoding(problem: Problem, *, large_groups: bool = True) -> bool:
    """Whether the rows of a group fit one tile; without `large_groups`, at most `MAX_ROWS` of them."""
    single = min(group_of(problem), MAX_GROUP) if large_groups else 0
    return packed_rows(problem) <= max(MAX_ROWS, single)
