"""Inline PTX of dropout: Philox 4x32-7, whose words decide about eight keys of a row at a time.

A round takes a counter (c0, c1, c2, c3) to (high1 ^ c1 ^ key0, low1, high0 ^ c3 ^ key1, low0), with the products
high0:low0 of c0 and high1:low1 of c2. The counter starts as (octet of keys, row, head, 0). So much of the first three
rounds depends on a row or on an octet alone, and is computed once for several calls.

A thread's pairs belong to more calls than it has time for: it makes every fourth or eighth of them, for all threads that
hold their keys, and these exchange the bits.
"""

from triton import constexpr_function
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

# Operands, two registers each, of a thread's two rows: results, rows and octets, then inputs that both rows share.
DECLARATIONS = gl.constexpr("""{ // keep_bits
.reg .b64 product; .reg .pred p;
.reg .b32 x, y, z, mine, select, row, octet, head_high, head_low, bits0, bits1, c0, c1, c2, c3, a_high, a_low, b_high, b_low;
.reg .b32 row0_high, row0_low, row1_high, row1_low, octet0_high, octet0_low, octet1_high, octet1_low;
.reg .b32 first0, second0, first1, second1;
""")


@constexpr_function
def keep_bits_asm(calls, transposed):
    """`calls` calls for each of a thread's two rows, of consecutive octets; or for each of its two octets, of rows."""
    text = DECLARATIONS + keys_asm()
    text += multiply("head", "$8", 1) + "mov.b32 bits0, 0x0; mov.b32 bits1, 0x0;\n"
    if transposed:
        text += octet_asm(0, "$4") + octet_asm(1, "$5")
    else:
        text += row_asm(0, "$2") + row_asm(1, "$3")
    for call in range(calls):
        if transposed:
            text += f"add.u32 row, $2, {call // 2 * 8 + call % 2};\n" + row_asm(0, "row")
        else:
            text += f"add.u32 octet, $4, {call};\n" + octet_asm(0, "octet")
        for n in range(2):
            text += philox_asm(*((0, n) if transposed else (n, 0))) + collect_asm(4 * n + call)
    return text + (exchange_of_eight() if transposed else exchange_of_four()) + "}"


@constexpr_function
def keys_asm():
    """Keys of the seven rounds."""
    weyl = (0x9E3779B9, 0xBB67AE85)
    names = ", ".join(f"key{n}_{r}" for n in range(2) for r in range(7))
    steps = (f"add.u32 key{n}_{r}, ${10 + 2 * n}, {r * weyl[n] % 2**32:#x};\n" for r in range(7) for n in range(2))
    return f".reg .b32 {names};\n{''.join(steps)}"


@constexpr_function
def multiply(name, x, n):
    """Both words of the product of x and multiplier n."""
    multiplier = (0xD2511F53, 0xCD9E8D57)[n]
    return f"mul.wide.u32 product, {x}, {multiplier:#x}; mov.b64 {{{name}_low, {name}_high}}, product;\n"


@constexpr_function
def xor(result, a, b, c):
    return f"lop3.b32 {result}, {a}, {b}, {c}, 0x96;\n"


@constexpr_function
def row_asm(n, row):
    """The product of c0 in the second round, which depends on the row alone."""
    return xor("x", "head_high", row, "key0_0") + multiply(f"row{n}", "x", 0)


@constexpr_function
def octet_asm(n, octet):
    """The words of the first three rounds that depend on the octet alone."""
    return (
        multiply("a", octet, 0) + f"mov.b32 first{n}, a_low; xor.b32 x, a_high, key1_0;\n"
        + multiply("a", "x", 1) + f"mov.b32 second{n}, a_low;\n" + xor("x", "a_high", "head_low", "key0_1")
        + multiply(f"octet{n}", "x", 0)
    )  # fmt: skip


@constexpr_function
def philox_asm(row, octet):
    """The four words of a call."""
    text = (
        xor("x", f"row{row}_high", f"first{octet}", "key1_1") + multiply("a", "x", 1)
        + xor("c0", "a_high", f"second{octet}", "key0_2") + "mov.b32 c1, a_low;\n"
        + xor("c2", f"octet{octet}_high", f"row{row}_low", "key1_2") + f"mov.b32 c3, octet{octet}_low;\n"
    )  # fmt: skip
    for r in range(3, 7):
        text += multiply("a", "c0", 0) + multiply("b", "c2", 1)
        text += xor("c0", "b_high", "c1", f"key0_{r}") + xor("c2", "a_high", "c3", f"key1_{r}")
        text += "mov.b32 c1, b_low; mov.b32 c3, a_low;\n"
    return text


@constexpr_function
def collect_asm(position):
    """Put a call's bits, whether each half of its words is kept, to this position of each byte of two registers."""
    text = ""
    for n in range(2):
        for half, word in (("x", f"c{2 * n}"), ("y", f"c{2 * n + 1}")):
            # The top bits of both halves: of the sum of the lower 15 bits and $14, or (with $16) and of the half.
            text += f"and.b32 {half}, {word}, 0x7fff7fff; add.u32 {half}, {half}, $14;\n"
            text += f"lop3.b32 {half}, {half}, {word}, $16, 0xe8;\n"
        text += f"prmt.b32 x, x, y, 0x7531; shr.u32 x, x, {7 - position};\n"
        text += f"lop3.b32 bits{n}, x, {0x01010101 << position:#x}, bits{n}, 0xea;\n"
    return text


@constexpr_function
def exchange_of_four():
    """Exchange among the threads of a row: each takes two halves of all calls, which are in two bytes."""
    return (
        "and.b32 x, $6, 2; setp.ne.b32 p, x, 0; selp.b32 mine, bits1, bits0, p; selp.b32 x, bits0, bits1, p;\n"
        "shfl.sync.bfly.b32 y, x, 2, 31, 0xffffffff;\n"
        "and.b32 x, $6, 1; setp.ne.b32 p, x, 0; selp.b32 select, 0x7632, 0x5410, p;\n"
        "prmt.b32 z, mine, y, select; xor.b32 select, select, 0x2222; prmt.b32 x, mine, y, select;\n"
        "shfl.sync.bfly.b32 y, x, 1, 31, 0xffffffff;\n"
    ) + sort_asm("z", "y", ((1, 4), (2, 2)), 0x6240, 0x1111)


@constexpr_function
def exchange_of_eight():
    """Exchange among the threads of an octet: each takes one half of all calls, which is in a byte."""
    return (
        "and.b32 x, $6, 4; setp.ne.b32 p, x, 0; selp.b32 mine, bits1, bits0, p; selp.b32 x, bits0, bits1, p;\n"
        "shfl.sync.bfly.b32 y, x, 16, 31, 0xffffffff;\n"
        "and.b32 x, $6, 2; setp.ne.b32 p, x, 0; selp.b32 select, 0x7632, 0x5410, p;\n"
        "prmt.b32 z, mine, y, select; xor.b32 select, select, 0x2222; prmt.b32 x, mine, y, select;\n"
        "shfl.sync.bfly.b32 y, x, 8, 31, 0xffffffff;\n"
        "and.b32 x, $6, 1; setp.ne.b32 p, x, 0; selp.b32 select, 0x7531, 0x6420, p;\n"
        "prmt.b32 mine, z, y, select; xor.b32 select, select, 0x1111; prmt.b32 x, z, y, select;\n"
        "shfl.sync.bfly.b32 y, x, 4, 31, 0xffffffff;\n"
    ) + sort_asm("mine", "y", ((1, 4), (2, 2), (4, 1)), 0x3120, 0x4444)


@constexpr_function
def sort_asm(mine, others, places, first, second):
    """Bring bytes in the order of the threads that made them, then both rows' bits together. `places`: how a bit of
    the thread's number moves bytes.
    """
    text = f"mov.b32 select, {first:#x};\n"
    for bit, place in places:
        text += f"and.b32 x, $6, {bit}; setp.ne.b32 p, x, 0; selp.b32 x, {place * 0x1111:#x}, 0, p; xor.b32 select, select, x;\n"
    return text + (
        f"prmt.b32 x, {mine}, {others}, select; xor.b32 select, select, {second:#x};\n"
        f"prmt.b32 y, {mine}, {others}, select;\n"
        "shl.b32 z, y, 4; lop3.b32 $0, x, z, 0x0f0f0f0f, 0xe4; shr.u32 x, x, 4; lop3.b32 $1, x, y, 0x0f0f0f0f, 0xe4;\n"
    )


@gluon.jit
def keep_bits(rows, octets, lane, head, key_0, key_1, addend, small, CALLS: gl.constexpr, TRANSPOSED: gl.constexpr):
    """`[M, 4]`: bits of each thread's pairs."""
    return gl.inline_asm_elementwise(
        keep_bits_asm(CALLS, TRANSPOSED), "=&r,=&r" + ",r" * 16,
        [rows, octets, lane, head, key_0, key_1, addend, small], dtype=gl.int32, is_pure=False, pack=2,
    )  # fmt: skip
