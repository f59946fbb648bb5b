"""The backward pass of short sequences in one kernel, in Triton's interpreter, against the fp64 oracle."""

import os
from typing import Any
from unittest import mock

import pytest
import torch
from checking import dense_case, features

from flashtile.backend.triton import host_backward
from flashtile.testing.oracle import solve
from flashtile.testing.poison import poisoned_allocation
from flashtile.testing.tolerance import compare

pytestmark = [
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy's, of infinities that the contract allows
]
BATCH, HEADS, ROWS, KEYS = 3, 2, 13, 11
HALF = torch.float16
CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window": (3, 2)},
    "chunks": {"attention_chunk": 4},
    "softcap": {"softcap": 2.0},
    "slopes": {"alibi_slopes": torch.tensor([0.5, 0.1])},
    "slopes of sequences": {"alibi_slopes": torch.rand(BATCH, HEADS)},
    "dropout": {"dropout_p": 0.4, "dropout_seed": 3},
    "mask": {"mask": torch.rand(BATCH, 1, ROWS, KEYS) > 0.4},
    "rows without keys": {"mask": torch.arange(ROWS)[:, None].expand(1, 1, ROWS, KEYS) > 5},
    "mask function": features()["mask function"],
    "score_mod": {"score_mod": lambda score, b, h, i, j: 0.5 * score + 0.1 * (i - j) * h},
}


def wrong(arguments: dict[str, Any], **sizes: Any) -> list[str]:
    """The results outside of their bounds, of a call that one kernel differentiates."""
    shape = {"batch": BATCH, "num_heads_q": HEADS, "num_heads_kv": HEADS, "seqlen_q": ROWS, "seqlen_k": KEYS}
    case = dense_case(**{**shape, "head_dim": 24, "dtype": HALF, **sizes}, **arguments)
    with mock.patch.object(host_backward, "launch_short", wraps=host_backward.launch_short) as launched:
        with poisoned_allocation():
            results = case.run("triton")
        assert launched.call_count == 1
    return [str(x) for x in compare(results, case, solve(case)) if not x.ok]


@pytest.mark.parametrize("name", CALLS)
def test_all_gradients_of_one_launch(name: str) -> None:
    assert wrong(CALLS[name], kind="outliers") == []


@pytest.mark.parametrize(("rows", "keys"), [(1, 16), (16, 1), (16, 16)])
def test_lengths(rows: int, keys: int) -> None:
    assert wrong({"causal": True}, seqlen_q=rows, seqlen_k=keys, head_dim=40, head_dim_v=16) == []


@pytest.mark.parametrize("batch", [1, BATCH])
@pytest.mark.parametrize("heads", [1, HEADS])
@pytest.mark.parametrize(("rows", "keys"), [(ROWS, 16), (1, 16), (ROWS, 1), (1, 1)])
def test_a_bias_of_any_shape(batch: int, heads: int, rows: int, keys: int) -> None:
    bias = torch.randn(batch, heads, rows, keys).to(HALF)
    assert wrong({"bias": bias, "softcap": 3.0}, seqlen_k=16) == []
