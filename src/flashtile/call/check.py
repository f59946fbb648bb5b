"""Whether the tensors of a call fit together. Every failure names the argument, what was given and what would fit."""

import itertools
from collections.abc import Mapping

import torch
from torch import Tensor

from ..errors import ArgumentError
from ..expression import Formula
from ..expression.program import type_of
from . import device, eight_bit
from .advice import broadcasts_to, layout_example, pairs_example
from .call import FEATURES, Call, Tensors
from .features import BOOL, INDEX, INDEX_DTYPES, SCORES, one_of
from .memory import freed

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
MAX_HEAD_DIM = 1024
EXAMPLES = {
    "dense": "flashtile.attention(q, k, v) with q [2, 8, 128, 64], k [2, 4, 256, 64], v [2, 4, 256, 64]",
    "varlen": (
        "flashtile.attention_varlen(q, k, v, cu, cu) with q, k, v [300, 8, 64] and "
        "cu = torch.tensor([0, 100, 300], dtype=torch.int32)"
    ),
    "paged": (
        "flashtile.attention_varlen(q, k, v, cu, None, seqused_k=lengths, page_table=table) with q [2, 8, 64], "
        "k, v [32, 16, 8, 64], cu = [0, 1, 2], lengths = [40, 7] and table [2, 3], all int32"
    ),
}


def named(call: Call) -> dict[str, Tensor | None]:
    """The tensors of a call under the names that errors give them."""
    modifiers = {name_of_captured(call, n): x for n, x in enumerate(call.tensors.score_mod_tensors)}
    return dict(zip(Tensors._fields[:-1], call.tensors[:-1], strict=True)) | modifiers


def name_of_captured(call: Call, n: int) -> str:
    of_mask = n - call.num_score_tensors
    return f"score_mod.tensors[{n}]" if of_mask < 0 else f"mask.tensors[{of_mask}]"


def memory(tensors: Mapping[str, Tensor | None], layout: str) -> None:
    """Whether all elements are still there."""
    for name, x in tensors.items():
        if x is not None and freed(x):
            accepted = (
                "a tensor whose storage is in place until backward is done; this one's has been freed, as by "
                "untyped_storage().resize_(0)"
            )
            raise ArgumentError(name, x, accepted, EXAMPLES[layout])


def strided(call: Call) -> None:
    """Whether all tensors are strided and on one device. Public functions have checked it; here come the tensors of
    operators, and of hooks that changed what was saved.
    """
    device = call.tensors.q.device
    for name, x in named(call).items():
        if x is not None and (x.layout is not torch.strided or x.device != device):
            raise ArgumentError(name, x, f"a strided tensor on the device of q, {device}", EXAMPLES[call.layout])


def tensors(call: Call) -> None:
    """Shapes and dtypes of q, k and v."""
    t, layout = call.tensors, call.layout

    def fail(argument: str, given: object, accepted: str) -> None:
        raise ArgumentError(argument, given, accepted, EXAMPLES[layout])

    def fail_in_layout(argument: str, given: object, accepted: str) -> None:
        example = layout_example(t.q, t.k, t.v) if layout == "dense" else None
        raise ArgumentError(argument, given, accepted, example or EXAMPLES[layout])

    # Latent rows of 656 bytes, which `check_cache` has seen.
    is_packed = layout == "paged" and t.k.dtype is torch.uint8 and call.settings.v_dim is not None
    rank_q = 4 if t.cu_seqlens_q is None else 3
    rank_k = 3 if layout == "varlen" else 4
    shape_q = "[B, Hq, Sq, D]" if t.cu_seqlens_q is None else "[Tq, Hq, D]"
    shape_k = {"dense": "[B, Hkv, Sk, {}]", "varlen": "[Tk, Hkv, {}]", "paged": "[num_pages, page_size, Hkv, {}]"}[
        layout
    ]
    for name, x, rank, shape in (
        ("q", t.q, rank_q, shape_q),
        ("k", t.k, rank_k, shape_k.format("D")),
        ("v", t.v, rank_k, shape_k.format("Dv")),
    ):
        if x.dim() != rank:
            fail_in_layout(name, x, f"{rank} dimensions, {shape}")
        if is_packed and name != "q":
            continue
        if name != "q" and t.k.dtype in eight_bit.FORMATS:
            if x.dtype != t.k.dtype:
                fail(name, x, f"the dtype of k, {t.k.dtype}")
        elif x.dtype is eight_bit.QUERIES and name == "q":
            queries_of_eight_bits(call)
        elif t.q.dtype is eight_bit.QUERIES:
            fail(name, x, f"{eight_bit.DTYPES_IN_WORDS}, as q has 8 bits")
        elif x.dtype not in DTYPES:
            others = "float8_e4m3fn" if name == "q" else eight_bit.DTYPES_IN_WORDS
            fail(name, x, f"float16, bfloat16, float32 or float64; of 8 bits, {others}")
        elif x.dtype != t.q.dtype:
            fail(name, x, f"the dtype of q, {t.q.dtype}")
        if not 1 <= x.shape[-1] <= MAX_HEAD_DIM:
            fail(name, x, f"a head dimension (the last) of 1 to {MAX_HEAD_DIM}")
    heads_q, heads_kv = t.q.shape[1], t.k.shape[1 if layout == "dense" else -2]
    if heads_q == 0:
        fail("q", t.q, f"at least one head in {shape_q}")
    if t.k.shape[-1] != t.q.shape[-1] and not is_packed:
        fail("k", t.k, f"the head dimension of q, {t.q.shape[-1]}, in {shape_k.format('D')}")
    if layout == "dense" and t.k.shape[0] != t.q.shape[0]:
        fail("k", t.k, f"the batch of q, {t.q.shape[0]}, in {shape_k.format('D')}")
    if heads_kv == 0 or heads_q % heads_kv != 0:
        accepted = f"a number of heads Hkv in {shape_k.format('D')} that divides the {heads_q} heads of q"
        fail_in_layout("k", t.k, accepted)
    if t.v.shape[:-1] != t.k.shape[:-1]:
        fail("v", t.v, f"the shape of k up to the last dimension, {list(t.k.shape[:-1])}")
    if layout == "paged" and t.k.shape[1] == 0:
        fail("k", t.k, "pages of at least one key, [num_pages, page_size, Hkv, D]")


def queries_of_eight_bits(call: Call) -> None:
    """Whether a call whose queries have 8 bits has nothing that such calls lack."""
    if call.settings.dropout_p > 0:
        accepted = "0.0 for queries of 8 bits, whose calls are those of inference; for training, q in 16 bits"
        raise ArgumentError("dropout_p", call.settings.dropout_p, accepted, EXAMPLES[call.layout])


def descales(call: Call, batch: int) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The scales of q, k and v of 8 bits, as views (`eight_bit.query_scales`, `eight_bit.key_scales`)."""
    t, layout = call.tensors, call.layout
    views = []
    for name in eight_bit.DESCALES:
        x = getattr(t, name)
        if x is not None and layout == "varlen":
            x = packed_descale(name, x, t.k, batch)
        elif x is not None:
            x = descale(name, x, t.k, batch, paged=layout == "paged", example=EXAMPLES[layout])
        views.append(x)
    k, v = views
    return query_descale(call, batch), k, v


def query_descale(call: Call, batch: int) -> Tensor | None:
    """The scales of queries of 8 bits, as a view."""
    q, x, example = call.tensors.q, call.tensors.q_descale, EXAMPLES[call.layout]
    if x is None:
        return None
    if not eight_bit.is_eight_bit(q):
        accepted = f"None for queries of {q.dtype}: scales are those of float8_e4m3fn"
        raise ArgumentError("q_descale", x, accepted, example)
    heads_kv, packed = call.tensors.k.shape[1 if call.layout == "dense" else -2], q.dim() == 3
    rows = q.shape[0 if packed else 2]
    sizes = f"B = {batch}, Hkv = {heads_kv}, Hq = {q.shape[1]}, {'Tq' if packed else 'Sq'} = {rows}"
    if packed and tuple(x.shape) == (batch, heads_kv) == (q.shape[1], rows):
        accepted = f"[B, Hkv, 1] for scales of sequences or [1, Hq, Tq] for those of tokens, with {sizes}"
        raise ArgumentError("q_descale", x, accepted, example)
    view = eight_bit.query_scales(x, q, heads_kv, batch)
    if view is None or x.dtype != torch.float32:
        accepted = f"float32 [Hkv], [B, Hkv] or {'[Hq, Tq]' if packed else '[B, Hq, Sq]'} with {sizes}"
        raise ArgumentError("q_descale", x, accepted, example)
    return view


def packed_descale(name: str, x: Tensor, k: Tensor, batch: int) -> Tensor:
    """The scales of packed keys of 8 bits, as a view `[B|1, Tk|1, 1, Hkv]`."""
    if not eight_bit.is_eight_bit(k):
        accepted = f"None for keys of {k.dtype}: scales are those of {eight_bit.DTYPES_IN_WORDS}"
        raise ArgumentError(name, x, accepted, EXAMPLES["varlen"])
    tokens, heads = k.shape[:2]
    if tuple(x.shape) == (batch, heads) == (heads, tokens):
        accepted = f"[1, Tk, 1, Hkv] for scales of tokens or [B, 1, 1, Hkv] for those of sequences: both are {heads}"
        raise ArgumentError(name, x, accepted, EXAMPLES["varlen"])
    view = eight_bit.key_scales(x, k, batch, "varlen")
    if view is None or x.dtype != torch.float32:
        accepted = f"float32 [Hkv], [B, Hkv] or [Hkv, Tk] with B = {batch}, Hkv = {heads}, Tk = {tokens}"
        raise ArgumentError(name, x, accepted, EXAMPLES["varlen"])
    return view


def descale(name: str, x: Tensor, cache: Tensor, batch: int, *, paged: bool, example: str) -> Tensor:
    """The scales of a cache of 8 bits, as a view."""
    if not eight_bit.is_eight_bit(cache):
        accepted = f"None for keys of {cache.dtype}: scales are those of {eight_bit.DTYPES_IN_WORDS}"
        raise ArgumentError(name, x, accepted, example)
    if x.dtype != torch.float32:
        raise ArgumentError(name, x, eight_bit.shapes_in_words(paged=paged), example)
    if eight_bit.is_ambiguous(x, cache, batch, paged=paged):
        accepted = (
            f"[num_pages, 1, Hkv] for scales of pages or [B, 1, 1, Hkv] for scales of sequences, as there are {batch} "
            "of both"
        )
        raise ArgumentError(name, x, accepted, example)
    view = eight_bit.scales_of_pages(x, cache, batch, paged=paged)
    if view is None:
        heads, pages = cache.shape[2 if paged else 1], cache.shape[0]
        sizes = f"B = {batch}, Hkv = {heads}, " + (
            f"num_pages = {pages}, page_size = {cache.shape[1]}"
            if paged
            else f"B_cache = {pages}, S_max = {cache.shape[2]}"
        )
        raise ArgumentError(name, x, f"{eight_bit.shapes_in_words(paged=paged)} with {sizes}", example)
    return view


def broadcasts(call: Call, batch: int, seqlen_q: int, seqlen_k: int) -> None:
    """The tensors that modify scores: mask, bias, slopes, sinks, and the seed."""
    t = call.tensors
    example = EXAMPLES[call.layout]
    heads = t.q.shape[1]
    full = (batch, heads, seqlen_q, seqlen_k)

    def fail(argument: str, given: Tensor, accepted: str, pairs: bool) -> None:
        of_pairs = pairs_example(call, argument, given, full) if pairs else None
        raise ArgumentError(argument, given, accepted, of_pairs or example)

    for name, feature in FEATURES.items():
        x = getattr(t, name)
        if x is None or feature.dtype not in (SCORES, BOOL):
            continue
        pairs = feature.broadcasts
        if x.dtype not in (dtypes := feature.dtypes(t.q.dtype)):
            fail(name, x, f"dtype {one_of(dtypes)}{feature.advice}", pairs)
        sizes = feature.sizes(B=batch, H=heads, Sq=seqlen_q, Sk=seqlen_k)
        if pairs and not broadcasts_to(x, full):
            fail(name, x, f"four dimensions [B, H, Sq, Sk] = {list(full)}, each of which may be 1", pairs)
        if not pairs and tuple(x.shape) not in sizes:
            fail(name, x, "shape " + " or ".join(str(list(size)) for size in sizes), pairs)
    seed = t.dropout_seed
    if (seed is None and call.settings.dropout_p > 0) or (
        seed is not None and (seed.dtype != torch.int64 or seed.numel() != 1)
    ):
        accepted = f"an int, or an int64 tensor of one element on {t.q.device}"
        raise ArgumentError("dropout_seed", seed, accepted, example)


def varlen_bounds(call: Call) -> tuple[int, int, int]:
    """`batch`, `max_seqlen_q`, `max_seqlen_k` of a varlen call, with its index tensors checked; their values too
    where they are on a CPU.
    """
    t, settings, example = call.tensors, call.settings, EXAMPLES[call.layout]
    for name, feature in FEATURES.items():
        if feature.dtype != INDEX or not feature.layouts:
            continue
        x, rank = getattr(t, name), len(feature.shapes[0])
        if x is not None and (x.dtype not in INDEX_DTYPES or x.dim() != rank):
            raise ArgumentError(name, x, f"int32 (or int64), {rank} dimension{'s' * (rank > 1)}", example)
    if t.cu_seqlens_q is None:  # a KV cache with dense queries
        batch, total_q = t.q.shape[0], t.q.shape[2]
    elif t.cu_seqlens_q.shape[0] == 0:
        raise ArgumentError("cu_seqlens_q", t.cu_seqlens_q, "[B + 1] offsets that start with 0", example)
    else:
        batch, total_q = t.cu_seqlens_q.shape[0] - 1, t.q.shape[0]
    if t.cu_seqlens_k is None and (t.page_table is None or t.seqused_k is None):
        accepted = "[B + 1] offsets; only with both `page_table` and `seqused_k` may it be None"
        raise ArgumentError("cu_seqlens_k", None, accepted, example)
    of_batch = (("cu_seqlens_k", batch + 1), ("seqused_q", batch), ("seqused_k", batch), ("page_table", batch))
    for name, length in of_batch:
        x = getattr(t, name)
        if x is not None and x.shape[0] != length:
            accepted = f"first dimension {length}, for the {batch} sequences of cu_seqlens_q"
            raise ArgumentError(name, x, accepted, example)
    total_k = t.k.shape[0] if t.page_table is None else t.page_table.shape[1] * t.k.shape[1]
    values(call)
    max_q = total_q if settings.max_seqlen_q is None else settings.max_seqlen_q
    max_k = total_k if settings.max_seqlen_k is None else settings.max_seqlen_k
    return batch, max_q, max_k


def values(call: Call) -> None:
    """Check index values (CPU only); the rest follows from the signature."""
    if call.layout != "dense" and device.host_readable(call.tensors.q):
        varlen_values(call)


def varlen_values(call: Call) -> None:
    """The values of index tensors on a CPU."""
    t, example = call.tensors, EXAMPLES[call.layout]
    max_q, max_k = call.settings.max_seqlen_q, call.settings.max_seqlen_k
    if t.cu_seqlens_q is not None:
        limit = max_q if t.seqused_q is None else None
        lengths_q = offsets("cu_seqlens_q", t.cu_seqlens_q, t.q.shape[0], limit, example)
        if t.seqused_q is not None:
            used_lengths("seqused_q", t.seqused_q, max_q, lengths_q, example)
    lengths_k = None
    if t.cu_seqlens_k is not None:
        total = t.k.shape[0] if t.page_table is None else None
        limit = max_k if t.seqused_k is None else None
        lengths_k = offsets("cu_seqlens_k", t.cu_seqlens_k, total, limit, example)
    if t.seqused_k is not None:
        room = lengths_k if t.page_table is None else None
        lengths_k = used_lengths("seqused_k", t.seqused_k, max_k, room, example)
    if t.page_table is not None:
        assert lengths_k is not None
        pages(t.page_table, lengths_k, t.k.shape[0], t.k.shape[1], example)


def used_lengths(name: str, x: Tensor, longest: int | None, room: list[int] | None, example: str) -> list[int]:
    """The lengths that are in use, from 0 to `longest` and to each sequence's room."""
    used: list[int] = x.tolist()
    for b, n in enumerate(used):
        limits = [limit for limit in (longest, room[b] if room else None) if limit is not None]
        if n < 0 or any(n > limit for limit in limits):
            accepted = f"0 to {min(limits)}" if limits else "lengths from 0"
            raise ArgumentError(name, x, f"{accepted} at sequence {b}, which has {n}", example)
    return used


def offsets(name: str, x: Tensor, total: int | None, longest: int | None, example: str) -> list[int]:
    """The lengths between cumulative offsets that start at 0, never fall, and end inside the tokens."""
    values = x.tolist()
    lengths = [end - start for start, end in itertools.pairwise(values)]
    if values[0] != 0:
        raise ArgumentError(name, x, f"offsets that start with 0; the first is {values[0]}", example)
    for b, n in enumerate(lengths):
        if n < 0:
            raise ArgumentError(name, x, f"offsets that never fall; after {values[b]} comes {values[b + 1]}", example)
        if longest is not None and n > longest:
            limit = f"sequences of at most max_seqlen = {longest} tokens; sequence {b} has {n}"
            raise ArgumentError(name, x, limit, example)
    if total is not None and values[-1] > total:
        raise ArgumentError(name, x, f"offsets up to the {total} tokens given; the last is {values[-1]}", example)
    return lengths


def pages(table: Tensor, lengths: list[int], num_pages: int, page_size: int, example: str) -> None:
    """Every page that a sequence needs is in the table, and every entry it uses names a page."""
    rows = table.tolist()
    for b, length in enumerate(lengths):
        needed = -(-length // page_size)
        if needed > table.shape[1]:
            accepted = f"at least {needed} pages of {page_size} keys for the {length} keys of sequence {b}"
            raise ArgumentError("page_table", table, accepted, example)
        for page in rows[b][:needed]:
            if not 0 <= page < num_pages:
                accepted = f"entries of 0 to {num_pages - 1}; sequence {b} uses {page}"
                raise ArgumentError("page_table", table, accepted, example)


def functions(call: Call) -> None:
    """Whether there is a function for each captured tensor."""
    s, num_mask = call.settings, call.settings.num_mask_tensors
    for name, key, number in (("score_mod", s.score_mod, call.num_score_tensors), ("mask", s.mask_mod, num_mask)):
        if number < 0 or (key is None and number > 0):
            accepted = "a number of tensors from 0" if key is not None else f"none without a {name} function"
            raise ArgumentError(f"{name}.tensors", number, accepted, EXAMPLES[call.layout])


def captured(call: Call, formula: Formula, batch: int, seqlens: tuple[int, int]) -> None:
    """Whether the captured tensors of a formula are of the types that it was traced with, on q's device, and have an
    entry for each index of the pair that indexes them.
    """
    s, q, example = call.settings, call.tensors.q, EXAMPLES[call.layout]
    every, num_own = call.tensors.score_mod_tensors, s.num_mask_tensors if formula.is_mask else call.num_score_tensors
    first = len(every) - num_own if formula.is_mask else 0
    if num_own != len(formula.tensors) or first < 0:
        accepted = f"{len(formula.tensors)} tensors, as its formula reads"
        raise ArgumentError("mask.tensors" if formula.is_mask else "score_mod.tensors", num_own, accepted, example)
    for n, (dtype, ndim) in enumerate(formula.tensors, first):
        x = every[n]
        if type_of(x) != (dtype, ndim) or x.device != q.device or x.layout is not torch.strided:
            accepted = f"{dtype} with {ndim} dimensions on {q.device}, as its formula reads"
            raise ArgumentError(name_of_captured(call, n), x, accepted, example)
    ends = {"b": s.b0 + batch, "h": s.h0 + q.shape[1], "q_idx": s.i0 + seqlens[0], "k_idx": s.j0 + seqlens[1]}
    instructions = formula.program.instructions
    for load in (x for x in instructions if x.op == "load"):
        tensor = every[first + load.value]
        for dimension, operand in enumerate(load.operands):
            index = instructions[operand]
            if index.op == "input" and ends[index.value] > tensor.shape[dimension]:
                accepted = f"at least {ends[index.value]} entries in dimension {dimension}, which {index.value} indexes"
                raise ArgumentError(name_of_captured(call, first + load.value), tensor, accepted, example)
