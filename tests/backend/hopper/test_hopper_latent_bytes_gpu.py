"""The Hopper kernel of latent rows of 8 bits on a GPU: `pytest -m gpu` and this file.

A barrier that is never signaled hangs: a test that takes too long ends the process and prints the stack.
"""

import pytest
import torch
from eight_bit_rows import in_eight_bits
from test_hopper_latent_gpu import latent_case

import flashtile
from flashtile.backend.hopper import support
from flashtile.testing.oracle import solve
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
    assert [str(x) for x in compare(results, case, solve(case)) if not x.ok] == []


def test_numbers_of_all_bytes() -> None:
    """Each byte but NaN as a value, exactly; one that is NaN reaches its column alone."""
    bytes_ = torch.zeros(1, 64, 1, 576, device="cuda", dtype=torch.uint8)
    bytes_[0, 0, 0, :512] = torch.arange(512, device="cuda").to(torch.uint8)
    q = torch.zeros(1, 16, 1, 576, device="cuda", dtype=BF16)
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8):
        cache = bytes_.view(dtype)
        out = flashtile.attention_with_kvcache(
            q, cache, None, v_dim=512, cache_seqlens=torch.tensor([1], device="cuda").int(),
            page_table=torch.zeros(1, 1, device="cuda").int(), scale=1.0, backend="hopper",
        )  # fmt: skip
        expected = cache[0, 0, 0, :512].float().to(BF16)
        assert torch.equal(out[0, 0, 0].nan_to_num(-7.0), expected.nan_to_num(-7.0))


def test_pages_that_do_not_exist() -> None:
    """Their keys are not visible, whatever the page has."""
    case = in_eight_bits(latent_case(16, 1, 64, BF16, 1), "e4m3")
    arguments = {name: x for name, x in case.arguments.items() if name not in ("v_cache", "cache_seqlens")}
    lengths = case.arguments["cache_seqlens"].clone()

    def out_of(**changes: torch.Tensor) -> torch.Tensor:
        given = arguments | {"v_cache": None, "cache_seqlens": lengths, "backend": "hopper"} | changes
        return flashtile.attention_with_kvcache(**given)

    whole, table = out_of(), arguments["page_table"].clone()
    lengths[0], shorter = 128, lengths.clone()
    expected = out_of(cache_seqlens=shorter)[0]
    lengths[0], table[0, 2] = 192, -1
    out = out_of(page_table=table)
    assert torch.equal(out[1:], whole[1:])
    torch.testing.assert_close(out[0], expected)
