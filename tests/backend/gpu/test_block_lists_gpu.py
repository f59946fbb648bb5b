"""Lists of the blocks that a mask function shows: `pytest -m gpu tests/backend/gpu/test_block_lists_gpu.py`."""

import importlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from checking import dense_case
from listed_masks import near_in_documents
from torch import Tensor

import flashtile
from flashtile import MaskMod, mask_mods
from flashtile.dispatch import fast_path
from flashtile.testing.case import MaskFunction
from flashtile.testing.oracle import solve
from flashtile.testing.tolerance import compare

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]
S = 700


@pytest.fixture(autouse=True)
def lists_for_all_calls() -> Iterator[None]:
    fast_path.forget()
    with mock.patch.object(importlib.import_module("flashtile.backend.gpu.block_lists"), "LEAST_PAIRS", 0):
        yield
    fast_path.forget()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("head_dim", "window"), [(64, None), (64, (None, 0)), (128, None), (128, (190, 70))])
def test_within_the_bound(dtype: torch.dtype, head_dim: int, window: tuple[int | None, int] | None) -> None:
    ids = torch.stack([torch.arange(S) // n for n in (256, 61)]).cuda()
    mask = MaskFunction(near_in_documents, (ids, torch.tensor([S, 40, 0, 130]).cuda()))
    sizes: dict[str, Any] = {
        "num_heads_q": 4,
        "num_heads_kv": 2,
        "seqlen_q": S - 57,
        "seqlen_k": S,
        "head_dim": head_dim,
    }
    case = dense_case(**sizes, dtype=dtype)
    tensors = {name: x.cuda() for name, x in case.arguments.items()}
    assert case.dout is not None
    assert case.dlse is not None
    case = replace(
        case, arguments=tensors | {"mask": mask, "window": window}, dout=case.dout.cuda(), dlse=case.dlse.cuda()
    )
    results = {key: x.cpu() for key, x in case.run("triton").items()}
    worst = compare(results, case, solve(case))[0]
    assert worst.ok, str(worst)


@pytest.mark.parametrize("shape", [(1, 4, S - 57, S), (2, 1, 1, S)], ids=str)
def test_a_mask_that_is_a_tensor(shape: tuple[int, ...]) -> None:
    """Documents in which some pairs are hidden, and padding."""
    i, j = torch.arange(shape[2])[:, None], torch.arange(S)
    near = (i // 200 == j // 200) if shape[2] > 1 else j < torch.tensor([300, 520]).view(2, 1, 1, 1)
    mask = near & ((torch.rand(shape, generator=torch.Generator().manual_seed(0)) < 0.97) | (j < 256))
    case = dense_case(
        num_heads_q=4, num_heads_kv=2, seqlen_q=S - 57, seqlen_k=S, head_dim=64, dtype=torch.bfloat16, mask=mask
    )
    expected = solve(case)
    assert case.dout is not None
    assert case.dlse is not None
    arguments = {name: x.cuda() for name, x in case.arguments.items()}
    case = replace(case, arguments=arguments, dout=case.dout.cuda(), dlse=case.dlse.cuda())
    lists = importlib.import_module("flashtile.backend.gpu.block_lists")
    with mock.patch.object(lists, "mask_visibility", wraps=lists.mask_visibility) as read:
        results = {key: x.cpu() for key, x in case.run("triton").items()}
    assert read.call_count == 1  # for forward, dq, dk and dv
    worst = compare(results, case, expected)[0]
    assert worst.ok, str(worst)


def gradients(mask: MaskMod | Callable[..., Tensor] | Tensor, inputs: list[Tensor]) -> list[Tensor]:
    out = flashtile.attention(*inputs, mask=mask, backend="triton")
    return [out, *torch.autograd.grad(out.float().square().sum(), inputs)]


def test_kept_lists_on_another_stream_and_in_a_graph() -> None:
    """The lists of a function of positions alone are made once; a graph holds its own."""
    inputs = [torch.randn(1, 2, S, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]

    def mask(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (j <= i) | (j < 100)

    positions = torch.arange(S, device="cuda")
    right = gradients(((positions <= positions[:, None]) | (positions < 100))[None, None], inputs)
    found = [gradients(mask, inputs) for _ in range(3)]
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        found.append(gradients(mask, inputs))
    torch.cuda.synchronize()
    inputs = [x.detach().requires_grad_() for x in inputs]  # autograd gives others their first call's stream
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found.append(gradients(mask, inputs))
    fast_path.forget()
    taken = [torch.full((2**18,), -1, device="cuda", dtype=torch.int32) for _ in range(64)]  # what was freed
    graph.replay()
    for results in found:
        for x, y in zip(results, right, strict=True):
            torch.testing.assert_close(x, y, atol=2e-2, rtol=2e-2)
    del taken


def test_a_captured_graph_sees_values_of_now() -> None:
    """No value is read by the host, and a replayed graph takes the ids that the tensor has then."""
    inputs = [torch.randn(1, 2, S, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    ids = torch.arange(S, device="cuda") // 128
    mask = mask_mods.document(ids)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            gradients(mask, inputs)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        gradients(mask, inputs)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = gradients(mask, inputs)
    for size in (128, 300, 37, S):
        ids.copy_(torch.arange(S, device="cuda") // size)
        graph.replay()
        expected = gradients((ids[:, None] == ids)[None, None], inputs)
        for x, y in zip(found, expected, strict=True):
            torch.testing.assert_close(x, y, atol=2e-2, rtol=2e-2)
