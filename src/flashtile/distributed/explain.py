"""The scheme of a sharded call in words: what it is, what moves, and what the others would take."""

from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from .balance import divided, visible_pairs
from .calls import Placing, as_batch, lengths_of, prepared
from .inputs import documents_of, with_defaults
from .layout import Layout
from .schemes import predictions, rates_of
from .simulate import Rates, Simulation
from .work import imbalance


@dataclass(frozen=True)
class ShardedExplanation:
    """The scheme of a sharded call. `str(explanation)` is the text for people, `as_dict()` is for JSON.

    Attributes:
        scheme: the one that the call takes.
        layout: the layout of rows.
        ranks: the sizes of the mesh.
        rates: the rates of the model of time: measured ones after `measure_rates`, else round figures.
        simulations: the prediction of each scheme of this mesh.
        imbalance: the visible pairs of the busiest rank over the mean of all, by layout. A mask counts if it is a
            function or has the rows of the whole sequence. "balanced" is the layout of the call, if it is one, else the
            one that `balanced` finds.
    """

    scheme: str
    layout: str
    ranks: tuple[int, ...]
    rates: Rates
    simulations: tuple[Simulation, ...]
    imbalance: dict[str, float]

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
        shares = ", ".join(f"{layout} {n:.3g}" for layout, n in self.imbalance.items())
        return "\n".join([*lines, f"visible pairs of the busiest rank over the mean: {shares}"])


def explain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mesh: DeviceMesh,
    layout: str | Layout = "contiguous",
    scheme: str = "auto",
    length: int | tuple[int, int] | None = None,
    cu_seqlens_q: Any = None,
    cu_seqlens_k: Any = None,
    **keywords: Any,
) -> ShardedExplanation:
    """Say which scheme a call of `flashtile.distributed.attention` takes, what moves, and how evenly ranks share the
    work; run none of it. A mask is counted, which waits for its device.

    Example:
        >>> print(flashtile.distributed.explain(q, k, v, mesh=mesh, causal=True))  # doctest: +SKIP

    Args:
        q, k, v, mesh, layout, scheme, length, keywords: as the call itself takes them.
        cu_seqlens_q, cu_seqlens_k: the offsets of a call of `attention_varlen`, whose tokens are packed.

    Returns:
        A `ShardedExplanation`.

    Raises:
        AttentionError: as the call itself would.
    """
    names = "mask", "bias", "alibi_slopes", "sinks"
    tensors = {"q": q, "k": k, "v": v} | {name: keywords.pop(name, None) for name in names}
    documents = None
    if cu_seqlens_q is not None:
        documents = documents_of(cu_seqlens_q, cu_seqlens_k)
        tensors, length = as_batch(tensors), lengths_of(documents)
    keywords = with_defaults("explain", keywords)
    ready = prepared(tensors, keywords, Placing(mesh, layout, scheme, length, False), documents)
    rows, keys, window = ready.rows, ready.keys, ready.call.settings.window
    mask = tensors["mask"]
    if isinstance(mask, Tensor) and mask.shape[2] not in (1, rows.length):
        mask = None  # a mask has this rank's rows
    batch, heads = ready.workload.batch, ready.workload.heads
    work = visible_pairs(rows.length, keys.length, window, mask, documents, batch, heads).of_rows()
    kind = layout.kind if isinstance(layout, Layout) else layout
    layouts = {name: Layout(name, rows.length, rows.ranks) for name in ("contiguous", "zigzag")}  # type: ignore[arg-type]
    layouts["balanced"] = rows if kind == "balanced" else divided(work, rows.ranks)
    return ShardedExplanation(
        ready.scheme, kind, tuple(mesh.shape), rates_of(mesh),
        tuple(predictions(mesh, ready.workload)), {name: imbalance(work, x) for name, x in layouts.items()},
    )  # fmt: skip
