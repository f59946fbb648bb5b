"""A small byte-level GPT: real attention inputs, and the model that `examples/train_bytes.py` trains.

Pre-norm blocks (Radford et al., "Language models are unsupervised multitask learners", section 2.3) with rotary
positions (Su et al., "RoFormer", section 3.2.2). Attention comes from outside, a function `attend(q, k, v) -> out` of
`[B, H, S, D]`, so that one seed trains the same model with any implementation. The text is the English help
topics that every Python ships with.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from .. import attention, attention_with_kvcache

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
BYTES = 256
ROTARY_BASE = 10_000.0


@dataclass(frozen=True)
class Shape:
    layers: int = 2
    heads: int = 4
    head_dim: int = 64

    @property
    def width(self) -> int:
        return self.heads * self.head_dim


def flashtile_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attention(q, k, v, causal=True)  # type: ignore[return-value]


def sdpa_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


ATTENTIONS: dict[str, Attend] = {"flashtile": flashtile_attention, "sdpa": sdpa_attention}


class Cache:
    """Keys and values of one layer, filled in place by `attention_with_kvcache`."""

    def __init__(self, batch: int, seqlen: int, shape: Shape, like: Tensor) -> None:
        size = (batch, shape.heads, seqlen, shape.head_dim)
        self.k, self.v = (torch.zeros(size, dtype=like.dtype, device=like.device) for _ in range(2))


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.norm_attention, self.norm_mlp = (nn.LayerNorm(shape.width) for _ in range(2))
        self.qkv = nn.Linear(shape.width, 3 * shape.width, bias=False)
        self.project = nn.Linear(shape.width, shape.width, bias=False)
        self.widen = nn.Linear(shape.width, 4 * shape.width)
        self.narrow = nn.Linear(4 * shape.width, shape.width)

    def queries_keys_values(self, x: Tensor) -> tuple[Tensor, ...]:
        """x [B, S, H * D] -> q, k, v [B, H, S, D], as views of one product."""
        heads = self.qkv(self.norm_attention(x)).unflatten(2, (3, self.shape.heads, self.shape.head_dim))
        return heads.permute(2, 0, 3, 1, 4).unbind(0)

    def after_attention(self, x: Tensor, out: Tensor) -> Tensor:
        x = x + self.project(out.transpose(1, 2).flatten(2))
        return x + self.narrow(F.gelu(self.widen(self.norm_mlp(x))))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        q, k, v = self.queries_keys_values(x)
        return self.after_attention(x, attend(rotated(q, cos, sin), rotated(k, cos, sin), v))

    def step(self, x: Tensor, cos: Tensor, sin: Tensor, cache: Cache, lengths: Tensor) -> Tensor:
        """Forward for the next tokens of sequences whose `lengths` earlier tokens are in the cache."""
        q, k, v = self.queries_keys_values(x)
        out = attention_with_kvcache(
            q, cache.k, cache.v, cache_seqlens=lengths, k=k, v=v, rotary_cos=cos, rotary_sin=sin, causal=True
        )
        return self.after_attention(x, out)  # type: ignore[arg-type]


class ByteGPT(nn.Module):
    def __init__(self, shape: Shape = Shape()) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = nn.Embedding(BYTES, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        self.apply(initialize)

    def forward(self, tokens: Tensor, attend: Attend, tables: tuple[Tensor, Tensor] | None = None) -> Tensor:
        """tokens [B, S] -> logits [B, S, 256]. `tables` come from `rotary_tables` for the tokens' positions, if they
        are not the first ones.
        """
        cos, sin = tables or rotary_tables(tokens.shape[1], self.shape.head_dim, self.embedding.weight)
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, cos, sin, attend)
        return self.logits(x)

    def logits(self, x: Tensor) -> Tensor:
        return self.norm(x) @ self.embedding.weight.T

    @torch.no_grad()
    def generate(self, prompt: bytes, count: int, temperature: float = 0.8, seed: int = 0) -> Iterator[int]:
        """`count` more bytes, one at a time, over a KV cache of every layer."""
        device = self.embedding.weight.device
        generator = torch.Generator(device).manual_seed(seed)
        seqlen = len(prompt) + count
        caches = [Cache(1, seqlen, self.shape, self.embedding.weight) for _ in self.blocks]
        cos, sin = rotary_tables(seqlen, self.shape.head_dim, self.embedding.weight)
        lengths = torch.zeros(1, dtype=torch.int32, device=device)
        tokens = torch.tensor([list(prompt)], device=device)
        for _ in range(count):
            logits = self.step(tokens, caches, lengths, cos, sin)[:, -1]
            lengths += tokens.shape[1]
            weights = torch.softmax(logits / temperature, 1)
            tokens = torch.multinomial(weights, 1, generator=generator)
            yield int(tokens)

    def step(self, tokens: Tensor, caches: list[Cache], lengths: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Logits of the next tokens [B, S_new], whose keys and values are appended to the caches."""
        x = self.embedding(tokens)
        for block, cache in zip(self.blocks, caches, strict=True):
            x = block.step(x, cos, sin, cache, lengths)  # type: ignore[operator]
        return self.logits(x)


def initialize(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)


def rotary_tables(seqlen: int, head_dim: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin of each position's angles, [S, D / 2], on the device and in the dtype of `like`."""
    frequencies = ROTARY_BASE ** (-torch.arange(0, head_dim, 2, device=like.device) / head_dim)
    angles = torch.arange(seqlen, device=like.device)[:, None] * frequencies
    return angles.cos().to(like.dtype), angles.sin().to(like.dtype)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs of neighboring features by the angles of their positions; x [B, H, S, D]."""
    first, second = x.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack([first * cos - second * sin, second * cos + first * sin], -1).flatten(-2)


# Training ------------------------------------------------------------------------------------------------------------


def text() -> Tensor:
    """The help topics of this Python as bytes, uint8 [N]."""
    from pydoc_data.topics import topics

    return torch.frombuffer(bytearray("\n\n".join(topics.values()).encode()), dtype=torch.uint8)


def windows(data: Tensor, batch: int, seqlen: int, generator: torch.Generator) -> Tensor:
    """Random pieces of the text, int64 [B, S]."""
    starts = torch.randint(len(data) - seqlen, (batch,), generator=generator)
    return torch.stack([data[start : start + seqlen] for start in starts.tolist()]).long()


class OneProcess:
    """Rows of sequences, and sums, where one process has everything."""

    def rows(self, x: Tensor, dim: int) -> Tensor:
        """The rows of this process, of a tensor that has all along a dimension."""
        return x

    def add_up(self, tensors: list[Tensor]) -> None:
        """Sum each tensor over all processes, in place."""


ONE_PROCESS = OneProcess()


def train(
    model: ByteGPT, attend: Attend, steps: int, *, batch: int = 8, seqlen: int = 128, rate: float = 2e-3, seed: int = 0,
    processes: OneProcess = ONE_PROCESS,
) -> Iterator[float]:  # fmt: skip
    """Train the model on its own device with AdamW and cosine decay; yield each step's loss, in nats per byte."""
    device = model.embedding.weight.device
    cos, sin = rotary_tables(seqlen, model.shape.head_dim, model.embedding.weight)
    tables = processes.rows(cos, 0), processes.rows(sin, 0)
    data, generator = text(), torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), rate, betas=(0.9, 0.95), fused=True)
    for step in range(steps):
        warmed = min(1.0, (step + 1) / 10)
        for group in optimizer.param_groups:
            group["lr"] = rate * warmed * (0.55 + 0.45 * math.cos(math.pi * step / steps))
        tokens = windows(data, batch, seqlen + 1, generator).to(device)
        given, following = processes.rows(tokens[:, :-1], 1), processes.rows(tokens[:, 1:], 1)
        share = following.numel() / (batch * seqlen)
        loss = share * F.cross_entropy(model(given, attend, tables).flatten(0, 1), following.flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        loss = loss.detach()
        processes.add_up([loss, *(x.grad for x in model.parameters() if x.grad is not None)])
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        yield loss.item()


def new_model(seed: int = 0, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> ByteGPT:
    """Initialize a model: the same weights for a seed on every device. The default generator keeps its state."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return ByteGPT().to(device, dtype)
