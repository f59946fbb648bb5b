"""The random choices that problems of every kind have in common."""

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .inputs import KINDS, bias_values, query_key_value
from .layouts import LAYOUTS, combined, lay_out
from .score_functions import random_score_function

PAIR_BUDGET = 400_000  # B * Hq * Sq * Sk of one case with head_dim 64; what the oracle's time is proportional to
AROUND = (16, 32, 64, 128, 256)  # tile sizes: lengths on both sides of them matter
COMBINED = 0.1  # of tensors
NAN = float("nan")
# Queries, keys and values of given shapes [..., S, D], in place of random ones.
Values = Callable[[tuple[tuple[int, ...], ...], torch.dtype, random.Random], tuple[Tensor, Tensor, Tensor]]


class Draw:
    """A stream of choices from a seed, and what all problems choose first."""

    def __init__(
        self, seed: int, device: torch.device, dtypes: tuple[torch.dtype, ...], values: Values | None = None
    ) -> None:
        self.seed = seed
        self.values = values
        self.device = device
        self.rng = random.Random(seed)
        self.combinations = random.Random(f"layouts of {seed}")  # apart: the rest of a seed's problem does not change
        self.generator = torch.Generator().manual_seed(seed)
        self.dtype = self.rng.choice(dtypes)
        self.kind = self.pick(dict(zip(KINDS, (6, 2, 2), strict=True)))
        self.plain = self.chance(0.12)  # no feature at all: the fast paths
        self.num_heads_kv = self.pick({1: 3, 2: 3, 3: 1})
        self.num_heads_q = self.num_heads_kv * self.pick({1: 4, 2: 3, 3: 1, 4: 1})
        self.head_dim = self._head_dim()
        self.head_dim_v = self._head_dim() if self.chance(0.2) else self.head_dim

    def chance(self, p: float) -> bool:
        return self.rng.random() < p

    def pick(self, weights: dict) -> Any:
        return self.rng.choices(list(weights), list(weights.values()))[0]

    def _head_dim(self) -> int:
        common = {64: 10, 128: 6, 32: 6, 16: 4, 48: 2, 80: 2, 96: 3}
        uncommon = {1: 1, 3: 1, 8: 2, 40: 1, 72: 1, 100: 1, 192: 1, 256: 1, 320: 0.5, 512: 0.5, 1024: 0.5}
        if self.chance(0.1):
            return self.rng.randint(1, 160)
        return self.pick(common | uncommon)

    def seqlen(self) -> int:
        width = max(self.head_dim, self.head_dim_v)
        longest = 300 if width <= 192 else 100 if width <= 320 else 40
        kind = self.pick({"empty": 3, "one": 8, "near a tile": 32, "small": 22, "any": 35})
        if kind == "near a tile":
            return max(1, min(longest, self.rng.choice(AROUND) + self.rng.randint(-2, 2)))
        return {"empty": 0, "one": 1, "small": self.rng.randint(2, 40), "any": self.rng.randint(1, longest)}[kind]

    def affordable(self, pairs: int) -> bool:
        return pairs * self.num_heads_q * (self.head_dim + self.head_dim_v + 64) <= PAIR_BUDGET * 192

    def query_key_value(self, *shapes: tuple[int, ...]) -> list[Tensor]:
        """q, k, v [..., H, S, D] on the CPU, rarely with one NaN, or an infinity in V."""
        if self.values is None:
            tensors = query_key_value(self.kind, shapes, self.dtype, self.generator)
        else:
            tensors = self.values(shapes, self.dtype, self.rng)
        if not self.plain and self.chance(0.04):
            which = self.rng.randrange(3)
            values = [NAN] if which < 2 else [NAN, float("inf"), -float("inf")]
            if tensors[which].numel():
                tensors[which].view(-1)[self.rng.randrange(tensors[which].numel())] = self.rng.choice(values)
        return list(tensors)

    def layout(self, values: Tensor, expandable: tuple[int, ...] | None = None) -> Tensor:
        """`values` on the device, in some layout, at times combined; `expandable` as in `lay_out`, () for none."""
        weights = (8, 4, 3, 0 if expandable == () else 1, 1)
        x = lay_out(
            values.to(self.device), self.pick(dict(zip(LAYOUTS[:-1], weights, strict=True))), self.rng, expandable
        )
        return combined(x, self.combinations) if self.combinations.random() < COMBINED else x

    def pairwise_shape(self, batch: int, seqlen_q: int, seqlen_k: int) -> tuple[int, ...]:
        """[B, H, Sq, Sk] with some dimensions 1."""
        full = (batch, self.num_heads_q, seqlen_q, seqlen_k)
        return tuple(n if self.chance(keep) else 1 for n, keep in zip(full, (0.5, 0.5, 0.6, 0.8), strict=True))

    def features(self, lengths: list[tuple[int, int]], seqlen_q: int, seqlen_k: int) -> dict[str, Any]:
        """The keyword arguments that dense and varlen calls share.

        `lengths` are Sq and Sk of each sequence, `seqlen_q` and `seqlen_k` the size of bias and mask.
        """
        rng, dtype, device, batch = self.rng, self.dtype, self.device, len(lengths)
        if self.plain:
            return {"causal": self.chance(0.5)}
        features: dict[str, Any] = {"causal": self.pick({False: 58, True: 35, "top_left": 7})}
        if self.chance(0.3):
            features["window"] = tuple(self._window_side(seqlen_k) for _ in range(2))
        if self.chance(0.3):
            features["scale"] = self.pick({1 / self.head_dim: 3, 0.3 / self.head_dim**0.5: 3, 0.0: 0.3, -0.1: 0.3})
        if self.chance(0.2):
            features["softcap"] = rng.choice([1.0, 5.0, 20.0, 50.0])
        if self.chance(0.15):
            density = rng.choice([0.1, 0.5, 0.9, 0.99])
            mask = torch.rand(self.pairwise_shape(batch, seqlen_q, seqlen_k), generator=self.generator) < density
            features["mask"] = self.layout(mask)
        if self.chance(0.2):
            slopes = 2.0 ** -(8 * torch.rand(self.num_heads_q, generator=self.generator))
            if self.chance(0.5):
                slopes = slopes * torch.linspace(0.5, 1.5, batch)[:, None]
            features["alibi_slopes"] = slopes.to(device)
        if self.chance(0.2):
            sinks = torch.randn(self.num_heads_q, generator=self.generator) * 3
            sinks[torch.rand(self.num_heads_q, generator=self.generator) < 0.1] = -torch.inf
            features["sinks"] = sinks.to(rng.choice([dtype, torch.float32])).to(device)
        if self.chance(0.15):
            choice = rng.randrange(100)
            of = (choice, batch, self.num_heads_q, rng.choice([dtype, torch.float32]), device, self.generator)
            features["score_mod"] = random_score_function(*of)
        if self.chance(0.25):
            # An infinite score times a tensor's element has a NaN gradient: no infinities before a score_mod.
            kind = "normal" if "score_mod" in features else self.kind
            bias = bias_values(kind, self.pairwise_shape(batch, seqlen_q, seqlen_k), dtype, self.generator)
            bias = poisoned_bias(bias if self.chance(0.5) else bias.float(), lengths)
            features["bias"] = self.layout(bias, (1,))
        if self.chance(0.2):
            features["dropout_p"] = rng.choice([1e-5, 0.1, 0.17, 0.5, 0.9])
            seed = rng.choice([0, 1, 2**32 - 1, 2**63 - 1, rng.getrandbits(63)])
            features["dropout_seed"] = torch.tensor([seed], device=device) if self.chance(0.3) else seed
        return features

    def _window_side(self, seqlen_k: int) -> int | None:
        return self.rng.choice([None, -1, 0, 1, self.rng.randint(0, 40), self.rng.randint(0, max(1, seqlen_k))])

    def cotangents(self, out_shape: tuple[int, ...], lse_shape: tuple[int, ...]) -> tuple[Tensor | None, Tensor | None]:
        """dout and dlse on the CPU or already laid out; sometimes one of them or both are absent."""
        wide = torch.float64 if self.dtype == torch.float64 else torch.float32
        dout = dlse = None
        if self.chance(0.9):
            dout = torch.randn(out_shape, generator=self.generator, dtype=wide).to(self.dtype)
            if dout.numel() and not self.plain and self.chance(0.01):
                dout.view(-1)[self.rng.randrange(dout.numel())] = NAN
        if self.chance(0.4 if dout is not None else 0.6):
            dlse = torch.randn(lse_shape, generator=self.generator, dtype=wide)
        return dout, dlse


def poisoned_bias(bias: Tensor, lengths: list[tuple[int, int]]) -> Tensor:
    """The bias with NaN where no sequence has a pair; `lengths` are Sq and Sk of each."""
    for b in range(bias.shape[0]):
        users = lengths if bias.shape[0] == 1 else lengths[b : b + 1]
        for dim in (2, 3):
            used = max((pair[dim - 2] for pair in users), default=0)
            if bias.shape[dim] > max(used, 1):
                bias[b].narrow(dim - 1, used, bias.shape[dim] - used).fill_(NAN)
    return bias
