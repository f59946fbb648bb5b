"""The scheme of a call."""

from torch.distributed.device_mesh import DeviceMesh

from ..call.call import Call
from ..errors import ArgumentError
from .group import EXAMPLE, Grid
from .layout import Layout

ONE_DIMENSION = ("ring", "gather", "ulysses")
TWO_DIMENSIONS = ("ring+ulysses", "gather+ulysses")


def accepted_schemes(mesh_dims: int, num_heads: int, inner: int) -> list[str]:
    """Schemes of a mesh, of whose last dimension `inner` is the size."""
    names = ONE_DIMENSION if mesh_dims == 1 else TWO_DIMENSIONS
    return [name for name in names if "ulysses" not in name or num_heads % inner == 0]


def scheme_of(scheme: str, call: Call, rows: Layout, keys: Layout, grid: Grid, mesh: DeviceMesh) -> str:
    """The scheme by its name, or the one that "auto" takes."""
    num_heads, inner = call.tensors.q.shape[1], mesh.size(mesh.ndim - 1)
    accepted = accepted_schemes(mesh.ndim, num_heads, inner)
    if scheme == "auto" and accepted:
        return accepted[0]
    if scheme not in accepted:
        names = (
            " or ".join(map(repr, ["auto", *accepted])) if accepted else "query heads that the second dimension divides"
        )
        raise ArgumentError("scheme", scheme, f"for {num_heads} query heads on this mesh, {names}", EXAMPLE)
    return scheme
