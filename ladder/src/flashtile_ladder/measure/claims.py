"""Claims about attention that do not survive measurement: each a function that measures, and a verdict.

They are from teaching material on FlashAttention, and one is of an earlier version of this course. For some nothing was
measured; for others the measurement compared something else than the claim names. `python -m
flashtile_ladder.measure.claims` measures all of them on a CPU, in seconds. docs/ladder-claims.md explains each one and
has the same output, which a test compares with a new run.
"""

import itertools
import math
import textwrap
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .. import iomodel, step05_flash1, step06_flash2
from ..iomodel import Shape
from ..related import complexity, running_lse
from . import rounding

KB = 1024


class Verdict(NamedTuple):
    """A measurement in words with figures, and whether the claim holds."""

    measured: str
    holds: bool


class Claim(NamedTuple):
    name: str
    text: str  # what is claimed
    check: Callable[..., Verdict]
    ours: bool = False  # an earlier version of this course had it


CLAIMS: list[Claim] = []  # in the order of this file


def claim(name: str, text: str, ours: bool = False) -> Callable[[Callable[..., Verdict]], Callable[..., Verdict]]:
    """Put the decorated check into `CLAIMS`."""

    def listed(check: Callable[..., Verdict]) -> Callable[..., Verdict]:
        CLAIMS.append(Claim(name, text, check, ours))
        return check

    return listed


# Accuracy -------------------------------------------------------------------------------------------------------------


@claim("running log-sum-exp", "Carrying lse is more stable than carrying the sum, which may reach 1e30.")
def running_lse_is_stable(n: int = 262144) -> Verdict:
    found = running_lse.errors(n, rows=8)
    plain, running, shifted = found.values()
    words = f"error of lse at N = {n}: running sum {plain:.1e} , running log-sum-exp {running:.1e} , "
    words += f"{running / plain:.0f} times; {shifted:.1e} if shifted by lse. The sum is at most N, not 1e30"
    return Verdict(words, running <= plain)


@claim("Kahan", "Compensated summation does not make attention more accurate.")
def kahan_does_not_help(n: int = 256, d: int = 64) -> Verdict:
    """Errors against float64; against another float32 kernel, all that Kahan does is to differ from it."""
    words, gains = [], []
    for row in rounding.table(n, d):
        if row["change"] == "none":
            plain = row
        if row["change"] == "compensated sums (Kahan)":
            gains.append(plain["out_error"] / row["out_error"])
            words.append(
                f"at scale {row['scale']} error of out {plain['out_error']:.1e} , {row['out_error']:.1e} with Kahan"
            )
    return Verdict(f"{'; '.join(words)} : {gains[0]:.1f} and {gains[1]:.1f} times better", max(gains) <= 1)


def to_tf32(x: Tensor) -> Tensor:
    """What a tensor core reads of an operand."""
    return torch.from_numpy(rounding.truncated_to_tf32(x.numpy()))


@claim("float32", "Errors of 0.001 to 0.002 are those of float32 with the online softmax.")
def errors_are_float32s(lengths: Sequence[int] = (64, 128, 256, 512, 1024), d: int = 64) -> Verdict:
    """Largest errors of one head, with exact products of float32 numbers and with operands cut to TF32."""
    exact, cut = [], []
    for n in lengths:
        q, k, v = torch.randn(3, n, d, generator=torch.Generator().manual_seed(n))
        truth = torch.softmax(q.double() @ k.double().mT / math.sqrt(d), dim=1) @ v.double()  # [N, d]
        for errors, operand in ((exact, lambda x: x), (cut, to_tf32)):
            p = torch.softmax(operand(q) @ operand(k).mT / math.sqrt(d), dim=1)  # [N, N]
            errors.append(float((operand(p) @ operand(v) - truth).abs().max()))
    words = f"float32 at most {max(exact):.1e} ; with operands cut to TF32 " + " ".join(f"{x:.4f}" for x in cut)
    return Verdict(words + f" at N = {' '.join(map(str, lengths))}", max(exact) > 1e-3)


# Softmax --------------------------------------------------------------------------------------------------------------


def listing(x: Tensor) -> Tensor:
    """Scores `[R, N]` to "probabilities" `[R, N]`, with the mistake of a published "online softmax".

    The maximum begins with element 0, so the sum has to begin with 1 = exp(x_0 - x_0). It begins with 0, and the loop
    begins with element 1: element 0 is not in the sum.
    """
    m, l = x[:, 0].clone(), x.new_zeros(len(x))  # [R]
    for j in range(1, x.shape[1]):
        m_new = torch.maximum(m, x[:, j])
        l = l * torch.exp(m - m_new) + torch.exp(x[:, j] - m_new)
        m = m_new
    return torch.exp(x - m[:, None]) / l[:, None]


@claim("listing", "This two-dimensional online softmax is a softmax.")
def listing_is_softmax() -> Verdict:
    row = torch.tensor([[5.0, 1.0, 2.0]], dtype=torch.float64)
    total = float(listing(row).sum())
    return Verdict(f"the row 5 1 2 gives weights that sum to {total:.1f}", math.isclose(total, 1))


@claim("listing's speed", "It is 2.5 times faster than the native softmax.")
def listing_is_faster(rows: int = 64, n: int = 256) -> Verdict:
    """Tensor operations, each a call from Python and on a GPU a launch; the native softmax is one."""
    calls = 0

    class Count(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            nonlocal calls
            calls += 1
            return func(*args, **(kwargs or {}))

    x = torch.randn(rows, n)
    with Count():
        listing(x)
    return Verdict(f"{calls} tensor operations, views among them, for {n} columns; the native softmax is 1", calls <= 1)


# Memory ---------------------------------------------------------------------------------------------------------------


def tile_bytes(rows: int, keys: int, d: int, itemsize: int = 4) -> int:
    """Bytes of one step of FlashAttention-1 on chip: Q and O `[rows, d]`, K and V `[keys, d]`, S `[rows, keys]`."""
    return itemsize * (2 * rows * d + 2 * keys * d + rows * keys)


@claim("tile of 768", "192 KB of shared memory at d = 64 give Bc = 768.")
def tile_of_768_fits(on_chip: int = 192 * KB, d: int = 64) -> Verdict:
    """M counts elements: 192 KB are 48 K of float32. Bc = ceil(M / 4d) with M = 192 K takes bytes for elements."""
    words = []
    for unit, memory in (("bytes", on_chip), ("elements", on_chip // 4)):
        rows, keys = step05_flash1.block_sizes(memory, d)
        words.append(f"M in {unit} : Bc = {keys} , {tile_bytes(rows, keys, d) / KB:.0f} KB")
    rows, keys = step05_flash1.block_sizes(on_chip, d)
    return Verdict(f"{'; '.join(words)} of {on_chip // KB} KB", tile_bytes(rows, keys, d) <= on_chip)


@claim("flash memory", "The memory of flash attention hardly grows with N.")
def flash_memory_hardly_grows(lengths: Sequence[int] = (256, 512, 1024), d: int = 64) -> Verdict:
    """Bytes of out and lse of step 6, which are all that it allocates in the big memory."""
    sizes = []
    for n in lengths:
        q, k, v = torch.zeros(3, n, d)
        results = step06_flash2.attention(q, k, v)
        sizes.append(sum(x.untyped_storage().nbytes() for x in results))
    words = " , ".join(f"{size // KB} KB at N = {n}" for n, size in zip(lengths, sizes, strict=True))
    return Verdict(f"{words} : it doubles with N, standard attention's quadruples", len(set(sizes)) == 1)


@claim("N times", "Flash attention moves N times fewer data.")
def flash_moves_n_times_less(lengths: Sequence[int] = (1024, 4096), d: int = 64) -> Verdict:
    """Bytes of standard attention over those of a kernel that moves each matrix once, from the model."""
    ratios = []
    for n in lengths:
        shape = Shape.square(n, d)
        ratios.append(iomodel.standard_forward(shape).moved / iomodel.flash2_forward(shape, n, n).moved)
    words = ", ".join(f"{ratio:.1f} at N = {n}" for n, ratio in zip(lengths, ratios, strict=True))
    words += f"; N / d is {' and '.join(f'{n // d}' for n in lengths)}"
    return Verdict(words, all(ratio >= n / 2 for n, ratio in zip(lengths, ratios, strict=True)))


@claim("a byte", "Attention's products have 63 operations for each byte, below a ridge of 201.")
def products_have_63_operations_for_a_byte(n: int = 4096, d: int = 64) -> Verdict:
    """N² d / (N d + N²) counts multiply-adds over *elements*; a ridge counts operations over bytes."""
    elements = n * n * d / (n * d + n * n)
    words = f"N² d / (N d + N²) = {elements:.0f} at N = {n}, d = {d}, for each element ; for each byte "
    words += f"{elements / 4:.1f} in float32, {elements / 2:.1f} in 16 bits"
    return Verdict(words, elements / 4 >= 60)


PUBLISHED_LEVELS = {  # of an H100: cycles of an access, TB/s
    "registers": (1, 19),
    "shared": (5, 19),
    "L2": (30, 4),
    "HBM": (400, 3),
}
MEASURED_LEVELS = {  # of an H200 (docs/ladder_measurements.md), which is an H100 with another HBM
    "registers": (4.56, 508),
    "shared": (29.0, 32.8),
    "L2": (287, 7.97),
    "HBM": (666, 3.81),
}


@claim(
    "levels of memory",
    "Registers, shared memory, L2 and HBM of an H100 take 1, 5, 30 and 400 cycles, at 19, 19, 4 and 3 TB/s.",
)
def levels_take_1_5_30_and_400_cycles() -> Verdict:
    """A table of a text against the walks of memory_levels.py."""
    words, wrong = [], []
    for level, (cycles, rate) in MEASURED_LEVELS.items():
        said_cycles, said_rate = PUBLISHED_LEVELS[level]
        wrong += [max(a / b, b / a) for a, b in ((cycles, said_cycles), (rate, said_rate))]
        words.append(f"{level} {cycles:.3g} cycles , {rate:.3g} TB/s")
    far = sum(factor >= 2 for factor in wrong)
    words.append(f"off by {min(wrong):.1f} to {max(wrong):.0f} times , {far} of {len(wrong)} figures by 2 or more")
    return Verdict("; ".join(words), far == 0)


def fetched_for_used(stride: int, fetch: int = 32, itemsize: int = 4) -> float:
    """Bytes fetched for each byte used, when 32 lanes read numbers `stride` apart in fetches of `fetch` bytes."""
    fetches = {lane * stride * itemsize // fetch for lane in range(32)}
    return len(fetches) * fetch / (32 * itemsize)


MEASURED_STRIDES = {16: 12.4, 32: 15.3}  # times of an H200, in units of that of stride 1 (docs/ladder_measurements.md)


@claim("strides", "A strided load costs min(stride, 8) times a coalesced one.", ours=True)
def strided_loads_cost_eight_at_most() -> Verdict:
    """Bytes fetched for each byte used, by the size of a fetch, against the measured times."""
    strides = (1, 2, 4, 8, 16, 32)
    words = [
        f"fetches of {fetch} bytes: " + " ".join(f"{fetched_for_used(stride, fetch):.0f}" for stride in strides)
        for fetch in (32, 64)
    ]
    measured = " and ".join(map(str, MEASURED_STRIDES.values()))
    return Verdict(
        f"at strides 1 to 32, {' ; '.join(words)} ; measured at 16 and 32: {measured}",
        all(time <= fetched_for_used(stride) for stride, time in MEASURED_STRIDES.items()),
    )


# Operations and published ratios --------------------------------------------------------------------------------------


@claim("weights times values", "P V costs O(N d h).")
def weights_times_values_is_linear() -> Verdict:
    """Operations of P V over all heads, counted while it runs: linear in N, doubling N would double them."""
    d, heads = 16, 4
    counts = [complexity.count(n, d, heads)["weights times values"] for n in (64, 128)]
    formula = complexity.formulas(128, d, heads)["weights times values"]
    words = f"{counts[0]} at N = 64 , {counts[1]} at N = 128 : {counts[1] / counts[0]:.0f} times; 2 N² d h = {formula}"
    return Verdict(words, counts[1] == 2 * counts[0])


PUBLISHED_MS = {  # N: scalar autograd, plain Python, C++ -O2
    8: (0.209, 0.018, 0.001),
    16: (0.446, 0.032, 0.005),
    32: (0.886, 0.061, 0.017),
    64: (1.551, 0.100, 0.063),
}


@claim("autograd", "Scalar autograd is 9 to 34 times slower than plain Python.")
def autograd_is_9_to_34_times_slower() -> Verdict:
    """The summary of a text against the table of the same text."""
    ratios = [autograd / raw for autograd, raw, _ in PUBLISHED_MS.values()]
    compiled = [raw / cpp for _, raw, cpp in PUBLISHED_MS.values()]
    words = f"the table above it has {min(ratios):.1f} to {max(ratios):.1f} , "
    words += f"and {min(compiled):.1f} to {max(compiled):.1f} from Python to C++"
    return Verdict(words, min(ratios) < 10 and max(ratios) > 33)


@claim("Python and C++", "Plain Python is 2 to 18 times slower than C++.")
def python_to_cpp_is_2_to_18() -> Verdict:
    """Raw Python over C++. The first column grows as N, as one row over N keys does; the second as N², as all do."""
    as_printed = [raw / cpp for _, raw, cpp in PUBLISHED_MS.values()]
    like_with_like = [n * raw / cpp for n, (_, raw, cpp) in PUBLISHED_MS.items()]
    growth = [[b[i] / a[i] for a, b in itertools.pairwise(PUBLISHED_MS.values())] for i in (1, 2)]
    words = f"as printed {min(as_printed):.1f} to {max(as_printed):.1f} ; from row to row of its table Python grows by "
    words += f"{min(growth[0]):.1f} to {max(growth[0]):.1f} , C++ by {min(growth[1]):.1f} to {max(growth[1]):.1f} : "
    words += f"one query row against all N; with N rows on both sides {' '.join(f'{x:.0f}' for x in like_with_like)}"
    return Verdict(words, max(like_with_like) < 20)


PUBLISHED_SPEEDUPS = {1024: 2.1, 2048: 1.6, 4096: 3.6}  # table 4.2: PyTorch over Flash


@claim("magnitude", "Flash attention improves speed and memory by an order of magnitude.")
def speed_is_an_order_of_magnitude() -> Verdict:
    """A summary against the table of the same text."""
    low, high = min(PUBLISHED_SPEEDUPS.values()), max(PUBLISHED_SPEEDUPS.values())
    return Verdict(f"the table has {low} to {high} times in speed, 32 to 128 times in memory", high >= 10)


def report() -> str:
    """Every claim with its measurement and verdict."""
    lines = []
    for claim in CLAIMS:
        verdict = claim.check()
        lines += textwrap.wrap(f"{'our own claim' if claim.ours else 'claim'}: {claim.text}", 110)
        lines += textwrap.wrap(verdict.measured, 110, initial_indent="  measured: ", subsequent_indent="    ")
        lines += [f"  verdict: {'holds' if verdict.holds else 'does not hold'}", ""]
    return "\n".join(lines).rstrip()


def main() -> None:
    print(report())
