"""Ready mask functions, and the pairs that the definitions of their sources show."""

from collections.abc import Callable

import torch
from checking import dense_case
from torch import Tensor

from flashtile import MaskMod, mask_mods
from flashtile.testing.case import Case
from flashtile.testing.oracle import solve
from flashtile.testing.tolerance import compare

N = 24
ROWS, KEYS = torch.arange(N)[:, None], torch.arange(N)
LENGTHS = torch.tensor([5, 0])
IDS = torch.tensor([7] * 3 + [2] * 9 + [7] * 2 + [0] * 10)
PARENTS = [-1, 0, 0, 1, 1, 2, 3, 3, 5, -1, 9, 2, 2, 4, 4, 1, 9, 10, 17, 0, 19, 19, -1, 22]


def by_pairs(visible: Callable[[int, int], bool]) -> Tensor:
    return torch.tensor([[visible(i, j) for j in range(N)] for i in range(N)])


def neighbors(place: int, size: int, kernel: int) -> set[int]:
    """The `kernel` nearest of `size` places; at a border, the first or last ones."""
    first = min(max(place - kernel // 2, 0), size - kernel)
    return set(range(first, first + kernel))


def in_grid(i: int, j: int) -> bool:
    """Whether a token of a grid of 4 x 6 is among the 3 x 5 nearest ones of another."""
    return j // 6 in neighbors(i // 6, 4, 3) and j % 6 in neighbors(i % 6, 6, 5)


def diffuses(i: int, j: int) -> bool:
    """The three parts of the mask of block diffusion, for 12 noisy and 12 clean tokens in blocks of 3."""
    block_i, block_j = i % 12 // 3, j % 12 // 3
    if i < 12:
        return block_i == block_j if j < 12 else block_i > block_j
    return j >= 12 and block_i >= block_j


def is_ancestor(node: int, key: int) -> bool:
    while node >= 0 and node != key:
        node = PARENTS[node]
    return node == key


def context_and_tree(i: int, j: int) -> bool:
    return j < 4 or is_ancestor(i, j - 4)


RUNS = torch.randint(0, N + 1, (2, 1, N, 4), generator=torch.Generator().manual_seed(5))


def in_columns(bounds: list[int], causal: bool) -> Tensor:
    """The mask of some of RUNS, of each sequence; as in FlashMask's paper, -inf for the rows in a column's runs."""
    visible = torch.ones(2, 1, N, N, dtype=torch.bool)
    for b in range(2):
        for j, column in enumerate(RUNS[b, 0, :, bounds].tolist()):
            first, *rest = column
            visible[b, 0, first : rest[0] if len(bounds) == (2 if causal else 4) else N, j] = False
            if causal:
                visible[b, 0, :j, j] = False
            else:
                visible[b, 0, rest[1] if len(bounds) == 4 else 0 : rest[-1], j] = False
    return visible


CAUSAL, DOCUMENTS = ROWS >= KEYS, IDS[:, None] == IDS
EXPECTED: dict[str, tuple[MaskMod, Tensor]] = {
    "causal": (mask_mods.causal(), CAUSAL),
    "causal with an offset": (mask_mods.causal(torch.tensor(3)), ROWS + 3 >= KEYS),
    "window": (mask_mods.window(4, 2), (ROWS - KEYS <= 4) & (KEYS - ROWS <= 2)),
    "window with an offset": (mask_mods.window(4, 0, -2), (ROWS - 2 - KEYS <= 4) & (KEYS <= ROWS - 2)),
    "prefix": (mask_mods.prefix(LENGTHS), torch.stack([(n > KEYS) | CAUSAL for n in LENGTHS])[:, None]),
    "document": (mask_mods.document(IDS), DOCUMENTS),
    "document of sequences": (
        mask_mods.document(torch.stack([IDS, IDS.flip(0)]).int()),
        torch.stack([DOCUMENTS, DOCUMENTS.flip(0, 1)])[:, None],
    ),
    "document with keys": (mask_mods.document(IDS, IDS.flip(0)), IDS[:, None] == IDS.flip(0)),
    "dilated": (mask_mods.dilated(8, 3), by_pairs(lambda i, j: abs(i - j) in (0, 3, 6))),
    "neighborhood": (mask_mods.neighborhood((N,), (7,)), by_pairs(lambda i, j: j in neighbors(i, N, 7))),
    "neighborhood of a grid": (mask_mods.neighborhood((4, 6), (3, 5)), by_pairs(in_grid)),
    "block_diffusion": (mask_mods.block_diffusion(12, 3), by_pairs(diffuses)),
    "flashmask of LTS, one sequence": (mask_mods.flashmask(RUNS[1:, ..., :1], causal=True), in_columns([0], True)[1]),
    "flashmask of LTS, LTE": (mask_mods.flashmask(RUNS[..., :2].int(), causal=True), in_columns([0, 1], True)),
    "flashmask of LTS, UTE": (mask_mods.flashmask(RUNS[..., ::3]), in_columns([0, 3], False)),
    "flashmask": (mask_mods.flashmask(RUNS), in_columns([0, 1, 2, 3], False)),
    "tree": (mask_mods.tree(torch.tensor(PARENTS)), by_pairs(is_ancestor)),
    "tree with a context": (mask_mods.tree(torch.tensor(PARENTS), 4), by_pairs(context_and_tree)),
    "and_masks": (mask_mods.and_masks(mask_mods.causal(), lambda b, h, i, j: IDS[i] == IDS[j]), CAUSAL & DOCUMENTS),
    "or_masks": (
        mask_mods.or_masks(mask_mods.document(IDS), mask_mods.prefix(LENGTHS), lambda b, h, i, j: (b == 1) & (j == 9)),
        torch.stack([DOCUMENTS | CAUSAL | (LENGTHS[b] > KEYS) | ((b == 1) & (KEYS == 9)) for b in range(2)])[:, None],
    ),
}


def of_head(mod: MaskMod, n: int) -> MaskMod:
    return mask_mods.and_masks(mod, lambda b, h, i, j: h == n)


def each_in_a_head() -> tuple[Case, MaskMod]:
    """A call whose heads have a mask each, as a tensor; and the same masks as one function, for which a backend
    compiles once.
    """
    mods, expected = zip(*EXPECTED.values(), strict=True)
    visible = torch.cat([x.expand(2, 1, N, N) for x in expected], dim=1)
    sizes = {"num_heads_q": len(mods), "num_heads_kv": len(mods) // 2, "seqlen_q": N, "seqlen_k": N}
    return dense_case(**sizes, mask=visible), mask_mods.or_masks(*(of_head(mod, n) for n, mod in enumerate(mods)))


def assert_ready_masks(backend: str) -> None:
    case, mod = each_in_a_head()
    expected = solve(case)
    case.arguments["mask"] = mod
    worst = compare(case.run(backend), case, expected)[0]
    assert worst.ok, worst
