"""Calls in which rows see nothing."""

from typing import Any

import torch

from flashtile.testing.case import MaskFunction

INF = torch.inf
ROW_1 = torch.arange(7)[:, None] == 1

# Calls of 7 rows and 9 keys in which one row or all rows see nothing, by cause.
BLIND: dict[str, dict[str, Any]] = {
    "no keys": {"seqlen_k": 0},
    "causal, more queries than keys": {"seqlen_q": 12, "seqlen_k": 5, "causal": True},
    "window left of the first key": {"seqlen_q": 12, "seqlen_k": 5, "window": (2, 1)},
    "top_left and window": {"seqlen_q": 4, "seqlen_k": 9, "causal": "top_left", "window": (1, None)},
    "mask of one row": {"mask": ~ROW_1[None, None]},
    "mask function of one row": {"mask": MaskFunction(lambda b, h, i, j: i != 1)},
    "mask of everything": {"mask": torch.zeros(1, 1, 1, 1, dtype=torch.bool)},
    "bias of -inf": {"bias": torch.where(ROW_1, -INF, 0.0)[None, None]},
    "score_mod of -inf": {"score_mod": lambda score, b, h, i, j: torch.where(i == 1, -INF, score)},
}
