"""Calls with masks and biases that `masks.py` times: the cells of `masks.toml`, their masks, and each library's call.

A mask is written twice: with `flashtile.mask_mods`, and as a function of indices, as FlexAttention takes it. The second
one also makes the bool tensors of all pairs that other libraries take, and that results are checked with.
"""

import math
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import flashtile
from flashtile import MaskMod, mask_mods

CELLS = Path(__file__).with_name("masks.toml")
MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
Attend = Callable[..., Tensor]  # of q, k, v and, where it has a gradient, the bias
SDPA = {"efficient": SDPBackend.EFFICIENT_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
PROVIDERS = ("flashtile", "flashtile dense", "packed", "flex", "fa3", *SDPA)
MOST_DENSE = 16384  # positions from which a bool tensor of all pairs is no way to call
UNLIMITED = -1  # a side of FlashAttention-3's windows
ROWS = 1024  # of a mask's tensor that are computed at once
PAIRS = ("", "bias", "bias with gradient", "padding")


@dataclass(frozen=True)
class Cell:
    """A call: the name and numbers of a mask, or a kind of tensor, and sizes."""

    mask: str = ""
    pairs: str = ""
    batch: int = 2
    heads: int = 16
    seqlen: int = 8192
    head_dim: int = 64
    first_page: int = 0

    def __str__(self) -> str:
        return f"{self.mask or self.pairs} [{self.batch}, {self.heads}, {self.seqlen}, {self.head_dim}]"

    def tiny(self) -> "Cell":
        """The same call of a few positions."""
        return replace(self, batch=min(self.batch, 2), heads=2, seqlen=256, head_dim=self.head_dim // 4)


def load_cells(path: Path = CELLS) -> list[Cell]:
    """The cells of a file.

    Raises:
        ValueError: an entry that no cell has, or an unknown mask or kind of tensor.
    """
    values = tomllib.loads(path.read_text())
    cells = []
    for entry in values["cells"]:
        entry = {**values["defaults"], **entry}
        if unknown := entry.keys() - {field.name for field in fields(Cell)}:
            raise ValueError(f"{path}: a cell has no entry {', '.join(sorted(unknown))}")
        cell = Cell(**entry)
        name, _ = name_and_numbers(cell.mask)
        if bool(cell.mask) == bool(cell.pairs) or name not in ("", *MASKS) or cell.pairs not in PAIRS:
            raise ValueError(f"{path}: {cell} has no mask or tensor, or an unknown one")
        cells.append(cell)
    return cells


def name_and_numbers(mask: str) -> tuple[str, list[int]]:
    words = mask.split()
    return " ".join(x for x in words if not x.isdigit()), [int(x) for x in words if x.isdigit()]


# Masks ----------------------------------------------------------------------------------------------------------------


class Mask(NamedTuple):
    """A mask in all ways to call it."""

    own: MaskMod
    function: MaskFunction
    of_sequences: bool = False  # whether it depends on the sequence
    cu_seqlens: Tensor | None = None  # of documents, of all sequences
    packed: dict[str, Any] | None = None  # other arguments of the call with packed documents
    sides: tuple[int, int] | None = None  # of a window, as FlashAttention-3 takes them; those of documents too


def causal(cell: Cell, device: torch.device) -> Mask:
    return Mask(mask_mods.causal(), lambda b, h, i, j: j <= i, sides=(UNLIMITED, 0))


def window(cell: Cell, device: torch.device, width: int) -> Mask:
    return Mask(mask_mods.window(width, 0), lambda b, h, i, j: (j <= i) & (i - j <= width), sides=(width, 0))


def prefix(cell: Cell, device: torch.device) -> Mask:
    lengths = torch.tensor([cell.seqlen * (n + 1) // (cell.batch + 2) for n in range(cell.batch)], device=device)
    return Mask(mask_mods.prefix(lengths), lambda b, h, i, j: (j <= i) | (j < lengths[b]), of_sequences=True)


def offsets(cell: Cell) -> list[list[int]]:
    """Where the documents of each sequence begin and end."""
    pages = tomllib.loads(CELLS.read_text())["pages"]
    scale = 16 if cell.seqlen < 1024 else 1  # of tiny calls
    found = []
    for n in range(cell.batch):
        first = cell.first_page + n * (len(pages) // 3)
        lengths = (max(1, pages[(first + m) % len(pages)] // scale) for m in range(cell.seqlen))
        ends = [0]
        while ends[-1] < cell.seqlen:
            ends.append(min(ends[-1] + next(lengths), cell.seqlen))
        found.append(ends)
    return found


def documents(cell: Cell, device: torch.device, width: int | None = None, *, causal: bool = False) -> Mask:
    """Documents, alone or with causal and a window."""
    ends = offsets(cell)
    ids = torch.stack([torch.repeat_interleave(torch.tensor(x).diff()) for x in ends]).int().to(device)  # [B, S]
    starts = [n * cell.seqlen + x for n, own in enumerate(ends) for x in own[:-1]]
    cu_seqlens = torch.tensor([*starts, cell.batch * cell.seqlen], dtype=torch.int32, device=device)
    packed: dict[str, Any] = {"causal": causal, "window": None if width is None else (width, 0)}
    own = mask_mods.document(ids)
    if causal:
        own = mask_mods.and_masks(mask_mods.causal() if width is None else mask_mods.window(width, 0), own)

    def function(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        shown = ids[b, i] == ids[b, j]
        shown = shown & (j <= i) if causal else shown
        return shown if width is None else shown & (i - j <= width)

    left, right = UNLIMITED if width is None else width, 0 if causal else UNLIMITED
    return Mask(own, function, True, cu_seqlens, packed, (left, right))


def causal_documents(cell: Cell, device: torch.device, width: int | None = None) -> Mask:
    return documents(cell, device, width, causal=True)


def dilated(cell: Cell, device: torch.device, width: int, dilation: int) -> Mask:
    def function(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return ((i - j).abs() <= width) & ((i - j).abs() % dilation == 0)

    return Mask(mask_mods.dilated(width, dilation), function)


def neighborhood(cell: Cell, device: torch.device, dims: int, kernel: int) -> Mask:
    """A square of tokens, or a row."""
    side = math.isqrt(cell.seqlen) if dims == 2 else cell.seqlen
    radius = min(kernel, side - 1) // 2

    def near(i: Tensor, j: Tensor) -> Tensor:
        return (j - i.clamp(radius, side - 1 - radius)).abs() <= radius

    def function(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return near(i, j) if dims == 1 else near(i // side, j // side) & near(i % side, j % side)

    return Mask(mask_mods.neighborhood((side,) * dims, (2 * radius + 1,) * dims), function)


def block_diffusion(cell: Cell, device: torch.device, block: int) -> Mask:
    length = cell.seqlen // 2

    def function(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        clean_i, clean_j = i >= length, j >= length
        of_i, of_j = i % length // block, j % length // block
        return ((of_i == of_j) & (clean_i == clean_j)) | ((of_j < of_i) & clean_j)

    return Mask(mask_mods.block_diffusion(length, block), function)


def tree(cell: Cell, device: torch.device) -> Mask:
    """A tree in which each token has two children, in depth-first order, so that a subtree is a range of positions."""
    parents, ends = [-1] * cell.seqlen, [cell.seqlen] * cell.seqlen

    def grow(first: int, end: int, parent: int) -> None:
        while first < end:  # the first child by recursion, the second one by iteration
            parents[first], ends[first] = parent, end
            middle = (first + 1 + end) // 2
            parent, first = first, first + 1
            if middle > first:
                grow(first, middle, parent)
                first = middle
                if first < end:
                    grow(first, end, parent)
                return

    grow(0, cell.seqlen, -1)
    end = torch.tensor(ends, device=device)
    return Mask(mask_mods.tree(torch.tensor(parents, device=device)), lambda b, h, i, j: (j <= i) & (i < end[j]))


def flashmask(cell: Cell, device: torch.device) -> Mask:
    """A question of a quarter of the positions, with six answers that do not see each other."""
    question, answer = cell.seqlen // 4, cell.seqlen // 8
    places = torch.arange(cell.seqlen, device=device)
    start = torch.where(places < question, cell.seqlen, question + ((places - question) // answer + 1) * answer).int()
    own = mask_mods.flashmask(start[None, None, :, None], causal=True)
    return Mask(own, lambda b, h, i, j: (j <= i) & (i < start[j]))


def window_or_first_keys(cell: Cell, device: torch.device, width: int, count: int) -> Mask:
    """A causal window, and the first keys for all later queries."""
    own = mask_mods.and_masks(
        mask_mods.causal(), mask_mods.or_masks(mask_mods.window(width, 0), lambda b, h, i, j: j < count)
    )
    return Mask(own, lambda b, h, i, j: (j <= i) & ((i - j <= width) | (j < count)))


MASKS: dict[str, Callable[..., Mask]] = {
    "causal": causal,
    "window": window,
    "prefix": prefix,
    "document": documents,
    "causal document": causal_documents,
    "causal window document": causal_documents,
    "dilated": dilated,
    "neighborhood": neighborhood,
    "block diffusion": block_diffusion,
    "tree": tree,
    "flashmask": flashmask,
    "window or first keys": window_or_first_keys,
}


def mask_of(cell: Cell, device: torch.device) -> Mask | None:
    """The mask of a cell; of its padding too."""
    if cell.pairs == "padding":
        lengths = torch.tensor([cell.seqlen - (n * 37) % (cell.seqlen // 2) for n in range(cell.batch)], device=device)
        own = MaskMod(lambda b, h, q_idx, k_idx, lengths: k_idx < lengths[b], (lengths,))
        return Mask(own, lambda b, h, i, j: j < lengths[b], of_sequences=True)
    name, numbers = name_and_numbers(cell.mask)
    return MASKS[name](cell, device, *numbers) if name else None


def dense_mask(cell: Cell, mask: Mask, device: torch.device) -> Tensor:
    """Visible pairs, bool `[B | 1, 1, S, S]`, or `[B, 1, 1, S]` of padding."""
    b = torch.arange(cell.batch if mask.of_sequences else 1, device=device)[:, None, None, None]
    h, j = torch.zeros(1, 1, 1, dtype=torch.int64, device=device), torch.arange(cell.seqlen, device=device)
    if cell.pairs == "padding":
        return mask.function(b, h, j[:1, None], j)
    parts = [mask.function(b, h, i[:, None], j) for i in torch.arange(cell.seqlen, device=device).split(ROWS)]
    return torch.cat([x.expand(len(b), 1, -1, cell.seqlen) for x in parts], dim=2)


# Calls ----------------------------------------------------------------------------------------------------------------


class Inputs(NamedTuple):
    """The tensors of a cell, `[B, H, S, D]` with heads inside of positions in memory, as projections leave them."""

    leaves: tuple[Tensor, ...]  # that have a gradient: q, k, v, and a bias
    bias: Tensor | None
    mask: Mask | None
    visible: Tensor | None
    dout: Tensor


def inputs_of(cell: Cell, device: torch.device, dtype: torch.dtype) -> Inputs:
    generator = torch.Generator(device).manual_seed(0)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=dtype)

    shape = (cell.batch, cell.seqlen, cell.heads, cell.head_dim)
    *qkv, dout = (randn(*shape).transpose(1, 2) for _ in range(4))
    bias = randn(1, cell.heads, cell.seqlen, cell.seqlen) if cell.pairs.startswith("bias") else None
    leaves = [*qkv, bias] if bias is not None and cell.pairs == "bias with gradient" else qkv
    mask = mask_of(cell, device)
    visible = None if mask is None else dense_mask(cell, mask, device)
    return Inputs(tuple(x.requires_grad_() for x in leaves), bias, mask, visible, dout)


def calls_of(cell: Cell, inputs: Inputs, flex: Any) -> Iterator[tuple[str, Attend]]:
    """Each provider's name and call of `leaves`; `flex` is FlexAttention with its block mask."""
    bias, mask, visible = inputs.bias, inputs.mask, inputs.visible
    own = visible if cell.pairs == "padding" else None if mask is None else mask.own
    yield "flashtile", lambda q, k, v, *_: flashtile.attention(q, k, v, mask=own, bias=bias)
    if cell.mask and cell.seqlen <= MOST_DENSE:
        yield "flashtile dense", lambda q, k, v: flashtile.attention(q, k, v, mask=visible)
    if cell.pairs == "padding" and mask is not None:
        yield "flashtile function", lambda q, k, v: flashtile.attention(q, k, v, mask=mask.own)
    if mask is not None and mask.packed is not None:
        yield "packed", packed_call(cell, mask)
    yield "flex", flex
    if mask is not None and mask.sides is not None and hasattr(torch.ops.flash_attn_3, "fwd"):  # its library is loaded
        yield "fa3", fa3_call(mask)
    if cell.seqlen <= MOST_DENSE:
        for name, backend in SDPA.items():
            yield name, sdpa_call(backend, visible if bias is None else bias)


def packed_call(cell: Cell, mask: Mask) -> Attend:
    assert mask.cu_seqlens is not None
    longest = int(mask.cu_seqlens.diff().max())
    cu_seqlens, arguments = mask.cu_seqlens, mask.packed or {}
    shape = (cell.batch, cell.seqlen, cell.heads, cell.head_dim)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))
        sizes: dict[str, Any] = {"max_seqlen_q": longest, "max_seqlen_k": longest}
        out = flashtile.attention_varlen(q, k, v, cu_seqlens, cu_seqlens, **sizes, **arguments)
        return out.view(shape).transpose(1, 2)

    return attend


class FlashAttention3(torch.autograd.Function):
    """FlashAttention-3's operators, of `[B, S, H, D]` or `[T, H, D]`."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, keywords: dict[str, Any]) -> Tensor:
        out, lse, *_ = torch.ops.flash_attn_3.fwd(q, k, v, num_splits=1, **keywords)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.keywords = keywords
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        gradients = [torch.empty_like(x) for x in ctx.saved_tensors[:3]]
        torch.ops.flash_attn_3.bwd(*grads, *ctx.saved_tensors, *gradients, **ctx.keywords)
        return *gradients, None


def fa3_call(mask: Mask) -> Attend:
    """FlashAttention-3's call: causal, with a window, or of packed documents."""
    assert mask.sides is not None
    keywords: dict[str, Any] = {"softcap": 0.0}
    if mask.sides == (UNLIMITED, 0):
        keywords["is_causal"] = True
    else:
        keywords |= {"window_size_left": mask.sides[0], "window_size_right": mask.sides[1]}
    if mask.cu_seqlens is not None:
        longest = int(mask.cu_seqlens.diff().max())
        keywords |= {"cu_seqlens_q": mask.cu_seqlens, "cu_seqlens_k": mask.cu_seqlens}
        keywords |= {"max_seqlen_q": longest, "max_seqlen_k": longest}

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rows = [x.transpose(1, 2) for x in (q, k, v)]
        packed = [x.flatten(0, 1) for x in rows] if mask.cu_seqlens is not None else rows
        out = FlashAttention3.apply(*packed, {"softmax_scale": q.shape[-1] ** -0.5, **keywords})
        return out.view(rows[0].shape).transpose(1, 2)  # pyright: ignore[reportAttributeAccessIssue]

    return attend


def sdpa_call(backend: SDPBackend, pairs: Tensor | None) -> Attend:
    def attend(q: Tensor, k: Tensor, v: Tensor, *_: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(q, k, v, attn_mask=pairs)

    return attend


class Flex:
    """FlexAttention of a cell, compiled on a GPU; the block mask is made at its first use."""

    def __init__(self, cell: Cell, inputs: Inputs):
        from torch.nn.attention.flex_attention import flex_attention

        self.cell, self.inputs = cell, inputs
        self.on_gpu = inputs.dout.device.type == "cuda"
        self.attend: Any = torch.compile(flex_attention, dynamic=False) if self.on_gpu else flex_attention
        self.block_mask: Any = None

    def create_block_mask(self) -> Any:
        from torch._inductor import config
        from torch.nn.attention.flex_attention import create_block_mask

        mask, cell = self.inputs.mask, self.cell
        assert mask is not None
        sequences = cell.batch if mask.of_sequences else None
        device = self.inputs.dout.device
        # Persistent reductions hold the pairs of whole blocks: LLVM takes minutes for that kernel at 16384 positions.
        with config.patch({"triton.persistent_reductions": False}):
            return create_block_mask(
                mask.function, sequences, None, cell.seqlen, cell.seqlen, device=device, _compile=self.on_gpu
            )

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *_: Tensor) -> Tensor:
        if self.block_mask is None and self.inputs.mask is not None:
            self.block_mask = self.create_block_mask()
        bias = self.inputs.bias

        def add(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            assert bias is not None
            return score + bias[0, h, i, j]

        return self.attend(q, k, v, score_mod=None if bias is None else add, block_mask=self.block_mask)
