"""Random choices that problems of every kind share."""

import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .case import ExactSides
from .choices import Choices, weighted
from .inputs import KINDS, bias_values, query_key_value
from .layouts import LAYOUTS, combined, lay_out
from .mask_functions import random_mask_function
from .score_functions import random_score_function

PAIR_BUDGET = 400_000  # B * Hq * Sq * Sk of one case with head_dim 64; the oracle's time is proportional to it
AROUND = (16, 32, 64, 128, 256)  # tile sizes, for lengths on both sides of them
COMBINED = 0.1  # part of tensors
MASK_FUNCTIONS = 0.1  # part of problems without a bool mask
RECORDED = range(
    1_000_000, 1_021_000
)  # seeds recorded before there were mask functions, `HopperDraw` and int64 indices
WIDE_INDICES = 0.4  # part of problems with lengths, offsets or pages: half of these tensors are int64
RESIZED = 0.2  # part of variations, whose kernels may have other tiles than their seed's
NAN = float("nan")
# Queries, keys and values of given shapes [..., S, D], in place of random ones.
Values = Callable[[tuple[tuple[int, ...], ...], torch.dtype, random.Random], tuple[Tensor, Tensor, Tensor]]


class Draw(Choices):
    """The choices of one problem, beginning with those that all problems make."""

    left_out: frozenset[str] = frozenset()  # arguments that no problem has
    page_sizes: tuple[int, ...] = (1, 2, 3, 8, 16, 16, 32, 64)

    def __init__(
        self,
        number: tuple[int, int],
        device: torch.device,
        dtypes: tuple[torch.dtype, ...],
        values: Values | None = None,
        kept: Sequence[Any] = (),
    ) -> None:
        """`number` is the seed and the variation; `kept` are the choices of variation 0, for another one."""
        super().__init__(*number, kept)
        self.values = values
        self.device = device
        # Streams of their own, so that the rest of a seed's problem does not change.
        self.combinations = random.Random(f"layouts of {self.seed}")
        self.mask_functions = random.Random(f"mask functions of {self.seed}")
        # Further features: which there are, for all variations of a seed, and their values.
        self.further = random.Random(f"further features of {self.seed}")
        self.values_of_further = random.Random(f"further features of {self.seed}, variation {self.variation}")
        self.dtype = self._dtype(dtypes)
        self.kind = weighted(self.rng, dict(zip(KINDS, (6, 2, 2), strict=True)))
        self.plain = self.chance(0.12)  # no feature at all: the fast paths
        self.num_heads_kv = self.pick({1: 3, 2: 3, 3: 1})
        self.num_heads_q = self.num_heads_kv * self.pick({1: 4, 2: 3, 3: 1, 4: 1})
        self.head_dim = self._head_dim()
        self.head_dim_v = self._head_dim() if self.chance(0.2) else self.head_dim

    def _dtype(self, dtypes: tuple[torch.dtype, ...]) -> torch.dtype:
        return self.choice(dtypes)

    def _head_dim(self) -> int:
        common = {64: 10, 128: 6, 32: 6, 16: 4, 48: 2, 80: 2, 96: 3}
        uncommon = {1: 1, 3: 1, 8: 2, 40: 1, 72: 1, 100: 1, 192: 1, 256: 1, 320: 0.5, 512: 0.5, 1024: 0.5}
        if self.chance(0.1):
            return self.keep(lambda: self.rng.randint(1, 160))
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

    def vary(self, queries: list[int], *keys: list[int]) -> tuple[list[int], ...]:
        """The lengths of sequences in this variation, from those in variation 0. Equal lengths stay equal.

        Plans depend on lengths rounded up to a power of two. Most variations stay in that range; the others have fewer
        and shorter sequences.
        """
        if self.variation == 0 or not queries:
            return queries, *keys
        resized = self.rng.random() < RESIZED
        count = self.rng.randint(1, len(queries)) if resized else len(queries)
        order = self.rng.sample(range(len(queries)), count)
        groups = [[group[b] for b in order] for group in (queries, *keys)]
        lengths = sorted({n for group in groups for n in group})
        varied = {n: self.rng.randint(min(n, 1), n) if resized else self._within_bucket(n) for n in lengths}
        pairs = sum(varied[m] * sum(varied[n] for n in of_keys) for m, *of_keys in zip(*groups, strict=True))
        if not self.affordable(pairs):
            varied = {n: min(n, other) for n, other in varied.items()}
        return tuple([varied[n] for n in group] for group in groups)

    def _within_bucket(self, n: int) -> int:
        """A length with the same next power of two, at times near a tile's edge."""
        longest = 1 << max(n - 1, 0).bit_length()
        shortest = longest // 2 + 1
        if n <= 2:
            return n
        if self.rng.random() < 0.5:
            return self.rng.randint(shortest, longest)
        edge = 16 * self.rng.randint(shortest // 16, longest // 16) + self.rng.randint(-2, 2)
        return min(max(edge, shortest), longest)

    def query_key_value(self, *shapes: tuple[int, ...]) -> list[Tensor]:
        """q, k, v [..., H, S, D] on the CPU, rarely with one NaN, or an infinity in V."""
        if self.values is None:
            tensors = query_key_value(self.kind, shapes, self.dtype, self.generator)
        else:
            tensors = self.values(shapes, self.dtype, self.rng)
        if not self.plain and self.rng.random() < 0.04:
            which = self.rng.randrange(3)
            values = [NAN] if which < 2 else [NAN, float("inf"), -float("inf")]
            if tensors[which].numel():
                tensors[which].view(-1)[self.rng.randrange(tensors[which].numel())] = self.rng.choice(values)
        return list(tensors)

    def wide_indices(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """The arguments with some of their int32 lengths, offsets and pages as int64, alike in all variations."""

        def chosen(of: str, probability: float) -> bool:
            return random.Random(f"wide {of} of {self.seed}").random() < probability

        if self.seed in RECORDED or not chosen("indices", WIDE_INDICES):
            return arguments
        narrow = {name: x for name, x in arguments.items() if isinstance(x, Tensor) and x.dtype is torch.int32}
        return arguments | {name: x.long() for name, x in narrow.items() if chosen(name, 0.5)}

    def layout(self, values: Tensor, expandable: tuple[int, ...] | None = None) -> Tensor:
        """`values` on the device, in some layout, at times combined; `expandable` as in `lay_out`, () for none."""
        weights = (8, 4, 3, 0 if expandable == () else 1, 1)
        layout = self.pick(dict(zip(LAYOUTS[:-1], weights, strict=True)))
        x = lay_out(values.to(self.device), layout, self.stream(), expandable)
        return combined(x, self.combinations) if self.combinations.random() < COMBINED else x

    def operand(self, values: Tensor, expandable: tuple[int, ...] | None = None) -> Tensor:
        """The same for queries, keys and values."""
        return self.layout(values, expandable)

    def pairwise_shape(self, batch: int, seqlen_q: int, seqlen_k: int) -> tuple[int, ...]:
        """[B, H, Sq, Sk] with some dimensions 1."""
        full = (batch, self.num_heads_q, seqlen_q, seqlen_k)
        return tuple(n if self.chance(keep) else 1 for n, keep in zip(full, (0.5, 0.5, 0.6, 0.8), strict=True))

    def features(self, lengths: list[tuple[int, int]], seqlen_q: int, seqlen_k: int) -> dict[str, Any]:
        """Keyword arguments that dense and varlen calls share.

        `lengths` are Sq and Sk of each sequence, `seqlen_q` and `seqlen_k` the size of bias and mask.
        """
        rng, dtype, device, batch = self.rng, self.dtype, self.device, len(lengths)
        if self.plain:
            return {"causal": self.chance(0.5)}
        features: dict[str, Any] = {"causal": self.pick({False: 58, True: 35, "top_left": 7})}
        if self.chance(0.3):
            features["window"] = tuple(self._window_side(seqlen_k) for _ in range(2))
        if self.chance(0.3):
            features["scale"] = self._scale()
        if self.chance(0.2):
            features["softcap"] = rng.choice([1.0, 5.0, 20.0, 50.0])
        if self.chance(0.15):
            density = rng.choice([0.1, 0.5, 0.9, 0.99])
            mask = torch.rand(self.pairwise_shape(batch, seqlen_q, seqlen_k), generator=self.generator) < density
            features["mask"] = self.layout(mask)
        elif self.seed not in RECORDED and self.mask_functions.random() < MASK_FUNCTIONS:
            choice, generator = self.mask_functions.randrange(100), torch.Generator().manual_seed(self.seed)
            features["mask"] = random_mask_function(choice, batch, self.num_heads_q, device, generator)
        if self.chance(0.2):
            slopes = 2.0 ** -(8 * torch.rand(self.num_heads_q, generator=self.generator))
            if self.chance(0.5):
                slopes = slopes * torch.linspace(0.5, 1.5, batch)[:, None]
            features["alibi_slopes"] = slopes.to(device)
        if self.chance(0.2):
            sinks = torch.randn(self.num_heads_q, generator=self.generator) * 3
            sinks[torch.rand(self.num_heads_q, generator=self.generator) < 0.1] = -torch.inf
            features["sinks"] = sinks.to(self.choice([dtype, torch.float32])).to(device)
        if self.chance(0.15):
            choice = self.choice(range(100))
            of = (choice, batch, self.num_heads_q, self.choice([dtype, torch.float32]), device, self.generator)
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
        return features | self._further_features(features, seqlen_k)

    def also(self, p: float) -> bool:
        """Whether the problem has a further feature."""
        return self.further.random() < p and not self.plain

    def _further_features(self, features: dict[str, Any], seqlen_k: int) -> dict[str, Any]:
        """Chunks, windows away from the query's own key, and other dtypes of what is added to the scores."""
        rng, more = self.values_of_further, {}
        if self.also(0.08) and "attention_chunk" not in self.left_out:
            more["attention_chunk"] = rng.choice([1, 2, 7, 16, 33, 64, rng.randint(1, max(1, seqlen_k))])
        if self.also(0.08):
            sides = [None, -1, -1, -7, 0, rng.randint(-20, 20), rng.randint(-20, max(20, seqlen_k))]
            more["window"] = ExactSides(sides[self.further.randrange(len(sides))] for _ in range(2))
        for name in ("bias", "alibi_slopes", "sinks"):
            dtypes = [torch.bfloat16, torch.float32, torch.float64] + [torch.float16] * (name != "bias")
            dtype = self.further.choice(dtypes)
            if self.also(0.15) and name in features:
                more[name] = features[name].to(dtype)
        return more

    def _window_side(self, seqlen_k: int) -> int | None:
        sides = [None, -1, 0, 1, self.rng.randint(0, 40), self.rng.randint(0, max(1, seqlen_k))]
        return sides[self.choice(range(len(sides)))]

    def _scale(self) -> float:
        scale: float = self.pick({1 / self.head_dim: 3, 0.3 / self.head_dim**0.5: 3, 0.0: 0.3, -0.1: 0.3})
        return scale if self.variation == 0 else scale * self.rng.uniform(0.5, 1)

    def cotangents(self, out_shape: tuple[int, ...], lse_shape: tuple[int, ...]) -> tuple[Tensor | None, Tensor | None]:
        """dout and dlse on the CPU or already laid out; sometimes one of them or both are absent."""
        wide = torch.float64 if self.dtype == torch.float64 else torch.float32
        dout = dlse = None
        if self.chance(0.9):
            dout = torch.randn(out_shape, generator=self.generator, dtype=wide).to(self.dtype)
            if dout.numel() and not self.plain and self.rng.random() < 0.01:
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
