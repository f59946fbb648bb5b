"""Operations for each byte of whole models: BERT-base, BERT-large and GPT-2 against N, and the batch of decoding.

Every operation of a layer is a kernel of its own that reads its operands from the big memory and writes its result,
two bytes for a number. A product [a, b] by [b, c] moves a b + b c + a c numbers for 2 a b c operations.

Encoders. For short N the weights dominate: 12 D² numbers are read for each layer at any N, so operations for each
byte rise with N. For long N the scores do: h N² numbers are written and read again, for 2 d operations each way, so
operations for each byte fall towards those of standard attention. The top lies between, near N = 512. What a fused
attention removes is this second part. (Kim et al., "Full Stack Optimization of Transformer Inference: a Survey", 2023,
section 2, for the shape of these curves.)

Decoders. A step has one token, so each weight that is read serves 2 operations for each sequence of the batch: with b
sequences, weights have b operations for each byte of 16-bit numbers. A machine with pi operations and beta bytes a
second is balanced at pi / beta operations for each byte, and weights reach that at the batch

    b* = (pi / beta) (bytes of a number) / 2        (the balance batch)

Keys and values do not: each sequence has its own, so attention keeps its g operations for each byte (g query heads for
each key head) at any batch.

`python -m flashtile_ladder related.intensity` prints the curves and balance batches.
"""

from collections.abc import Iterable
from typing import NamedTuple

from ..iomodel import Machine, Work

ITEMSIZE = 2
POINTWISE = {"softmax": 5, "gelu": 8, "add and normalize": 8}  # operations for each number


class Model(NamedTuple):
    """The sizes of a transformer; the feed-forward layer is 4 D wide."""

    name: str
    layers: int
    width: int  # D
    heads: int
    decodes: bool = False

    @property
    def head_dim(self) -> int:
        return self.width // self.heads


MODELS = (Model("BERT-base", 12, 768, 12), Model("BERT-large", 24, 1024, 16), Model("GPT-2", 12, 768, 12, True))
MACHINES = {  # NVIDIA's data sheets: 16-bit tensor cores without sparsity, and the big memory
    "A100 40 GB": Machine(312e12, 1.555e12),
    "A100 80 GB": Machine(312e12, 2.039e12),
    "H100 SXM": Machine(989e12, 3.35e12),
    "H200": Machine(989e12, 4.8e12),
}


def balance_batch(machine: Machine, itemsize: int = ITEMSIZE) -> float:
    """Sequences with which reading a weight takes as long as multiplying by it."""
    return machine.ridge * itemsize / 2


def product(a: int, b: int, c: int, times: int = 1) -> Work:
    """`times` products [a, b] by [b, c]."""
    return Work(2 * a * b * c * times, 0, ITEMSIZE * (a * b + b * c) * times, ITEMSIZE * a * c * times)


def pointwise(name: str, numbers: int, reads: int = 1) -> Work:
    """An operation on each number: `reads` operands are read, one result is written."""
    return Work(0, POINTWISE[name] * numbers, ITEMSIZE * numbers * reads, ITEMSIZE * numbers)


def total(works: Iterable[Work], times: int = 1) -> Work:
    """The sum, so many times."""
    return Work(*(times * sum(field) for field in zip(*works, strict=True)))


def layer(model: Model, rows: int, keys: int, batch: int = 1) -> dict[str, Work]:
    """One layer for `rows` tokens of each of `batch` sequences, over `keys` keys and values of its own."""
    tokens, width, heads = batch * rows, model.width, batch * model.heads
    mha = product(tokens, width, 3 * width), product(tokens, width, width)  # projections
    scores = product(rows, model.head_dim, keys, heads), pointwise("softmax", heads * rows * keys)
    values = product(rows, keys, model.head_dim, heads)
    ffn = product(tokens, width, 4 * width), pointwise("gelu", tokens * 4 * width), product(tokens, 4 * width, width)
    rest = pointwise("add and normalize", 2 * tokens * width, reads=2)
    return {"projections": total(mha), "attention": total((*scores, values)), "feed-forward": total(ffn), "rest": rest}


def run(model: Model, n: int) -> Work:
    """An encoder's pass over N tokens, or a decoder's N steps, token after token."""
    steps = [(1, keys) for keys in range(1, n + 1)] if model.decodes else [(n, n)]
    return total((total(layer(model, rows, keys).values()) for rows, keys in steps), model.layers)


def decode_intensity(model: Model, keys: int, batch: int) -> dict[str, float]:
    """Operations for each byte of a step of `batch` sequences with `keys` keys each, by part."""
    return {name: work.intensity for name, work in layer(model, 1, keys, batch).items()}


def main() -> None:
    lengths = (64, 128, 256, 512, 1024, 2048, 4096, 8192)
    print("operations for each byte, N =", *lengths)
    for model in MODELS:
        print(f"{model.name:>10}:", *(f"{run(model, n).intensity:.1f}" for n in lengths))
    parts = layer(MODELS[0], 4096, 4096)
    share = {name: f"{work.moved / total(parts.values()).moved:.0%}" for name, work in parts.items()}
    print("bytes of BERT-base at N = 4096:", ", ".join(f"{name} {x}" for name, x in share.items()))
    for name, machine in MACHINES.items():
        print(f"{name}: ridge {machine.ridge:.0f}, balance batch {balance_batch(machine):.0f}")
    for batch in (1, 16, 256):
        parts_of = decode_intensity(MODELS[2], 1024, batch)
        print(f"GPT-2, 1024 keys, batch {batch}:", ", ".join(f"{name} {x:.1f}" for name, x in parts_of.items()))
