"""Reference results for a `Case`: float64 on the CPU, sequence by sequence, with the ingredients of the error bound.

Dense, packed, paged and cached calls have one form here: tokens [T, H, D] and, for each sequence, the rows of its
queries and keys among them. Each sequence goes through `forward` and `backward`; its results are added at its rows.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..case import Case
from .backward import backward
from .cache import Cache
from .eight_bit import (
    BLOCK,
    DESCALES,
    LEAST,
    SUM,
    WEIGHT,
    WEIGHTS,
    has_eight_bits,
    lost_by_blocks,
    lost_scores,
    scales,
    scales_of_rows,
)
from .forward import INF, forward, score_error
from .packed_rows import numbers
from .philox import keep_factors
from .sequence import Sequence
from .sums import Sums
from .tangents import InputTangents, tangents

# Terms for which a GPU's sum of 16-bit inputs may lose eps(acc): its matrix units truncate a sum after each 16, and the
# softmax rounds the sum of a row by half of that, half as large on average, after each block of 64.
LATENT = (1, 576, 512)  # key heads and widths of latent rows
GPU_SUMS = {"out": 16, "tout": 16, "dq": 16, "dk": 16, "dv": 16, "lse": 256}


@dataclass(frozen=True)
class Expected:
    """One expected result with its error bound, in its own shape.

    `R`, `C` and `A` are as in docs/contract.md, section "Numbers"; `sums` defines them. `A` counts all terms of a
    score: scale * sum|q||k|, |bias|, |slope| * distance and the change by score_mod. Results that sum
    over rows (all gradients but dq) have the largest `A` among the rows that contribute to the element; a tensor of
    score_mod has the largest of the contributing sequences. lse has no R and C.

    `score_error` * eps(acc) * A bounds the error of a score, a dot product of D terms. `sum_error` * eps(acc) bounds
    the error of a sum over pairs, in units of C, and of the sum behind lse, in units of that sum, where it is more than
    the contract's 32 and 8.

    `rounded` is the same result as kernels may have it that round P to 8 bits, or scale it and round it to float16.
    """

    reference: Tensor  # float64
    dtype: torch.dtype  # dtype of the public function's result
    A: Tensor
    R: Tensor | None = None  # None for lse and its tangent, which has a C
    C: Tensor | None = None
    loss: Tensor | None = None  # error if every P and dS is off by 1, for the bound's `tiny`
    loose: Tensor | None = None  # bool: a NaN or infinity elsewhere in the same sequence and head may reach the element
    score_error: float = 4.0
    sum_error: float = 0.0
    slack: Tensor | None = None  # change by elements of q and k that may be rounded in two ways
    exact: Tensor | None = None  # bool: a copy, which has to be the same
    products: torch.dtype | None = None  # dtype that P is rounded to, if it is another one than the result's
    rounded: "Expected | None" = None


def solve(case: Case) -> dict[str, Expected]:
    """Expected results under the keys of `Case.run`: "out", "lse", then "dq", "dk", ... if the case has a backward, and
    "k_cache" and "v_cache", as they are after the call, if it has caches.
    """
    with torch.no_grad():
        return _Solution(case).expected()


class _Solution:
    """The sums of one call in packed layout while its sequences are added up."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.given: dict[str, Any] = {name: _exact(value) for name, value in case.arguments.items()}
        stored = case.arguments["k_cache" if "k_cache" in case.arguments else "k"]
        if stored.dtype is torch.uint8:
            self.given["k_bytes"], self.given["k_cache"] = self.given["k_cache"], numbers(stored, case.dtype)
        for name in ("k", "v", "k_cache", "v_cache") if has_eight_bits(stored) else ():
            if self.given.get(name) is not None:
                self.given[name] = self.given[name].double()
        if (columns := self.given.get("v_dim")) is not None:
            for name, of_k in (("v", "k"), ("v_cache", "k_cache")):
                if self.given.get(of_k) is not None:
                    self.given[name] = self.given[of_k][..., :columns]
            self.given["v_descale"] = self.given.get("k_descale")
        for name in ("bias", "alibi_slopes", "sinks"):
            if case.dtype != torch.float64 and self.given.get(name) is not None:
                self.given[name] = self.given[name].float().double()  # no finer than the scores
        self.dense = self.given["q"].ndim == 4
        self.most_rows = self.most_keys = 0  # sizes of one sequence: terms of a key's sums, and of a row's
        on_gpu, self.eight_bits = case.arguments["q"].is_cuda, has_eight_bits(case.arguments["q"])
        self.on_matrix_units = on_gpu and (case.dtype.itemsize == 2 or self.eight_bits)
        self.paged = self.given.get("page_table") is not None
        self.score_tensors = tuple(_exact(t) for t in getattr(self.given.get("score_mod"), "tensors", ()))
        self.cache = Cache(self.given, case.dtype, stored.dtype) if "k_cache" in self.given else None
        if self.cache is None:
            self.q, self.k, self.v = (self._packed(self.given[name], name) for name in ("q", "k", "v"))  # [T, H, D]
        else:
            self.q, self.k, self.v = self.cache.q.value, self.cache.k.value, self.cache.v.value
        out_shape = (*self.q.shape[:2], self.v.shape[2])  # [Tq, Hq, Dv]
        self.dlse = torch.zeros(out_shape[:2], dtype=torch.float64)  # [Tq, Hq]
        self.dout = None if case.dout is None else self._packed(_exact(case.dout), "out")
        if case.dlse is not None:
            self.dlse = self._packed(_exact(case.dlse), "lse")

        self.lse = torch.full(out_shape[:2], -INF, dtype=torch.float64)  # rows of no sequence see nothing
        self.A = torch.zeros(out_shape[:2], dtype=torch.float64)
        self.sums = {"out": Sums.zeros(out_shape)}
        self.slack = torch.zeros(out_shape, dtype=torch.float64), torch.zeros(out_shape[:2], dtype=torch.float64)
        self.lost = torch.zeros(out_shape, dtype=torch.float64)  # what small weights of 8 bits lose
        widths = self.k.shape[1], self.k.shape[2], self.v.shape[2]
        self.latent_bytes = has_eight_bits(stored) and widths == LATENT and case.dtype.itemsize == 2
        self.lost_scores = torch.zeros(out_shape[:2], dtype=torch.float64)  # what small queries of float16 lose
        self.tangents: dict[str, Tensor] = {name: _exact(x) for name, x in case.tangents.items()}
        if columns is not None and "k" in self.tangents:
            self.tangents["v"] = self.tangents["k"][..., :columns]
        self.tlse, self.tlse_size = (torch.zeros(out_shape[:2], dtype=torch.float64) for _ in range(2))
        if case.tangents:
            self.sums["tout"] = Sums.zeros(out_shape)
        if case.differentiates:
            packed = {"q": self.q.shape, "k": self.k.shape, "v": self.v.shape}
            for name, tensor in case.differentiable().items():
                self.sums[f"d{name}"] = Sums.zeros(packed.get(name, tensor.shape))

    def expected(self) -> dict[str, Expected]:
        group = self.q.shape[1] // self.k.shape[1]
        for batch, (q_rows, k_rows) in enumerate(self._sequences()):
            self._add_sequence(batch, q_rows, k_rows)
            self.most_rows = max(self.most_rows, len(q_rows) * group)
            self.most_keys = max(self.most_keys, len(k_rows))
        dtypes = {"out": self.case.dtype, "tout": self.case.dtype}
        dtypes |= {f"d{name}": tensor.dtype for name, tensor in self.case.differentiable().items()}
        results = {}
        error = score_error(self.q.shape[-1])
        for name, sums in self.sums.items():
            if name in ("out", "tout", "dq", "dk", "dv"):
                sums = sums.map(lambda part, name=name: self._unpacked(part, name))
            results[name] = Expected(
                sums.total, dtypes[name], sums.A, sums.squares.sqrt(), sums.absolutes, sums.loss, sums.loose, error,
                self._sum_error(name),
            )  # fmt: skip
        lse_dtype = torch.float64 if self.case.dtype == torch.float64 else torch.float32
        lse, A = self._unpacked(self.lse, "lse"), self._unpacked(self.A, "lse")
        lse = Expected(lse, lse_dtype, A, score_error=error, sum_error=self._sum_error("lse"))
        out_slack, lse_slack = (self._unpacked(x, name) for x, name in zip(self.slack, ("out", "lse"), strict=True))
        out, lse = replace(results.pop("out"), slack=out_slack), replace(lse, slack=lse_slack)
        if self.eight_bits:
            out, lse = self._with_eight_bits(out, lse)
        elif self.latent_bytes:
            out, lse = self._with_float16(out, lse)
        if self.tangents:
            tlse, size, more = (self._unpacked(x, "lse") for x in (self.tlse, self.tlse_size, self.A + 1))
            results["tlse"] = Expected(
                tlse, lse_dtype, more, None, size, size, score_error=error, sum_error=self._sum_error("lse")
            )
        return {"out": out, "lse": lse, **results, **self._caches()}

    def _with_eight_bits(self, out: Expected, lse: Expected) -> tuple[Expected, Expected]:
        """Results of queries of 8 bits, and what products of 8 bits may lose: docs/design/exactness.md derives it."""
        assert out.R is not None
        assert out.slack is not None
        assert lse.slack is not None
        of_scores = SUM * out.score_error
        of_weights = 4 * (WEIGHT + of_scores * out.A) * out.R
        of_sums = BLOCK / 2 * SUM * (out.reference.abs() + out.R)
        of_lse = (SUM + of_scores * lse.A) * lse.reference.abs().clamp(min=1)
        slack = out.slack + of_weights + of_sums + self._unpacked(self.lost, "out")
        rounded_out = replace(out, slack=slack, sum_error=0.0)
        rounded_lse = replace(lse, slack=lse.slack + of_lse, sum_error=0.0)
        products = self._products() if self.on_matrix_units else None
        return replace(out, products=products, rounded=rounded_out), replace(lse, rounded=rounded_lse)

    def _with_float16(self, out: Expected, lse: Expected) -> tuple[Expected, Expected]:
        """Results over latent rows of 8 bits, and what products in float16 may lose."""
        assert out.C is not None
        assert out.loss is not None
        assert out.slack is not None
        assert lse.slack is not None
        of_scores = self._unpacked(self.lost_scores, "lse")
        of_weights = LEAST / WEIGHTS * out.loss if self._products() is torch.float16 else 0.0
        rounded_out = replace(out, slack=out.slack + 2 * of_scores[..., None] * out.C + of_weights)
        return replace(out, rounded=rounded_out), replace(lse, rounded=replace(lse, slack=lse.slack + of_scores))

    def _products(self) -> torch.dtype:
        """The dtype of a GPU's products of P that are not of 8 bits, with queries or latent rows that are: P times the
        scales of tokens or pages may be outside of float16's range.
        """
        x, keys = self.given.get("v_descale"), self.k.shape[1]
        sequences = sum(1 for _ in self._sequences())
        of_pages = self.paged and x is not None and x.ndim == 2 and len(x) == len(self._stored_keys())
        by_head = x is None or (tuple(x.shape) in ((keys,), (sequences, keys)) and not of_pages)
        return torch.float16 if by_head else torch.bfloat16

    def _stored_keys(self) -> Tensor:
        return self.given["k" if self.cache is None else "k_cache"]  # type: ignore[no-any-return]

    def _sum_error(self, name: str) -> float:
        """That of a sum of 16-bit inputs on a GPU."""
        if name not in GPU_SUMS or not self.on_matrix_units:
            return 0.0
        return (self.most_rows if name in ("dk", "dv") else self.most_keys) / GPU_SUMS[name]

    def _caches(self) -> dict[str, Expected]:
        """Expected caches: copies, except for new rotated keys."""
        results = {}
        for name in ("k_cache", "v_cache") if self.cache is not None else ():
            assert self.cache is not None
            tokens = self.cache.k if name == "k_cache" else self.cache.v
            reference, magnitude = (self.cache.in_cache_layout(x) for x in (tokens.value, tokens.magnitude))
            zeros, ones = torch.zeros_like(reference), torch.ones_like(reference)
            exact = magnitude == 0
            if self.case.arguments[name] is None:  # columns of k_cache
                continue
            if self.cache.rows is not None:
                reference = self.cache.in_cache_layout(self.cache.rows).double()
                zeros = torch.zeros_like(reference)
                results[name] = Expected(reference, torch.uint8, zeros, zeros, zeros, zeros, exact=zeros == 0)
                continue
            dtype = self.case.arguments[name].dtype
            results[name] = Expected(reference, dtype, zeros, zeros, magnitude, loss=ones, exact=exact)
        for name in DESCALES:
            if (x := self.given.get(name)) is not None and name in self.case.arguments:
                zeros = torch.zeros_like(x)
                results[name] = Expected(x, torch.float32, zeros, zeros, zeros, zeros, exact=zeros == 0)
        return results

    def _sequences(self) -> Iterator[tuple[Tensor, Tensor]]:
        """For each sequence the rows of its queries and of its keys among the packed tokens."""
        if self.cache is not None:
            for b in range(self.cache.batch):
                yield self.cache.query_tokens(b), self.cache.key_slots(b)
            return
        if self.dense:
            batch, _, seqlen_q, _ = self.given["q"].shape
            seqlen_k = self.given["k"].shape[2]
            for b in range(batch):
                yield torch.arange(b * seqlen_q, (b + 1) * seqlen_q), torch.arange(b * seqlen_k, (b + 1) * seqlen_k)
            return
        starts_q, starts_k, used = self.given["cu_seqlens_q"], self.given["cu_seqlens_k"], self.given.get("seqused_k")
        for b in range(len(starts_q) - 1):
            seqlen_k = int(used[b]) if used is not None else int(starts_k[b + 1] - starts_k[b])
            positions = torch.arange(seqlen_k)
            if self.paged:
                page_size = self.given["k"].shape[1]
                k_rows = self.given["page_table"][b].long()[positions // page_size] * page_size + positions % page_size
            else:
                k_rows = int(starts_k[b]) + positions
            used_q = self.given.get("seqused_q")
            seqlen_q = int(used_q[b]) if used_q is not None else int(starts_q[b + 1] - starts_q[b])
            yield int(starts_q[b]) + torch.arange(seqlen_q), k_rows

    def _add_sequence(self, batch: int, q_rows: Tensor, k_rows: Tensor) -> None:
        arguments, shape = self.given, (self.q.shape[1], len(q_rows), len(k_rows))  # Hq, Sq, Sk
        dropout_p, keep = arguments.get("dropout_p") or 0.0, None
        if dropout_p > 0:
            keep = torch.from_numpy(keep_factors(dropout_p, int(arguments["dropout_seed"]), batch, *shape))
        slopes, scale, score_mod = arguments.get("alibi_slopes"), arguments.get("scale"), arguments.get("score_mod")
        sequence = Sequence(
            q=self._queries(batch, q_rows).transpose(0, 1),
            k=self._descaled("k", batch, k_rows).transpose(0, 1),
            v=self._descaled("v", batch, k_rows).transpose(0, 1),
            batch=batch,
            scale=self.q.shape[2] ** -0.5 if scale is None else scale,
            causal=arguments.get("causal", False),
            window=arguments.get("window"),
            chunk=arguments.get("attention_chunk"),
            mask=self._mask(batch, shape),
            softcap=arguments.get("softcap"),
            bias=self._local(arguments.get("bias"), batch, shape),
            alibi_slopes=slopes[batch] if slopes is not None and slopes.ndim == 2 else slopes,
            sinks=arguments.get("sinks"),
            score_fn=getattr(score_mod, "fn", score_mod),
            score_tensors=self.score_tensors,
            keep=keep,
            dout=None if self.dout is None else self.dout[q_rows].transpose(0, 1),
            dlse=self.dlse[q_rows].transpose(0, 1),
            q_either=None if self.cache is None else self.cache.q.either[q_rows].transpose(0, 1),
            k_either=None if self.cache is None else self.cache.k.either[k_rows].transpose(0, 1),
        )
        results = forward(sequence)
        self.lse[q_rows], self.A[q_rows] = results.lse.T, results.A.T
        self.sums["out"].add_rows(q_rows, results.out)
        if self.eight_bits:
            self.lost[q_rows] = self._lost(batch, k_rows, results.kept.value).transpose(0, 1)
        elif self.latent_bytes:
            self.lost_scores[q_rows] = lost_scores(sequence.q, results.k, sequence.scale, results.visible).T
        for total, part in zip(self.slack, results.slack or (), strict=False):
            total[q_rows] = part.transpose(0, 1)
        if self.tangents:
            moved = tangents(sequence, results, self._tangents(batch, q_rows, k_rows, shape))
            self.sums["tout"].add_rows(q_rows, moved.out)
            self.tlse[q_rows], self.tlse_size[q_rows] = moved.lse.T, moved.size.T
        for name, block in (backward(sequence, results) if self.case.differentiates else {}).items():
            if name not in self.sums:
                continue  # constants have no gradient
            if name in ("dq", "dk", "dv"):
                self.sums[name].add_rows(k_rows if name in ("dk", "dv") else q_rows, block)
            elif name == "dbias":
                index = self._local_index(arguments["bias"], batch, shape)
                self.sums[name].add_at(index, block.map(lambda part: part[None]))
            elif name == "dalibi_slopes" and arguments["alibi_slopes"].ndim == 2:
                self.sums[name].add_at(slice(batch, batch + 1), block.map(lambda part: part[None]))
            else:
                self.sums[name].add_at(..., block)

    def _descaled(self, name: str, batch: int, rows: Tensor) -> Tensor:
        """Keys or values of one sequence, `[Sk, Hkv, D]`."""
        x, scale = getattr(self, name)[rows], self._scales(name, batch, rows)
        return x if scale is None else x * scale[..., None]

    def _scales(self, name: str, batch: int, rows: Tensor) -> Tensor | None:
        """Scales of keys or values of one sequence, `[Sk, Hkv]`."""
        if self.cache is not None:
            return self.cache.scales(name, batch, rows)
        if self.paged:
            count = len(self.given["cu_seqlens_q"]) - 1
            return scales(self.given, f"{name}_descale", self.given[name], count, batch, rows)
        return scales_of_rows(self.given, f"{name}_descale", batch, rows)

    def _queries(self, batch: int, rows: Tensor) -> Tensor:
        """Queries of one sequence, `[Sq, Hq, D]`."""
        x, scale = self.q[rows], scales_of_rows(self.given, "q_descale", batch, rows)
        return x if scale is None else x * scale.repeat_interleave(x.shape[1] // scale.shape[1], 1)[..., None]

    def _lost(self, batch: int, rows: Tensor, weights: Tensor) -> Tensor:
        """What small weights of a row may lose, `[Hq, Sq, Dv]`."""
        v = self._descaled("v", batch, rows).transpose(0, 1)
        return lost_by_blocks(weights, v.repeat_interleave(weights.shape[0] // v.shape[0], 0))

    def _tangents(self, batch: int, q_rows: Tensor, k_rows: Tensor, shape: tuple[int, int, int]) -> InputTangents:
        t, rows = self.tangents, {"q": q_rows, "k": k_rows, "v": k_rows}
        tokens = {name: self._packed(t[name], name)[rows[name]].transpose(0, 1) for name in rows if name in t}
        slopes = t.get("alibi_slopes")
        return InputTangents(
            **{name: tokens.get(name) for name in rows},
            bias=self._local(t.get("bias"), batch, shape),
            alibi_slopes=slopes[batch] if slopes is not None and slopes.ndim == 2 else slopes,
            sinks=t.get("sinks"),
            score_tensors=tuple(t.get(f"score_mod_{n}") for n in range(len(self.score_tensors))),
        )

    def _mask(self, batch: int, shape: tuple[int, int, int]) -> Tensor | None:
        """The caller's mask, without padded keys. A mask function is called for all pairs."""
        given, hidden = self.given.get("mask"), 0
        mask = self._masked(given, batch, shape) if hasattr(given, "fn") else self._local(given, batch, shape)
        if self.cache is not None:
            hidden = self.cache.hidden(batch)
        if hidden == 0:
            return mask
        there = torch.arange(shape[2]) >= hidden
        return there[None, None] if mask is None else mask & there

    def _masked(self, mask: Any, batch: int, shape: tuple[int, int, int]) -> Tensor:
        b, h = torch.full((1, 1, 1, 1), batch), torch.arange(shape[0])[None, :, None, None]
        q_idx, k_idx = torch.arange(shape[1])[:, None], torch.arange(shape[2])
        visible = mask.fn(b, h, q_idx, k_idx, *(_exact(x) for x in mask.tensors))
        return visible.expand(1, *shape)[0]

    def _local_index(self, pairwise: Tensor, batch: int, shape: tuple[int, int, int]) -> tuple[slice, ...]:
        """Index of sequence `batch` in a tensor [B, H, Sq, Sk] whose dimensions may all be 1."""
        wanted = (slice(batch, batch + 1), *(slice(0, n) for n in shape))
        return tuple(slice(None) if size == 1 else part for size, part in zip(pairwise.shape, wanted, strict=True))

    def _local(self, pairwise: Tensor | None, batch: int, shape: tuple[int, int, int]) -> Tensor | None:
        return None if pairwise is None else pairwise[self._local_index(pairwise, batch, shape)][0]

    def _packed(self, tensor: Tensor, name: str) -> Tensor:
        """The public layout as tokens: [T, H, D], or [T, H] for lse."""
        if self.dense:
            return tensor.transpose(1, 2).flatten(0, 1)
        if name == "lse":
            return tensor.T
        return tensor.flatten(0, 1) if self.paged and name in ("k", "v") else tensor

    def _unpacked(self, tensor: Tensor, name: str) -> Tensor:
        """Tokens back in the public layout of the result `name`."""
        if self.dense:
            batch = self.given["q"].shape[0]
            seqlen = self.given["k" if name in ("dk", "dv") else "q"].shape[2]
            return tensor.unflatten(0, (batch, seqlen)).transpose(1, 2)
        if name == "lse":
            return tensor.T
        if self.paged and name in ("dk", "dv"):
            return tensor.unflatten(0, self.given["k"].shape[:2])
        return tensor


def _exact(value: Any) -> Any:
    """Floating tensors as float64, everything on the CPU."""
    if not isinstance(value, Tensor):
        return value
    value = value.detach().cpu()
    return value.double() if value.is_floating_point() else value
