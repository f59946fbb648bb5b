"""Flat machine code from ELF object files: what a linker would do, for position-independent code without data.

Code and constants of all objects are laid out in one range. Their distances are known then, so that every relocation is
resolved. Whatever else an object needs, such as a library's function or a writable variable, is an error.
"""

import struct
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

HEADER = struct.Struct("<18xH20xQ10xHHH")  # machine, offset of the section headers, their size and number, names
SECTION = struct.Struct("<IIQQQQIIQQ")
SYMBOL = struct.Struct("<IBBHQQ")
RELOCATION = struct.Struct("<QQq")
PROGBITS, SYMBOLS, RELOCATIONS, NOBITS = 1, 2, 4, 8  # types of sections
WRITABLE, IN_MEMORY = 1, 2  # flags of sections
GLOBAL, UNDEFINED = 1, 0
X86_64, AARCH64 = 62, 183
PAGE = 4096  # the code lies at the beginning of one


class LinkError(ValueError):
    """Code that cannot be flat."""


class Section(NamedTuple):
    type: int
    flags: int
    content: bytes
    link: int  # for symbols their names, for relocations the symbols
    info: int  # for relocations the section that they are in
    alignment: int


class Symbol(NamedTuple):
    name: str
    is_global: bool
    section: int
    value: int


class Object(NamedTuple):
    """An object file, and the places of its sections in the flat code."""

    machine: int
    sections: list[Section]
    symbols: list[Symbol]
    places: dict[int, int]


def parsed(image: bytes) -> Object:
    if image[:6] != b"\x7fELF\x02\x01":
        raise LinkError("no little-endian ELF file of 64 bits")
    machine, headers, size, count, _ = HEADER.unpack_from(image)
    sections = []
    for n in range(count):
        _, kind, flags, _, offset, length, link, info, alignment, _ = SECTION.unpack_from(image, headers + n * size)
        content = bytes(length) if kind == NOBITS else image[offset : offset + length]
        sections.append(Section(kind, flags, content, link, info, max(alignment, 1)))
    symbols = []
    for table in (x for x in sections if x.type == SYMBOLS):
        names = sections[table.link].content
        for name, info, _, section, value, _ in SYMBOL.iter_unpack(table.content):
            text = names[name : names.index(b"\0", name)].decode()
            symbols.append(Symbol(text, info >> 4 == GLOBAL, section, value))
    return Object(machine, sections, symbols, {})


def flat(images: Sequence[bytes], entry: str) -> tuple[bytes, int]:
    """The code of object files that call one another, and where in it the function `entry` begins.

    Raises:
        LinkError: an object needs what flat code does not have.
    """
    objects, code, defined = [parsed(image) for image in images], bytearray(), dict[str, int]()
    for x in objects:
        for n, section in enumerate(x.sections):
            if section.flags & IN_MEMORY and section.content:
                if section.type != PROGBITS or section.flags & WRITABLE:
                    raise LinkError("it has variables")
                code += bytes(-len(code) % section.alignment)
                x.places[n] = len(code)
                code += section.content
        for symbol in x.symbols:
            if symbol.is_global and symbol.section in x.places:
                if symbol.name in defined:
                    raise LinkError(f"{symbol.name} is defined twice")
                defined[symbol.name] = x.places[symbol.section] + symbol.value
    for x in objects:
        relocate(code, x, defined)
    return bytes(code), defined[entry]


def relocate(code: bytearray, x: Object, defined: dict[str, int]) -> None:
    """Resolve the relocations of an object."""
    for place, kind, symbol, addend in relocations(x):
        if symbol.section in x.places:
            to = x.places[symbol.section] + symbol.value
        elif symbol.section == UNDEFINED and symbol.name in defined:
            to = defined[symbol.name]
        else:
            raise LinkError(f"{symbol.name or 'a symbol'} is not in its object files")
        if (resolve := RESOLVE.get((x.machine, kind))) is None:
            raise LinkError(f"relocations of type {kind} on machine {x.machine} are not known")
        resolve(code, place, to + addend)


def relocations(x: Object) -> Iterator[tuple[int, int, Symbol, int]]:
    """Place in the flat code, type, symbol and addend."""
    for section in x.sections:
        if section.type == RELOCATIONS and section.info in x.places:
            for offset, info, addend in RELOCATION.iter_unpack(section.content):
                yield x.places[section.info] + offset, info & 0xFFFFFFFF, x.symbols[info >> 32], addend


def relative(code: bytearray, place: int, to: int) -> None:
    """A distance of 32 bits."""
    struct.pack_into("<i", code, place, to - place)


def patch(code: bytearray, place: int, bits: int) -> None:
    """Fill bits of an instruction of ARM that are 0."""
    (instruction,) = struct.unpack_from("<I", code, place)
    struct.pack_into("<I", code, place, instruction | bits)


def branch(code: bytearray, place: int, to: int) -> None:
    patch(code, place, (to - place >> 2) & 0x3FFFFFF)


def page(code: bytearray, place: int, to: int) -> None:
    """The distance of pages. An instruction has its two lowest bits apart."""
    pages = to // PAGE - place // PAGE
    patch(code, place, (pages & 3) << 29 | (pages >> 2 & 0x7FFFF) << 5)


def in_page(size: int) -> Callable[[bytearray, int, int], None]:
    """The place in a page, as the instruction has it: in units of what it loads."""
    return lambda code, place, to: patch(code, place, to % PAGE // size << 10)


RESOLVE: dict[tuple[int, int], Callable[[bytearray, int, int], None]] = {
    (X86_64, 2): relative,  # R_X86_64_PC32
    (X86_64, 4): relative,  # R_X86_64_PLT32
    (AARCH64, 282): branch,  # R_AARCH64_JUMP26
    (AARCH64, 283): branch,  # R_AARCH64_CALL26
    (AARCH64, 275): page,  # R_AARCH64_ADR_PREL_PG_HI21
    (AARCH64, 277): in_page(1),  # R_AARCH64_ADD_ABS_LO12_NC
    (AARCH64, 278): in_page(1),  # R_AARCH64_LDST8_ABS_LO12_NC
    (AARCH64, 284): in_page(2),  # R_AARCH64_LDST16_ABS_LO12_NC
    (AARCH64, 285): in_page(4),  # R_AARCH64_LDST32_ABS_LO12_NC
    (AARCH64, 286): in_page(8),  # R_AARCH64_LDST64_ABS_LO12_NC
    (AARCH64, 299): in_page(16),  # R_AARCH64_LDST128_ABS_LO12_NC
}
