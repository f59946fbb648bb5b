"""The Hopper kernel of latent rows of 8 bits on a GPU: `pytest -m gpu` and this file.

A barrier that is never signaled hangs: a test that takes too long ends the process and prints the stack.
"""

from typing import Any

import pytest
import torch
from eight_bit_rows import in_eight_bits, small_weights
from test_hopper_latent_gpu import latent_case

import flashtile
from flashtile.backend.hopper import support
from flashtile.testing.poison import poisoned_allocation
from flashtile.testing.tolerance import compare

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(support.unusable() is not None, reason=f"{support.unusable()}"),
    pytest.mark.usefixtures("watchdog"),
]
BF16, FP16 = torch.bfloat16, torch.float16


@pytest.mark.parametrize("num_splits", [None, 1, 3])
@pytest.mark.parametrize("kind", ["e4m3", "e5m2", "int8", "e4m3 by key", "656 bytes"])
@pytest.mark.parametrize(
    ("heads", "queries", "page_size", "dtype", "spread"),
    [(16, 1, 64, BF16, 1), (16, 2, 128, BF16, 8), (20, 3, None, BF16, 1), (16, 1, 64, FP16, 1), (128, 1, 64, BF16, 1)],
)
def test_decoding(
    heads: int,
    queries: int,
    page_size: int | None,
    dtype: torch.dtype,
    spread: float,
    kind: str,
    num_splits: int | None,
) -> None:
    if "key" in kind and dtype is FP16:
        pytest.skip("another backend takes it")
    case = in_eight_bits(latent_case(heads, queries, page_size, dtype, spread, num_splits=num_splits), kind)
    with poisoned_allocation():
        results = {name: x.cpu() for name, x in case.run("hopper").items()}
    assert [str(x) for x in compare(results, case, rounds_to_eight_bits=True) if not x.ok] == []


def test_weights_outside_of_float16() -> None:
    case = small_weights("cuda")
    assert (
        0.6
        < compare({name: x.cpu() for name, x in case.run("hopper").items()}, case, rounds_to_eight_bits=True)[0].ratio
        < 0.8
    )


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8])
def test_numbers_of_all_bytes(dtype: torch.dtype) -> None:
    """Each byte of a finite number as a value, exactly."""
    numbers = (torch.arange(512) % 256).to(torch.uint8).view(dtype).float().nan_to_num(0, 0, 0)
    rows = torch.zeros(1, 64, 1, 576, dtype=dtype)
    rows[0, 0, 0, :512] = numbers.to(dtype)
    q, lengths = torch.zeros(1, 16, 1, 576, device="cuda", dtype=BF16), torch.tensor([1], device="cuda").int()
    out = flashtile.attention_with_kvcache(
        q, rows.cuda(), None, v_dim=512, cache_seqlens=lengths, page_table=torch.zeros_like(lengths)[None], scale=1.0,
        backend="hopper",
    )  # fmt: skip
    assert torch.equal(out[0, 0, 0].cpu(), numbers.to(BF16))


def test_pages_that_do_not_exist() -> None:
    """Their keys are not visible, whatever the page has."""
    case = in_eight_bits(latent_case(16, 1, 64, BF16, 1), "e4m3")
    arguments = {name: x for name, x in case.arguments.items() if name not in ("v_cache", "cache_seqlens")}
    lengths, table = case.arguments["cache_seqlens"], arguments["page_table"].clone()
    shorter, longer = lengths.clone(), lengths.clone()
    shorter[0], longer[0], table[0, 2] = 128, 192, -1

    def out_of(**changes: torch.Tensor) -> torch.Tensor:
        given: dict[str, Any] = arguments | {"v_cache": None, "backend": "hopper"} | changes
        return flashtile.attention_with_kvcache(**given)

    whole, out = out_of(cache_seqlens=lengths), out_of(cache_seqlens=longer, page_table=table)
    assert torch.equal(out[1:], whole[1:])
    torch.testing.assert_close(out[0], out_of(cache_seqlens=shorter)[0])
