"""Attention over a sequence that is sharded over the ranks of a `DeviceMesh` of `torch.distributed`."""

from .layout import Layout
from .sharded import attention, attention_varlen
from .sharding import shard, unshard

__all__ = ["Layout", "attention", "attention_varlen", "shard", "unshard"]
