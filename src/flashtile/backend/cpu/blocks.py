"""The table of blocks that a kernel reads: which keys of a block a panel of rows sees, by the mask function.

A table belongs to one call: it is computed from the values that the mask's tensors have then, and again for backward.
That is a small part of the time of a call that has one.
"""

import functools
import itertools
from typing import NamedTuple

import torch
from torch import Tensor

from ...call.call import Call
from ...call.formulas import mask_formula
from ...call.problem import accumulation_dtype
from ...expression import Formula
from ...expression.blocks import FULL, HIDDEN, PARTIAL, Blocks, block_visibility, depends_on
from .lengths import Lengths
from .tables import PART, entry
from .workspace import BLOCK_PARTS

LEAST_WORK = 2**24  # multiply-adds of a call: about a millisecond, ten times that of a table


class BlockTable(NamedTuple):
    """The positions of a table's panels and of the parts of its blocks; three parts are a block."""

    formula: Formula
    blocks: Blocks
    heads_kv: int

    @classmethod
    def of(cls, call: Call, lengths: Lengths, panel_rows: int) -> "BlockTable | None":
        """The table for panels of `panel_rows` packed query rows; `None` for a call without a mask function, or too
        small for one.
        """
        formula = mask_formula(call)
        t, s = call.tensors, call.settings
        heads_kv = t.k.shape[1 if call.layout == "dense" else -2]
        width = t.q.shape[-1] + t.v.shape[-1]
        work = lengths.batch * heads_kv * lengths.max_rows * lengths.max_seqlen_k * width
        if formula is None or work < LEAST_WORK:
            return None
        heads = t.q.shape[1]
        blocks = Blocks(
            torch.arange(s.b0, s.b0 + lengths.batch),
            torch.arange(s.h0, s.h0 + heads),
            panel_positions(lengths.max_rows, panel_rows, heads // heads_kv) + s.i0,
            part_positions(lengths.max_seqlen_k) + s.j0,
        )
        return cls(formula, blocks, heads_kv)

    def entries(self, call: Call) -> Tensor:
        """The table, contiguous: uint8 `[B | 1, Hkv | 1, panels, blocks of keys]`."""
        real = accumulation_dtype(call.tensors.q.dtype)
        states = block_visibility(self.formula, call.tensors.score_mod_tensors, self.blocks, real)
        if states.shape[1] > self.heads_kv:  # a panel has rows of all heads that share a key head
            grouped = states.unflatten(1, (self.heads_kv, -1))
            low, high = grouped.amin(dim=2), grouped.amax(dim=2)
            states = torch.where(low == high, low, PARTIAL)
        first, *others = states.unflatten(-1, (-1, BLOCK_PARTS)).unbind(-1)
        number = first.to(torch.int32)
        for n, x in enumerate(others):
            number = number + 3 ** (n + 1) * x.to(torch.int32)
        return entry_of_parts()[number].contiguous()

    def strides(self) -> dict[str, int]:
        panels, keys = len(self.blocks.rows), len(self.blocks.keys) // BLOCK_PARTS
        apart_b, apart_h = (depends_on(self.formula, name) for name in "bh")
        of_sequence = panels * keys * (self.heads_kv if apart_h else 1)
        return {"block_b": of_sequence * apart_b, "block_h": panels * keys * apart_h, "block_i": keys}


@functools.cache
def entry_of_parts() -> Tensor:
    """The entry of a block by the states of its parts, as digits of a number to the base 3; the first part is the
    lowest digit.
    """
    found = []
    for backward in itertools.product((HIDDEN, PARTIAL, FULL), repeat=BLOCK_PARTS):
        parts = backward[::-1]
        seen = [n for n, state in enumerate(parts) if state != HIDDEN]
        if not seen:
            found.append(HIDDEN)
            continue
        first, last = seen[0], seen[-1]
        full = all(state == FULL for state in parts[first : last + 1])
        found.append(entry(FULL if full else PARTIAL, first, last))
    return torch.tensor(found, dtype=torch.uint8)


def panel_positions(rows: int, panel_rows: int, groups: int) -> Tensor:
    """The positions of each panel of packed rows, `[panels, positions]`; `kernels.tiles` says how rows are packed."""
    first = torch.arange(0, rows, panel_rows)[:, None]
    last = (first + panel_rows).clamp(max=rows) - 1
    count = (panel_rows - 1) // groups + 2 if groups > 1 else panel_rows
    return torch.minimum(first // groups + torch.arange(count), last // groups)


def part_positions(keys: int) -> Tensor:
    """The positions of each part of all blocks, `[parts, PART]`."""
    parts = -(-keys // (PART * BLOCK_PARTS)) * BLOCK_PARTS
    return torch.arange(parts * PART).clamp(max=keys - 1).view(parts, PART)


def table_strides(table: BlockTable | None) -> dict[str, int]:
    return {} if table is None else table.strides()


def table_tensors(table: BlockTable | None, call: Call) -> dict[str, Tensor]:
    """The table as an argument of a kernel."""
    return {} if table is None else {"blocks": table.entries(call)}
