"""The libraries that are compared, one file each, behind one interface."""

from collections.abc import Sequence
from pathlib import Path

from ...dispatch.status import backends
from .ffpa import BACKENDS as FFPA_BACKENDS
from .ffpa import Ffpa
from .flash_attn_2 import FlashAttention2
from .flash_attn_3 import FlashAttention3
from .flash_attn_4 import FlashAttention4
from .flex import Flex
from .onnx_runtime import OnnxRuntime
from .own import DETERMINISTIC, Flashtile
from .plain import Plain
from .provider import Declined, Prepared, Provider
from .sdpa import BACKENDS, Sdpa
from .torch_varlen import TorchVarlen

__all__ = ["Declined", "Prepared", "Provider", "all_names", "make"]


def all_names() -> tuple[str, ...]:
    """Names of all providers: `flashtile` is `backend="auto"`, `flashtile:NAME` one backend, and
    `flashtile:deterministic` is `auto` with `deterministic=True`.
    """
    own = ("flashtile", f"flashtile:{DETERMINISTIC}", *(f"flashtile:{status.name}" for status in backends()))
    others = ("flex", "plain", "torch_varlen", "fa2", "fa3", "fa4", *(f"ffpa:{x}" for x in FFPA_BACKENDS), "onnx")
    return (*own, "sdpa", *(f"sdpa:{name}" for name in BACKENDS), *others)


def make(names: Sequence[str], fa3_library: Path | None = None) -> list[Provider]:
    """Providers by name, without duplicates. A backend of flashtile that does not exist is unusable, with that reason.

    Raises:
        ValueError: no provider has that name.
    """
    simple = {"flex": Flex, "plain": Plain, "torch_varlen": TorchVarlen, "fa2": FlashAttention2, "fa4": FlashAttention4}
    simple |= {"onnx": OnnxRuntime}
    made: list[Provider] = []
    for name in dict.fromkeys(names):
        family, _, backend = name.partition(":")
        if family == "flashtile":
            made.append(Flashtile(backend))
        elif name == "sdpa" or (family == "sdpa" and backend in BACKENDS):
            made.append(Sdpa(backend))
        elif family == "ffpa" and backend in FFPA_BACKENDS:
            made.append(Ffpa(backend))
        elif name == "fa3":
            made.append(FlashAttention3(fa3_library))
        elif name in simple:
            made.append(simple[name]())
        else:
            raise ValueError(f"there is no provider {name!r}; there are {', '.join(all_names())}")
    return made
