"""Programs that only call attention, in `context_parallel`: of flashtile's functions, PyTorch's, and models."""

import copy
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gathered import check, dense_case, run_local
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import CheckpointError, checkpoint

import flashtile
import flashtile.compat.torch
import flashtile.integrations.transformers
import flashtile.nn
from flashtile.distributed import context, context_parallel, measure_rates, shard, unshard

try:  # before the processes fork, which then share it
    from transformers import MistralConfig, MistralForCausalLM
except ImportError:
    MistralConfig = MistralForCausalLM = None


def random(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(shape[1]))


def programs(mesh: DeviceMesh) -> None:
    for check_program in (pytorchs_function, checkpointed_calls, calls_outside, refused_in_contexts, models):
        check_program(mesh)


def public_functions(mesh: DeviceMesh) -> None:
    """Uneven shards of other lengths of keys, and packed sequences."""
    heads = 4 * mesh.size()
    case = dense_case(2, 37, 29, heads=(heads, 2), causal=True, window=(20, 5), sinks=random(1, heads)[0])
    for layout, check_ranks in (("zigzag", True), ("contiguous", False)):
        context = context_parallel(mesh, layout=layout, length=(37, 29), check=check_ranks)
        check(case, run_local(case, mesh, layout, with_lse, context=context))
    offsets = torch.tensor([0, 5, 24, 40], dtype=torch.int32)
    q, k = random(40, 4, 16), random(40, 2, 16)
    expected = flashtile.attention_varlen(q, k, k, offsets, offsets, causal=True)
    with context_parallel(mesh, length=7):  # a packed call has its length from the offsets
        local = [shard(x, mesh, 0, length=40) for x in (q, k, k)]
        found = flashtile.attention_varlen(*local, offsets, offsets, max_seqlen_q=19, max_seqlen_k=19, causal=True)
    torch.testing.assert_close(unshard(found, mesh, 0, length=40), expected)


def with_lse(q: Tensor, k: Tensor, v: Tensor, **arguments: Any) -> Any:
    return flashtile.attention(q, k, v, num_splits=None, out=None, return_lse=True, **arguments)


def pytorchs_function(mesh: DeviceMesh) -> None:
    """PyTorch's own function, with a derivative that runs after the context, in a checkpoint, and without one."""
    rows = 8 * mesh.size()
    case = dense_case(2, rows, rows, heads=(4, 4), dv=16, causal="top_left")
    case.dlse = None

    def call(q: Tensor, k: Tensor, v: Tensor, causal: str) -> Tensor:
        return scaled_dot_product_attention(q, k, v, is_causal=causal == "top_left")

    def recomputed(**arguments: Any) -> Tensor:
        return checkpoint(call, *arguments.values(), use_reentrant=False)

    x = shard(case.arguments["q"], mesh, 2)
    with flashtile.compat.torch.activate():
        before = call(x.requires_grad_(), x, x, "")
        for layout in ("contiguous", "zigzag"):
            context = context_parallel(mesh, layout=layout)
            check(case, run_local(case, mesh, layout, call, context=context))
        with pytest.raises(CheckpointError):
            run_local(case, mesh, "contiguous", recomputed, context=context_parallel(mesh))
        with context_parallel(mesh):
            check(case, run_local(case, mesh, "contiguous", recomputed, context=context_parallel(mesh)))
            for mode in (torch.no_grad(), torch.inference_mode()):
                with mode:
                    local = [shard(case.arguments[name], mesh, 2) for name in "qkv"]
                    check(case, {"out": unshard(call(*local, "top_left"), mesh, 2)})
            with pytest.raises(flashtile.AttentionError, match="outside of this context"):
                before.sum().backward()
            with pytest.raises(RuntimeError, match="No available kernel"), pytest.warns(UserWarning, match="dropout"):
                scaled_dot_product_attention(x, x, x, dropout_p=0.5)
        after = call(x, x, x, "")
        assert torch.equal(before, after)
        assert torch.backends.cuda.math_sdp_enabled()
        after.sum().backward()
    with context_parallel(mesh), flashtile.compat.torch.activate(), pytest.raises(ValueError, match="activate"):
        call(x, x, x, "")


def checkpointed_calls(mesh: DeviceMesh) -> None:
    """Recomputation in the context is sharded; outside of it, PyTorch finds that it differs."""
    case = dense_case(1, 6 * mesh.size(), 6 * mesh.size(), causal=True)

    def recomputed(**arguments: Any) -> Any:
        return checkpoint(with_lse, use_reentrant=False, **arguments)

    with pytest.raises(CheckpointError):
        run_local(case, mesh, "contiguous", recomputed, context=context_parallel(mesh))
    with context_parallel(mesh):
        check(case, run_local(case, mesh, "contiguous", recomputed, context=context_parallel(mesh)))


def calls_outside(mesh: DeviceMesh) -> None:
    """Other threads, an inner context without a mesh, and calls after an error in the context are not sharded."""
    x = random(1, 4, 8 * mesh.size(), 16)
    local, found = shard(x, mesh, 2), []
    alone = flashtile.attention(local, local, local)

    def other_thread() -> None:
        found.append(flashtile.attention(local, local, local))

    with context_parallel(mesh, layout="zigzag"):
        thread = threading.Thread(target=other_thread)
        thread.start()
        thread.join()
        with context_parallel(None):
            other_thread()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(context, "run_public", None)  # would fail
            measure_rates(mesh, num_bytes=8)
        sharded = flashtile.attention(local, k=local, v=local)
    with pytest.raises(KeyError), context_parallel(mesh):
        raise KeyError
    other_thread()
    assert all(torch.equal(y, alone) for y in found)
    assert len(found) == 3
    torch.testing.assert_close(sharded, shard(flashtile.attention(x, x, x), mesh, 2))


def refused_in_contexts(mesh: DeviceMesh) -> None:
    x = random(1, 4, 8, 16)
    wrong: dict[str, dict[str, Any]] = {
        "num_splits": {"num_splits": 2},
        "`out`": {"out": torch.empty_like(x)},
        "attn_mask": {"attn_mask": None},
        "mesh": {"mesh": mesh},
        "dropout_seed": {"dropout_p": 0.5},
        "causal": {"causal": "left"},
    }
    with context_parallel(mesh):
        for words, arguments in wrong.items():
            with pytest.raises(flashtile.ArgumentError, match=words):
                flashtile.attention(x, x, x, **arguments)
        with pytest.raises(flashtile.ArgumentError, match="argument 4"):
            flashtile.attention(x, x, x, x)
        with pytest.raises(flashtile.AttentionError, match="attention_with_kvcache has no sharded"):
            flashtile.attention_with_kvcache(x, x, x, cache_seqlens=8)
        with pytest.raises(flashtile.AttentionError, match="no forward mode"):
            torch.func.jvp(lambda q: flashtile.attention(q, x, x), (x,), (x,))
    with pytest.raises(flashtile.ArgumentError, match="layout"), context_parallel(mesh, layout="other"):
        pass


def models(mesh: DeviceMesh) -> None:
    """The layer of `flashtile.nn` and a model of transformers, with their tokens and positions sharded."""
    torch.manual_seed(0)
    layer = flashtile.nn.Attention(32, 4, num_kv_heads=2, causal=True, rotary_dim=8).double()
    x, rows = random(2, 19, 32), torch.arange(19)

    def tokens_of(dim: int, x: Tensor) -> Tensor:
        return shard(x, mesh, dim, layout="zigzag", length=19)

    def same(forward: Any, model: nn.Module, sharded: Any) -> None:
        """The same results and gradients of parameters as on one device."""
        expected = forward(model)
        weights = torch.randn_like(expected)
        model.zero_grad()
        (expected * weights).sum().backward()
        twin = copy.deepcopy(model)
        twin.zero_grad()
        with context_parallel(mesh, layout="zigzag", length=19):
            found = sharded(twin)
            (found * tokens_of(1, weights)).sum().backward()
        torch.testing.assert_close(unshard(found.detach(), mesh, 1, layout="zigzag", length=19), expected.detach())
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            dist.all_reduce(q.grad, group=mesh.get_group(0))
            torch.testing.assert_close(q.grad, p.grad)

    same(lambda m: m(x), layer, lambda m: m(tokens_of(1, x), positions=tokens_of(0, rows)))
    with context_parallel(mesh), pytest.raises(flashtile.ArgumentError, match="positions"):
        layer(x)
    if MistralConfig is None or MistralForCausalLM is None:
        return
    flashtile.integrations.transformers.register()
    config = MistralConfig(
        vocab_size=30, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, sliding_window=5, attn_implementation="tile_attention",
    )  # fmt: skip
    model, tokens = MistralForCausalLM(config).double(), torch.randint(30, (2, 19))
    own = tokens_of(1, tokens)
    arguments = {"position_ids": tokens_of(0, rows)[None], "attention_mask": torch.ones_like(own), "use_cache": False}
    same(lambda m: m(tokens).logits, model, lambda m: m(own, **arguments).logits)
