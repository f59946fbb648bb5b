"""Kernels for calls with a bias in which no block needs masks, in Triton's interpreter."""

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from checking import dense_case

from flashtile.backend.triton.launch import arguments as arguments_of_kernels
from flashtile.backend.triton.launch.arguments import is_even
from flashtile.backend.triton.support import interpreted
from flashtile.backend.triton.tile_config import KernelConfig
from flashtile.call.call import Call
from flashtile.testing.case import Case
from flashtile.testing.oracle import solve
from flashtile.testing.tolerance import compare

pytestmark = pytest.mark.skipif(not interpreted(), reason="needs TRITON_INTERPRET=1")


def case_of(rows: int, keys: int, **arguments: Any) -> Case:
    heads = {"batch": 1, "num_heads_q": 2, "num_heads_kv": 1}
    case = dense_case(**heads, seqlen_q=rows, seqlen_k=keys, head_dim=16, dtype=torch.float32)
    bias = torch.randn(1, 2, rows, keys, generator=torch.Generator().manual_seed(0))
    return replace(case, arguments=case.arguments | {"bias": bias} | arguments, description="")


@pytest.mark.parametrize(
    ("rows", "keys", "arguments", "even"),
    [
        (48, 64, {}, True),
        (48, 63, {}, False),
        (47, 64, {}, False),
        (48, 64, {"causal": True}, False),
        (48, 64, {"window": (9, None)}, False),
        (48, 64, {"mask": torch.arange(64)[None, None, None] % 3 > 0}, False),
        (48, 64, {"dropout_p": 0.2, "dropout_seed": 1}, False),
    ],
)
def test_calls_of_whole_blocks(rows: int, keys: int, arguments: dict[str, Any], even: bool) -> None:
    """Forward and backward, with the kernels that such calls get."""
    case, found = case_of(rows, keys, **arguments), set()

    def watched(call: Call, config: KernelConfig) -> bool:
        found.add(is_even(call, config))
        return is_even(call, config)

    with mock.patch.object(arguments_of_kernels, "is_even", watched):
        results = case.run("triton")
    assert found == {even}
    assert [str(x) for x in compare(results, case, solve(case)) if not x.ok] == []
