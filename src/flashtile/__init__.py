"""flashtile: exact attention for PyTorch, forward and backward, in O(S) memory, with nothing to compile."""

from . import supported as _supported  # noqa: F401 - says no before anything newer is read

# isort: split
from typing import TYPE_CHECKING as _TYPE_CHECKING

from . import mask_mods, score_mods
from .api.attention import ExactWindow, attention
from .api.explain import Explanation, explain
from .api.hadamard import hadamard
from .api.kvcache import attention_with_kvcache
from .api.latent_rows import PackedLatentRows, pack_latent_rows, unpack_latent_rows
from .api.merge import merge_attention
from .api.quantize import QuantizedKV, quantize_kv
from .api.varlen import attention_varlen
from .block_mask import BlockMask
from .call import sharding as _sharding
from .call.counting import CallCount, CallCounts, calls
from .dispatch import flops as _flops  # noqa: F401 - PyTorch's counter finds its formulas
from .dispatch.status import BackendStatus, backends
from .errors import ArgumentError, AttentionError, AttentionWarning, BackendError
from .expression import MaskMod, ScoreMod

__version__ = "0.1.0.dev0"

__all__ = [
    "ArgumentError",
    "AttentionError",
    "AttentionWarning",
    "BackendError",
    "BackendStatus",
    "BlockMask",
    "CallCount",
    "CallCounts",
    "ExactWindow",
    "Explanation",
    "MaskMod",
    "PackedLatentRows",
    "Prepared",
    "QuantizedKV",
    "ScoreMod",
    "attention",
    "attention_varlen",
    "attention_with_kvcache",
    "backends",
    "calls",
    "explain",
    "hadamard",
    "mask_mods",
    "merge_attention",
    "pack_latent_rows",
    "prepare",
    "quantize_kv",
    "score_mods",
    "unpack_latent_rows",
]


def _run_sharded(*arguments: object) -> object:
    """Hand a call in a context, or with DTensors, to the ranks."""
    from .distributed.context import run_public

    return run_public(*arguments)  # type: ignore[arg-type]


_sharding.run_public = _run_sharded


def __dir__() -> list[str]:
    """Public names alone: what is imported to define them is not."""
    return [*__all__, "__version__"]


if _TYPE_CHECKING:
    from .prebuilt.prepare import Prepared, prepare
else:  # or else checkers would take every name

    def __getattr__(name: str):
        """A subpackage or `prepare` at its first use: `import flashtile` is enough for `flashtile.nn.Attention`."""
        from importlib import import_module

        if name in ("compat", "distributed", "integrations", "nn"):
            return import_module(f"{__name__}.{name}")
        if name in ("prepare", "Prepared"):
            return getattr(import_module(f"{__name__}.prebuilt.prepare"), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
