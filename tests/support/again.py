"""Emulated problems whose every kernel, with its constants, others run too. They wait for `pytest -m again`."""

from collections.abc import Iterable
from typing import Any

import pytest

FIRST_TILES = """
    bias 64; bias of heads 128; bias of heads 32; causal 128; causal 40; causal 64; causal 96; causal window 128;
    causal window 64; deterministic causal 128; deterministic causal 64; deterministic causal 96; deterministic full
    64; deterministic grouped heads 128; deterministic top left 128; deterministic window 64; dropout 192/128;
    dropout 256; everything 192/128; float32 window 64; fp16 128; fp16 64; full 128; full 256; full 32; full 64;
    grouped heads 64; grouped heads 72; grouped heads 96; mask 32; mask and softcap 384; nothing dropped 64; packed
    128; packed 64; packed 80; packed dropout 256; packed everything 72; packed everything 8; packed everything 96;
    packed mask 40; packed sinks 64; packed window 128; paged window 192/128; sinks 128; sinks 64; slopes 64; slopes
    and window 96; top left 128; window 128; window 320; window 64
"""
OTHER_TILES = """
    bias 192/128; causal 128; causal 152; causal 96; causal window 128; dropout and bias 64; everything 192/128;
    everything 64; grouped heads 128; grouped heads 160; nothing dropped 64; packed 96; packed everything 64; packed
    everything 8; paged window 192/128; top left 256; window 320; window 64; window of earlier keys 64
"""


def marked(names: Iterable[str], again: str) -> list[Any]:
    """The names, of which those in the text have the marker."""
    names, known = list(names), again.replace("\n    ", " ").strip().split("; ")
    assert not {*known} - {*names}, "unknown problems"
    return [pytest.param(name, marks=pytest.mark.again) if name in known else name for name in names]
