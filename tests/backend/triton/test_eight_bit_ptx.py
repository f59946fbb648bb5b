"""PTX that converts pairs of 8-bit numbers, run on every number in every place of a register."""

import re
import struct
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cached import same_bits
from torch import Tensor

FORMATS = {
    "e4m3": torch.float8_e4m3fn, "e4m3 by bits": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2, "int8": torch.int8,
}  # fmt: skip
MASK = 2**32 - 1


def permuted(a: int, b: int, selector: int) -> int:
    both = struct.pack("<II", a, b)
    return int.from_bytes(bytes(both[selector >> shift & 7] for shift in range(0, 16, 4)), "little")


def halves(dtype: torch.dtype, function: Callable[..., Tensor]) -> Callable[..., int]:
    """An instruction on two 16-bit numbers of each register."""

    def instruction(*operands: int) -> int:
        pairs = [torch.tensor([x & 0xFFFF, x >> 16]).to(torch.uint16).view(dtype).double() for x in operands]
        low, high = function(*pairs).to(dtype).view(torch.uint16).tolist()
        return low | high << 16

    return instruction


def both_e4m3(x: int) -> int:
    numbers = torch.tensor([x & 0xFF, x >> 8], dtype=torch.uint8).view(torch.float8_e4m3fn)
    low, high = numbers.half().view(torch.uint16).tolist()
    return low | high << 16


def rounded(dtype: torch.dtype) -> Callable[[float, float], int]:
    """An instruction that rounds two float32 numbers, the upper one first."""

    def instruction(high: float, low: float) -> int:
        first, second = torch.tensor([low, high]).to(dtype).view(torch.uint16).tolist()
        return first | second << 16

    return instruction


INSTRUCTIONS: dict[str, Callable[..., Any]] = {
    "mov.b32": lambda x: x,
    "and.b32": lambda a, b: a & b,
    "xor.b32": lambda a, b: a ^ b,
    "or.b32": lambda a, b: a | b,
    "mul.f32": lambda a, b: float(torch.tensor(a) * torch.tensor(b)),
    "add.u32": lambda a, b: (a + b) & MASK,
    "shl.b32": lambda a, b: (a << b) & MASK,
    "shr.u32": lambda a, b: a >> b,
    "prmt.b32": permuted,
    "mul.f16x2": halves(torch.float16, torch.mul),
    "sub.f16x2": halves(torch.float16, torch.sub),
    "fma.rn.bf16x2": halves(torch.bfloat16, lambda a, b, c: a * b + c),
    "cvt.rn.f16x2.e4m3x2": both_e4m3,
    "cvt.f32.f16": lambda x: float(torch.tensor(x).to(torch.uint16).view(torch.float16)),
    "cvt.rn.bf16x2.f32": rounded(torch.bfloat16),
    "cvt.rn.f16x2.f32": rounded(torch.float16),
}


def run(asm: str, word: int) -> tuple[int, int]:
    """The results `$0` and `$1` of a word in `$2`."""
    registers = run_with(asm, {"$2": word})
    return registers["$0"], registers["$1"]


def run_with(asm: str, given: dict[str, Any]) -> dict[str, Any]:
    """All registers in the end."""
    registers = dict(given)
    for line in asm.strip("{} ").split(";"):
        name, _, operands = line.strip().partition(" ")
        if not name or name == ".reg":
            continue
        found = re.findall(r"\{[^}]*\}|[^,\s]+", operands)
        target, *sources = found
        values = [registers[x] if x in registers else int(x, 0) for x in sources]
        if target.startswith("{"):
            low, high = re.findall(r"\w+", target)
            registers |= {low: values[0] & 0xFFFF, high: values[0] >> 16}
        elif name == "lop3.b32":
            assert values.pop() == 0xEA
            registers[target] = values[0] & values[1] | values[2]
        else:
            registers[target] = INSTRUCTIONS[name](*values)
    return registers


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", FORMATS)
def test_every_number_in_every_place(name: str, dtype: torch.dtype) -> None:
    pytest.importorskip("triton")
    from flashtile.backend.triton.kernels.eight_bit import pairs_asm

    asm = pairs_asm(name, dtype == torch.float16)
    stored = (torch.arange(256)[:, None] + torch.tensor([0, 85, 170, 43])).to(torch.uint8)  # four bytes of a register
    words = [int.from_bytes(bytes(x), "little") for x in stored.tolist()]
    found = torch.tensor([run(asm, word) for word in words]).to(torch.uint32).view(torch.uint16).view(dtype)
    expected = stored.view(FORMATS[name]).to(dtype).view(-1, 2, 2).mT.reshape(-1, 4)  # even features, odd ones
    assert same_bits(found.float(), expected.float())


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", FORMATS)
def test_every_number_in_words(name: str, dtype: torch.dtype, scaled: bool) -> None:
    """Of latent rows: two words, whose bytes 0 to 3 become four pairs of numbers, times the scales of both words."""
    pytest.importorskip("triton")
    from flashtile.backend.triton.kernels.latent_words import words_asm

    if scaled and not name.startswith("e4m3"):
        pytest.skip("rows with scales are float8_e4m3fn")
    asm = words_asm(name.replace("e4m3", "packed") if scaled else name, dtype == torch.float16, scaled)
    stored = (torch.arange(256)[:, None] + torch.tensor([0, 85, 170, 43, 7, 99, 201, 128])).to(torch.uint8)
    found, scales = [], torch.tensor([0.37, -3.1])
    for x in stored.tolist():
        given = {"$4": int.from_bytes(bytes(x[:4]), "little"), "$5": int.from_bytes(bytes(x[4:]), "little")}
        registers = run_with(asm, given | {"$6": float(scales[0]), "$7": float(scales[1])})
        found.append([registers[f"${n}"] for n in range(4)])
    numbers = torch.tensor(found).to(torch.uint32).view(torch.uint16).view(dtype)
    expected = stored.view(FORMATS[name]).float().view(-1, 2, 4)  # of each word
    expected = (expected * scales[:, None] if scaled else expected).to(dtype).mT.reshape(-1, 8)
    assert same_bits(numbers.float(), expected.float())
