"""The kernels of mma.sync on the tiles that chips have memory and registers for, and calls of each feature."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from forced import Choice

import flashtile
from flashtile.api.explain import described_call
from flashtile.backend.triton.tile_config import KernelConfig, TileConfig
from flashtile.call.call import Call
from flashtile.call.plan import Candidate
from flashtile.testing.mask_functions import causal_by_head
from flashtile.testing.score_functions import tempered_table

from .launches import Launch, launches_of

PLAIN = "causal"
MOST_SPILLED = 200  # bytes of a thread, of a plain call; only 128 features on sm_80 take 320 in backward


class Tiles(NamedTuple):
    """Tiles of a width: rows, keys, warps, stages."""

    forward: tuple[int, int, int, int]
    backward: tuple[int, int, int, int] | None


TILES = {
    64: {arch: Tiles((128, 128, 4, 1), (32, 128, 4, 2)) for arch in ("sm_80", "sm_89", "sm_120")},
    128: {
        "sm_80": Tiles((128, 64, 4, 1), (64, 128, 8, 1)),
        "sm_89": Tiles((128, 64, 4, 1), (32, 128, 8, 1)),
        "sm_120": Tiles((128, 64, 4, 1), (32, 128, 8, 1)),
    },
    256: {"sm_80": Tiles((64, 64, 4, 1), (64, 64, 8, 1))},
    512: {
        "sm_80": Tiles((64, 64, 8, 4), (32, 32, 8, 1)),
        "sm_89": Tiles((64, 32, 8, 3), (16, 32, 8, 1)),
        "sm_120": Tiles((64, 32, 8, 3), (16, 32, 8, 1)),
    },
}


def feature_calls(head_dim: int) -> dict[str, Call]:
    """A call of each feature that compiles to another kernel."""
    q, k = (torch.empty(2, heads, 512, head_dim, dtype=torch.bfloat16) for heads in (4, 2))
    packed_q, packed_k = (torch.empty(512, heads, head_dim, dtype=torch.bfloat16) for heads in (4, 2))
    offsets, table = torch.zeros(5, dtype=torch.int32), (torch.ones(4), torch.zeros(4, 17))

    def call(**features: Any) -> Call:
        return described_call(q, k, k, None, None, features)

    return {
        PLAIN: call(causal=True),
        "window": call(window=(100, 50)),
        "softcap": call(softcap=30.0),
        "bias": call(bias=torch.empty(1, 4, 512, 512, dtype=torch.bfloat16), causal=True),
        "mask": call(mask=torch.ones(1, 1, 512, 512, dtype=torch.bool)),
        "mask function": call(mask=flashtile.MaskMod(causal_by_head)),
        "score_mod": call(score_mod=flashtile.ScoreMod(tempered_table, table)),
        "sinks": call(sinks=torch.zeros(4), causal=True),
        "packed": described_call(packed_q, packed_k, packed_k, offsets, offsets, {"causal": True}),
    }


def chosen(tiles: Tiles) -> Choice:
    """A plan of these tiles."""
    forward, backward = (x and KernelConfig(*x, mma=True) for x in tiles)

    def choose(found: list[Candidate]) -> Candidate:
        tile: TileConfig = found[0].tile
        return found[0]._replace(
            tile=tile._replace(forward=forward, one_loop=backward, given_splits=tile.forward, fused=None)
        )

    return choose


def launches_of_mma(call: Call, head_dim: int, arch: str) -> Iterator[Launch]:
    """The launches of kernels in Gluon, and of those that read their sums."""
    choice = chosen(TILES[head_dim][arch])
    for launch in launches_of(call, arch, choice, choice):
        if ".kernels.mma." in launch.kernel.fn.__module__:
            yield launch


def launches_by_width(arch: str, *, full: bool) -> Iterator[tuple[str, Launch]]:
    """The launches on a chip that has tiles, by the name of the call: of every width and feature, or of one."""
    for head_dim in [x for x in TILES if arch in TILES[x]][: None if full else 1]:
        for name, call in feature_calls(head_dim).items():
            if full or name == PLAIN:
                yield from ((f"mma.sync, {name}, hdim {head_dim}", x) for x in launches_of_mma(call, head_dim, arch))
