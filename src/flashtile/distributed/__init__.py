"""Attention over a sequence that is sharded over the ranks of a `DeviceMesh` of `torch.distributed`."""

from .layout import Layout
from .sharded import attention
from .sharding import shard, unshard

__all__ = ["Layout", "attention", "shard", "unshard"]
