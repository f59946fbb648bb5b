"""attention_with_kvcache: what it writes into caches of any layout, and nothing else."""

from collections.abc import Callable

import pytest
import torch
from cached import (
    NAN,
    Arguments,
    appended,
    assert_right,
    call_in_place,
    guarded,
    problem,
    run,
    same_bits,
)
from torch import Tensor


@pytest.mark.parametrize("page_size", [None, 1, 4])
def test_appends_in_place(page_size: int | None) -> None:
    """Into the tensors that were given; all other bits of them stay, and those around them."""
    arguments = problem(page_size=page_size)
    caches, guards = guarded(arguments)
    expected = appended(arguments)
    call_in_place(caches)
    assert same_bits(caches["k_cache"], expected[0])
    assert same_bits(caches["v_cache"], expected[1])
    assert all(guard.intact() for guard in guards)


def views(arguments: Arguments) -> dict[str, Callable[[], tuple[Tensor, Tensor]]]:
    """Layouts in which caches are kept, as k and v of the problem's shapes (of equal widths)."""
    batch, heads, capacity, width = arguments["k_cache"].shape
    full = torch.full
    return {  # type: ignore[return-value]
        "k and v side by side": lambda: full((batch, heads, capacity, 2 * width), NAN).split(width, dim=-1),
        "k and v in one tensor": lambda: full((batch, 2, heads, capacity, width), NAN).unbind(1),
        "positions first": lambda: full((2, capacity, batch, heads, width), NAN).permute(0, 2, 3, 1, 4).unbind(0),
        "features before positions": lambda: full((2, batch, heads, width, capacity), NAN).mT.unbind(0),
        "every other slot": lambda: full((2, batch, heads, 2 * capacity, width), NAN)[:, :, :, 1::2].unbind(0),
    }


@pytest.mark.parametrize("layout", views(problem()))
@pytest.mark.parametrize("paged", [False, True])
def test_strided_caches(layout: str, paged: bool) -> None:
    """Views of other tensors: written where they lie, and nothing between them."""
    arguments = problem(page_size=4 if paged else None, head_dim_v=8)
    k_view, v_view = views(arguments)[layout]()
    k_view.copy_(arguments["k_cache"])
    v_view.copy_(arguments["v_cache"])
    root = k_view._base
    assert root is not None
    before = root.clone()
    out = call_in_place(arguments | {"k_cache": k_view, "v_cache": v_view})
    torch.testing.assert_close(out, run(arguments).out)
    k_expected, v_expected, _ = appended(arguments)
    assert same_bits(k_view, k_expected)
    assert same_bits(v_view, v_expected)
    k_view.copy_(arguments["k_cache"])
    v_view.copy_(arguments["v_cache"])
    assert same_bits(root, before)  # with the views put back, everything is


def test_a_common_beginning_in_pages() -> None:
    """Two sequences share a page and append to pages of their own."""
    arguments = problem(held=(4, 4), page_size=4)
    arguments["page_table"][1, 0] = arguments["page_table"][0, 0]
    assert_right(arguments)
