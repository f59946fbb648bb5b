"""PyTorch's `torch.nn.attention.varlen`: its functions for packed sequences, by `flashtile.attention_varlen`."""

from typing import Any, NamedTuple

from torch import Tensor

from ...api.signatures import options_of
from ...api.varlen import attention_varlen
from ..arguments import longest_of, refuse, window_of

EXAMPLE = "varlen_attn(query, key, value, cu_seq, cu_seq, max_len, max_len, window_size=(-1, 0))"


class AuxRequest(NamedTuple):
    """Results that are requested in addition to the output.

    Attributes:
        lse: the log-sum-exp of each row.
    """

    lse: bool = False


def varlen_attn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    *,
    return_aux: AuxRequest | None = None,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention over packed sequences with the arguments of `torch.nn.attention.varlen.varlen_attn` of PyTorch 2.13.

    Args:
        query: `[Tq, Hq, D]`.
        key: `[Tk, Hkv, D]`, or with `block_table` pages `[num_pages, page_size, Hkv, D]`.
        value: the same with Dv.
        cu_seq_q: int32 or int64 `[B + 1]`, offsets of the sequences in query.
        cu_seq_k: the same for key; `None` with `block_table` and `seqused_k`.
        max_q: an int, at least the longest sequence's queries.
        max_k: the same for keys.
        return_aux: `AuxRequest(lse=True)` also returns the log-sum-exp.
        scale: factor of the products; `D ** -0.5` if `None`.
        window_size: `(left, right)`, -1 is unlimited; `(-1, 0)` is causal, aligned to the last query and key.
        enable_gqa: key and value may have fewer heads than query.
        seqused_k: int32 or int64 `[B]`, keys of each sequence that exist. Differentiable here.
        block_table: int32 or int64 `[B, max_pages]`. Differentiable here.
        num_splits: parts that the keys are split into; `None` lets the backend choose.

    Returns:
        `[Tq, Hq, Dv]`; with `return_aux.lse` also lse `[Hq, Tq]`, -inf for rows that see no key.

    Raises:
        ArgumentError: an argument is not what it should be; other heads without `enable_gqa`.
    """
    return attend(
        None, query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, return_aux=return_aux, scale=scale,
        window_size=window_size, enable_gqa=enable_gqa, seqused_k=seqused_k, block_table=block_table,
        num_splits=num_splits,
    )  # fmt: skip


def attend(
    out: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    *,
    return_aux: AuxRequest | None = None,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    heads = key.shape[1] if block_table is None else key.shape[2]
    if not enable_gqa and heads != query.shape[1]:
        accepted = f"True where key and value have {heads} heads and query has {query.shape[1]}"
        refuse("enable_gqa", enable_gqa, accepted, f"{EXAMPLE[:-1]}, enable_gqa=True)")
    result, lse = attention_varlen(
        query,
        key,
        value,
        cu_seq_q,
        cu_seq_k,
        max_seqlen_q=longest_of(max_q),
        max_seqlen_k=longest_of(max_k),
        scale=scale,
        window=window_of(window_size, EXAMPLE),
        seqused_k=seqused_k,
        page_table=block_table,
        num_splits=num_splits,
        out=out,
        return_lse=True,
    )
    return (result, lse) if return_aux is not None and return_aux.lse else result


@options_of(varlen_attn)
def varlen_attn_out(
    out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    **options: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention as by `varlen_attn`, whose result is written into `out [Tq, Hq, Dv]`. It has no derivatives.

    Raises:
        ArgumentError: as `varlen_attn`; out has another shape or dtype; a tensor requires a gradient outside of
            `torch.no_grad()`.
    """
    return attend(out, query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, **options)
