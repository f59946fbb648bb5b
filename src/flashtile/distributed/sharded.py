"""The public functions: attention over a sequence whose rows and keys are sharded over a mesh."""

from typing import Any, Unpack

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ..api.signatures import Causal, MaskArgument, ScoreModArgument, ShardedKeywords, WindowArgument, options_of
from ..call.sharding import is_dtensor
from . import compiled
from .calls import Placing, as_batch, lengths_of, prepared, run
from .inputs import documents_of, with_defaults
from .layout import Layout


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mesh: DeviceMesh | None = None,
    layout: str | Layout = "contiguous",
    scheme: str = "auto",
    length: int | tuple[int, int] | None = None,
    check: bool = False,
    causal: Causal = False,
    window: WindowArgument = None,
    attention_chunk: int | None = None,
    mask: MaskArgument = None,
    scale: float | None = None,
    softcap: float | None = None,
    bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    score_mod: ScoreModArgument = None,
    dropout_p: float = 0.0,
    dropout_seed: int | None = None,
    return_lse: bool = False,
    deterministic: bool | None = None,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact attention of this rank's rows over the keys of all ranks of a mesh.

    Arguments mean what they mean in `flashtile.attention` for the whole sequence: positions of causal, window, masks,
    ALiBi, score_mod and dropout are those in it, and a seed gives the dropout mask of one device. First derivatives
    exist, also through `lse`. Gradients of tensors that all ranks have (bias, slopes, sinks, tensors of score_mod) are
    the part of this rank's rows or heads, to be summed over the mesh as gradients of a model's weights are. Shard the
    sequence with `shard`, and all ranks must take part in forward and in backward (Liu et al., "Ring Attention", 2023;
    Jacobs et al., "DeepSpeed Ulysses", 2023).

    Of `DTensor`s, the sequence, the batch and the heads may be sharded, each over other dimensions of the mesh; k and v
    have the placements of q, short of heads, which may be replicated. Other tensors are whole, or DTensors with the
    placements of q or replicated ones.

    Args:
        q: this rank's rows of the queries `[B, Hq, Sq, D]`.
        k: this rank's rows of the keys `[B, Hkv, Sk, D]`.
        v: this rank's rows of the values `[B, Hkv, Sk, Dv]`.
        mesh: a `DeviceMesh` with one dimension; or with two, where heads are exchanged along the second. `None` for
            DTensors, which have one.
        layout: as in `shard`, for queries and keys; "zigzag" balances causal attention, a `Layout` of `balanced` any
            mask of as many queries as keys. DTensors are cut as "chunks", unless their rows are in another order.
        scheme: "ring" (keys travel from rank to rank), "gather" (each rank gathers all keys, some heads at a time),
            "ulysses" (ranks exchange rows for heads; for as many ranks as divide Hq); for a mesh with two dimensions
            "ring+ulysses" or "gather+ulysses". "auto" takes what `simulate` takes to be the fastest.
        length: rows of the whole sequence, or of queries and of keys. `None`: all ranks have as many, or the
            tensors are DTensors.
        check: compare shapes and arguments of all ranks first, and raise on all of them where they differ. This waits
            for the device. Without it, ranks that differ end in the process group's timeout, or in wrong results.
        mask: bool, as `bias`; or a function of positions, `(b, h, q_idx, k_idx) -> bool`.
        bias: `[B, Hq, Sq, Sk]`, each dimension may be 1, with all keys, and this rank's rows or all.
        alibi_slopes: `[Hq]` or `[B, Hq]`, the same on all ranks.
        sinks: `[Hq]`, the same on all ranks.
        dropout_seed: an int, the same on all ranks; required where `dropout_p` is above 0.

    The other arguments: as in `flashtile.attention`.

    Returns:
        `out [B, Hq, Sq, Dv]` of this rank's rows in q's dtype; with `return_lse` also `lse [B, Hq, Sq]`. Of DTensors,
        both have the placements of q.

    Raises:
        ArgumentError: an argument is not what it should be, or the rank's rows are not the layout's.
        AttentionError: with `check`, on all ranks, where one raises or differs from the first rank.
        BackendError: no backend takes a part of the call, or the named one does not.
        ExchangeError: in forward or backward, another rank has ended, raised, or not come within the timeout of the
            process group. NCCL ends the process instead.
    """
    tensors = {"q": q, "k": k, "v": v, "mask": mask, "bias": bias, "alibi_slopes": alibi_slopes, "sinks": sinks}
    keywords: dict[str, Any] = {  # `locals()` has no meaning in a trace of PyTorch 2.11
        "causal": causal, "window": window, "attention_chunk": attention_chunk, "scale": scale, "softcap": softcap,
        "score_mod": score_mod, "dropout_p": dropout_p, "dropout_seed": dropout_seed, "deterministic": deterministic,
        "backend": backend,
    }  # fmt: skip
    placing = Placing(mesh, layout, scheme, length, check)
    if torch.compiler.is_compiling():
        out, lse = compiled.run(tensors, keywords, placing)
    elif any(map(is_dtensor, tensors.values())):
        from .dtensor import run_dtensors

        out, lse = run_dtensors(tensors, keywords, placing)
    else:
        out, lse = run(prepared(tensors, keywords, placing, None))
    return (out, lse) if return_lse else out


@options_of(attention, without=("length", "bias"))
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any = None,
    *,
    mesh: DeviceMesh,
    layout: str | Layout = "contiguous",
    scheme: str = "auto",
    check: bool = False,
    return_lse: bool = False,
    **options: Unpack[ShardedKeywords],
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact attention of packed sequences, whose tokens are sharded over a mesh as one sequence.

    Arguments mean what they mean in `flashtile.attention_varlen` for the whole, and in `attention` for the mesh. A
    sequence may begin on one rank and end on another. Each pair of a sequence's rows and keys on a rank is one call of
    the operators, so that it suits sequences of thousands of tokens.

    Args:
        q: this rank's tokens `[Tq, Hq, D]`.
        k: this rank's tokens `[Tk, Hkv, D]`.
        v: this rank's tokens `[Tk, Hkv, Dv]`.
        cu_seqlens_q: offsets `[B + 1]` of all sequences, in a list or a tensor on the CPU. The last one is the number
            of tokens of all ranks.
        cu_seqlens_k: the keys' offsets; by default the queries'.
        alibi_slopes: `[Hq]` or `[B, Hq]`, the same on all ranks.

    The other arguments: as in `attention`.

    Returns:
        `out [Tq, Hq, Dv]` of this rank's tokens in q's dtype; with `return_lse` also `lse [Hq, Tq]`.

    Raises:
        ArgumentError: as `attention`; also for offsets that decrease or are not on the host.
        AttentionError: as `attention`.
        BackendError: as `attention`.
    """
    keywords: dict[str, Any] = {**options}
    tensors = {"q": q, "k": k, "v": v} | {name: keywords.pop(name, None) for name in ("mask", "alibi_slopes", "sinks")}
    keywords = with_defaults("attention_varlen", keywords)
    tensors = as_batch(tensors)
    if torch.compiler.is_compiling():
        placing = Placing(mesh, layout, scheme, None, check)
        out, lse = compiled.run(tensors, keywords, placing, (cu_seqlens_q, cu_seqlens_k))
    else:
        documents = documents_of(cu_seqlens_q, cu_seqlens_k)
        placing = Placing(mesh, layout, scheme, lengths_of(documents), check)
        out, lse = run(prepared(tensors, keywords, placing, documents))
    out = out.squeeze(0).transpose(0, 1)  # whose gradient is a view, unlike that of out[0]
    return (out, lse.squeeze(0)) if return_lse else out
