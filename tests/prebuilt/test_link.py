"""Object files become flat code: every relocation is resolved, and what flat code does not have is refused."""

import struct
from typing import Any

import pytest
from llvmlite import binding as llvm

from flashtile.backend.cpu import jit
from flashtile.backend.cpu.machine_code import source_of
from flashtile.backend.cpu.targets import generic
from flashtile.prebuilt import cpu, link

ARM, X86 = generic("neon", cpu.AARCH64), generic("avx2", cpu.X86_64)
CALLER = """
declare void @other(ptr)
define void @entry(ptr %p) nounwind {
  call void @other(ptr %p)
  store <4 x float> <float 1.0, float 2.0, float 3.0, float 5.0>, ptr %p, align 4
  ret void
}
"""
OTHER = "define void @other(ptr %p) nounwind {\n  ret void\n}"
VARIABLE = """
@counter = internal global i64 7
define void @entry(ptr %p) nounwind {
  %n = load i64, ptr @counter
  store i64 %n, ptr %p
  store i64 9, ptr @counter
  ret void
}
"""


def object_file(source: str, processor: Any) -> bytes:
    return jit.compile_object(source, cpu.machine_of(processor))


def called(code: bytes) -> list[int]:
    """Where the calls in code for ARM go to."""
    found = []
    for place, (word,) in zip(range(0, len(code), 4), struct.iter_unpack("<I", code), strict=False):
        if word >> 26 == 0b100101:
            distance = (word & 0x3FFFFFF) - (word >> 25 & 1) * 2**26
            found.append(place + 4 * distance)
    return found


def loaded_constants(code: bytes) -> list[bytes]:
    """The vectors that `adrp` and `ldr` load in code for ARM."""
    words, found = [x for (x,) in struct.iter_unpack("<I", code[: len(code) // 4 * 4])], []
    for n, word in enumerate(words):
        if word & 0x9F000000 == 0x90000000:
            register, pages = word & 31, (word >> 5 & 0x7FFFF) << 2 | word >> 29 & 3
            load = next(x for x in words[n + 1 :] if x & 0xFFC00000 == 0x3DC00000 and x >> 5 & 31 == register)
            place = (4 * n // link.PAGE + pages) * link.PAGE + (load >> 10 & 0xFFF) * 16
            found.append(code[place : place + 16])
    return found


@pytest.mark.parametrize("before", [0, 5000], ids=["one page", "several pages"])
def test_calls_and_constants_of_arm(before: int) -> None:
    """`other` and the constant are behind `entry`, or on other pages."""
    padding = f"@padding = constant [{before} x i8] zeroinitializer"
    images = [object_file(x, ARM) for x in (CALLER, padding, OTHER)]
    code, entry = link.flat(images, "entry")
    _, other = link.flat(images, "other")
    assert called(code) == [other]
    assert other - entry > before
    assert loaded_constants(code) == [struct.pack("<4f", 1, 2, 3, 5)]


def test_kernels_for_arm_call_their_parts() -> None:
    kernel = next(cpu.standard_kernels("neon", "float16"))
    images = [object_file(text, ARM) for text in source_of(*kernel).texts().values()]
    code, entry = link.flat(images, kernel.name)
    parts = {x.name for x in link.parsed(images[0]).symbols if x.is_global and x.section == link.UNDEFINED}
    assert entry == 0
    assert len(parts) > 5
    assert {link.flat(images, name)[1] for name in parts} <= {*called(code)}


@pytest.mark.parametrize(
    ("sources", "reason"),
    [((CALLER,), "other is not in its"), ((VARIABLE,), "variables"), ((CALLER, OTHER, OTHER), "defined twice")],
    ids=["a function elsewhere", "a variable", "two functions of one name"],
)
@pytest.mark.parametrize("processor", [X86, ARM], ids=["x86", "ARM"])
def test_what_is_not_flat_is_refused(sources: tuple[str, ...], reason: str, processor: Any) -> None:
    with pytest.raises(link.LinkError, match=reason):
        link.flat([object_file(x, processor) for x in sources], "entry")


def test_relocations_of_other_kinds_are_refused() -> None:
    """Those of code that may lie anywhere in 64 bits."""
    cpu.machine_of(ARM)  # which initializes LLVM
    machine = llvm.Target.from_triple(ARM.triple).create_target_machine(reloc="static", codemodel="large")
    with pytest.raises(link.LinkError, match="relocations of type"):
        link.flat([jit.compile_object(CALLER, machine), jit.compile_object(OTHER, machine)], "entry")


def test_other_files_are_refused() -> None:
    with pytest.raises(link.LinkError, match="ELF"):
        link.flat([b"MZ" + bytes(100)], "entry")
