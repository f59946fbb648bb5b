"""attention_with_kvcache with lengths and pages on the device, whatever these hold."""

import pytest
import torch
from cached import (
    Arguments,
    angles,
    as_tokens,
    call_in_place,
    guarded,
    int32,
    problem,
    run,
    same_bits,
    slots,
    turned,
)
from checking import lengths_on_the_device
from torch import Tensor

COS, SIN = angles(12, 8)


def on_the_device(arguments: Arguments) -> tuple[Arguments, Tensor]:
    """The call in place between guard bands, as on a GPU; the caches as they are after it."""
    caches, guards = guarded(arguments)
    with lengths_on_the_device():
        out = call_in_place(caches)
    assert all(guard.intact() for guard in guards)
    return caches, out


def assert_written(caches: Arguments, arguments: Arguments, places: dict[tuple[int, int], Tensor]) -> None:
    """k's cache has the given keys at `(page, slot)`, and all else of it is as it was."""
    expected = arguments["k_cache"].clone()
    for place, key in places.items():
        as_tokens(expected, arguments)[place] = key
    assert same_bits(caches["k_cache"], expected)


@pytest.mark.parametrize("entry", [-1, -(2**31), 100, 2**31 - 1])
def test_keys_of_a_page_that_does_not_exist_are_dropped(entry: int) -> None:
    """Sequence 1 appends its third and fourth key; the fourth's page is none."""
    arguments = problem(held=(3, 2), new=2, page_size=3, capacity=9)
    arguments["page_table"][1, 1] = entry
    caches, out = on_the_device(arguments)
    table, k = arguments["page_table"], arguments["k"]
    kept = {(int(table[0, 1]), n): k[0, :, n] for n in range(2)} | {(int(table[1, 0]), 2): k[1, :, 0]}
    assert_written(caches, arguments, kept)
    hidden = torch.ones(2, 1, 1, 9, dtype=torch.bool)
    hidden[1, ..., 3:6] = False
    good = arguments | {"page_table": arguments["page_table"].clone(), "mask": hidden}
    good["page_table"][1, 1] = good["page_table"][1, 2]
    torch.testing.assert_close(out, run(good).out)


@pytest.mark.parametrize("page_size", [None, 3])
def test_keys_past_the_end_of_a_cache_are_dropped(page_size: int | None) -> None:
    """Sequence 0 has room for one of its two new keys, sequence 1 for none."""
    arguments = problem(held=(7, 7), new=2, capacity=9, page_size=page_size)
    page, slot = slots(arguments, 0)
    arguments["cache_seqlens"] = int32(8, 9)
    caches, out = on_the_device(arguments)
    assert_written(caches, arguments, {(int(page[8]), int(slot[8])): arguments["k"][0, :, 0]})
    assert out.shape == (2, 4, 2, 6)


@pytest.mark.parametrize("row", [-1, 7, 2**31 - 1])
def test_rows_that_do_not_exist_are_dropped(row: int) -> None:
    arguments = problem(held=(3, 2), new=2)
    arguments["cache_batch_idx"] = int32(row, 1)
    caches, out = on_the_device(arguments)
    assert_written(caches, arguments, {(1, 2 + n): arguments["k"][1, :, n] for n in range(2)})
    assert not out[0].any()


def test_nothing_fits() -> None:
    """Every write is dropped, also the first."""
    arguments = problem(held=(3, 2), new=2)
    arguments["cache_batch_idx"] = int32(-1, 9)
    caches, out = on_the_device(arguments)
    assert_written(caches, arguments, {})
    assert not out.any()


def test_tokens_of_no_sequence_are_dropped() -> None:
    """In packed tensors, also where they stand in front of everything that fits."""
    arguments = problem(held=(3, 2), new=(0, 0))
    caches, out = on_the_device(arguments)
    assert_written(caches, arguments, {})
    assert not out.any()
    arguments = problem(held=(3, 2), new=(1, 2))
    caches, out = on_the_device(arguments)
    kept = {(0, 3): arguments["k"][0]} | {(1, 2 + n): arguments["k"][1 + n] for n in range(2)}
    assert_written(caches, arguments, kept)
    assert not out[3:].any()


def test_negative_lengths_and_short_rotary_tables_stay_inside() -> None:
    """A negative length counts as 0, and angles past the table are its last."""
    arguments = problem(held=(3, 2), new=2, rotary_cos=COS[:4], rotary_sin=SIN[:4])
    arguments["cache_seqlens"] = int32(3, -5)
    caches, out = on_the_device(arguments)
    positions = {0: torch.tensor([3, 3]), 1: torch.tensor([0, 1])}
    for b, angle in positions.items():
        first = 3 if b == 0 else 0
        keys = turned(arguments["k"][b].transpose(0, 1), angle, arguments)
        torch.testing.assert_close(caches["k_cache"][b, :, first : first + 2].transpose(0, 1), keys)
    assert out.isfinite().all()


@pytest.mark.parametrize("new", [2, (1, 2), (0, 0)])
def test_tables_without_entries(new: int | tuple[int, ...]) -> None:
    """No page and no angle exists: nothing is written, and nothing turns."""
    arguments = problem(held=(3, 2), new=new, page_size=3, rotary_cos=COS[:0], rotary_sin=SIN[:0])
    arguments |= {"page_table": arguments["page_table"][:, :0], "cache_seqlens": int32(0, 0)}
    caches, out = on_the_device(arguments)
    assert_written(caches, arguments, {})
    assert not out.any()


@pytest.mark.parametrize("pad", [-1, 5, 99])
def test_any_leftpad_hides_keys(pad: int) -> None:
    """None of them, or all."""
    arguments = problem(held=(3, 2), new=2)
    _, out = on_the_device(arguments | {"leftpad_k": int32(pad, 0)})
    expected = run(arguments).out
    torch.testing.assert_close(out[1], expected[1])
    if pad < 0:
        torch.testing.assert_close(out[0], expected[0])
    else:
        assert not out[0].any()


@pytest.mark.parametrize("offsets", [(0, 2, 1, 4), (0, 2, 3, 9), (0, -1, 3, 4), (0, 2**31 - 1, 3, 4)])
def test_offsets_outside_of_q_touch_nothing_else(offsets: tuple[int, ...]) -> None:
    """`on_the_device` looks at the guard bands of the caches."""
    arguments = problem(new=(2, 1, 1), page_size=3, rotary_cos=COS, rotary_sin=SIN)
    arguments["cu_seqlens_q"] = int32(*offsets)
    assert on_the_device(arguments)[1].shape == (*arguments["q"].shape[:2], 6)
