"""Cubins without what only debuggers read: the kernel's PTX as text, line numbers and the names of source files.

Triton compiles with line numbers, and without them ptxas schedules some instructions differently. So they are blanked
afterwards, in place: machine code, symbols and the layout of the file stay as they are.
"""

import struct

HEADER = struct.Struct("<40xQ10xHHH")  # ELF64: offset of the section headers, their size and number, index of names
SECTION = struct.Struct("<I20xQQ")  # name, offset, size
DEBUG = (b".debug_", b".nv_debug_")


def without_debug(image: bytes) -> bytes:
    """The cubin with zeros in its debug sections."""
    assert image[:5] == b"\x7fELF\x02", "no ELF file of 64 bits"
    headers, size, count, names = HEADER.unpack_from(image)
    sections = [SECTION.unpack_from(image, headers + n * size) for n in range(count)]
    first_name = sections[names][1]
    blanked = bytearray(image)
    for name, offset, length in sections:
        if image.startswith(DEBUG, first_name + name):
            blanked[offset : offset + length] = bytes(length)
    return bytes(blanked)
