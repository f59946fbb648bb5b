"""Attention over a sequence that is sharded over the ranks of a `DeviceMesh` of `torch.distributed`."""

from .balance import balanced
from .context import context_parallel
from .decode import attention_with_kvcache
from .explain import ShardedExplanation, explain
from .group import ExchangeError
from .layout import Layout
from .schemes import measure_rates
from .sharded import attention, attention_varlen
from .sharding import shard, unshard
from .simulate import Rates, Simulation, simulate

__all__ = [
    "ExchangeError",
    "Layout",
    "Rates",
    "ShardedExplanation",
    "Simulation",
    "attention",
    "attention_varlen",
    "attention_with_kvcache",
    "balanced",
    "context_parallel",
    "explain",
    "measure_rates",
    "shard",
    "simulate",
    "unshard",
]
