"""Time of calls of a few tokens on a CPU, which is the host's: `python benchmarks/host_time_cpu.py`.

One thread. Each figure is the least of the rounds' means: what the call takes where nothing else runs. To compare two
states of the source, run it with PYTHONPATH set to each in turn. The floor is what PyTorch takes for an operator or an
autograd.Function in Python that only allocates the results, also in the form that transforms of torch.func need.
"""

import functools
import itertools
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import flashtile
from flashtile import private_torch
from flashtile.call.call import Tensors

ROUNDS, CALLS, WARM = 9, 300, 20


def microseconds(run: Callable[[], Any]) -> float:
    """Time of one call."""
    for _ in range(WARM):
        run()
    means = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        for _ in range(CALLS):
            run()
        means.append((time.perf_counter() - start) / CALLS * 1e6)
    return min(means)


def calls() -> dict[str, Callable[[], Any]]:
    """`[1, 1, 4, 16]` where a name says no other."""
    q, k, v = (torch.randn(1, 1, 4, 16) for _ in range(3))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out = flashtile.attention(*leaves)
    dout = torch.ones_like(out)
    packed, offsets = torch.randn(8, 1, 16), torch.tensor([0, 3, 8], dtype=torch.int32)
    caches, new, lengths = torch.randn(2, 2, 1, 64, 16), torch.randn(2, 1, 1, 16), torch.tensor([3, 9])
    keys, grown = torch.randn(1, 1, 4000, 16), itertools.count(1)
    mask = flashtile.mask_mods.document(torch.tensor([0, 0, 1, 1]))
    score_mod = flashtile.score_mods.alibi(torch.rand(1))

    def autocast() -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return flashtile.attention(q, k, v)

    def growing() -> torch.Tensor:
        longer = keys[:, :, : next(grown)]
        return flashtile.attention(q, longer, longer)

    return {
        "forward": lambda: flashtile.attention(q, k, v),
        "causal, window, softcap": lambda: flashtile.attention(q, k, v, causal=True, window=(3, 0), softcap=30.0),
        "dropout": lambda: flashtile.attention(q, k, v, dropout_p=0.1, dropout_seed=3),
        "drawn seed": lambda: flashtile.attention(q, k, v, dropout_p=0.1),
        "autocast": autocast,
        "mask function": lambda: flashtile.attention(q, k, v, mask=mask),
        "bare mask function": lambda: flashtile.attention(q, k, v, mask=lambda b, h, i, j: j <= i),
        "score_mod": lambda: flashtile.attention(q, k, v, score_mod=score_mod),
        "bare score_mod": lambda: flashtile.attention(q, k, v, score_mod=lambda s, b, h, i, j: s * 2),
        "mask function and score_mod with gradients": lambda: flashtile.attention(
            *leaves, mask=mask, score_mod=score_mod
        ),
        "forward with gradients": lambda: flashtile.attention(*leaves),
        "backward": lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True),
        "packed, 3 and 5 tokens": lambda: flashtile.attention_varlen(packed, packed, packed, offsets, offsets),
        "KV cache, 3 and 9 tokens": lambda: flashtile.attention_with_kvcache(new, *caches, cache_seqlens=lengths),
        "KV cache, 5 tokens each": lambda: flashtile.attention_with_kvcache(new, *caches, cache_seqlens=5),
        "170 keys": lambda: flashtile.attention(q, keys[:, :, :170], keys[:, :, :170]),
        "one key more at each call": growing,  # its quickest round has 21 to 320 keys
    }


class Empty(torch.autograd.Function):
    """A function that allocates out and lse, and returns the gradient of out for each input."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = torch.empty_like(q), q.new_empty(q.shape[:3])
        ctx.save_for_backward(out, lse, q, k, v)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor, _: Tensor) -> tuple[Tensor, ...]:
        return dout, dout, dout


class WithContext(torch.autograd.Function):
    """As `Empty`, with the context made behind forward, as transforms of torch.func need it, and absent inputs too."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*flat: Tensor | None) -> tuple[Tensor, Tensor]:
        assert flat[0] is not None
        return torch.empty_like(flat[0]), flat[0].new_empty(flat[0].shape[:3])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor | None, ...], output: tuple[Tensor, ...]) -> None:
        ctx.save_for_backward(*output, *inputs)
        ctx.set_materialize_grads(False)
        ctx.save_for_forward(*output, *inputs)

    @staticmethod
    def backward(ctx: Any, dout: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        return dout, dout, dout, *(None for _ in ABSENT)


ABSENT = [None] * (len(Tensors._fields) - 3)  # tensors of a plain call that are not there
at_one_level = private_torch.apply_at_one_level(WithContext)


@torch.library.custom_op("flashtile_benchmark::empty", mutates_args=())
def empty(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.empty_like(q)


def functions() -> dict[str, Callable[..., Any]]:
    """The functions that are compared at `[1, 8, 16, 64]`; each takes q, k and v."""
    return {
        "flashtile": flashtile.attention,
        "scaled_dot_product_attention": scaled_dot_product_attention,
        "empty operator": empty,
        "empty autograd.Function": lambda *x: Empty.apply(*x)[0],
        "the same with setup_context": lambda *x: at_one_level(*x, *ABSENT)[0],
    }


def compared() -> dict[str, Callable[[], Any]]:
    """Calls of 16 tokens: forward, with gradients, and backward."""
    inputs, runs = [torch.randn(1, 8, 16, 64) for _ in range(3)], {}
    leaves = [x.clone().requires_grad_() for x in inputs]
    dout = torch.ones_like(inputs[0])
    for name, function in functions().items():
        runs[f"16 tokens, forward, {name}"] = functools.partial(function, *inputs)
        if name != "empty operator":
            runs[f"16 tokens, with gradients, {name}"] = functools.partial(function, *leaves)
            out = function(*leaves)
            runs[f"16 tokens, backward, {name}"] = functools.partial(
                torch.autograd.grad, out, leaves, dout, retain_graph=True
            )
    return runs


def main() -> None:
    torch.set_num_threads(1)
    for name, run in (calls() | compared()).items():
        print(f"{name}: {microseconds(run):.1f} us")


if __name__ == "__main__":
    main()
