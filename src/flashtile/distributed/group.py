"""The process group of a mesh with one dimension, and this process's place in it."""

from typing import Any, NamedTuple

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ..errors import ArgumentError

EXAMPLE = 'flashtile.distributed.attention(q, k, v, mesh=init_device_mesh("cuda", (2,)))'


class Group(NamedTuple):
    """A process group, its size, and this process's rank in it."""

    handle: dist.ProcessGroup
    size: int
    rank: int

    def global_rank(self, rank: int) -> int:
        return dist.get_global_rank(self.handle, rank % self.size)

    def gather(self, value: Any) -> list[Any]:
        """The (picklable) values of all ranks."""
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.handle)
        return values


def group_of(mesh: DeviceMesh) -> Group:
    accepted = 'a DeviceMesh with one dimension that this process is part of; of a larger one, `mesh["name"]`'
    if not isinstance(mesh, DeviceMesh) or mesh.ndim != 1 or mesh.get_coordinate() is None:
        raise ArgumentError("mesh", mesh, accepted, EXAMPLE)
    return Group(mesh.get_group(), mesh.size(), mesh.get_local_rank())
