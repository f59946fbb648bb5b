"""The backend's kernels: tiles of rows and keys, warps and stages that fit a program, by width and shared memory."""

from typing import NamedTuple

from ....call.problem import LONGEST
from ..tile_config import BlockedSecond, KernelConfig, WidthConfigs


class Walk(NamedTuple):
    """A walk over "keys" or "rows", in steps, for blocks of the other side and heads up to `width`."""

    over: str
    block: int
    step: int
    num_warps: int
    num_stages: int
    width: int
    longest: int = LONGEST  # length of the side that is walked over; longer ones were not measured


Table = tuple[tuple[int, KernelConfig], ...]  # tiles by the most features of their kernels
SPLITS = (1, 2, 4, 8, 16, 32, 64)  # splits of keys, each with kernels of its own
NARROW = (  # tiles up to 256 features, for 99 KiB and more
    WidthConfigs(64, KernelConfig(128, 64, 4, 3), KernelConfig(64, 64, 4, 2), KernelConfig(64, 64, 4, 2)),
    WidthConfigs(128, KernelConfig(64, 64, 4, 2), KernelConfig(32, 64, 4, 2), KernelConfig(64, 32, 4, 2)),
    WidthConfigs(256, KernelConfig(64, 32, 4, 2), KernelConfig(32, 32, 4, 1), KernelConfig(32, 32, 4, 1)),
)
HALF = {  # float16 and bfloat16, by shared memory in KiB
    227: (
        WidthConfigs(64, KernelConfig(64, 64, 4, 3), KernelConfig(64, 64, 4, 3), KernelConfig(128, 64, 4, 3)),
        WidthConfigs(128, KernelConfig(128, 128, 8, 3), KernelConfig(32, 128, 8, 3), KernelConfig(128, 64, 8, 3)),
        WidthConfigs(256, KernelConfig(128, 64, 8, 2), KernelConfig(64, 64, 8, 1), KernelConfig(128, 32, 8, 2)),
        WidthConfigs(512, KernelConfig(64, 32, 8, 2), KernelConfig(32, 32, 8, 1), KernelConfig(32, 32, 8, 1)),
    ),
    163: (
        *NARROW,
        WidthConfigs(512, KernelConfig(32, 32, 8, 2), KernelConfig(32, 16, 8, 1), KernelConfig(32, 32, 8, 1)),
    ),
    99: (
        *NARROW,
        WidthConfigs(512, KernelConfig(32, 16, 4, 1), KernelConfig(16, 16, 4, 1), KernelConfig(16, 16, 4, 1)),
    ),
    64: (
        WidthConfigs(64, KernelConfig(128, 64, 4, 1), KernelConfig(64, 64, 4, 1), KernelConfig(64, 64, 4, 1)),
        WidthConfigs(128, KernelConfig(64, 64, 4, 1), KernelConfig(32, 64, 4, 1), KernelConfig(64, 32, 4, 1)),
        WidthConfigs(256, KernelConfig(64, 32, 4, 1), KernelConfig(16, 32, 4, 1), KernelConfig(32, 16, 4, 1)),
        WidthConfigs(512, KernelConfig(16, 16, 4, 1), KernelConfig(16, 16, 4, 1), KernelConfig(16, 16, 4, 1)),
    ),
}
SINGLE = (  # float32; exact products have no matrix units, so registers bound the tiles
    WidthConfigs(64, KernelConfig(64, 32, 8, 1), KernelConfig(32, 32, 8, 1), KernelConfig(32, 32, 8, 1)),
    WidthConfigs(128, KernelConfig(32, 32, 8, 1), KernelConfig(16, 32, 8, 1), KernelConfig(32, 16, 8, 1)),
    WidthConfigs(256, KernelConfig(16, 32, 8, 1), KernelConfig(16, 16, 8, 1), KernelConfig(16, 16, 8, 1)),
    WidthConfigs(512, KernelConfig(16, 16, 8, 1), KernelConfig(16, 16, 8, 1), KernelConfig(16, 16, 8, 1)),
)
LARGE = KernelConfig(128, 64, 8, 1, precision="tf32x3")  # forward and dq: one program fills the registers of a core
# Batch-invariant forward of 128 features in float32, where warps have whole rows.
WARPGROUP = KernelConfig(64, 32, 4, 1, precision="tf32x3")
SINGLE_TF32X3 = (  # Hopper's; wider tiles of float32 have no registers for compensated sums
    WidthConfigs(64, LARGE, KernelConfig(32, 32, 4, 1, precision="tf32x3"), LARGE),
    WidthConfigs(
        128,
        KernelConfig(32, 32, 4, 1, precision="tf32x3"),
        KernelConfig(32, 32, 8, 1, precision="tf32x3"),
        KernelConfig(32, 32, 4, 1, precision="tf32x3"),
    ),
)


def table(*rows: tuple[int, int, int, int, int], mma: bool = False, precision: str = "ieee") -> Table:
    """Rows of the most features and a tile's rows, keys, warps and stages."""
    return tuple((width, KernelConfig(m, n, warps, stages, precision, mma)) for width, m, n, warps, stages in rows)


# More tiles by kernel and chips: "most" shared memory, "half" of it, or mma.sync; in float32, by precision on Hopper,
# where bf16x6 has rows that were split ahead. The kernel of "mma one loop" walks over rows, and forward's tiles are for
# plain calls, on chips with mma.sync for a bias. Tiles of tangents were measured on chips with the most shared memory
# (`benchmarks/derivatives.py --candidates`), and chosen by ptxas on others, where they spill at most 4 bytes a thread.
# Second derivatives take the first that fits (`benchmarks/second_derivatives.py`).
MORE: dict[tuple[str, str], Table] = {
    ("forward", "most"): table(
        (64, 64, 64, 4, 3), (64, 128, 64, 4, 3), (64, 64, 32, 4, 3), (128, 64, 64, 4, 3), (256, 64, 64, 4, 2)
    ),
    ("dkdv", "most"): table((64, 64, 64, 4, 3), (64, 32, 128, 4, 3)),
    ("dq", "most"): table((64, 128, 64, 4, 3), (64, 128, 32, 4, 3)),
    ("forward", "mma.sync"): table((64, 64, 64, 4, 3), (128, 128, 32, 4, 3)),
    ("dkdv", "mma.sync"): table((64, 32, 128, 4, 3), (128, 32, 128, 8, 3)),
    ("dq", "mma.sync"): table((64, 128, 32, 4, 3), (128, 128, 32, 4, 2), (256, 64, 32, 4, 1)),
    ("mma forward", "mma.sync"): table(
        (128, 128, 64, 4, 1), (128, 128, 128, 8, 1), (128, 64, 64, 4, 1), (256, 64, 64, 4, 1),
        (512, 64, 64, 8, 4), (512, 64, 32, 8, 3), mma=True,
    ),
    ("mma one loop", "mma.sync"): table(
        (64, 32, 128, 4, 2), (64, 64, 64, 4, 2), (128, 64, 128, 8, 1), (128, 32, 128, 8, 2), (128, 32, 128, 8, 1),
        (128, 64, 64, 4, 1), (256, 64, 64, 8, 1), (256, 16, 64, 8, 1), (512, 32, 32, 8, 1), (512, 16, 32, 8, 1),
        mma=True,
    ),
    ("mma tangents", "mma.sync"): table(
        (64, 64, 64, 4, 1), (64, 128, 128, 8, 1), (128, 128, 64, 8, 1), (128, 64, 32, 4, 1), (256, 64, 32, 8, 1),
        mma=True,
    ),
    ("tangents", "most"): table(
        (64, 64, 64, 4, 3), (64, 128, 64, 8, 3), (128, 128, 32, 8, 3), (256, 32, 32, 4, 2), (512, 16, 16, 8, 1)
    ),
    ("tangents", "half"): table(
        (64, 128, 32, 8, 2), (64, 64, 32, 4, 2), (128, 64, 32, 8, 2), (256, 32, 32, 8, 2), (512, 16, 16, 8, 1)
    ),
    ("tangents", "float32"): table((64, 32, 16, 8, 1), (512, 16, 16, 8, 1)),
    ("rows", "tf32x3"): table((64, 64, 64, 4, 1), (64, 32, 64, 4, 1), precision="tf32x3"),
    ("dkdv", "tf32x3"): table((64, 32, 64, 4, 1), precision="tf32x3"),
    ("dq", "bf16x6"): table((64, 128, 64, 8, 2), (64, 64, 64, 4, 1), precision="bf16x6"),
    ("dkdv", "bf16x6"): table((64, 64, 64, 4, 1), precision="bf16x6"),
    ("second rows", "float32"): table((512, 16, 16, 4, 1), precision="tf32x3"),
    ("second keys", "float32"): table((512, 16, 16, 4, 1), precision="tf32x3"),
    ("second rows", "half"): table(
        (64, 64, 64, 4, 2), (128, 64, 32, 4, 2), (128, 64, 32, 4, 1), (256, 32, 32, 4, 1), (512, 16, 16, 4, 1)
    ),
    ("second keys", "half"): table(
        (64, 64, 64, 4, 2), (128, 32, 128, 8, 1), (128, 64, 32, 4, 1), (256, 32, 32, 4, 1), (512, 16, 16, 4, 1)
    ),
}  # fmt: skip
# Of wide heads: weights of pairs in memory, and their products (`launch.second_blocks`), by ptxas without spills.
BLOCKED = {
    "half": BlockedSecond(
        KernelConfig(64, 64, 4, 2), KernelConfig(128, 64, 8, 3), KernelConfig(64, 128, 8, 3), columns=128, unit=128
    ),
    "float32": BlockedSecond(
        KernelConfig(64, 32, 4, 1, precision="tf32x3"), KernelConfig(64, 32, 8, 2, precision="tf32x3"),
        KernelConfig(32, 64, 8, 2, precision="tf32x3"), columns=64, unit=128,
    ),
    "interpreter": BlockedSecond(*(KernelConfig(16, 16, 4, 1),) * 3, columns=16, unit=32),
}  # fmt: skip
# Batch-invariant forward by mma.sync (`few_rows.with_whole_rows`): as many rows as features and as warps times keys,
# or 16 rows and eight keys for each warp.
WHOLE_ROWS = table((128, 128, 32, 4, 3), (256, 16, 32, 4, 2), (512, 16, 32, 4, 1))
TF32_DKDV = KernelConfig(64, 32, 4, 1, precision="tf32x3")  # for one product
BIASED = WidthConfigs(  # calls of 16-bit numbers with a bias for each pair
    32, KernelConfig(64, 64, 4, 3), KernelConfig(32, 128, 4, 3), KernelConfig(128, 32, 4, 3)
)
INTERPRETER = WidthConfigs(512, *(KernelConfig(16, 16, 4, 1),) * 3)
WALKS = (  # 16-bit inputs
    Walk("keys", 16, 64, 4, 3, width=64),
    Walk("keys", 32, 64, 4, 3, width=64),
    Walk("keys", 64, 64, 4, 3, width=64),
    Walk("keys", 128, 64, 4, 3, width=32),
    Walk("rows", 16, 128, 4, 2, width=16),
    Walk("rows", 256, 64, 8, 1, width=32, longest=256),
    Walk("keys", 256, 64, 8, 1, width=64, longest=256),
)
INTERPRETER_WALKS = tuple(Walk(over, 16, 16, 4, 1, width=512) for over in ("keys", "rows"))
