"""Inline PTX of dropout: Philox 4x32-7, whose four words are eight halves, one for each of eight keys of a row.

A round takes the counter (c0, c1, c2, c3) to (high1 ^ c1 ^ key0, low1, high0 ^ c3 ^ key1, low0), with the products
high0:low0 of c0 and high1:low1 of c2. It begins as (octet of keys, row, head, 0), so that much of the first three
rounds depends on the row or on the octet alone, and is computed once for several calls.

Four threads hold the eight keys, in a transposed tile eight threads. Each makes a part of the calls for all of them,
and they exchange bits by shuffles.
"""

from triton import constexpr_function
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

ROUNDS = gl.constexpr(7)
# Operands, a register for each of a thread's two rows: $0 and $1 are the results, $2 and $3 rows, $4 and $5 octets, $6
# the thread's number among those that exchange, $8 the head, $10 and $12 the seed, $14 and $16 the threshold.
REGISTERS = gl.constexpr("""{ // keep_bits
.reg .b64 product; .reg .pred p;
.reg .b32 x, y, z, mine, select, row, octet, bits0, bits1, head_high, head_low, a_high, a_low, b_high, b_low;
.reg .b32 row0_high, row0_low, row1_high, row1_low, octet0_high, octet0_low, octet1_high, octet1_low;
.reg .b32 first0, second0, first1, second1, c0, c1, c2, c3, call;
""")


@constexpr_function
def keep_bits_asm(calls, transposed):
    """`calls` calls for each of a thread's two rows, of consecutive octets; or for each of its two octets, of rows."""
    text = REGISTERS + round_keys_asm() + multiply_asm("head", "$8", 1)
    text += "mov.b32 bits0, 0x0; mov.b32 bits1, 0x0; mov.b32 call, 0;\n"
    text += octet_asm(0, "$4") + octet_asm(1, "$5") if transposed else row_asm(0, "$2") + row_asm(1, "$3")
    text += '.pragma "nounroll";\nNEXT:\n'  # straight code of all calls waits for instructions
    if transposed:  # two adjacent rows of every eight
        text += "and.b32 row, call, 2; mad.lo.u32 row, row, 3, call; add.u32 row, row, $2;\n" + row_asm(0, "row")
    else:
        text += "add.u32 octet, $4, call;\n" + octet_asm(0, "octet")
    for n in range(2):
        text += philox_asm(*((0, n) if transposed else (n, 0))) + collect_asm()
    text += f"add.u32 call, call, 1; setp.ne.u32 p, call, {calls};\n@p bra NEXT;\n"
    return text + exchange_asm(transposed) + "}"


@constexpr_function
def round_keys_asm():
    """The keys of all rounds, which ptxas keeps in uniform registers."""
    constants = (0x9E3779B9, 0xBB67AE85)
    text = ""
    for n in range(2):
        for r in range(ROUNDS):
            text += f".reg .b32 key{n}_{r}; add.u32 key{n}_{r}, ${10 + 2 * n}, {r * constants[n] % 2**32:#x};\n"
    return text


@constexpr_function
def multiply_asm(name, x, n):
    """Both words of x times multiplier n."""
    multiplier = (0xD2511F53, 0xCD9E8D57)[n]
    return f"mul.wide.u32 product, {x}, {multiplier:#x}; mov.b64 {{{name}_low, {name}_high}}, product;\n"


@constexpr_function
def xor_asm(result, a, b, c):
    return f"lop3.b32 {result}, {a}, {b}, {c}, 0x96;\n"


@constexpr_function
def row_asm(n, row):
    """Product of c0 in the second round."""
    return xor_asm("x", "head_high", row, "key0_0") + multiply_asm(f"row{n}", "x", 0)


@constexpr_function
def octet_asm(n, octet):
    """Words of the first two rounds, and the product of c0 in the third."""
    return (
        multiply_asm("a", octet, 0) + f"mov.b32 first{n}, a_low; xor.b32 x, a_high, key1_0;\n"
        + multiply_asm("a", "x", 1) + f"mov.b32 second{n}, a_low;\n" + xor_asm("x", "a_high", "head_low", "key0_1")
        + multiply_asm(f"octet{n}", "x", 0)
    )  # fmt: skip


@constexpr_function
def philox_asm(row, octet):
    """The four words of a call."""
    text = xor_asm("x", f"row{row}_high", f"first{octet}", "key1_1") + multiply_asm("a", "x", 1)
    text += xor_asm("c0", "a_high", f"second{octet}", "key0_2") + "mov.b32 c1, a_low;\n"
    text += xor_asm("c2", f"octet{octet}_high", f"row{row}_low", "key1_2") + f"mov.b32 c3, octet{octet}_low;\n"
    for r in range(3, ROUNDS):
        text += multiply_asm("a", "c0", 0) + multiply_asm("b", "c2", 1)
        text += xor_asm("c0", "b_high", "c1", f"key0_{r}") + xor_asm("c2", "a_high", "c3", f"key1_{r}")
        text += "mov.b32 c1, b_low; mov.b32 c3, a_low;\n"
    return text


@constexpr_function
def collect_asm():
    """Whether each half of a call is kept, as the top bit of each byte of two registers, after a shift.

    The lower 15 bits plus $14 carry into the top bit where they reach the threshold's. $16 has all bits set for a
    threshold without a top bit, and none for one with it: the majority with the half's own top bit is the comparison.
    """
    text = ""
    for n in range(2):
        for result, word in (("x", f"c{2 * n}"), ("y", f"c{2 * n + 1}")):
            text += f"and.b32 {result}, {word}, 0x7fff7fff; add.u32 {result}, {result}, $14;\n"
            text += f"lop3.b32 {result}, {result}, {word}, $16, 0xe8;\n"
        text += f"prmt.b32 x, x, y, 0x7531; shr.u32 bits{n}, bits{n}, 1;\n"
        text += f"lop3.b32 bits{n}, x, bits{n}, 0x80808080, 0xe4;\n"
    return text


@constexpr_function
def exchange_asm(transposed):
    """Send each thread the bytes of its keys, sort them by the thread that they come from, and split them by row.

    A thread needs two halves of the calls of four threads, or transposed one half of those of eight. In each stage it
    keeps one of two registers, or half of the bytes of both, and exchanges the others.
    """
    first, stages = (2, 2), ((1, 1, 0x5410, 0x2222),)
    moves, order, other_half = ((1, 4), (2, 2)), 0x6240, 0x1111
    if transposed:
        first, stages = (4, 16), ((2, 8, 0x5410, 0x2222), (1, 4, 0x6420, 0x1111))
        moves, order, other_half = ((1, 4), (2, 2), (4, 1)), 0x3120, 0x4444
    text = has_bit_asm(first[0]) + "selp.b32 mine, bits1, bits0, p; selp.b32 x, bits0, bits1, p;\n"
    text += f"shfl.sync.bfly.b32 y, x, {first[1]}, 31, 0xffffffff;\n"
    for bit, distance, low, to_high in stages:
        text += has_bit_asm(bit) + f"selp.b32 select, {low ^ to_high:#x}, {low:#x}, p; prmt.b32 z, mine, y, select;\n"
        text += f"xor.b32 select, select, {to_high:#x}; prmt.b32 x, mine, y, select; mov.b32 mine, z;\n"
        text += f"shfl.sync.bfly.b32 y, x, {distance}, 31, 0xffffffff;\n"
    text += f"mov.b32 select, {order:#x};\n"
    for bit, distance in moves:
        text += has_bit_asm(bit) + f"selp.b32 x, {distance * 0x1111:#x}, 0x0, p; xor.b32 select, select, x;\n"
    text += f"prmt.b32 x, mine, y, select; xor.b32 select, select, {other_half:#x}; prmt.b32 y, mine, y, select;\n"
    return text + (
        "shl.b32 z, y, 1; lop3.b32 $0, x, z, 0x55555555, 0xe4; shr.u32 x, x, 1; lop3.b32 $1, x, y, 0x55555555, 0xe4;\n"
    )


@constexpr_function
def has_bit_asm(bit):
    """Test a bit of the thread's number."""
    return f"and.b32 x, $6, {bit}; setp.ne.b32 p, x, 0; "


@gluon.jit
def keep_bits(rows, octets, thread, head, stream, CALLS: gl.constexpr, TRANSPOSED: gl.constexpr):
    """`[M, 4]`: bits of each thread's pairs, by `dropout.places`."""
    return gl.inline_asm_elementwise(
        keep_bits_asm(CALLS, TRANSPOSED), "=&r,=&r" + ",r" * 16,
        [rows, octets, thread, head, stream.key_0, stream.key_1, stream.addend, stream.majority],
        dtype=gl.int32, is_pure=False, pack=2,
    )  # fmt: skip
