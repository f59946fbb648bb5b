"""The tensors of a cell, as a `Case`: the arguments of the public function by their names, and the cotangent of out."""

from typing import Any

import torch
from torch import Tensor

from ..testing.case import Case
from ..testing.inputs import query_key_value
from .captured import HEAD_DIM, HEADS, captured
from .cell import Cell
from .patterns import SCORE_MODS, pattern


def make_case(cell: Cell, device: torch.device, seed: int = 0) -> Case:
    """Random tensors of the cell's shapes. In memory, positions come before heads as after a projection:
    `q [B, H, S, D]` is a view of `[B, S, H, D]`. Packed `q` is `[T, H, D]`.
    """
    generator = torch.Generator("cpu" if device.type == "meta" else device).manual_seed(seed)
    dtype = cell.torch_dtype

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=dtype, device=device, generator=generator)

    if cell.lengths:
        tokens = sum(cell.lengths)
        shapes = [(tokens, heads, width) for heads, width in head_shapes(cell)]
        q, k, v = query_key_values(cell, shapes, normal, device, seed)
        starts = torch.tensor([0, *cell.lengths]).cumsum(0).int().to(device)
        longest = max(cell.lengths)
        arguments: dict[str, Any] = {"q": q, "k": k, "v": v, "cu_seqlens_q": starts, "cu_seqlens_k": starts}
        arguments |= {"max_seqlen_q": longest, "max_seqlen_k": longest}
        function, dout = "attention_varlen", normal(tokens, cell.heads, cell.width_v)
    else:
        seqlens = (cell.seqlen_q, cell.keys, cell.keys)
        shapes = [(cell.batch, n, *shape) for n, shape in zip(seqlens, head_shapes(cell), strict=True)]
        q, k, v = (x.transpose(1, 2) for x in query_key_values(cell, shapes, normal, device, seed))
        arguments = {"q": q, "k": k, "v": v}
        function, dout = "attention", normal(cell.batch, cell.seqlen_q, cell.heads, cell.width_v).transpose(1, 2)
    arguments |= features(cell, device, normal)
    return Case(function, arguments, dout, seed=seed, description=cell.label(), forward_only=not cell.differentiates)


def head_shapes(cell: Cell) -> list[tuple[int, int]]:
    return [(cell.heads, cell.head_dim), (cell.num_heads_kv, cell.head_dim), (cell.num_heads_kv, cell.width_v)]


def query_key_values(cell: Cell, shapes: list[tuple[int, ...]], normal: Any, device: torch.device, seed: int) -> Any:
    """q, k, v with tokens before heads; of the kind `cell.inputs`."""
    if cell.inputs == "normal":
        return tuple(normal(*shape) for shape in shapes)
    if cell.inputs == "captured":
        return captured_values(cell, seed, device)
    generator = torch.Generator().manual_seed(seed)  # heads before tokens, as the testing inputs are
    swapped = tuple((*shape[:-3], shape[-2], shape[-3], shape[-1]) for shape in shapes)
    made = query_key_value(cell.inputs, swapped, cell.torch_dtype, generator)
    return tuple(x.transpose(-3, -2).contiguous().to(device) for x in made)


def captured_values(cell: Cell, seed: int, device: torch.device) -> list[Tensor]:
    """q, k, v [B, S, H, D] of the trained model, as many of its heads as the cell has.

    Raises:
        ValueError: the cell has other heads than the model.
    """
    square = not cell.lengths and cell.keys == cell.seqlen_q and cell.num_heads_kv == cell.heads
    if not square or cell.heads > HEADS or (cell.head_dim, cell.width_v) != (HEAD_DIM, HEAD_DIM):
        raise ValueError(
            f"captured inputs are dense, with up to {HEADS} heads of {HEAD_DIM} and as many keys as queries"
        )
    tensors = captured(cell.batch, cell.seqlen_q, seed)
    return [x[:, : cell.heads].transpose(1, 2).to(device, cell.torch_dtype).contiguous() for x in tensors]


def features(cell: Cell, device: torch.device, normal: Any) -> dict[str, Any]:
    arguments: dict[str, Any] = {"causal": cell.causal}
    if cell.window:
        arguments["window"] = cell.window
    if cell.softcap:
        arguments["softcap"] = cell.softcap
    if cell.bias:
        arguments["bias"] = normal(1, cell.heads, cell.seqlen_q, cell.keys)
    if cell.mask is True:
        shape = (cell.batch, 1, 1, cell.keys)
        arguments["mask"] = torch.rand(shape, generator=torch.Generator().manual_seed(1)).to(device) < 0.9
    elif cell.mask:
        arguments["mask"] = pattern(cell.mask, cell.batch, cell.seqlen_q, cell.keys, device)
    if cell.score_mod:
        arguments["score_mod"] = SCORE_MODS[cell.score_mod](cell.heads, device)
    if cell.alibi:
        arguments["alibi_slopes"] = alibi_slopes(cell.heads).to(device)
    if cell.sinks:
        arguments["sinks"] = normal(cell.heads)
    if cell.dropout:
        arguments |= {"dropout_p": cell.dropout, "dropout_seed": 1}
    return arguments


def alibi_slopes(heads: int) -> Tensor:
    """2 ** (-8 h / H) for h = 1..H, float32 (Press et al., "ALiBi", section 3)."""
    return 2.0 ** (-8.0 * torch.arange(1, heads + 1) / heads)
