"""Provider interface: a library that computes attention, or declines a case with a reason."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...testing.case import Case

FEATURES = ("softcap", "bias", "mask", "alibi_slopes", "sinks", "score_mod")
FREE_PART = 0.5  # part of the free memory that a provider may plan to fill


class Declined(Exception):  # noqa: N818  it is an answer, not an error
    """A provider's reason not to compute a case."""


@dataclass(frozen=True)
class Prepared:
    """One case, ready to run any number of times.

    `forward()` returns out in the case's layout. `backward(dout)` returns dq, dk, dv of a forward that it runs itself.
    `detail` describes the provider's choice.
    """

    forward: Callable[[], Tensor]
    backward: Callable[[Tensor], tuple[Tensor, ...]] | None = None
    detail: str = ""


class Provider(ABC):
    """A library under the name that sweeps use for it."""

    name: str
    contract_dropout = False  # whether dropout draws the random numbers of the contract, so that it can be checked

    def unusable(self, device: torch.device) -> str | None:
        """The reason why the library cannot run on this machine or device; `None` if it can."""
        return None

    def version(self) -> str:
        return f"torch {torch.__version__}"

    @abstractmethod
    def prepare(self, case: Case, decode: bool = False) -> Prepared:
        """Bind the case to the library's call. With `decode`, keys and values are a full cache.

        Raises:
            Declined: the library has no such call.
        """


def from_autograd(attend: Callable[..., Tensor], case: Case, detail: str = "") -> Prepared:
    """`attend(q, k, v) -> out` with PyTorch's own backward, of the case's tensors in its own layout."""
    leaves = [case.arguments[name].detach() for name in ("q", "k", "v")]
    if not case.differentiates:
        return Prepared(lambda: attend(*leaves), None, detail)
    leaves = [x.requires_grad_() for x in leaves]
    graphs: dict[int, tuple[Tensor, list[Tensor]]] = {}  # by stream: backward runs where its forward ran

    def backward(dout: Tensor) -> tuple[Tensor, ...]:
        stream = torch.cuda.current_stream(dout.device).cuda_stream if dout.device.type == "cuda" else 0
        if stream not in graphs:
            own = [x.detach().requires_grad_() for x in leaves]
            graphs[stream] = attend(*own), own
        out, own = graphs[stream]
        return torch.autograd.grad(out, own, dout, retain_graph=True)

    return Prepared(lambda: attend(*leaves), backward, detail)


def features(case: Case) -> set[str]:
    """Features that a library needs for this case."""
    arguments = case.arguments
    q, k, v = (arguments[name] for name in ("q", "k", "v"))
    needed = {name for name in FEATURES if arguments.get(name) is not None}
    needed |= {"causal"} if arguments.get("causal") else set()
    needed |= {"window"} if arguments.get("window") else set()
    needed |= {"dropout"} if arguments.get("dropout_p") else set()
    needed |= {"packed sequences"} if case.function == "attention_varlen" else set()
    needed |= {"Dv other than D"} if q.shape[-1] != v.shape[-1] else set()
    heads = 1 if q.dim() == 4 else -2
    needed |= {"grouped heads"} if q.shape[heads] != k.shape[heads] else set()
    return needed


def require(case: Case, library: str, allowed: set[str]) -> None:
    """Decline a case with a feature that the library's call does not take."""
    missing = features(case) - allowed
    if missing:
        raise Declined(f"{library} takes no {', no '.join(sorted(missing))}")


def effective_window(case: Case) -> tuple[int, int]:
    """`(left, right)` of window and causal together; -1 is unlimited. Bottom-right aligned, as in the contract."""
    left, right = case.arguments.get("window") or (-1, -1)
    if case.arguments.get("causal"):
        right = 0 if right < 0 else min(right, 0)
    return left, right


def softmax_scale(case: Case) -> float:
    return case.arguments["q"].shape[-1] ** -0.5


def group_of(case: Case) -> int:
    """Query heads for each head of keys and values."""
    q, k = case.arguments["q"], case.arguments["k"]
    heads = 1 if q.dim() == 4 else -2
    return q.shape[heads] // k.shape[heads]


def require_free_memory(case: Case, scores: float, what: str) -> None:
    """Decline a dense case whose `scores` matrices [B, H, Sq, Sk] (in fp32, a number of them) would fill the memory."""
    q, k = case.arguments["q"], case.arguments["k"]
    wanted = scores * 4 * q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2]
    free = free_bytes(q.device)
    if free is not None and wanted > FREE_PART * free:
        raise Declined(f"{what} of {wanted / 2**30:.1f} GiB with {free / 2**30:.1f} GiB of free memory")


def free_bytes(device: torch.device) -> int | None:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        with open("/proc/meminfo") as file:
            lines = dict(line.split(":", 1) for line in file)
        return int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError):
        return None


def visible_pairs(case: Case) -> Tensor | None:
    """Bool [Sq, Sk] of a dense case's causal and window; `None` if they hide nothing."""
    q, k = case.arguments["q"], case.arguments["k"]
    seqlen_q, seqlen_k = q.shape[2], k.shape[2]
    left, right = effective_window(case)
    if left < 0 and (right < 0 or seqlen_q == 1):
        return None
    distance = relative_position(seqlen_q, seqlen_k, q.device)
    visible = torch.ones_like(distance, dtype=torch.bool)
    if left >= 0:
        visible &= distance <= left
    if right >= 0:
        visible &= distance >= -right
    return visible


def added_by_score_mod(case: Case) -> Tensor:
    """Terms [1, H, Sq, Sk] in q's dtype that an additive score_mod adds, for libraries that take a tensor only."""
    q, k, score_mod = case.arguments["q"], case.arguments["k"], case.arguments["score_mod"]
    require_free_memory(case, 2 / q.shape[0], "a bias")
    b, h = torch.zeros((1, 1, 1, 1), dtype=torch.long), torch.arange(q.shape[1])[None, :, None, None]
    rows, keys = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])
    indices = (x.to(q.device) for x in (b, h, rows, keys))
    added = score_mod.fn(torch.zeros(1, device=q.device), *indices, *score_mod.tensors)
    return added.to(q.dtype).expand(1, q.shape[1], q.shape[2], k.shape[2]).contiguous()


def relative_position(seqlen_q: int, seqlen_k: int, device: torch.device) -> Tensor:
    """i + Sk - Sq - j, int64 [Sq, Sk]."""
    rows = torch.arange(seqlen_q, device=device)[:, None] + seqlen_k - seqlen_q
    return rows - torch.arange(seqlen_k, device=device)


def call_with_known(function: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
    """Call without the keywords that are `None`: versions of a library differ in the keywords they know."""
    return function(*arguments, **{name: value for name, value in keywords.items() if value is not None})


def first_of(result: Any) -> Tensor:
    """The first result of a call that returns out, or a tuple that begins with it."""
    return result[0] if isinstance(result, tuple | list) else result
