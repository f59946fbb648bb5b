"""Operations of multi-head attention with its projections: formulas, and the counts that they have to match.

One layer has N tokens of D = h d numbers. A product of matrices [a, b] and [b, c] costs 2 a b c operations.

    projections of q, k, v   3 x 2 N D²         N D² is the largest term as long as N < 2 D
    scores       Q Kᵀ        2 N² d for a head, 2 N² D for all
    weights times values     2 N² d for a head, 2 N² D for all: quadratic in N, as scores are
    output projection        2 N D²

So all of it is 8 N D² + 4 N² D, and the quadratic part is the larger one from N = 2 D on. The number of heads is not in
the sum: h heads of D / h cost what one head of D does. Only the softmax has it, 5 operations for each of h N² scores.

`python -m flashtile_ladder related.complexity` prints formulas and counts for a few shapes.
"""

import math

import torch

SOFTMAX_OPERATIONS = 5  # for each score: compare, subtract, exp, add, divide


def formulas(n: int, d: int, heads: int) -> dict[str, int]:
    """Operations of each product of one layer with `heads` heads of `d`."""
    wide = heads * d
    return {
        "projections of q, k, v": 3 * 2 * n * wide**2,
        "scores": 2 * n**2 * wide,
        "weights times values": 2 * n**2 * wide,
        "output projection": 2 * n * wide**2,
    }


def count(n: int, d: int, heads: int) -> dict[str, int]:
    """The same, counted from the operands and results of the products while a layer runs."""
    wide = heads * d
    x = torch.randn(n, wide)  # [N, D]
    w_qkv, w_out = torch.randn(wide, 3 * wide), torch.randn(wide, wide)
    counts = {}

    def product(name: str, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        result = a @ b
        counts[name] = 2 * result.numel() * a.shape[-1]  # a multiplication and an addition for each term of each sum
        return result

    qkv = product("projections of q, k, v", x, w_qkv)  # [N, 3 D]
    q, k, v = qkv.view(n, 3, heads, d).permute(1, 2, 0, 3)  # [h, N, d] x 3
    p = torch.softmax(product("scores", q, k.mT) / math.sqrt(d), dim=-1)  # [h, N, N]
    out = product("weights times values", p, v)  # [h, N, d]
    product("output projection", out.transpose(0, 1).reshape(n, wide), w_out)  # [N, D]
    return counts


def main() -> None:
    for n, d, heads in ((128, 64, 4), (128, 256, 1), (512, 64, 4), (2048, 64, 4)):
        counted = count(n, d, heads)
        softmax = SOFTMAX_OPERATIONS * heads * n**2
        quadratic = counted["scores"] + counted["weights times values"]
        share = quadratic / sum(counted.values())
        words = "as the formulas" if counted == formulas(n, d, heads) else "NOT as the formulas"
        print(f"N = {n:>4}, {heads:>2} heads of {d:>3}: {sum(counted.values()) / 1e9:5.2f} G, {words};", end=" ")
        print(f"Q Kᵀ and P V {share:.0%}, softmax {softmax / 1e9:.2f} G more")
