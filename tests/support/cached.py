"""Calls of attention_with_kvcache and their expected results, computed from the contract sequence by sequence."""

from typing import Any, NamedTuple

import torch
from checking import offsets
from torch import Tensor

import flashtile
from flashtile.testing.case import Case, ExactSides, MaskFunction, ScoreFunction
from flashtile.testing.inputs import query_key_value
from flashtile.testing.oracle import solve
from flashtile.testing.poison import with_guard_bands
from flashtile.testing.tolerance import worst

Arguments = dict[str, Any]
NAN = torch.nan
CACHES = ("k_cache", "v_cache")


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


class Step(NamedTuple):
    """The results of one call and the caches after it."""

    out: Tensor
    lse: Tensor
    k_cache: Tensor
    v_cache: Tensor


def run(arguments: Arguments, **options: Any) -> Step:
    """One call on copies of the caches, which keep their strides."""
    given = arguments | {name: copy_of(arguments[name]) for name in CACHES}
    score_mod = given.get("score_mod")
    if isinstance(score_mod, ScoreFunction):
        given["score_mod"] = flashtile.ScoreMod(score_mod.fn, score_mod.tensors)
    if isinstance(mask := given.get("mask"), MaskFunction):
        given["mask"] = mask.public()
    if isinstance(given.get("window"), ExactSides):
        given["window"] = flashtile.ExactWindow(*given["window"])
    out, lse = flashtile.attention_with_kvcache(**given, return_lse=True, **options)
    return Step(out, lse, given["k_cache"], given["v_cache"])


def copy_of(x: Tensor) -> Tensor:
    """A copy with the same strides, also where they leave gaps."""
    extent = 1 + sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True))
    copy = torch.full((extent,), NAN if x.is_floating_point() else -128, dtype=x.dtype).as_strided(x.shape, x.stride())
    return copy.copy_(x)


def assert_right(arguments: Arguments, **options: Any) -> Step:
    """Results within the contract's bound, new keys and values in their places, every other slot as it was."""
    before = {name: arguments[name].clone() for name, x in arguments.items() if isinstance(x, Tensor)}
    step = run(arguments, **options)
    assert all(same_bits(before[name], arguments[name]) for name in before)  # only the caches are written
    expected_k, expected_v, written = appended(arguments)
    assert same_bits(step.v_cache, expected_v)
    assert same_bits(step.k_cache[~written], expected_k[~written])
    if arguments.get("rotary_cos") is None:
        assert same_bits(step.k_cache, expected_k)
    eps = torch.finfo(step.k_cache.dtype).eps
    torch.testing.assert_close(step.k_cache[written], expected_k[written], rtol=2 * eps, atol=8 * eps)
    case = as_packed(arguments, step.k_cache, step.v_cache)
    expected, rows = solve(case), queries_of(arguments)
    out = tokens_of(step.out)
    lse = step.lse if step.out.dim() == 3 else step.lse.transpose(0, 1).flatten(1)  # [H, T]
    assert not out[len(rows) :].any()  # tokens of no sequence
    assert (lse[:, len(rows) :] == -torch.inf).all()
    for name, x in (("out", out[: len(rows)]), ("lse", lse[:, : len(rows)])):
        deviation = worst(x, expected[name], case.dtype, name)
        assert deviation.ok, f"{deviation}\n{case.description}"
    return step


def same_bits(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors are equal, with equal NaN."""
    if not x.is_floating_point():
        return torch.equal(x, y)
    return torch.equal(x.isnan(), y.isnan()) and torch.equal(x.nan_to_num(), y.nan_to_num())


def tokens_of(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(0, 1) if x.dim() == 4 else x


def batch_of(arguments: Arguments) -> int:
    cu = arguments.get("cu_seqlens_q")
    return arguments["q"].shape[0] if cu is None else cu.shape[0] - 1


def rows_of(arguments: Arguments, name: str, b: int) -> Tensor:
    """Sequence b's tokens `[S, H, D]` of q, k or v."""
    x = arguments[name]
    if x.dim() == 4:
        return x[b].transpose(0, 1)
    cu = arguments.get("cu_seqlens_k_new") if name in ("k", "v") else None
    cu = (arguments["cu_seqlens_q"] if cu is None else cu).tolist()
    return x[cu[b] : cu[b + 1]]


def queries_of(arguments: Arguments) -> Tensor:
    """Indices of the tokens of q that belong to a sequence."""
    q = arguments["q"]
    used = q.shape[0] * q.shape[2] if q.dim() == 4 else int(arguments["cu_seqlens_q"][-1])
    return torch.arange(used)


def lengths(arguments: Arguments) -> list[tuple[int, int]]:
    """Keys before, and keys after, of each sequence."""
    result = []
    for b in range(batch_of(arguments)):
        held = arguments["cache_seqlens"]
        held = held if isinstance(held, int) else int(held[b])
        new = 0 if arguments.get("k") is None else rows_of(arguments, "k", b).shape[0]
        result.append((held, held + new))
    return result


def start_of(arguments: Arguments, b: int) -> int:
    """Rotary position of sequence b's first new key."""
    starts = arguments.get("rotary_start")
    if starts is None:
        return lengths(arguments)[b][0]
    return starts if isinstance(starts, int) else int(starts[b])


def slots(arguments: Arguments, b: int) -> tuple[Tensor, Tensor]:
    """Page (or row of a dense cache) and slot of each of sequence b's positions."""
    position = torch.arange(lengths(arguments)[b][1])
    table, rows = arguments.get("page_table"), arguments.get("cache_batch_idx")
    row = b if rows is None else int(rows[b])
    if table is not None:
        size = arguments["k_cache"].shape[1]
        return table[row].long()[position // size], position % size
    return torch.full_like(position, row), position


def as_tokens(cache: Tensor, arguments: Arguments) -> Tensor:
    """`[page, slot, H, D]` as a view of either kind of cache."""
    return cache if arguments.get("page_table") is not None else cache.transpose(1, 2)


def turned(x: Tensor, positions: Tensor, arguments: Arguments) -> Tensor:
    """Rotary by complex multiplication: `x [S, H, D]`, in float64, rounded to x's dtype."""
    cos, sin = arguments.get("rotary_cos"), arguments.get("rotary_sin")
    if cos is None or sin is None or x.shape[0] == 0:
        return x
    width = 2 * cos.shape[1]
    angles = torch.complex(cos.double(), sin.double())[positions][:, None]  # [S, 1, R / 2]
    pairs = x[..., :width].double()
    if arguments.get("rotary_interleaved", True):
        turned = torch.view_as_real(torch.view_as_complex(pairs.unflatten(-1, (-1, 2)).contiguous()) * angles)
        turned = turned.flatten(-2)
    else:
        product = torch.complex(*pairs.unflatten(-1, (2, -1)).unbind(-2)) * angles
        turned = torch.cat((product.real, product.imag), dim=-1)
    return torch.cat((turned.to(x.dtype), x[..., width:]), dim=-1)


def appended(arguments: Arguments) -> tuple[Tensor, Tensor, Tensor]:
    """The caches with the new keys and values, and a mask of the new slots in the shape of k_cache."""
    k_cache, v_cache = arguments["k_cache"].clone(), arguments["v_cache"].clone()
    written = torch.zeros(k_cache.shape, dtype=torch.bool)
    if arguments.get("k") is None:
        return k_cache, v_cache, written
    for b, (before, after) in enumerate(lengths(arguments)):
        page, slot = (x[before:] for x in slots(arguments, b))
        start = start_of(arguments, b)
        k = turned(rows_of(arguments, "k", b), start + torch.arange(after - before), arguments)
        as_tokens(k_cache, arguments)[page, slot] = k
        as_tokens(v_cache, arguments)[page, slot] = rows_of(arguments, "v", b)
        as_tokens(written, arguments)[page, slot] = True
    return k_cache, v_cache, written


FEATURES = ("causal", "window", "attention_chunk", "scale", "softcap", "bias", "alibi_slopes", "sinks", "score_mod")
FEATURES += ("dropout_p", "dropout_seed")


def as_packed(arguments: Arguments, k_cache: Tensor, v_cache: Tensor) -> Case:
    """The attention over the caches after the call, as a packed call for the oracle."""
    q, k, v = [], [], []
    ends = [after for _, after in lengths(arguments)]
    for b, after in enumerate(ends):
        rows = rows_of(arguments, "q", b)
        steps = torch.arange(rows.shape[0])
        if arguments.get("rotary_start") is None:
            steps = steps + after - rows.shape[0] - start_of(arguments, b)
        if arguments.get("rotary_q_fixed"):
            steps = steps[:1].expand(rows.shape[0])
        q.append(turned(rows, (start_of(arguments, b) + steps).clamp(min=0), arguments))
        page, slot = slots(arguments, b)
        k.append(as_tokens(k_cache, arguments)[page, slot])
        v.append(as_tokens(v_cache, arguments)[page, slot])
    capacity = max(ends, default=0)
    mask = arguments.get("mask")
    leftpad = arguments.get("leftpad_k")
    if leftpad is not None and isinstance(mask, MaskFunction):
        of_caller, first = mask.fn, leftpad
        mask = MaskFunction(lambda b, h, i, j, *x: of_caller(b, h, i, j, *x) & (j >= first[b]), mask.tensors)
    elif leftpad is not None:
        exists = torch.arange(capacity) >= leftpad[:, None, None, None]
        mask = exists if mask is None else exists & (mask if mask.shape[3] == 1 else mask[..., :capacity])
    empty = arguments["q"].new_empty
    heads_kv = as_tokens(k_cache, arguments).shape[2]
    given: Arguments = {
        "q": torch.cat([empty((0, arguments["q"].shape[1], arguments["q"].shape[-1])), *q]),
        "k": torch.cat([empty((0, heads_kv, k_cache.shape[-1])), *k]),
        "v": torch.cat([empty((0, heads_kv, v_cache.shape[-1])), *v]),
        "cu_seqlens_q": offsets(*(x.shape[0] for x in q)),
        "cu_seqlens_k": offsets(*ends),
        "mask": mask,
    }
    return Case("attention_varlen", given | {name: arguments[name] for name in FEATURES if name in arguments})


# Problems -------------------------------------------------------------------------------------------------------------


def angles(length: int, width: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """`rotary_cos` and `rotary_sin`, `[length, width / 2]`."""
    frequency = 100.0 ** -(torch.arange(width // 2) * 2 / width)
    angle = torch.arange(length)[:, None] * frequency
    return angle.cos().to(dtype), angle.sin().to(dtype)


def problem(
    *,
    held: tuple[int, ...] = (3, 0, 8),
    new: int | tuple[int, ...] | None = 2,
    queries: int | tuple[int, ...] | None = None,
    capacity: int = 12,
    page_size: int | None = None,
    heads: tuple[int, int] = (4, 2),
    head_dim: int = 8,
    head_dim_v: int = 6,
    dtype: torch.dtype = torch.float32,
    kind: str = "normal",
    seed: int = 0,
    **arguments: Any,
) -> Arguments:
    """A call whose caches hold NaN in empty slots; with `page_size` they are shuffled pages. `new` and `queries` are
    packed if they are tuples; `queries` default to `new`.
    """
    generator = torch.Generator().manual_seed(seed)
    (hq, hkv), batch = heads, len(held)
    queries = new if queries is None else queries
    queries = 1 if queries is None else queries
    new_each = new if isinstance(new, tuple) else (new or 0,) * batch

    packed = isinstance(queries, tuple)
    total_q = sum(queries) if isinstance(queries, tuple) else batch * queries
    total_new = sum(new_each)
    total_k = total_new + sum(held)  # tokens in the last dimension but one, the new ones first
    shapes = ((hq, total_q, head_dim), (hkv, total_k, head_dim), (hkv, total_k, head_dim_v))
    q, k, v = query_key_value(kind, shapes, dtype, generator)
    given: Arguments = {"cache_seqlens": torch.tensor(held, dtype=torch.int32), "q": q.transpose(0, 1)}
    if isinstance(queries, tuple):
        given["cu_seqlens_q"] = offsets(*queries)
    if new is not None:
        given |= {"k": k[:, :total_new].transpose(0, 1), "v": v[:, :total_new].transpose(0, 1)}
    for name in {"q", "k", "v"} & given.keys():
        x = given[name]
        if packed:  # and two tokens of no sequence
            given[name] = torch.cat((x, x.new_full((2, *x.shape[1:]), NAN)))
        else:
            given[name] = x.unflatten(0, (batch, -1)).transpose(1, 2)
    if page_size is None:
        given["k_cache"] = torch.full((batch + 2, hkv, capacity, head_dim), NAN, dtype=dtype)
        given["v_cache"] = torch.full((batch + 2, hkv, capacity, head_dim_v), NAN, dtype=dtype)
    else:
        columns = -(-capacity // page_size)
        pages = torch.randperm(batch * columns + 2, generator=generator).int()
        given["page_table"] = pages[: batch * columns].reshape(batch, columns)
        given["k_cache"] = torch.full((len(pages), page_size, hkv, head_dim), NAN, dtype=dtype)
        given["v_cache"] = torch.full((len(pages), page_size, hkv, head_dim_v), NAN, dtype=dtype)
    given |= arguments
    start = total_new
    for b, n in enumerate(held):
        page, slot = (x[:n] for x in slots(given, b))
        as_tokens(given["k_cache"], given)[page, slot] = k[:, start : start + n].transpose(0, 1)
        as_tokens(given["v_cache"], given)[page, slot] = v[:, start : start + n].transpose(0, 1)
        start += n
        if given.get("leftpad_k") is not None:
            page, slot = (x[: int(given["leftpad_k"][b])] for x in (page, slot))
            as_tokens(given["k_cache"], given)[page, slot] = NAN
            as_tokens(given["v_cache"], given)[page, slot] = NAN
    return given


def guarded(arguments: Arguments) -> tuple[Arguments, list[Any]]:
    """The call with poison in front of and behind the caches."""
    guards = {name: with_guard_bands(arguments[name]) for name in CACHES}
    return arguments | {name: guard.tensor for name, guard in guards.items()}, list(guards.values())


def call_in_place(arguments: Arguments, **options: Any) -> Any:
    return flashtile.attention_with_kvcache(**arguments, **options)
