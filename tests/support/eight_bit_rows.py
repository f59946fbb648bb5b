"""Problems over latent rows of 16 bits as problems over rows of 8 bits."""

import math
from dataclasses import replace

import torch

from flashtile.testing.case import Case
from flashtile.testing.packed_rows import bytes_of

DTYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2, "int8": torch.int8}


def in_eight_bits(case: Case, kind: str) -> Case:
    """The problem with its cache in a format, with scales of a head or "by key", or in "656 bytes"."""
    rows, more = case.arguments["k_cache"], {}
    if kind == "656 bytes":
        return replace(case, arguments=case.arguments | {"k_cache": bytes_of(rows)})
    name, by_key = kind.removesuffix(" by key"), kind.endswith("by key")
    shape = rows.shape[:3] if by_key else (1,)
    generator = torch.Generator(rows.device).manual_seed(1)
    descale = torch.rand(shape, generator=generator, device=rows.device) + 0.5
    if name == "int8":
        rows, descale = (rows.float() * 40).nan_to_num(77).round().clamp(-127, 127), descale / 40
    more = {"k_cache": rows.to(DTYPES[name]), "k_descale": descale}
    return replace(case, arguments=case.arguments | more)


def small_weights(device: str = "cpu") -> Case:
    """64 keys: the first has values of 0, and all weight but 63 * 2 ** -40.5. These become 0 in float16, if the largest
    weight is 2 ** 15.
    """
    q = torch.zeros(1, 16, 1, 576, dtype=torch.bfloat16)
    rows = torch.ones(1, 64, 1, 576).to(torch.float8_e4m3fn)
    q[..., 512:], rows[..., 512:], rows[0, 0, 0, :512] = 0.4375, 0.0, 0.0
    rows[0, 0, 0, 512:] = 1.0  # a score of 28
    given = {"q": q, "k_cache": rows, "v_cache": None, "v_dim": 512, "scale": 40.5 * math.log(2) / 28}
    given |= {"cache_seqlens": torch.tensor([64]).int(), "page_table": torch.zeros(1, 1).int()}
    return Case(
        "attention_with_kvcache",
        {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in given.items()},
    )
