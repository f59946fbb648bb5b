"""Calls that have to be refused: valid calls with one wrong argument."""

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Arguments = dict[str, Any]
EVERYWHERE: dict[str, Callable[[Arguments], Any]] = {
    "causal": lambda arguments: "sideways",
    "window": lambda arguments: (3,),
    "attention_chunk": lambda arguments: -1,
    "scale": lambda arguments: float("nan"),
    "softcap": lambda arguments: -1.0,
    "dropout_p": lambda arguments: 1.0,
    "backend": lambda arguments: "abacus",
    "q": lambda arguments: arguments["q"].to(torch.int32),
    "bias": lambda arguments: torch.zeros(2, 3, device=arguments["q"].device),
    "mask": lambda arguments: torch.zeros((1, 1, 1, 1), device=arguments["q"].device),
    "sinks": lambda arguments: arguments["q"].new_zeros(arguments["q"].shape[1] + 1),
    "alibi_slopes": lambda arguments: arguments["q"].new_zeros((3, 3, 3)),
}
OF_KEYS: dict[str, Callable[[Tensor], Tensor]] = {
    "one dimension less": lambda x: x.flatten(0, 1),
    "other dtype": lambda x: x.to(torch.float16 if x.dtype != torch.float16 else torch.float32),
    "other head dimension": lambda x: torch.cat([x, x[..., :1]], dim=-1),
    "no tensor": lambda x: x.tolist(),  # type: ignore[arg-type, return-value]
}
LENGTHS: dict[str, Callable[[Tensor], Tensor]] = {  # values that only a CPU call reads
    "cu_seqlens_q": lambda x: x + 1,
    "cache_seqlens": lambda x: x + 2**20,
    "seqused_q": lambda x: x - 2**20,
    "seqused_k": lambda x: x - 2**20,
}


def has_elements(lengths: Tensor | int | None) -> bool:
    """Whether a call has these lengths, of one sequence at least."""
    return lengths.numel() > 0 if isinstance(lengths, Tensor) else lengths is not None


def mistaken(arguments: Arguments, rng: random.Random) -> tuple[str, Arguments]:
    """Arguments with one that is wrong, and a description of the mistake."""
    k = "k_cache" if "k_cache" in arguments else "k"
    choices = [*EVERYWHERE, *(f"{k}: {words}" for words in OF_KEYS)]
    if arguments["q"].device.type == "cpu":
        choices += [name for name in LENGTHS if has_elements(arguments.get(name))]
    choice = rng.choice(choices)
    name, _, words = choice.partition(": ")
    if words:
        return choice, arguments | {name: OF_KEYS[words](arguments[name])}
    value = EVERYWHERE[name](arguments) if name in EVERYWHERE else LENGTHS[name](arguments[name])
    return choice, arguments | {name: value}
