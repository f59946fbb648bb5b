"""Named problems for the Hopper kernels, and the calls whose kernels are compiled without a GPU."""

from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from offline.families import call_of
from variants import (
    CAUSAL,
    FP16,
    FP32,
    LENGTHS,
    Draw,
    Sizes,
    Variant,
    all_of,
    bias,
    dropout,
    fixed,
    mask,
    sinks,
    slopes,
    slopes_of_sequences,
)

from flashtile.api.explain import described_call
from flashtile.backend.hopper.plan import candidates
from flashtile.backend.hopper.tile_config import ForwardConfig
from flashtile.call.call import Call
from flashtile.testing.case import Case, ExactSides

LONGER = (*LENGTHS[9:], 192, 193, 255, 256, 383, 384, 385, 511, 513, 640)  # around the edges of all tiles

NUMBERS = fixed(causal=True, window=(200, None), softcap=20.0, scale=0.2)
FEATURES = {
    "full": fixed(),
    "causal": CAUSAL,
    "top left": fixed(causal="top_left", window=(None, 60)),
    "window": fixed(window=(40, 25)),
    "causal window": fixed(causal=True, window=(150, None)),
    "softcap": fixed(causal=True, softcap=3.0),
    "slopes": all_of(CAUSAL, slopes),
    "slopes of sequences": slopes_of_sequences,
    "sinks": all_of(CAUSAL, sinks),
    "everything": all_of(NUMBERS, slopes, sinks),
}
DETERMINISTIC = fixed(deterministic=True)
EVERYTHING = all_of(NUMBERS, slopes_of_sequences, sinks)
VARIANTS = {
    f"{name} {dim}": Variant(features, head_dim=dim) for name, features in FEATURES.items() for dim in (64, 128)
}
VARIANTS |= {
    "grouped heads 64": Variant(CAUSAL, heads=(6, 2)),
    "grouped heads 128": Variant(head_dim=128, heads=(4, 1), transposed=True),
    "fp16 64": Variant(CAUSAL, FP16, transposed=True),
    "fp16 128": Variant(CAUSAL, FP16, head_dim=128),
    "window of earlier keys 64": Variant(fixed(window=ExactSides((60, -5)))),
    "packed window of later keys 128": Variant(
        fixed(window=ExactSides((-3, 70)), deterministic=True), layout="packed", head_dim=128, heads=(4, 2)
    ),
    "negative scale": Variant(fixed(scale=-0.1), head_dim=128),
    "packed 64": Variant(CAUSAL, layout="packed", heads=(6, 2)),
    "packed 128": Variant(layout="packed", head_dim=128),
    "packed window 128": Variant(fixed(window=(50, 10)), layout="packed", head_dim=128, heads=(4, 2)),
    "packed everything 64": Variant(EVERYTHING, layout="used"),
    "packed sinks 64": Variant(all_of(CAUSAL, sinks), layout="used", heads=(4, 2)),
    "packed softcap 128": Variant(fixed(causal="top_left", softcap=3.0), layout="used", head_dim=128),
}
CHUNKED = {  # head dimensions that are split into chunks
    "causal 80": Variant(CAUSAL, head_dim=80, heads=(4, 2)),
    "packed 80": Variant(CAUSAL, layout="packed", head_dim=80, heads=(4, 2)),
    "packed everything 80": Variant(EVERYTHING, FP16, head_dim=80, layout="used"),
    "causal 96": Variant(CAUSAL, head_dim=96),
    "window 96": Variant(FEATURES["window"], head_dim=96),
    "grouped heads 96": Variant(CAUSAL, FP16, head_dim=96, heads=(6, 2), transposed=True),
    "packed 96": Variant(layout="packed", head_dim=96),
    "packed everything 96": Variant(EVERYTHING, head_dim=96, layout="used"),
    "window 160": Variant(FEATURES["window"], head_dim=160),
    "grouped heads 160": Variant(CAUSAL, FP16, head_dim=160, heads=(4, 1), transposed=True),
    "packed 160": Variant(CAUSAL, layout="packed", head_dim=160, heads=(4, 2)),
    "causal 192/128": Variant(CAUSAL, head_dim=192, head_dim_v=128),
    "everything 192/128": Variant(all_of(NUMBERS, slopes, sinks), head_dim=192, head_dim_v=128),
    "packed window 192/128": Variant(fixed(window=(50, 10)), layout="packed", head_dim=192, head_dim_v=128),
    "window 192": Variant(fixed(window=(40, 25)), head_dim=192, heads=(4, 2)),
    "packed 192": Variant(CAUSAL, layout="packed", head_dim=192),
    "full 256": Variant(head_dim=256),
    "causal 256": Variant(CAUSAL, head_dim=256, heads=(4, 1)),
    "top left 256": Variant(FEATURES["top left"], head_dim=256),
    "packed 256": Variant(CAUSAL, layout="packed", head_dim=256, heads=(4, 2)),
}
NARROWER = {  # than the kernels
    "causal 40": Variant(CAUSAL, head_dim=40, heads=(4, 2), transposed=True),
    "packed everything 8": Variant(EVERYTHING, FP16, head_dim=8, layout="used"),
    "full 32": Variant(head_dim=32, heads=(4, 2)),
    "causal 24": Variant(all_of(CAUSAL, DETERMINISTIC), head_dim=24, transposed=True),
    "packed 32": Variant(FEATURES["window"], head_dim=32, layout="packed"),
    "window 72": Variant(FEATURES["window"], head_dim=72),
    "grouped heads 72": Variant(CAUSAL, head_dim=72, heads=(6, 2), transposed=True),
    "packed everything 72": Variant(EVERYTHING, head_dim=72, layout="used"),
    "packed 88": Variant(CAUSAL, layout="packed", head_dim=88, heads=(4, 2)),
    "sinks 104/72": Variant(FEATURES["sinks"], head_dim=104, head_dim_v=72),
    "causal 152": Variant(CAUSAL, FP16, head_dim=152, heads=(4, 1), transposed=True),
    "packed 176": Variant(CAUSAL, layout="packed", head_dim=176),
    "packed everything 136/56": Variant(EVERYTHING, head_dim=136, head_dim_v=56, layout="packed"),
    "window 248/200": Variant(FEATURES["window"], head_dim=248, head_dim_v=200),
}
BIASED = {  # with a value for each pair
    "bias 64": Variant(bias(True, True, True, True, half=True)),
    "bias of heads 32": Variant(bias(False, True, True, True, half=True), head_dim=32),
    "bias of heads 128": Variant(all_of(CAUSAL, bias(False, True, True, True)), head_dim=128, heads=(4, 2)),
    "bias of keys 96": Variant(bias(True, False, False, True, half=True), head_dim=96),
    "bias of rows 256": Variant(bias(False, True, True, False), head_dim=256),
    "bias 192/128": Variant(bias(True, True, True, True), head_dim=192, head_dim_v=128),
    "packed bias 128": Variant(all_of(CAUSAL, bias(True, True, True, True)), FP16, head_dim=128, layout="used"),
    "mask 64": Variant(mask),
    "mask 32": Variant(all_of(mask, CAUSAL), head_dim=32),
    "mask and window 128": Variant(all_of(mask, fixed(window=(90, 20))), head_dim=128, heads=(4, 2)),
    "mask and bias 192": Variant(all_of(mask, bias(False, False, True, True), slopes), head_dim=192),
    "packed mask 40": Variant(all_of(mask, sinks), head_dim=40, layout="packed"),
    "mask and softcap 128": Variant(all_of(mask, FEATURES["softcap"], bias(True, True, True, True)), head_dim=128),
}
DROPPED = {  # with dropout
    "dropout 64": Variant(dropout, heads=(4, 2)),
    "dropout 128": Variant(all_of(dropout, CAUSAL), FP16, head_dim=128, transposed=True),
    "dropout and window 96": Variant(all_of(dropout, FEATURES["window"]), head_dim=96),
    "dropout and sinks 40": Variant(all_of(dropout, FEATURES["sinks"]), head_dim=40, heads=(4, 1)),
    "dropout 192/128": Variant(all_of(dropout, CAUSAL), head_dim=192, head_dim_v=128),
    "dropout 256": Variant(dropout, head_dim=256, heads=(4, 2)),
    "dropout and softcap 128": Variant(all_of(dropout, FEATURES["softcap"], slopes), head_dim=128),
    "dropout and bias 64": Variant(all_of(dropout, bias(False, True, True, True, half=True), mask)),
    "packed dropout 64": Variant(all_of(dropout, CAUSAL), layout="used", heads=(4, 2)),
    "packed dropout 128": Variant(all_of(dropout, DETERMINISTIC), head_dim=128, layout="packed"),
    "packed dropout 256": Variant(all_of(dropout, CAUSAL), head_dim=256, layout="packed"),
    "half dropped 64": Variant(all_of(fixed(dropout_p=0.5, dropout_seed=2**62 + 3), CAUSAL)),
    "most dropped 128": Variant(fixed(dropout_p=0.9, dropout_seed=-5), head_dim=128),
    "nothing dropped 64": Variant(fixed(dropout_p=1e-6, dropout_seed=1)),
}
SLOPED = {  # with gradients of slopes
    "packed slopes 64": Variant(all_of(CAUSAL, slopes), layout="used", heads=(4, 2)),
    "packed slopes of sequences 128": Variant(all_of(dropout, slopes_of_sequences), head_dim=128, layout="packed"),
    "slopes and window 96": Variant(all_of(slopes, FEATURES["window"]), head_dim=96, heads=(4, 1)),
}
PAGED = {
    "paged 64": Variant(CAUSAL, layout="paged", heads=(6, 2)),
    "paged everything 128": Variant(EVERYTHING, layout="paged", head_dim=128, page_size=64),
    "paged window 192/128": Variant(
        fixed(window=(50, 10)), FP16, layout="paged", head_dim=192, head_dim_v=128, page_size=8
    ),
    "paged 256": Variant(layout="paged", head_dim=256, heads=(4, 2), page_size=192),
}
WIDE = {  # whose columns two warpgroups share
    "grouped heads 512": Variant(CAUSAL, head_dim=512, heads=(4, 1), transposed=True),
    "window 320": Variant(FEATURES["window"], FP16, head_dim=320),
    "packed everything 512/264": Variant(EVERYTHING, head_dim=512, head_dim_v=264, layout="used", heads=(4, 2)),
    "dropout and bias 264/512": Variant(all_of(dropout, bias(True, True, True, True)), head_dim=264, head_dim_v=512),
    "mask and softcap 384": Variant(all_of(mask, FEATURES["softcap"]), head_dim=384),
    "paged 512": Variant(CAUSAL, layout="paged", head_dim=512, heads=(4, 1), page_size=48),
}
FLOAT32 = {
    "float32 causal 128": Variant(CAUSAL, FP32, head_dim=128, heads=(4, 2), transposed=True),
    "float32 window 64": Variant(FEATURES["window"], FP32),
    "float32 top left 72": Variant(all_of(FEATURES["top left"], fixed(scale=-0.1)), FP32, head_dim=72, heads=(4, 1)),
    "packed float32 96/80": Variant(CAUSAL, FP32, layout="used", head_dim=96, head_dim_v=80, heads=(4, 2)),
}
VARIANTS |= CHUNKED | NARROWER | BIASED | DROPPED | SLOPED | PAGED | WIDE | FLOAT32
VARIANTS |= {
    f"deterministic {name}": replace(VARIANTS[name], features=all_of(VARIANTS[name].features, DETERMINISTIC))
    for name in ("full 64", "causal 64", "causal 128", "window 64", "top left 128", "grouped heads 128", "causal 96")
}
VARIANTS = {name: replace(variant, longest=max(LONGER)) for name, variant in VARIANTS.items()}
FORWARD_ONLY = ("softcap 64", "everything 64", "everything 8")


def case_of(name: str, seed: int, device: str, lengths: tuple[int, ...] = LONGER) -> Case:
    """A random problem of a variant. The backward pass of FORWARD_ONLY, pages and wide dropout, the gradient of a bias,
    and that of slopes with a softcap or wide heads, run in other backends.
    """
    variant = VARIANTS[name]
    if device == "cpu":  # in the emulation, whose time is that of all tiles
        variant = replace(variant, batches=(1, 2))
    case = variant.case(seed, device, lengths)
    wide = max(case.arguments[x].shape[-1] for x in "qv") > 128
    constant = ("alibi_slopes", "bias") if wide or case.arguments.get("softcap") else ("bias",)
    wide_dropout = name in WIDE and case.arguments.get("dropout_p")
    forward_only = name.endswith(FORWARD_ONLY) or variant.layout == "paged" or bool(wide_dropout)
    return replace(case, forward_only=forward_only, constant=constant)


# Lengths with different configurations: one block of keys, enough heads that fill the device, and others.
ONE, FEW, SHORT, LONG = 100, 320, 512, 8192
FAMILIES = [(name, dim, seqlen) for name in FEATURES for dim in (64, 128) for seqlen in (SHORT, LONG)]
FAMILIES += [(name, dim, SHORT) for name in FEATURES for dim in (80, 96, 160, 192, (192, 128), 256)]
FAMILIES += [(name, dim, LONG) for name in FEATURES for dim in (80, 96)]
FAMILIES += [(name, 32, seqlen) for name in ("full", "causal", "everything") for seqlen in (SHORT, LONG)]
FAMILIES += [(name, VARIANTS[name].head_dim, SHORT) for name in VARIANTS if "packed" in name]
FAMILIES += [("full", dim, seqlen) for dim in (64, 128) for seqlen in (ONE, FEW)]
BIAS_TILES = "bias in tiles"
FAMILIES += [(name, 512, seqlen) for name in FEATURES for seqlen in (SHORT, LONG)]
FAMILIES += [(name, VARIANTS[name].head_dim, SHORT) for name in {**PAGED, **WIDE} if "packed" not in name]
FAMILIES += [(name, VARIANTS[name].head_dim, SHORT) for name in FLOAT32 if "packed" not in name]
FAMILIES += [(BIAS_TILES, dim, SHORT) for dim in (32, 64, 80, 96, 128)]


def call_of_family(name: str, head_dim: int | tuple[int, int], seqlen: int) -> Call:
    """`head_dim` may be a pair: of q and k, and of v."""
    if name in VARIANTS:
        return call_of(VARIANTS[name])
    width, width_v = head_dim if isinstance(head_dim, tuple) else (head_dim, head_dim)
    heads = 64 if seqlen == FEW else 2
    q, k, v = (torch.empty(1, heads, seqlen, d, dtype=torch.bfloat16) for d in (width, width, width_v))
    features = FEATURES[name] if name in FEATURES else bias(False, True, True, True, half=True)
    keywords = features(Draw(0, (seqlen,)), Sizes(1, heads, seqlen, seqlen, q.dtype))
    return described_call(q, k, v, None, None, keywords)


def with_tiles(configs: dict[tuple[int, int], ForwardConfig]) -> Any:
    """A patch by which forward takes these tiles for their widths, whatever the call."""
    forward = candidates.FORWARD | {width: (config,) for width, config in configs.items()}
    return mock.patch.multiple(candidates, FORWARD=forward, warpgroups_with_room=lambda *_: (1, 2, 3))


def tiles_of(num_warpgroups: int, block_n: int | None = None) -> dict[tuple[int, int], ForwardConfig]:
    """By width, the first kernel of so many warpgroups, of a given block of keys."""
    found = {}
    for width, configs in candidates.FORWARD.items():
        fitting = [x for x in configs if x.num_warpgroups == num_warpgroups and block_n in (None, x.block_n)]
        if fitting:
            found[width] = fitting[0]
    return found
