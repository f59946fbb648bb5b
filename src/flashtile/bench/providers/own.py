"""flashtile itself: `backend="auto"`, one backend by name, or `deterministic=True`."""

from typing import Any

import torch
from torch import Tensor

from ... import __version__, attention, attention_varlen, attention_with_kvcache
from ...api.explain import backward_plan, described_call, needs_of, tiles_in_words
from ...call.problem import Problem
from ...dispatch.planner import plan
from ...dispatch.status import backends
from ...errors import BackendError
from ...testing.case import Case
from .provider import Declined, Prepared, Provider, from_autograd

DETERMINISTIC = "deterministic"


class Flashtile(Provider):
    contract_dropout = True

    def __init__(self, variant: str) -> None:
        """`variant` is a backend's name, `deterministic`, or empty."""
        self.options: dict[str, Any] = {"deterministic": True} if variant == DETERMINISTIC else {}
        self.backend = variant if variant and not self.options else "auto"
        self.name = f"flashtile:{variant}" if variant else "flashtile"

    def version(self) -> str:
        return __version__

    def unusable(self, device: torch.device) -> str | None:
        if self.backend == "auto":
            return None
        known = {status.name: status for status in backends()}
        if self.backend not in known:
            return f"there is no backend {self.backend!r}; there are {', '.join(known)}"
        return known[self.backend].reason

    def prepare(self, case: Case, decode: bool = False) -> Prepared:
        rest = {name: x for name, x in case.arguments.items() if name not in ("q", "k", "v")}
        function = attention if case.function == "attention" else attention_varlen
        try:
            detail = self.chosen(case)
        except BackendError as error:
            raise Declined(error.reasons.get(self.backend, str(error))) from error
        if decode:
            k = case.arguments["k"]
            lengths = torch.full((k.shape[0],), k.shape[2], dtype=torch.int32, device=k.device)

            def step(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
                return attention_with_kvcache(q, k, v, cache_seqlens=lengths, backend=self.backend, **rest)  # type: ignore[return-value]

            return from_autograd(step, case, detail)

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return function(q, k, v, backend=self.backend, **self.options, **rest)  # type: ignore[return-value]

        return from_autograd(attend, case, detail)

    def chosen(self, case: Case) -> str:
        """The backend and its tiles, as the planner chooses them."""
        arguments = case.arguments | self.options
        q, k, v = (arguments.pop(name) for name in ("q", "k", "v"))
        cu_q, cu_k = arguments.pop("cu_seqlens_q", None), arguments.pop("cu_seqlens_k", None)
        call = described_call(q, k, v, cu_q, cu_k, arguments)
        problem, needs = Problem.describe(call), needs_of(call)
        choice = plan(problem, q.device, self.backend)
        tiles, _ = tiles_in_words(call, choice, backward_plan(problem, q.device, self.backend, needs), needs)
        return f"{choice.backend}: {tiles}"
