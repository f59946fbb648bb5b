"""The arguments of kernels that read or write keys and values of 8 bits."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ....call import eight_bit_layouts as layouts
from ....call.call import Call, Tensors
from ....call.device import describe_device
from ....call.eight_bit import DESCALES, FORMATS, bits, is_eight_bit, key_scales, query_scales, scales_of_pages
from ....call.problem import alignment
from ...gpu.pointers import Described
from ...gpu.replay import Recorder
from ...scalars import rows_last
from ..eight_bit import of_queries

DIMENSIONS = "bpnh"  # dimensions of scales: sequences, pages, slots, heads
NATIVE_E4M3 = 89  # the first compute capability with conversions of float8_e4m3fn


def with_numbers(recorder: Recorder, call: Call) -> Call:
    """The call with keys of 8 bits in pages, and queries of 8 bits as 16-bit numbers, which stand for them exactly; its
    tensors are the recorder's. Scales stay apart.
    """
    if not is_eight_bit(call.tensors.k):
        return call
    dtype, call = call.out_dtype, in_pages(recorder, call)
    if not is_eight_bit(call.tensors.q):
        return call
    t = call.tensors
    by_key = (
        scale_kinds(descales(t))["V_SCALES"] == "key" and not t.q.is_cpu
    )  # whose interpreter multiplies no bfloat16
    q = recorder.op(partial(Tensor.to, dtype=of_queries(v_by_key=by_key)), t.q)
    settings = call.settings._replace(out_dtype=str(dtype).removeprefix("torch."))
    return call._replace(tensors=t._replace(q=q), settings=settings)


def in_pages(recorder: Recorder, call: Call) -> Call:
    """As `eight_bit_layouts.in_pages`, of the recorder's tensors."""
    if call.layout == "paged":
        return call
    k, v = (recorder.op(rows_last, x) for x in call.tensors[1:3])
    call = call._replace(tensors=call.tensors._replace(k=k, v=v))
    t, layout, most, batch = call.tensors, call.layout, layouts.most_keys(call), layouts.batch_of(call)
    views = {name: recorder.view(x, layouts.as_pages(x)) for name, x in (("k", k), ("v", v))}
    for name in DESCALES:
        x = getattr(t, name)
        view = None if x is None else key_scales(x, k, batch, layout)
        views |= {} if x is None or view is None else {name: recorder.view(x, view)}
    tensors = t._replace(**views)
    if layout == "dense":
        table = recorder.constant(partial(layouts.page_of_sequence, batch, k.device))
        lengths = recorder.constant(partial(layouts.keys_of_sequence, batch, most, k.device))
        tensors = tensors._replace(page_table=table, seqused_k=lengths)
    else:
        tensors = tensors._replace(page_table=recorder.op(partial(layouts.pages_of_tokens, most), t.cu_seqlens_k))
    return call._replace(tensors=tensors, settings=call.settings._replace(max_seqlen_k=most))


def key_pointer(x: Tensor) -> Tensor | Described:
    """k or v as kernels take them: floats of 8 bits as integers, which every chip has."""
    return Described(x, integers, None) if is_eight_bit(x) and x.dtype.is_floating_point else x


def integers(x: Tensor, _: None) -> Tensor:
    return bits(x)


def key_format(k: Tensor) -> str:
    """`KEY_FORMAT` of a kernel that reads numbers of 8 bits; empty of others."""
    name = "packed" if k.dtype is torch.uint8 else FORMATS.get(k.dtype, "")
    if name == "packed":
        return name if converts_e4m3(k) else "packed by bits"
    if name == "e4m3" and not converts_e4m3(k):
        return "e4m3 by bits"
    return "int8 by float32" if name == "int8" and k.is_cpu else name


def converts_e4m3(k: Tensor) -> bool:
    arch = describe_device(k.device).arch
    return arch.startswith("sm_") and int(arch[3:]) >= NATIVE_E4M3


def in_pairs(k: Tensor, q_dtype: torch.dtype) -> bool:
    """Whether kernels read two features of k or v as one word. AMD's compiler was not measured with words; products in
    float32 gain nothing.
    """
    known = k.is_cpu or describe_device(k.device).arch.startswith("sm_")
    return is_eight_bit(k) and known and q_dtype is not torch.float32 and alignment(k) % 2 == 0 and k.shape[-1] % 2 == 0


def descales(t: Tensors) -> dict[str, Tensor | None]:
    """The scales of k and v as views `[B|1, num_pages|1, page_size|1, Hkv]`."""
    views: dict[str, Tensor | None] = {"k_descale": t.k_descale, "v_descale": t.v_descale}
    table = t.page_table
    for name, x in views.items():
        if x is not None and table is not None:
            views[name] = scales_of_pages(x, t.k, table.shape[0], paged=True)
    return views


def scale_pointers(t: Tensors) -> dict[str, Tensor | None]:
    return {"k_descale": t.k_descale, "v_descale": t.v_descale}


def row_scale_strides(call: Call) -> dict[str, int | None]:
    """Strides of the scales of queries; 0 of dimensions that a scale does not depend on."""
    t = call.tensors
    if t.q_descale is None:
        return {f"stride_q_descale_{dim}": None for dim in "bhgm"}
    heads_kv = t.k.shape[1 if call.layout == "dense" else -2]
    x = query_scales(t.q_descale, t.q, heads_kv, layouts.batch_of(call))
    assert x is not None
    b, h, m = (stride if n > 1 else 0 for n, stride in zip(x.shape, x.stride(), strict=True))
    of_q, of_k = (h, 0) if x.shape[1] == t.q.shape[1] else (0, h)
    return {f"stride_q_descale_{dim}": n for dim, n in zip("bhgm", (b, of_q, of_k, m), strict=True)}


def scale_strides(views: Mapping[str, Tensor | None]) -> dict[str, int | None]:
    """Strides of scales; 0 of dimensions that a scale does not depend on."""
    found: dict[str, int | None] = {}
    for name, x in views.items():
        for n, dim in enumerate(DIMENSIONS):
            stride = None if x is None else x.stride(n) if x.shape[n] > 1 else 0
            found[f"stride_{name}_{dim}"] = stride
    return found


def constants(t: Tensors) -> dict[str, Any]:
    """The compile-time constants of `forward_kernel`. Probabilities times scales may be outside of float16's range: two
    bfloat16 numbers stand for one, but in Triton's interpreter, which multiplies none.
    """
    kinds, values = scale_kinds(descales(t)), ""
    if kinds["V_SCALES"] == "key" and t.q.dtype is torch.float16:
        values = "fp32" if t.q.is_cpu else "bf16x2"
    ptx = describe_device(t.k.device).arch.startswith("sm_")
    numbers = {"KEY_FORMAT": key_format(t.k), "PTX": t.k.dtype.itemsize == 1 and ptx, "VALUES": values}
    return numbers | kinds | {"Q_SCALES": t.q_descale is not None}


def scale_kinds(views: Mapping[str, Tensor | None]) -> dict[str, str]:
    """The constants `K_SCALES` and `V_SCALES`."""
    kinds = {
        name: "" if x is None else "key" if x.shape[1] > 1 or x.shape[2] > 1 else "head" for name, x in views.items()
    }
    return {"K_SCALES": kinds["k_descale"], "V_SCALES": kinds["v_descale"]}
