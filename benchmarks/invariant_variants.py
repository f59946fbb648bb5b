"""Temporary: variants of batch-invariant plans, timed in one process. `python invariant_variants.py decode|prefill WIDTH`."""

import sys
from unittest import mock

import torch
from batch_invariance import decoding, prefill

from flashtile.backend.hopper.plan import tables
from flashtile.backend.hopper.tile_config import ForwardConfig
from flashtile.backend.triton import support
from flashtile.bench.clocks import clock_of
from flashtile.bench.rounds import Entrant, interleave
from flashtile.bench.sweep import Timing
from flashtile.dispatch import fast_path
from statistics import median

clock = clock_of(torch.device("cuda"))
what, width, rounds = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
planned = support.candidates


def tiles_of(change):
    def candidates(*given):
        x = planned(*given)[0]
        tile = x.tile
        forward = tile.forward._replace(**{k: v for k, v in change.items() if k in tile.forward._fields})
        more = {k: v for k, v in change.items() if k in ("part_keys", "part_registers")}
        return [x._replace(tile=tile._replace(forward=forward, **more), num_splits=change.get("splits", x.num_splits))]
    return candidates


def captured(label, call, on, patch):
    fast_path.forget()
    try:
        with patch:
            return Entrant(label, clock.replayable([lambda: call(on)]))
    except Exception as error:
        print(label, "failed", f"{type(error).__name__}: {error}"[:150], flush=True)
        return None
    finally:
        fast_path.forget()


def show(name, entrants):
    entrants = [x for x in entrants if x is not None]
    interleave(clock, entrants, Timing(rounds=rounds, sample_seconds=0.003, rest_seconds=0.0005), str)
    base = entrants[0].seconds
    words = [f"{x.label} {1e6 * median(x.seconds):.1f} ({median(a / b for a, b in zip(x.seconds, base)):.3f})"
             if x.failure is None else f"{x.label} {x.failure}"[:80] for x in entrants]
    print(name, "|", "; ".join(words), flush=True)


if what == "decode":
    SHAPES = [tuple(map(int, x.split("x"))) for x in sys.argv[4].split(",")]
    for batch, keys in SHAPES:
        call = decoding(batch, keys, width)
        ways = [("plain", False, None), ("invariant", True, {})]
        if width == 128:
            ways += [("128 keys", True, {"block_n": 128, "part_registers": None}), ("128 keys, 168", True, {"block_n": 128}),
                     ("255", True, {"part_registers": None})]
            if batch <= 8:
                ways += [(f"128 keys, {n} splits", True, {"block_n": 128, "part_registers": None, "splits": n}) for n in ((8, 16) if batch == 1 else (4, 8))]
        elif batch in (1, 8):
            ways += [(f"{n} splits", True, {"splits": n}) for n in ((8, 32) if batch == 1 else (2, 4, 8, 16))]
            ways += [("255", True, {"part_registers": None})] if width == 64 else [("168", True, {"part_registers": 168})]
        patches = [(label, on, mock.patch.object(support, "candidates", tiles_of(change)) if change else mock.patch.dict({}))
                   for label, on, change in ways]
        show(f"decode {width} {batch}x{keys}", [captured(label, call, on, patch) for label, on, patch in patches])
        del call
else:
    D = tables.D64
    configs = {
        "2x128": ForwardConfig(D, D, 64, 128, 2, 4),
        "3x128": tables.three_warpgroups(D, 128),
        "1x64": tables.one_warpgroup(D, 64, 3, programs=3),
        "2x64": ForwardConfig(D, D, 64, 64, 2, 6),
        "2x64, 16 exps": ForwardConfig(D, D, 64, 64, 2, 6, speculative_exps=8),
        "3x64": ForwardConfig(D, D, 64, 64, 3, 6, 160, 32, speculative_exps=0),
        "2x64, 2 programs": ForwardConfig(D, D, 64, 64, 2, 3, 112, 24, speculative_exps=0, programs_per_core=2),
        "1x64, 2 programs": tables.one_warpgroup(D, 64, 4, programs=2),
    }
    for batch, tokens in ((32, 512), (4, 4096), (1, 16384)):
        call = prefill(batch, tokens, 64)
        found = [captured("plain", call, False, mock.patch.dict({})), captured("invariant", call, True, mock.patch.dict({}))]
        found += [captured(label, call, False, mock.patch.dict(tables.FORWARD, {(64, 64): (config,)})) for label, config in configs.items()]
        show(f"prefill {batch}x{tokens}", found)
