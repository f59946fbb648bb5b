"""Layers for models, made of flashtile's public functions: `flashtile.nn.Attention`."""

from .attention import Attention
from .cache import Cache

__all__ = ["Attention", "Cache"]
