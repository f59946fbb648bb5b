"""A call that is part of a larger one, as ranks and splits compute it: positions count from the larger one's origin."""

import itertools
from typing import Any

import pytest
import torch
from calls import HKV, HQ, all_indices, dense_call, everything, varlen_call
from checking import features, offsets, tile_size
from torch import Tensor

import flashtile
from flashtile.call.call import Call
from flashtile.dispatch.autograd import attend


def part_of(call: Call, dims: dict[str, slice], **settings: Any) -> Call:
    """The call on a slice of some of `batch`, `heads` (of q), `rows` and `keys`."""
    batch, heads, rows, keys = (dims.get(name, slice(None)) for name in ("batch", "heads", "rows", "keys"))
    heads_kv = slice(heads.start // 2, heads.stop // 2) if heads != slice(None) else heads

    def pairwise(x: Tensor | None) -> Tensor | None:
        if x is None:
            return None
        index = (batch, heads, rows, keys)
        return x[tuple(slice(None) if n == 1 else i for n, i in zip(x.shape, index, strict=True))]

    t = call.tensors
    tensors = t._replace(
        q=t.q[batch, heads, rows],
        k=t.k[batch, heads_kv, keys],
        v=t.v[batch, heads_kv, keys],
        mask=pairwise(t.mask),
        bias=pairwise(t.bias),
        alibi_slopes=None if t.alibi_slopes is None else t.alibi_slopes[batch, heads],
        sinks=None if t.sinks is None else t.sinks[heads],
    )
    whole_diagonal = t.k.shape[2] - t.q.shape[2]
    diagonal = whole_diagonal - (tensors.k.shape[2] - tensors.q.shape[2])
    return Call(tensors, call.settings._replace(diagonal=diagonal, num_heads=HQ, **settings))


def requiring_grad(call: Call) -> Call:
    """Leaves in place of q, k, v and the modifiers of one call."""
    grads = {n: getattr(call.tensors, n) for n in ("q", "k", "v", "bias", "alibi_slopes", "sinks")}
    leaves = {n: x.detach().requires_grad_() for n, x in grads.items() if x is not None}
    mods = tuple(x.detach().requires_grad_() for x in call.tensors.score_mod_tensors)
    return call._replace(tensors=call.tensors._replace(**leaves, score_mod_tensors=mods))


def gradients(whole: Call, out: Tensor, lse: Tensor) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(5)
    cotangents = [torch.randn(x.shape, generator=generator) for x in (out, lse)]
    leaves = {n: x for n, x in whole.tensors._asdict().items() if isinstance(x, Tensor) and x.requires_grad}
    leaves |= {f"mod {n}": x for n, x in enumerate(whole.tensors.score_mod_tensors)}
    found = torch.autograd.grad((out, lse), list(leaves.values()), cotangents)
    return dict(zip(leaves, found, strict=True))


SHARDS = {
    "batch": (slice(0, 1), slice(1, 2)),
    "heads": (slice(0, 2), slice(2, 4)),
    "rows": (slice(0, 3), slice(3, 7)),
    "keys": (slice(0, 4), slice(4, 4), slice(4, 9)),
}
ORIGIN = {"batch": "b0", "heads": "h0", "rows": "i0", "keys": "j0"}
CASES = features()
CASES = {n: CASES[n] for n in ("causal", "top_left", "window", "dropout")} | {"everything": None}


@pytest.mark.parametrize(("name", "dim"), itertools.product(CASES, SHARDS))
def test_parts_of_a_call_make_the_whole(name: str, dim: str) -> None:
    """Positions, masks, ALiBi, dropout and score_mod count from the whole call's origin; keys are put together by
    `merge_attention`. Gradients flow back through the slices.
    """
    arguments = CASES[name] or everything()
    whole = requiring_grad(dense_call(**arguments))
    out, lse = attend(whole)
    expected = gradients(whole, out, lse)
    with tile_size(2, 2):
        results = []
        for n, shard in enumerate(SHARDS[dim]):
            part = part_of(whole, {dim: shard}, **{ORIGIN[dim]: shard.start})
            if dim == "keys" and n > 0:  # the sink is a key, and belongs to one of the parts
                part = part._replace(tensors=part.tensors._replace(sinks=None))
            results.append(attend(part))
        outs, lses = zip(*results, strict=True)
        if dim == "keys":
            found_out, found_lse = flashtile.merge_attention(outs, lses)
        else:
            axis = {"batch": 0, "heads": 1, "rows": 2}[dim]
            found_out, found_lse = torch.cat(outs, axis), torch.cat(lses, axis)
        found = gradients(whole, found_out, found_lse)
    torch.testing.assert_close(found_out, out)
    torch.testing.assert_close(found_lse, lse)
    for leaf, gradient in expected.items():
        torch.testing.assert_close(found[leaf], gradient, rtol=1e-4, atol=1e-5)


def test_heads_of_packed_sequences() -> None:
    call = varlen_call(alibi_slopes=torch.rand(3, HQ), dropout_p=0.4, dropout_seed=2, causal=True)
    out, lse = attend(call)
    t = call.tensors
    for group in range(HKV):
        heads, kv = slice(2 * group, 2 * group + 2), slice(group, group + 1)
        part = t._replace(q=t.q[:, heads], k=t.k[:, kv], v=t.v[:, kv], alibi_slopes=t.alibi_slopes[:, heads])
        part_out, part_lse = attend(Call(part, call.settings._replace(h0=2 * group, num_heads=HQ)))
        torch.testing.assert_close(part_out, out[:, heads])
        torch.testing.assert_close(part_lse, lse[heads])


def test_sequences_of_a_packed_call() -> None:
    """The last sequence alone, with `b0` where it stands in the whole batch."""
    mod = flashtile.ScoreMod(all_indices, (torch.randn(3, HQ),))
    call = varlen_call(score_mod=mod, dropout_p=0.4, dropout_seed=2, causal=True)
    out, lse = attend(call)
    t = call.tensors
    part = t._replace(q=t.q[4:7], k=t.k[7:8], v=t.v[7:8], cu_seqlens_q=offsets(3), cu_seqlens_k=offsets(1))
    part_out, part_lse = attend(Call(part, call.settings._replace(b0=2)))
    torch.testing.assert_close(part_out, out[4:7])
    torch.testing.assert_close(part_lse, lse[:, 4:7])
