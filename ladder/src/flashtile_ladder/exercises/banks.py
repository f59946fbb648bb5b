"""Eight rows of a tile in shared memory, and how they may be laid out: for which d does ldmatrix need one turn?"""

from collections.abc import Callable

SIZES = (16, 32, 64, 128)  # numbers of 16 bits in a row
LINE = 8  # pieces of 16 bytes that shared memory hands out in a turn
CASES: dict[str, Callable[[int, int, int], int]] = {  # the place of a piece, from its row, itself, and pieces of a row
    "rows as they are": lambda row, piece, pieces: row * pieces + piece,
    "padded by 16 bytes": lambda row, piece, pieces: row * (pieces + 1) + piece,
    "swizzled by its row": lambda row, piece, pieces: row * pieces + (piece ^ row % min(pieces, LINE)),
    "swizzled by its line": lambda row, piece, pieces: (
        row * pieces + (piece ^ row // max(LINE // pieces, 1) % min(pieces, LINE))
    ),
}


def predicted() -> dict[str, set[int]]:
    """Of d = 16, 32, 64 and 128, those for which the pieces of eight rows lie in different banks."""
    free = {name: set() for name in CASES}
    free["rows as they are"] = set()
    free["padded by 16 bytes"] = {16, 32, 64, 128}
    free["swizzled by its row"] = {64, 128}
    free["swizzled by its line"] = {16, 32, 64, 128}
    return free


def turns(name: str, d: int) -> int:
    """Of the slowest of all reads of one piece from each of eight rows."""
    most = 0
    for first in (0, 8):
        for piece in range(d // 8):
            places = [CASES[name](row, piece, d // 8) % LINE for row in range(first, first + 8)]
            most = max(most, *(places.count(x) for x in places))
    return most


def holds(name: str, d: int) -> bool:
    return turns(name, d) == 1


def sentence(name: str, d: int, right: bool) -> str:
    return f"At d = {d}, {name!r} takes {'one turn' if right else f'{turns(name, d)} turns'}"
