"""The rounding of a correct kernel, in plain torch for dense cases: deviations that the tolerances have to
accept.

Online softmax over tiles with base-2 exponentials, all sums in the accumulation dtype, P and dS cast to the
input dtype before their matrix products, out rounded to the input dtype and delta formed from that. Every step
is a method, so that a test can replace it with a mistake and check that the tolerances detect it.
"""

import math

import torch
from torch import Tensor

from flashtile.testing.case import Case, ExactSides, MaskFunction
from flashtile.testing.oracle.philox import keep_factors
from flashtile.testing.tolerance import accumulation_dtype

INF = float("inf")
LOG2_E = math.log2(math.e)


class TiledEmulation:
    """One dense case in tiles of `block_m` rows and `block_n` keys. Keys and values are repeated to the query heads."""

    def __init__(self, case: Case, block_m: int = 64, block_n: int = 32) -> None:
        self.case, self.given = case, case.arguments
        self.dtype, self.acc = case.dtype, accumulation_dtype(case.dtype)
        self.batch, self.num_heads_q, self.seqlen_q, self.head_dim = self.given["q"].shape
        self.num_heads_kv, self.seqlen_k = self.given["k"].shape[1:3]
        self.scale = self.head_dim**-0.5 if self.given.get("scale") is None else self.given["scale"]
        self.row_tiles = tiles(self.seqlen_q, block_m)
        self.key_tiles = tiles(self.seqlen_k, block_n)
        self.q = self.given["q"].to(self.acc)
        self.k, self.v = (self.given[name].to(self.acc)[:, self.kv_heads()] for name in ("k", "v"))
        self.bias, self.slopes, self.sinks = (self.optional(name) for name in ("bias", "alibi_slopes", "sinks"))
        score_mod = self.given.get("score_mod")
        self.score_fn = getattr(score_mod, "fn", score_mod)
        self.score_tensors = [tensor.to(self.acc).requires_grad_() for tensor in getattr(score_mod, "tensors", ())]
        self.visible = self.visibility()
        self.keep = self.dropout()

    def run(self) -> dict[str, Tensor]:
        """The same results as `Case.run`."""
        out, lse = self.forward()
        results = {"out": out, "lse": lse[..., 0]}
        return results | self.backward(out, lse) if self.case.differentiates else results

    # Inputs of the score.

    def optional(self, name: str) -> Tensor | None:
        tensor = self.given.get(name)
        return None if tensor is None else tensor.to(self.acc)

    def kv_heads(self) -> Tensor:
        return torch.arange(self.num_heads_q) // (self.num_heads_q // self.num_heads_kv)

    def diagonal(self, i: Tensor) -> Tensor:
        return i + self.seqlen_k - self.seqlen_q

    def visibility(self) -> Tensor:  # bool [B, H, Sq, Sk]
        i, j = torch.arange(self.seqlen_q)[:, None], torch.arange(self.seqlen_k)
        visible = torch.ones(self.batch, self.num_heads_q, self.seqlen_q, self.seqlen_k, dtype=torch.bool)
        if self.given.get("causal"):
            visible &= j <= (i if self.given["causal"] == "top_left" else self.diagonal(i))
        left, right = self.given.get("window") or (None, None)
        unlimited = None if isinstance(self.given.get("window"), ExactSides) else -1
        if left is not None and left != unlimited:
            visible &= j >= self.diagonal(i) - left
        if right is not None and right != unlimited:
            visible &= j <= self.diagonal(i) + right
        if chunk := self.given.get("attention_chunk"):
            first = self.diagonal(i) - self.diagonal(i) % chunk
            visible &= (j >= first) & (j < first + chunk)
        mask = self.given.get("mask")
        if isinstance(mask, MaskFunction):
            b, h = torch.arange(self.batch)[:, None, None, None], torch.arange(self.num_heads_q)[None, :, None, None]
            mask = mask.fn(b, h, i, j, *mask.tensors)
        return visible if mask is None else visible & mask

    def dropout(self) -> Tensor:  # [B, H, Sq, Sk], or a scalar one
        if not self.given.get("dropout_p"):
            return torch.ones((), dtype=self.acc)
        seed, sizes = int(self.given["dropout_seed"]), (self.num_heads_q, self.seqlen_q, self.seqlen_k)
        masks = [torch.from_numpy(keep_factors(self.given["dropout_p"], seed, b, *sizes)) for b in range(self.batch)]
        return torch.stack(masks).to(self.acc) if masks else torch.ones((), dtype=self.acc)

    def linear_bias(self, rows: slice, keys: slice) -> Tensor:
        assert self.slopes is not None
        return -self.slopes.expand(self.batch, self.num_heads_q)[:, :, None, None] * self.distance(rows, keys)

    def distance(self, rows: slice, keys: slice) -> Tensor:
        i, j = torch.arange(self.seqlen_q)[rows, None], torch.arange(self.seqlen_k)[keys]
        return (self.diagonal(i) - j).abs().to(self.acc)

    def products(self, rows: slice, keys: slice) -> Tensor:
        return self.scale * (self.q[:, :, rows] @ self.k[:, :, keys].mT)

    def score(self, rows: slice, keys: slice) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
        """Masked scores of a tile, tanh of the softcap, and the scores before and after score_mod with its graph."""
        s, tanh = self.products(rows, keys), None
        if self.given.get("softcap"):
            tanh = torch.tanh(s / self.given["softcap"])
            s = self.given["softcap"] * tanh
        if self.bias is not None:
            s = s + part(self.bias, rows, keys)
        if self.slopes is not None:
            s = s + self.linear_bias(rows, keys)
        modified = s
        if self.score_fn is not None:
            s.requires_grad_()
            b, h = torch.arange(self.batch)[:, None, None, None], self.score_heads()[None, :, None, None]
            i, j = torch.arange(self.seqlen_q)[rows, None], torch.arange(self.seqlen_k)[keys]
            modified = self.score_fn(s, b, h, i, j, *self.score_tensors)
        return modified.detach().where(self.visible[:, :, rows, keys], -INF), tanh, s, modified

    def score_heads(self) -> Tensor:
        return torch.arange(self.num_heads_q)

    # Forward.

    def exp(self, s: Tensor, shift: Tensor) -> Tensor:
        return torch.exp2(s * LOG2_E - shift * LOG2_E)

    def initial(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """Running maximum and sum before the first key: the sink's."""
        m = torch.full_like(like, -INF) if self.sinks is None else self.sinks[None, :, None, None].expand_as(like)
        return m, (m != -INF).to(self.acc)

    def rescale(self, running: Tensor, alpha: Tensor, keys: slice) -> Tensor:
        return running * alpha

    def row_sum(self, p: Tensor, m: Tensor, rows: slice, keys: slice) -> Tensor:
        return p.sum(3, keepdim=True)

    def forward(self) -> tuple[Tensor, Tensor]:
        """out [B, H, Sq, Dv] and lse [B, H, Sq, 1]."""
        out = self.q.new_zeros(self.batch, self.num_heads_q, self.seqlen_q, self.v.shape[3])
        lse = torch.full_like(self.q[..., :1], -INF)
        for rows in self.row_tiles:
            (m, l), acc = self.initial(lse[:, :, rows]), torch.zeros_like(out[:, :, rows])  # noqa: E741
            for keys in self.key_tiles:
                s = self.score(rows, keys)[0]
                m_new = torch.maximum(m, s.amax(3, keepdim=True))
                shift = m_new.where(m_new != -INF, 0.0)
                alpha, p = self.exp(m, shift), self.exp(s, shift)
                l = self.rescale(l, alpha, keys) + self.row_sum(p, shift, rows, keys)  # noqa: E741
                kept = (p * part(self.keep, rows, keys)).to(self.dtype).to(self.acc)
                acc = self.rescale(acc, alpha, keys) + kept @ self.v[:, :, keys]
                m = m_new
            out[:, :, rows] = acc / l.where(l != 0, 1.0)
            lse[:, :, rows] = m + l.log()
        return self.finish(out).to(self.dtype), lse

    def finish(self, out: Tensor) -> Tensor:
        return out

    # Backward.

    def delta(self, out: Tensor, dout: Tensor) -> Tensor:
        delta = (out.to(self.acc) * dout).sum(3, keepdim=True)
        return delta if self.case.dlse is None else delta - self.case.dlse[..., None].to(self.acc)

    def dp(self, product: Tensor, keep: Tensor) -> Tensor:
        return product * keep

    def dv_weights(self, p: Tensor, keep: Tensor) -> Tensor:
        return p * keep

    def cap_slope(self, tanh: Tensor) -> Tensor:
        return 1 - tanh.square()

    def through_score_mod(self, ds: Tensor, s: Tensor, modified: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(modified, [s, *self.score_tensors], ds)

    def rows_of(self, keys: slice) -> list[slice]:
        """The row tiles that backward goes through for a tile of keys."""
        return self.row_tiles

    def backward(self, out: Tensor, lse: Tensor) -> dict[str, Tensor]:
        dout = torch.zeros_like(out) if self.case.dout is None else self.case.dout
        dout = dout.to(self.acc)
        delta, shift = self.delta(out, dout), lse.where(lse != -INF, 0.0)
        dq, dk, dv = torch.zeros_like(self.q), torch.zeros_like(self.k), torch.zeros_like(self.v)
        dbias = None if self.bias is None else torch.zeros_like(self.bias)
        dslopes = self.q.new_zeros(self.batch, self.num_heads_q)
        dtensors = [torch.zeros_like(tensor) for tensor in self.score_tensors]
        for keys in self.key_tiles:
            for rows in self.rows_of(keys):
                masked, tanh, s, modified = self.score(rows, keys)
                p, keep = self.exp(masked, shift[:, :, rows]), part(self.keep, rows, keys)
                dv[:, :, keys] += self.cast(self.dv_weights(p, keep)).mT @ dout[:, :, rows]
                ds = p * (self.dp(dout[:, :, rows] @ self.v[:, :, keys].mT, keep) - delta[:, :, rows])
                if self.score_fn is not None:
                    ds, *gradients = self.through_score_mod(ds, s, modified)
                    for dtensor, gradient in zip(dtensors, gradients, strict=True):
                        dtensor += gradient
                dslopes -= (ds * self.distance(rows, keys)).sum((2, 3))
                if dbias is not None:
                    dbias_part = part(dbias, rows, keys)
                    dbias_part += ds.sum_to_size(dbias_part.shape)
                if tanh is not None:
                    ds = ds * self.cap_slope(tanh)
                dq[:, :, rows] += self.scale * (self.cast(ds) @ self.k[:, :, keys])
                dk[:, :, keys] += self.scale * (self.cast(ds).mT @ self.q[:, :, rows])
        gradients = {"dq": dq, "dk": self.over_group(dk), "dv": self.over_group(dv)}
        if dbias is not None:
            gradients["dbias"] = dbias
        if self.slopes is not None:
            gradients["dalibi_slopes"] = dslopes.sum_to_size(self.slopes.shape)
        if self.sinks is not None:
            sink = self.sinks[None, :, None, None]
            gradients["dsinks"] = -(self.exp(sink, shift).where(sink != -INF, 0.0) * delta).sum((0, 2, 3))
        gradients |= {f"dscore_mod_{n}": gradient for n, gradient in enumerate(dtensors)}
        inputs = self.case.differentiable()
        return {name: gradient.to(inputs[name[1:]].dtype) for name, gradient in gradients.items() if name[1:] in inputs}

    def cast(self, x: Tensor) -> Tensor:
        return x.to(self.dtype).to(self.acc)

    def over_group(self, gradient: Tensor) -> Tensor:
        return gradient.unflatten(1, (self.num_heads_kv, -1)).sum(2)


def tiles(seqlen: int, block: int) -> list[slice]:
    return [slice(start, min(start + block, seqlen)) for start in range(0, seqlen, block)]


def part(tensor: Tensor, rows: slice, keys: slice) -> Tensor:
    """The tile of a tensor that broadcasts to [B, H, Sq, Sk]."""
    if tensor.ndim == 0:
        return tensor
    rows, keys = (slice(None) if size == 1 else cut for size, cut in zip(tensor.shape[2:], (rows, keys), strict=True))
    return tensor[:, :, rows, keys]
