"""Integrations into other libraries, each optional: transformers, diffusers, ONNX.

Nothing here is imported by `import flashtile`, and each module needs its library only when it is used.
"""

from types import ModuleType as _ModuleType


def __getattr__(name: str) -> _ModuleType:
    """A module at its first use: `import flashtile` is enough for `flashtile.integrations.transformers.register()`."""
    from importlib import import_module

    if name in ("diffusers", "onnx", "transformers"):
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
