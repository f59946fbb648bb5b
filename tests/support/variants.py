"""Named problems for compiled kernels: each name fixes the compile-time choices, the rest is random.

Each name is one set of head dimensions, dtype, layout and features; a few dozen cover what a GPU backend compiles.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from checking import offsets
from torch import Tensor

from flashtile.testing.case import Case, ExactSides, MaskFunction
from flashtile.testing.draw import poisoned_bias
from flashtile.testing.inputs import KINDS, query_key_value
from flashtile.testing.mask_functions import random_mask_function
from flashtile.testing.poison import in_larger_buffer

LENGTHS = (1, 2, 15, 16, 17, 31, 33, 63, 64, 65, 127, 128, 129, 191, 200, 257)  # around every tile


class Draw:
    """Random sizes and tensors of one problem."""

    def __init__(self, seed: int, lengths: tuple[int, ...]):
        self.rng = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.kind = self.rng.choice(KINDS)
        self.lengths = lengths

    def length(self) -> int:
        return self.rng.choice(self.lengths)

    def randn(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator)


@dataclass(frozen=True)
class Sizes:
    """Sizes of a feature's tensors."""

    batch: int
    num_heads: int
    seqlen_q: int
    seqlen_k: int
    dtype: torch.dtype


Features = Callable[[Draw, Sizes], dict[str, Any]]


def fixed(**arguments: Any) -> Features:
    return lambda draw, sizes: arguments


def bias(*kept: bool, half: bool = False) -> Features:
    """A bias whose dimensions are kept or broadcast, in float32 or, if `half`, in the dtype of q."""

    def shape(sizes: Sizes) -> list[int]:
        full = (sizes.batch, sizes.num_heads, sizes.seqlen_q, sizes.seqlen_k)
        return [n if keep else 1 for n, keep in zip(full, kept, strict=True)]

    return lambda draw, sizes: {"bias": draw.randn(*shape(sizes)).to(sizes.dtype if half else torch.float32)}


def mask(draw: Draw, sizes: Sizes) -> dict[str, Any]:
    return {"mask": draw.randn(sizes.batch, 1, sizes.seqlen_q, sizes.seqlen_k) > -0.5}


def mask_function(draw: Draw, sizes: Sizes) -> dict[str, Any]:
    return {"mask": random_mask_function(draw.rng.randrange(100), sizes.batch, sizes.num_heads, "cpu", draw.generator)}


def slopes(draw: Draw, sizes: Sizes) -> dict[str, Any]:
    return {"alibi_slopes": draw.randn(sizes.num_heads).abs() * 0.1}


def slopes_of_sequences(draw: Draw, sizes: Sizes) -> dict[str, Any]:
    return {"alibi_slopes": draw.randn(sizes.batch, sizes.num_heads).abs() * 0.1}


def sinks(draw: Draw, sizes: Sizes) -> dict[str, Any]:
    return {"sinks": draw.randn(sizes.num_heads)}


def dropout(draw: Draw, sizes: Sizes) -> dict[str, Any]:
    return {"dropout_p": 0.2, "dropout_seed": draw.rng.getrandbits(62)}


def all_of(*features: Features) -> Features:
    return lambda draw, sizes: {name: x for feature in features for name, x in feature(draw, sizes).items()}


NUMBERS = fixed(causal=True, window=(90, None), softcap=20.0, scale=0.2)
EVERYTHING = all_of(NUMBERS, bias(True, True, True, True), mask, slopes, sinks, dropout)
NOTHING = fixed()


@dataclass(frozen=True)
class Variant:
    features: Features = NOTHING
    dtype: torch.dtype = torch.bfloat16
    head_dim: int = 64
    head_dim_v: int | None = None
    heads: tuple[int, int] = (2, 2)
    layout: str = "dense"  # "packed", "used" (packed, and fewer keys than there is room for) or "paged"
    seqlen_q: int | None = None
    seqlen_k: int | None = None  # of dense calls
    batches: tuple[int, ...] = (1, 2, 3)  # of dense calls
    transposed: bool = False  # [B, S, H, D] in memory
    apart: bool = False  # packed rows an odd number of elements apart, with NaN between them
    unused: bool = False  # packed rows that are not in use, with NaN in them
    longest: int = 257
    page_size: int = 16

    def case(self, seed: int, device: str, lengths: tuple[int, ...] = LENGTHS) -> Case:
        draw = Draw(seed, tuple(n for n in lengths if n <= self.longest))
        return self.dense(draw, seed, device) if self.layout == "dense" else self.packed(draw, seed, device)

    def tensors(self, draw: Draw, *leading: tuple[int, ...]) -> list[Tensor]:
        width_v = self.head_dim_v or self.head_dim
        shapes = tuple((*x, n) for x, n in zip(leading, (self.head_dim, self.head_dim, width_v), strict=True))
        return list(query_key_value(draw.kind, shapes, self.dtype, draw.generator))

    def dense(self, draw: Draw, seed: int, device: str) -> Case:
        heads_q, heads_k = self.heads
        seqlen_q, seqlen_k = self.seqlen_q or draw.length(), self.seqlen_k or draw.length()
        sizes = Sizes(draw.rng.choice(self.batches), heads_q, seqlen_q, seqlen_k, self.dtype)
        keys = (sizes.batch, heads_k, sizes.seqlen_k)
        given = self.tensors(draw, (sizes.batch, heads_q, sizes.seqlen_q), keys, keys)
        if self.transposed:
            given = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in given]
        return self.finished("attention", dict(zip("qkv", given, strict=True)), sizes, draw, seed, device)

    def packed(self, draw: Draw, seed: int, device: str) -> Case:
        heads_q, heads_k = self.heads
        batch = draw.rng.choice((2, 4))
        lengths_q = [self.seqlen_q or draw.rng.choice((0, draw.length())) for _ in range(batch)]
        lengths_k = [draw.rng.choice((0, draw.length(), draw.length())) for _ in range(batch)]
        longest_q, longest_k = max(*lengths_q, 1), max(*lengths_k, 1)
        sizes = Sizes(batch, heads_q, longest_q, longest_k, self.dtype)
        more = draw.rng.choice((0, 3))  # tokens that belong to no sequence
        tokens_q = (heads_q, sum(lengths_q) + more)
        arguments: dict[str, Any] = {"cu_seqlens_q": offsets(*lengths_q)}
        if self.layout == "paged":
            columns = -(-longest_k // self.page_size)
            num_pages = batch * columns + 2
            order = torch.randperm(num_pages, generator=draw.generator)[: batch * columns]
            given = self.tensors(draw, tokens_q, *(2 * [(heads_k, num_pages * self.page_size)]))
            k, v = (x.transpose(0, 1).unflatten(0, (num_pages, self.page_size)).contiguous() for x in given[1:])
            arguments |= {"k": k, "v": v, "cu_seqlens_k": None, "page_table": order.view(batch, columns).int()}
            arguments |= {"seqused_k": torch.tensor(lengths_k, dtype=torch.int32)}
        else:
            room = [n + draw.rng.choice((0, 5)) for n in lengths_k] if self.layout == "used" else lengths_k
            given = self.tensors(draw, tokens_q, *(2 * [(heads_k, sum(room) + more)]))
            arguments |= {"k": given[1].transpose(0, 1), "v": given[2].transpose(0, 1)}
            arguments |= {"cu_seqlens_k": offsets(*room)}
            if self.layout == "used":
                arguments["seqused_k"] = torch.tensor(lengths_k, dtype=torch.int32)
        arguments = {"q": given[0].transpose(0, 1)} | arguments
        if self.apart:
            arguments |= {name: in_larger_buffer(arguments[name], ((1, 0), (0, 1), (0, 3))) for name in "qk"}
        arguments |= {"max_seqlen_q": longest_q, "max_seqlen_k": longest_k}
        if self.layout == "used":
            arguments["max_seqlen_k"] = longest_k + 5
            sizes = Sizes(batch, heads_q, longest_q, longest_k + 5, self.dtype)
        if self.unused:
            lengths_q = self.use_fewer(draw, arguments, lengths_q)
        case = self.finished("attention_varlen", arguments, sizes, draw, seed, device)
        if "bias" in case.arguments:
            poisoned_bias(case.arguments["bias"], list(zip(lengths_q, lengths_k, strict=True)))
        return case

    def use_fewer(self, draw: Draw, arguments: dict, lengths: list[int]) -> list[int]:
        used = [draw.rng.randint(0, n) for n in lengths]
        for start, n, length in zip(arguments["cu_seqlens_q"].tolist(), used, lengths, strict=False):
            arguments["q"][start + n : start + length] = torch.nan
        arguments["seqused_q"] = torch.tensor(used, dtype=torch.int32)
        return used

    def finished(self, function: str, arguments: dict, sizes: Sizes, draw: Draw, seed: int, device: str) -> Case:
        arguments = arguments | self.features(draw, sizes)
        out_shape = (*arguments["q"].shape[:-1], self.head_dim_v or self.head_dim)
        lse_shape = out_shape[:-1] if function == "attention" else (out_shape[1], out_shape[0])
        dout, dlse = draw.randn(*out_shape).to(self.dtype), draw.randn(*lse_shape)
        arguments = {name: on_device(x, device) for name, x in arguments.items()}
        return Case(function, arguments, dout.to(device), dlse.to(device), seed)


def on_device(x: Any, device: str) -> Any:
    if isinstance(x, MaskFunction):
        return MaskFunction(x.fn, tuple(tensor.to(device) for tensor in x.tensors))
    return x.to(device) if isinstance(x, Tensor) else x


CAUSAL = fixed(causal=True)
FP16, FP32 = torch.float16, torch.float32
VARIANTS = {
    "hdim 64": Variant(),
    "hdim 64 causal": Variant(CAUSAL),
    "hdim 128": Variant(head_dim=128),
    "hdim 128 causal, grouped heads": Variant(CAUSAL, head_dim=128, heads=(4, 2)),
    "hdim 256 transposed": Variant(CAUSAL, head_dim=256, transposed=True),
    "hdim 96": Variant(CAUSAL, head_dim=96),
    "hdim 192/128": Variant(CAUSAL, head_dim=192, head_dim_v=128),
    "hdim 320": Variant(head_dim=320, longest=130),
    "hdim 512": Variant(CAUSAL, head_dim=512, longest=130),
    "hdim 16": Variant(CAUSAL, FP16, 16),
    "hdim 72": Variant(fixed(), FP16, 72),
    "hdim 33/5": Variant(CAUSAL, FP16, 33, 5),
    "fp32": Variant(CAUSAL, FP32),
    "fp32 hdim 128": Variant(fixed(), FP32, 128),
    "fp32 hdim 256": Variant(fixed(), FP32, 256, longest=130),
    "fp32 everything": Variant(EVERYTHING, FP32, 40, heads=(4, 2)),
    "top left": Variant(fixed(causal="top_left", window=(None, 60))),
    "window": Variant(fixed(window=(40, 25)), FP16),
    "causal window": Variant(fixed(causal=True, window=(70, None)), head_dim=128),
    "softcap": Variant(fixed(causal=True, softcap=3.0), head_dim=128),
    "bias": Variant(bias(True, True, True, True), FP16),
    "bias of heads and keys": Variant(all_of(CAUSAL, bias(False, True, False, True))),
    "bias of sequences and rows": Variant(bias(True, False, True, False, half=True)),
    "one bias, negative scale": Variant(all_of(fixed(scale=-0.1), bias(False, False, False, False))),
    "mask": Variant(mask),
    "mask function": Variant(mask_function, heads=(4, 2), layout="packed"),
    "slopes": Variant(all_of(CAUSAL, slopes)),
    "sinks": Variant(all_of(CAUSAL, sinks)),
    "dropout": Variant(all_of(CAUSAL, dropout), head_dim=128),
    "everything": Variant(EVERYTHING, heads=(4, 2)),
    "short": Variant(bias(False, True, True, True), head_dim=32, longest=64),
    "short everything": Variant(
        all_of(NUMBERS, bias(True, True, True, True), mask, slopes, dropout), FP16, 64, longest=64
    ),
    "few rows": Variant(all_of(NUMBERS, slopes, dropout), FP16, seqlen_q=30),
    "few keys": Variant(all_of(NUMBERS, slopes, dropout), head_dim=40, seqlen_k=77),
    "packed": Variant(CAUSAL, layout="packed", heads=(4, 2)),
    "packed window": Variant(fixed(window=ExactSides((50, -3))), layout="packed", head_dim=128),
    "packed, hdim 48 apart": Variant(
        all_of(CAUSAL, bias(True, True, True, False)), head_dim=48, heads=(6, 3), layout="packed", apart=True
    ),
    "packed everything": Variant(all_of(EVERYTHING, slopes_of_sequences), layout="used", heads=(4, 2)),
    "paged": Variant(CAUSAL, layout="paged", heads=(4, 2)),
    "paged everything": Variant(EVERYTHING, FP16, layout="paged", page_size=3),
    "hdim 40/1, twenty queries": Variant(CAUSAL, FP16, 40, 1, heads=(4, 2), seqlen_q=20),
    "one query": Variant(CAUSAL, head_dim=128, heads=(8, 2), seqlen_q=1),
    "hdim 512, sixteen rows": Variant(CAUSAL, head_dim=512, heads=(8, 2), seqlen_q=4, longest=130),
    "packed chunks, rows unused": Variant(
        all_of(fixed(attention_chunk=21), bias(True, False, True, True), slopes_of_sequences, sinks),
        FP16,
        heads=(4, 2),
        layout="used",
        unused=True,
    ),
    "packed, three queries": Variant(CAUSAL, layout="packed", heads=(8, 2), seqlen_q=3),
}
