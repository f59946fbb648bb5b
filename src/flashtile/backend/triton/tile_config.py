"""Configurations of kernels as values: tiles, warps, stages, walks."""

from typing import NamedTuple


class KernelConfig(NamedTuple):
    """A kernel's tile of query rows and keys, its warps and its pipeline stages."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    precision: str = "ieee"  # precision of float32 products (`Constants.PRECISION`)
    mma: bool = False  # it is one of `kernels.mma`
    bias_once: bool = False  # a bias's gradient loads its tile of the bias once, into registers

    def __str__(self) -> str:
        return f"{self.block_m} x {self.block_n} ({self.num_warps} warps, {self.num_stages} stages)"


class FusedConfig(NamedTuple):
    """One kernel for all gradients: all rows or all keys of a head are one block, or both are. `splits` programs share
    the walk over the blocks of the other side.
    """

    tile: KernelConfig
    walk: str | None = None  # over "keys" or "rows"
    splits: int = 1

    def __str__(self) -> str:
        shared = f", {self.splits} splits" * (self.splits > 1)
        return str(self.tile) + ("" if self.walk is None else f" over {self.walk}{shared}")


class BlockedSecond(NamedTuple):
    """The kernels of a second derivative whose weights of pairs are in memory, one range of heads and rows after
    another: the tiles of weights, and of sums of some columns for rows and for keys. The weights of `unit` rows and
    keys are all stored if any is. Programs share the keys of sums for rows, up to `programs` of them for each core.
    """

    weights: KernelConfig
    rows: KernelConfig
    keys: KernelConfig
    columns: int
    unit: int
    programs: int = 1

    def __str__(self) -> str:
        return f"weights {self.weights}, {self.columns} columns of rows {self.rows} and of keys {self.keys}"


class TileConfig(NamedTuple):
    """The kernels' configurations for one problem. Forward packs `pack_gqa` query heads of a group into one tile, and
    `fused` is one kernel for all gradients, where rows or keys are few; `one_loop` is one for dq, dk and dv of any
    lengths. `dbias` is dq's tile unless it is given. `given_splits` is forward's tile where the caller fixes
    `num_splits`, `tangents` the tile of forward with tangents, and `second` the tiles of rows and of keys in a second
    derivative. `products` and `products_backward` name who multiplies where PyTorch does (`launch.products`).
    Batch-invariant decoding has parts of `part_keys`, and at most `part_registers` of a thread.
    """

    forward: KernelConfig
    dkdv: KernelConfig
    dq: KernelConfig
    pack_gqa: int = 1
    dbias: KernelConfig | None = None
    fused: FusedConfig | None = None
    one_loop: KernelConfig | None = None
    given_splits: KernelConfig | None = None
    tangents: KernelConfig | None = None
    second: tuple[KernelConfig, KernelConfig] | BlockedSecond | None = None
    products: str | None = None
    products_backward: str | None = None
    part_keys: int = 0
    part_registers: int | None = None


class WidthConfigs(NamedTuple):
    """The configurations for head dimensions up to `width`."""

    width: int
    forward: KernelConfig
    dkdv: KernelConfig
    dq: KernelConfig
