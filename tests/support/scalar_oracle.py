"""The contract once more, one score at a time, to test the oracle."""

import math

import torch
from torch import Tensor

from flashtile.testing.case import Case


def philox_scalar(counter: list[int], key: list[int]) -> list[int]:
    for _ in range(7):
        p0, p1 = 0xD2511F53 * counter[0], 0xCD9E8D57 * counter[2]
        mask = 0xFFFFFFFF
        counter = [p1 >> 32 ^ counter[1] ^ key[0], p1 & mask, p0 >> 32 ^ counter[3] ^ key[1], p0 & mask]
        key = [(key[0] + 0x9E3779B9) & mask, (key[1] + 0xBB67AE85) & mask]
    return counter


def keep_scalar(p: float, seed: int, b: int, h: int, num_heads_q: int, i: int, j: int) -> float:
    words = philox_scalar([j // 8, i, b * num_heads_q + h, 0], [seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF])
    half = words[j % 8 // 2] >> (16 if j % 2 else 0) & 0xFFFF
    t = round(p * 65536)
    return 65536 / (65536 - t) if half >= t else 0.0


def naive(case: Case) -> dict[str, Tensor]:
    """Dense cases by loops over Python scalars; gradients by autograd."""
    leaves = {name: tensor.detach().double().requires_grad_() for name, tensor in case.differentiable().items()}
    given = {**case.arguments, **leaves}
    q, k, v, score_mod = given["q"], given["k"], given["v"], given.get("score_mod")
    batch, num_heads_q, seqlen_q, head_dim = q.shape
    num_heads_kv, seqlen_k = k.shape[1:3]
    scale = given.get("scale") or 1 / math.sqrt(head_dim)
    tensors = [leaves[name] for name in leaves if name.startswith("score_mod_")]

    def of(tensor: Tensor, *index: int) -> Tensor:  # an element of a tensor whose dimensions may be 1
        return tensor[tuple(0 if size == 1 else n for n, size in zip(index, tensor.shape, strict=True))]

    def visible(b: int, h: int, i: int, j: int) -> bool:
        diagonal = i + seqlen_k - seqlen_q
        left, right = (None if side == -1 else side for side in given.get("window") or (None, None))
        seen = {True: j <= diagonal, False: True, "top_left": j <= i}[given.get("causal", False)]
        seen = seen and (left is None or j >= diagonal - left) and (right is None or j <= diagonal + right)
        if hasattr(mask := given.get("mask"), "fn"):
            return bool(seen and mask.fn(*(torch.tensor(n) for n in (b, h, i, j)), *mask.tensors))
        return bool(seen and (mask is None or of(mask, b, h, i, j)))

    def score(b: int, h: int, i: int, j: int) -> Tensor:
        s = scale * sum(q[b, h, i, d] * k[b, h // (num_heads_q // num_heads_kv), j, d] for d in range(head_dim))
        if given.get("softcap"):
            s = given["softcap"] * torch.tanh(s / given["softcap"])
        if given.get("bias") is not None:
            s = s + of(given["bias"], b, h, i, j)
        if given.get("alibi_slopes") is not None:
            slopes = given["alibi_slopes"]
            s = s - (slopes[b, h] if slopes.ndim == 2 else slopes[h]) * abs(i + seqlen_k - seqlen_q - j)
        if score_mod is not None:
            s = getattr(score_mod, "fn", score_mod)(s, *(torch.tensor(n) for n in (b, h, i, j)), *tensors)
        return s

    def row(b: int, h: int, i: int) -> tuple[Tensor, Tensor]:
        keys = [j for j in range(seqlen_k) if visible(b, h, i, j)]
        exps = [torch.exp(score(b, h, i, j)) for j in keys]
        total = sum(exps, torch.zeros((), dtype=torch.float64))
        if given.get("sinks") is not None:
            total = total + torch.exp(given["sinks"][h])
        out = torch.zeros(v.shape[3], dtype=torch.float64)
        for j, e in zip(keys, exps, strict=True):
            p = given.get("dropout_p", 0.0)
            keep = keep_scalar(p, int(given["dropout_seed"]), b, h, num_heads_q, i, j) if p else 1.0
            out = out + keep * e / total * v[b, h // (num_heads_q // num_heads_kv), j]
        return out, total.log() if total.requires_grad else torch.tensor(-torch.inf).double()

    out, lse = (
        torch.zeros(batch, num_heads_q, seqlen_q, v.shape[3]).double(),
        torch.zeros(batch, num_heads_q, seqlen_q).double(),
    )
    for b in range(batch):
        for h in range(num_heads_q):
            for i in range(seqlen_q):
                out[b, h, i], lse[b, h, i] = row(b, h, i)
    results = {"out": out.detach(), "lse": lse.detach()}
    if case.differentiates:
        loss = torch.zeros(()).double()
        loss = loss + ((out * case.dout).sum() if case.dout is not None else 0)
        loss = loss + ((lse * case.dlse)[lse.isfinite()].sum() if case.dlse is not None else 0)
        gradients = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
        for (name, leaf), gradient in zip(leaves.items(), gradients, strict=True):
            results[f"d{name}"] = torch.zeros_like(leaf) if gradient is None else gradient
    return results
