"""attention_with_kvcache: rotary positions of queries and new keys."""

import pytest
import torch
from cached import (
    angles,
    appended,
    assert_right,
    int32,
    problem,
    run,
    same_bits,
    turned,
)


def test_the_two_conventions_differ_by_the_order_of_features() -> None:
    """Pairs (0, 1), (2, 3), ... or (n, n + width / 2): the same after a permutation, also of a part of D."""
    width, head_dim = 6, 8
    cos, sin = angles(12, width)
    halves = problem(head_dim=head_dim, causal=True, rotary_cos=cos, rotary_sin=sin, rotary_interleaved=False)
    order = [*(n // 2 + (n % 2) * (width // 2) for n in range(width)), *range(width, head_dim)]
    interleaved = halves | {name: halves[name][..., order] for name in ("q", "k", "k_cache")}
    assert_right(halves)
    assert_right(interleaved | {"rotary_interleaved": True})
    torch.testing.assert_close(run(interleaved | {"rotary_interleaved": True}).out, run(halves).out)
    interleaved.pop("rotary_interleaved")  # the default
    torch.testing.assert_close(run(interleaved).out, run(halves).out)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("width", [2, 6, 8])
def test_features_past_rotary_dim_are_left_alone(width: int, interleaved: bool) -> None:
    cos, sin = angles(12, width)
    arguments = problem(rotary_cos=cos, rotary_sin=sin, rotary_interleaved=interleaved)
    step = assert_right(arguments)
    _, _, written = appended(arguments)
    given, kept = arguments["k"][..., width:], step.k_cache[written].unflatten(0, (-1, 8))[:, width:]
    assert same_bits(kept.sort(0).values, given.flatten(0, 2).sort(0).values)


def test_only_relative_positions_matter() -> None:
    """Ten keys of padding in front of everything turn q and k alike."""
    cos, sin = angles(64, 8)
    step = run(problem(held=(0,), new=6, capacity=30, causal=True, rotary_cos=cos, rotary_sin=sin))
    shifted = problem(held=(10,), new=6, capacity=30, causal=True, rotary_cos=cos, rotary_sin=sin, leftpad_k=int32(10))
    fresh = problem(held=(0,), new=6, capacity=30)
    torch.testing.assert_close(run(shifted | {name: fresh[name] for name in "qkv"}).out, step.out)


@pytest.mark.parametrize("queries", [1, 2, 3])
def test_queries_are_the_last_tokens(queries: int) -> None:
    """With fewer queries than new keys they are the last of them, for rotary as for causal."""
    cos, sin = angles(12, 8)
    features = {"causal": True, "rotary_cos": cos, "rotary_sin": sin}
    all_rows = problem(new=3, **features)
    some = all_rows | {"q": all_rows["q"][:, :, 3 - queries :]}
    assert_right(some)
    torch.testing.assert_close(run(some).out, run(all_rows).out[:, :, 3 - queries :])


@pytest.mark.parametrize("interleaved", [False, True])
def test_queries_in_front_of_position_0_turn_as_there(interleaved: bool) -> None:
    cos, sin = angles(12, 8)
    arguments = problem(held=(2, 0), new=1, queries=4, rotary_interleaved=interleaved)
    turning = arguments | {"rotary_cos": cos, "rotary_sin": sin}
    by_hand = dict(arguments)
    for name, first in (("q", (-1, -3)), ("k", (2, 0))):
        x, places = arguments[name].transpose(1, 2), torch.arange(arguments[name].shape[2])
        by_hand[name] = torch.stack(
            [turned(x[b], (places + first[b]).clamp(min=0), turning).transpose(0, 1) for b in range(2)]
        )
    torch.testing.assert_close(run(turning).out, run(by_hand).out)
