"""The calls whose kernels are compiled."""

from typing import Any

import torch
from variants import VARIANTS, Variant

from flashtile.api.explain import described_call
from flashtile.call.call import Call, Settings, Tensors

ARCHITECTURES = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_103", "sm_120", "gfx942", "gfx950")
FAMILIES = (
    "hdim 64 causal", "hdim 128", "hdim 256 transposed", "hdim 96", "hdim 192/128", "hdim 512", "hdim 33/5", "fp32",
    "fp32 hdim 128", "softcap", "bias", "bias of heads and keys", "mask", "slopes", "dropout", "everything", "short",
    "short everything", "few rows", "few keys", "packed",
    "packed, hdim 48 apart", "packed everything", "paged", "one query",
    "hdim 40/1, twenty queries", "hdim 512, sixteen rows", "bias, hdim 32, whole blocks",
    "latent rows, 16 heads", "latent rows, 32 heads", "latent rows, 128 heads", "latent words, 16 heads",
    "latent words, 128 heads", "latent words of 656 bytes, 128 heads",
    "batch-invariant", "batch-invariant, one query",
)  # fmt: skip


def most_registers(arch: str) -> int:
    """Registers that a thread can have; AMD's vector registers include those for accumulation."""
    return 512 if arch.startswith("gfx") else 255


def call_of(variant: Variant) -> Call:
    """A call of long sequences. Kernels depend on lengths only for few queries, which have their own tiles."""
    case = variant.case(0, "cpu", (min(257, variant.longest),))
    arguments: dict[str, Any] = dict(case.arguments)
    positional = [arguments.pop(name, None) for name in ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k")]
    return described_call(*positional, arguments)


def latent_call(heads: int, dtype: torch.dtype = torch.bfloat16) -> Call:
    """Decoding over pages of latent rows, of q's dtype, of 8 bits with a scale for each head, or of 656 bytes."""
    packed = dtype is torch.uint8
    q = torch.empty(2, heads, 1, 576, dtype=torch.bfloat16)
    rows = torch.empty(8, 64, 1, 656 if packed else 576).to(dtype)
    descale = torch.ones(1, 1, 1, 1) if dtype.itemsize == 1 and not packed else None
    lengths, table = torch.tensor([256, 256]).int(), torch.arange(8).view(2, 4).int()
    tensors = Tensors(
        q, rows, rows[..., :512], seqused_k=lengths, page_table=table, k_descale=descale, v_descale=descale
    )  # fmt: skip
    return Call(tensors, Settings(scale=192**-0.5, window_right=0, max_seqlen_k=256, v_dim=512))


def call_of_family(name: str) -> Call:
    if name.startswith("latent rows"):
        return latent_call(int(name.split()[2]))
    if name.startswith("latent words"):
        dtype = torch.uint8 if "bytes" in name else torch.float8_e4m3fn
        return latent_call(int(name.split()[-2]), dtype)
    if name.startswith("batch-invariant"):
        rows = 1 if name.endswith("one query") else 300
        q, k = (torch.empty(2, heads, n, 128, dtype=torch.bfloat16) for heads, n in ((8, rows), (2, 500)))
        return described_call(q, k, k, None, None, {"causal": True, "batch_invariant": True})
    if name not in VARIANTS:  # lengths of a variant are random
        q, bias = (torch.empty(1, 2, 512, n, dtype=torch.bfloat16) for n in (32, 512))
        return described_call(q, q, q, None, None, {"bias": bias})
    return call_of(VARIANTS[name])
