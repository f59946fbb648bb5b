"""The scheme of a sharded call in words: what it is, what moves, and what the others would take."""

from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from .schemes import predictions, rates_of
from .sharded import KEYWORDS, Placing, prepared
from .simulate import Rates, Simulation


@dataclass(frozen=True)
class ShardedExplanation:
    """The scheme of a sharded call. `str(explanation)` is the text for people, `as_dict()` is for JSON.

    Attributes:
        scheme: the one that the call takes.
        layout: the layout of rows.
        ranks: the sizes of the mesh.
        rates: the rates of the model of time: measured ones after `measure_rates`, else round figures.
        simulations: the prediction of each scheme of this mesh.
    """

    scheme: str
    layout: str
    ranks: tuple[int, ...]
    rates: Rates
    simulations: tuple[Simulation, ...]

    def as_dict(self) -> dict[str, Any]:
        simulations = [found._asdict() for found in self.simulations]
        return asdict(self) | {"rates": self.rates._asdict(), "simulations": simulations}

    def __str__(self) -> str:
        lines = [f"{self.scheme} over {' x '.join(map(str, self.ranks))} ranks, {self.layout}"]
        for s in self.simulations:
            chosen = "->" if s.scheme == self.scheme else "  "
            lines.append(
                f"{chosen} {s.scheme}: a rank sends "
                f"{s.bytes_forward / 1e6:.3g} MB in {s.seconds_forward * 1e3:.3g} ms, "
                f"backward {s.bytes_backward / 1e6:.3g} MB in {s.seconds_backward * 1e3:.3g} ms, "
                f"predicted speedup {s.speedup:.3g}"
            )
        return "\n".join(lines)


def explain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mesh: DeviceMesh,
    layout: str = "contiguous",
    scheme: str = "auto",
    length: int | tuple[int, int] | None = None,
    **keywords: Any,
) -> ShardedExplanation:
    """Say which scheme a call of `flashtile.distributed.attention` takes, and what moves; run none of it.

    Example:
        >>> print(flashtile.distributed.explain(q, k, v, mesh=mesh, causal=True))  # doctest: +SKIP

    Args:
        q, k, v, mesh, layout, scheme, length, keywords: as the call itself takes them.

    Returns:
        A `ShardedExplanation`.

    Raises:
        AttentionError: as the call itself would.
    """
    names = "mask", "bias", "alibi_slopes", "sinks"
    tensors = {"q": q, "k": k, "v": v} | {name: keywords.pop(name, None) for name in names}
    ready = prepared(tensors, KEYWORDS | keywords, Placing(mesh, layout, scheme, length, False), None)
    rates = rates_of(mesh.device_type)
    return ShardedExplanation(ready.scheme, layout, tuple(mesh.shape), rates, tuple(predictions(mesh, ready.workload)))
