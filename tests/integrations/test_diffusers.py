"""diffusers' native attention inside and outside of the `with` block; by command only, as CI does not install it."""

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import CheckpointError

diffusers = pytest.importorskip("diffusers", minversion="0.36", reason="needs the extra `diffusers`")

from diffusers.models import attention_dispatch, attention_processor  # noqa: E402

from flashtile.compat.torch import sdpa  # noqa: E402
from flashtile.errors import ArgumentError, AttentionError  # noqa: E402
from flashtile.integrations import diffusers as integration  # noqa: E402

BACKENDS = attention_dispatch._AttentionBackendRegistry._backends
NATIVE = attention_dispatch.AttentionBackendName.NATIVE


def unet() -> tuple[nn.Module, dict[str, Any]]:
    """Attention by `F.scaled_dot_product_attention`, over itself and over text with a mask."""
    model = diffusers.UNet2DConditionModel(
        block_out_channels=(8, 16),
        layers_per_block=1,
        norm_num_groups=4,
        cross_attention_dim=12,
        attention_head_dim=4,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
    )
    text, mask = torch.randn(2, 7, 12), torch.ones(2, 7, dtype=torch.bool)
    mask[1, 4:] = False
    sample = torch.randn(2, 4, 8, 8)
    return model, {"sample": sample, "timestep": 3, "encoder_hidden_states": text, "encoder_attention_mask": mask}


def flux() -> tuple[nn.Module, dict[str, Any]]:
    """Attention by the registry's backend."""
    sizes = {"in_channels": 4, "num_layers": 1, "num_single_layers": 1, "attention_head_dim": 16}
    sizes |= {"num_attention_heads": 2, "joint_attention_dim": 12, "pooled_projection_dim": 12}
    model = diffusers.FluxTransformer2DModel(**sizes, patch_size=1, axes_dims_rope=(4, 4, 8))
    inputs = {"hidden_states": torch.randn(1, 9, 4), "encoder_hidden_states": torch.randn(1, 5, 12)}
    inputs |= {"pooled_projections": torch.randn(1, 12), "timestep": torch.tensor([0.5])}
    inputs |= {"txt_ids": torch.zeros(5, 3), "img_ids": torch.randint(0, 5, (9, 3)).float()}
    return model, inputs


def run(model: nn.Module, inputs: dict[str, Any]) -> tuple[Tensor, list[Tensor]]:
    model.zero_grad()
    out = model(**inputs).sample
    out.square().sum().backward()
    return out.detach(), [x.grad.clone() for x in model.parameters() if x.grad is not None]


@pytest.mark.parametrize("make", [unet, flux])
def test_models(make: Any) -> None:
    torch.manual_seed(0)
    model, inputs = make()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=parameter[0].numel() ** -0.5)
    expected, gradients = run(model, inputs)
    with mock.patch.object(sdpa, "attention", wraps=sdpa.attention) as calls:
        assert torch.equal(run(model, inputs)[0], expected)
        assert calls.call_count == 0
        with integration.tile_attention():
            found, ours = run(model, inputs)
        assert calls.call_count >= 2
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    for a, b in zip(ours, gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4 * float(b.abs().max()) + 1e-6)


def raise_inside() -> None:
    with integration.tile_attention():
        assert BACKENDS[NATIVE] is integration.native_attention
        assert attention_processor.F is not functional
        assert attention_processor.F.softmax is functional.softmax
        with integration.tile_attention():
            pass
        assert BACKENDS[NATIVE] is integration.native_attention
        assert attention_processor.F is not functional
        raise ZeroDivisionError


def test_the_end_of_the_block_restores_everything() -> None:
    before = dict(BACKENDS)
    with pytest.raises(ZeroDivisionError):
        raise_inside()
    assert before == BACKENDS
    assert attention_processor.F is functional


def test_registered_until_unregistered() -> None:
    """Twice is once, also in a block, and a block inside changes nothing."""
    before = dict(BACKENDS)
    with integration.tile_attention():
        for _ in range(2):
            integration.register()
    with integration.tile_attention():
        pass
    assert BACKENDS[NATIVE] is integration.native_attention
    assert attention_processor.F is not functional
    for _ in range(2):
        integration.unregister()
    assert before == BACKENDS
    assert attention_processor.F is functional


@pytest.mark.parametrize("make", [unet, flux])
def test_gradient_checkpointing(make: Any) -> None:
    """Backward runs attention again: after the block in PyTorch, which notices, and else in flashtile."""
    torch.manual_seed(0)
    model, inputs = make()
    _, expected = run(model, inputs)
    model.enable_gradient_checkpointing()
    model.train()
    with integration.tile_attention():
        out = model(**inputs).sample
    with pytest.raises(CheckpointError, match="different metadata"):
        out.square().sum().backward()
    integration.register()
    try:
        with mock.patch.object(sdpa, "attention", wraps=sdpa.attention) as calls:
            out = model(**inputs).sample
            forward = calls.call_count
            model.zero_grad()
            out.square().sum().backward()
        assert calls.call_count == 2 * forward > 0
    finally:
        integration.unregister()
    gradients = [x.grad for x in model.parameters() if x.grad is not None]
    for a, b in zip(gradients, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4 * float(b.abs().max()) + 1e-6)


def test_masks_and_refusals() -> None:
    q, k = torch.randn(2, 5, 4, 8), torch.randn(2, 7, 4, 8)
    for mask in (torch.ones(2, 7).tril(2).bool(), torch.randn(2, 7), torch.randn(2, 1, 5, 7)):
        expected = attention_dispatch.dispatch_attention_fn(q, k, k, attn_mask=mask)
        with integration.tile_attention():
            found = attention_dispatch.dispatch_attention_fn(q, k, k, attn_mask=mask)
        torch.testing.assert_close(found, expected)
    for refused in ({"return_lse": True}, {"_parallel_config": object()}):
        with pytest.raises(ArgumentError, match="accepted"):
            integration.native_attention(q, k, k, **refused)


def test_other_versions_are_named() -> None:
    with mock.patch.object(integration, "VERSIONS", ((9, 0), (10, 0))), pytest.raises(AttentionError, match=r"9\.0"):
        integration.tile_attention().__enter__()
    with mock.patch.dict(BACKENDS) as backends:
        backends.pop(NATIVE)
        with pytest.raises(AttentionError, match="no native attention"):
            integration.tile_attention().__enter__()
