"""Table of how evenly layouts share the visible pairs of masks."""

from typing import Any

import torch
from cells import markdown

from flashtile import mask_mods
from flashtile.call.window import Window
from flashtile.distributed import Layout, balanced
from flashtile.distributed.balance import visible_pairs
from flashtile.distributed.inputs import documents_of
from flashtile.distributed.work import imbalance

LENGTH, RANKS = 2**17, (2, 8, 32)


def calls() -> dict[str, tuple[Window, dict[str, Any]]]:
    """The window of each call, and the arguments of `balanced`."""
    draws = torch.randn(32, generator=torch.Generator().manual_seed(0)).exp()
    ends = (draws.cumsum(0) / draws.sum() * LENGTH).round().int().tolist()
    causal = Window(None, 0)
    return {
        "causal": (causal, {"causal": True}),
        "window of 4096": (Window(4095, 0), {"window": (4095, 0)}),
        "32 packed documents, causal": (causal, {"causal": True, "cu_seqlens": [0, *ends]}),
        "prefix of a third": (Window(), {"mask": mask_mods.prefix(torch.tensor([LENGTH // 3]))}),
    }


def balance() -> str:
    """A row for each call and number of ranks: the busiest rank's pairs over the mean, and a rank's most pieces."""
    body = []
    for name, (window, arguments) in calls().items():
        offsets = arguments.get("cu_seqlens")
        documents = None if offsets is None else documents_of(offsets, None)
        work = visible_pairs(LENGTH, LENGTH, window, arguments.get("mask"), documents, 1, 1).of_rows()
        for ranks in RANKS:
            even = balanced(ranks, LENGTH, **arguments)
            layouts = Layout("contiguous", LENGTH, ranks), Layout("zigzag", LENGTH, ranks), even
            pieces = max(len(even.pieces(rank)) for rank in range(ranks))
            body.append([name, str(ranks), *(f"{imbalance(work, x):.2f}" for x in layouts), str(pieces)])
    return markdown(("mask", "ranks", "contiguous", "zigzag", "balanced", "its pieces of a rank"), body)


TABLES = {"balance": balance}
