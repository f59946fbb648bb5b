"""Problems over latent rows of 16 bits as problems over rows of 8 bits."""

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
