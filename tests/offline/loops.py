"""The innermost loops of machine code: the instruction that multiplies there, and accesses of spilled registers."""

import re
from collections import Counter
from typing import NamedTuple

LABEL = re.compile(r"^\s*(\.L\w+):")
BRANCH = re.compile(r"\b(?:BRA|s_c?branch\w*)\b[^;\n]*?(\.L\w+)")
PRODUCT = re.compile(r"\b(?:(?:U?[A-Z]{1,3}MMA|UTC[A-Z]*MMA)(?:\.[\w.]+)?|v_mfma_\w+)")
SPILL = re.compile(r"\b(?:STL|LDL|scratch_(?:load|store))\w*")


class Loops(NamedTuple):
    """Of a kernel. `spills` are instructions of innermost loops that multiply."""

    products: str  # the most frequent instruction that multiplies matrices; empty if there is none
    spills: int


def product_loops(code: str) -> list[list[str]]:
    """Lines from a label to a branch back to it, of loops that multiply without another such loop inside."""
    lines, labels = code.splitlines(), dict[str, int]()
    loops: set[tuple[int, int]] = set()
    for n, line in enumerate(lines):
        if label := LABEL.match(line):
            labels[label[1]] = n
        elif (branch := BRANCH.search(line)) and any(map(PRODUCT.search, lines[labels.get(branch[1], n) : n])):
            loops.add((labels[branch[1]], n))
    inner = [x for x in loops if not any(x[0] <= y[0] and y[1] <= x[1] and x != y for y in loops)]
    return [lines[start : end + 1] for start, end in sorted(inner)]


def loops_of(code: str) -> Loops:
    spills = sum(SPILL.search(line) is not None for loop in product_loops(code) for line in loop)
    products = Counter(PRODUCT.findall(code))
    return Loops(products.most_common(1)[0][0] if products else "", spills)
