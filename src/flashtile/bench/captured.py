"""Queries, keys and values of a trained model: real inputs, with the outliers that random ones lack.

A byte-level GPT is trained for 60 steps, once in a process; the tensors are the inputs of its attention layers on text.
The heads of all layers are concatenated: to an attention function they are all the same.
"""

import functools
import random
from pathlib import Path

import torch
from torch import Tensor

from .byte_gpt import ByteGPT, Shape, new_model, sdpa_attention, text, train, windows

STEPS = 60
HEADS, HEAD_DIM = Shape().layers * Shape().heads, Shape().head_dim
Triple = tuple[Tensor, Tensor, Tensor]


trained: list[ByteGPT] = []  # this process's model, or empty


def use(model: ByteGPT) -> None:
    """Capture from this model from now on, instead of training one on first use."""
    trained[:] = [model]


def trained_model(steps: int = STEPS) -> ByteGPT:
    """The model that tensors are captured from; on the CPU."""
    if not trained:
        with torch.inference_mode(False), torch.enable_grad():  # in any mode of the caller
            model = new_model()
            for _ in train(model, sdpa_attention, steps):
                pass
        use(model)
    return trained[0]


def captured(batch: int, seqlen: int, seed: int = 0, model: ByteGPT | None = None) -> Triple:
    """q, k, v [B, 8, S, 64] in float32, of `batch` pieces of text; `model` is the trained one by default."""
    seen: list[Triple] = []

    def watched(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        seen.append((q, k, v))
        return sdpa_attention(q, k, v)

    tokens = windows(text(), batch, seqlen, torch.Generator().manual_seed(seed))
    with torch.no_grad():
        (model or trained_model())(tokens, watched)
    q, k, v = (torch.cat(layers, 1) for layers in zip(*seen, strict=True))
    return q, k, v


class Source:
    """Values for problems of any shape, cut from captured tensors: rows that follow one another in a head of one text,
    with features repeated where a problem is wider than the model.
    """

    def __init__(self, tensors: Triple) -> None:
        self.tensors = tensors

    def __call__(self, shapes: tuple[tuple[int, ...], ...], dtype: torch.dtype, rng: random.Random) -> Triple:
        """q, k, v of the shapes [..., S, D]."""
        q, k, v = (self.values(x, shape, rng).to(dtype) for x, shape in zip(self.tensors, shapes, strict=True))
        return q, k, v

    def values(self, source: Tensor, shape: tuple[int, ...], rng: random.Random) -> Tensor:
        rows = source.flatten(0, 1)  # [B * H, S, D]
        count = torch.Size(shape[:-2]).numel()
        made = torch.empty((count, *shape[-2:]), dtype=source.dtype)
        for n in range(count):
            head, start = rows[rng.randrange(len(rows))], rng.randrange(source.shape[2])
            positions = (start + torch.arange(shape[-2])) % source.shape[2]
            made[n] = head[positions][:, torch.arange(shape[-1]) % source.shape[3]]
        return made.reshape(shape)

    def save(self, path: Path) -> None:
        torch.save(self.tensors, path)

    @classmethod
    @functools.cache
    def load(cls, path: Path) -> "Source":
        return cls(tuple(torch.load(path)))
