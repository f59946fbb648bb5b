"""Tiles of heads and the busiest core, counted and simulated."""

import heapq
import random
from collections.abc import Callable, Iterator

import pytest
import torch

from flashtile.backend.gpu import waves
from flashtile.backend.gpu.waves import SAMPLES, Head, Work, busiest, crowded, key_tiles, row_tiles
from flashtile.call.window import UNLIMITED, Window, visible_pairs

CORES = 7
FEW_WAVES = 5  # in which it matters when the last group of heads begins
WINDOWS = (
    UNLIMITED, Window(None, 0), Window(90, 20), Window(0, 0), Window(None, -70), Window(-30, None),
    Window(top_left=True), Window(None, 40, top_left=True), Window(None, 0, chunk=100),
    Window(60, None, chunk=256), Window(200, 7),
)  # fmt: skip
TILES = ((64, 128), (128, 64), (192, 64), (16, 16))


def visible(window: Window, rows: int, keys: int) -> torch.Tensor:
    """Whether a row sees a key, `[rows, keys]`."""
    i, j, diagonal = torch.arange(rows)[:, None], torch.arange(keys), keys - rows
    seen = torch.ones(rows, keys, dtype=torch.bool)
    if window.left is not None:
        seen &= j >= i + diagonal - window.left
    if window.right is not None:
        seen &= j <= i + diagonal + window.right
    if window.top_left:
        seen &= j <= i
    if window.chunk is not None:
        seen &= j // window.chunk == (i + diagonal) // window.chunk
    return seen


def blocks_of(seen: torch.Tensor, size: int) -> int:
    """Blocks of columns, from the first to the last one that a row sees."""
    columns = seen.any(0).nonzero()
    return int(columns[-1] // size - columns[0] // size + 1) if len(columns) else 0


def lengths(longest: int) -> Iterator[tuple[int, int]]:
    draw = random.Random(0)
    for _ in range(6):
        yield draw.randint(1, longest), draw.randint(1, longest)


@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize(("block_m", "block_n"), TILES)
def test_steps_are_the_visible_blocks(window: Window, block_m: int, block_n: int) -> None:
    """Of each tile of a head that has few of them."""
    for rows, keys in lengths(SAMPLES * 16):
        seen = visible(window, rows, keys)
        steps, full = [], []
        for part in seen.split(block_m):
            steps.append(blocks_of(part, block_n))
            full.append(sum(bool(x.all()) for x in part.split(block_n, 1) if x.shape[1] == block_n))
        head = row_tiles(window, rows, keys, block_m, block_n)
        assert head.count == len(steps)
        if window.unlimited:
            assert {head.sample[0].steps} == set(steps)
        else:
            assert [x.steps for x in head.sample] == steps
            assert [x.edges for x in head.sample] == [n - m for n, m in zip(steps, full, strict=True)]
        steps = [blocks_of(part.T, block_m) for part in seen.split(block_n, 1)]
        head = key_tiles(window, rows, keys, block_m, block_n)
        assert head.count == len(steps)
        assert ([x.steps for x in head.sample] if not window.unlimited else steps) == steps


@pytest.mark.parametrize("window", [x for x in WINDOWS if x.chunk is None], ids=str)
def test_a_sample_stands_for_all_tiles(window: Window) -> None:
    """The pairs of all steps are those that the window shows, and those of the blocks at its edges."""
    for rows, keys in ((4000, 4000), (3001, 8111), (9999, 2000)):
        for tiles in (row_tiles, key_tiles):
            total = tiles(window, rows, keys, 64, 64).total
            pairs = visible_pairs(window, rows, keys) / 64**2
            edges = 4.2 * -(-max(rows, keys) // 64)  # at most two sides, each of a block or two
            assert 0.97 * pairs <= total.steps <= 1.03 * pairs + edges


def queue_time(tiles: list[float], cores: int, programs: int) -> float:
    """When the last tile of a queue is done, in steps of a core: each program takes the next tile when it is free, and
    a core's programs share it evenly.
    """
    free = [(0.0, n) for n in range(cores * programs)]
    end = 0.0
    for tile in tiles:
        start, n = heapq.heappop(free)
        heapq.heappush(free, (start + tile * programs, n))
        end = max(end, start + tile * programs)
    return end


def time(work: Work) -> float:
    return work.steps + waves.ENDS * work.tiles


@pytest.mark.parametrize("programs", [1, 2, 3, 4])
def test_equal_tiles_take_whole_waves(programs: int) -> None:
    """And those that are left, as long as a core's share of them."""
    for count in range(1, 60):
        head = Head(1, (waves.Tile(10, 0),))
        found = busiest(head, count, CORES, programs)
        whole, rest = divmod(count, CORES * programs)
        simulated = queue_time([10 + waves.ENDS] * (whole * CORES * programs), CORES, programs)
        left = crowded(-(-rest // CORES), programs) * (10 + waves.ENDS)
        assert time(found) == pytest.approx(simulated + left)
        assert found.steps == pytest.approx(10 * found.tiles)


@pytest.mark.parametrize("programs", [2, 3, 4])
def test_fewer_programs_of_a_core_take_less_time(programs: int) -> None:
    times = [crowded(n, programs) for n in range(programs + 1)]
    assert times == sorted(times)
    assert times[0] == 0
    assert times[-1] == programs


def in_turns(head_tiles: list[float], heads: int, at_once: int) -> list[float]:
    """The queue's tiles: the longest ones of the heads that take turns first."""
    found: list[float] = []
    for first in range(0, heads, at_once):
        found += [tile for tile in sorted(head_tiles, reverse=True) for _ in range(min(at_once, heads - first))]
    return found


def steps_of(tiles: Callable[..., Head], length: int, block_m: int, block_n: int) -> list[float]:
    """Steps of all tiles of a head, and not of a sample."""
    samples, waves.SAMPLES = waves.SAMPLES, 10**6
    try:
        head = tiles.__wrapped__(Window(None, 0), length, length, block_m, block_n)  # type: ignore[attr-defined]
    finally:
        waves.SAMPLES = samples
    return [tile.size for tile in head.sample]


def errors(tiles: Callable[..., Head], programs: int) -> Iterator[tuple[float, float, int, tuple[int, ...]]]:
    """Of random causal queues: the model's error, the number of waves and of groups, and the sizes."""
    draw = random.Random(programs)
    for _ in range(120):
        length, heads, cores = draw.randint(200, 9000), draw.randint(1, 70), draw.choice((20, 108, 132))
        at_once = draw.randint(1, heads)
        block_m, block_n = draw.choice(((64, 128), (128, 64), (128, 128), (192, 64)))
        head = tiles(Window(None, 0), length, length, block_m, block_n)
        if head.is_even:
            continue
        queue = in_turns(steps_of(tiles, length, block_m, block_n), heads, at_once)
        alone = len(queue) <= cores
        simulated = max(queue) * crowded(1, programs) if alone else queue_time(queue, cores, programs)
        found = time(busiest(head, heads, cores, programs, at_once))
        sizes = length, heads, cores, at_once, block_m, block_n
        yield found / simulated - 1, len(queue) / cores / programs, -(-heads // at_once), sizes


@pytest.mark.parametrize("tiles", [row_tiles, key_tiles])
@pytest.mark.parametrize("programs", [1, 2, 3])
def test_uneven_tiles_take_as_long_as_their_queue(tiles: Callable[..., Head], programs: int) -> None:
    wrong = [x for x in errors(tiles, programs) if abs(x[0]) > 0.15 and (x[1] > FEW_WAVES or x[2] == 1)]
    assert not wrong


@pytest.mark.parametrize("tiles", [row_tiles, key_tiles])
@pytest.mark.parametrize("programs", [1, 2, 3])
def test_few_waves_of_uneven_tiles(tiles: Callable[..., Head], programs: int) -> None:
    wrong = [x for x in errors(tiles, programs) if abs(x[0]) > 0.2]
    assert not wrong
