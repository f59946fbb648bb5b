"""Problems whose values are columns of the keys (`v_dim`), made of those with values of their own."""

import random
from dataclasses import replace

from .case import Case
from .draw import RECORDED
from .eight_bit import ROTARY

PART = 0.1  # share of the problems with packed sequences or a cache


def maybe_latent(case: Case) -> Case:
    """The problem, or one without values of its own."""
    choices = random.Random(f"latent of {case.seed}")  # the same for all variations
    if choices.random() >= PART or case.function == "attention" or case.seed in RECORDED or case.tangents:
        return case
    return latent(case)


def latent(case: Case) -> Case:
    """The problem with as many first columns of k for values as it had, or all; forward only. Without rotary positions
    of new keys, which of two neighbors a rotated number becomes may be open.
    """
    arguments, cached = dict(case.arguments), case.function == "attention_with_kvcache"
    k, v = ("k_cache", "v_cache") if cached else ("k", "v")
    arguments["v_dim"] = min(arguments[k].shape[-1], arguments[v].shape[-1])
    if arguments.get("k_cache") is not None and arguments.get("k") is not None:
        arguments = {name: x for name, x in arguments.items() if name not in ROTARY}
    for name in (v, "v", "v_descale"):
        arguments.pop(name, None)
    return replace(case, arguments=arguments | {v: None}, dout=None, dlse=None, description="")
