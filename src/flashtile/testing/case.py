"""One call of a public function, with everything needed to run and to differentiate it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .poison import Guarded, with_guard_bands

CACHES = ("k_cache", "v_cache", "k_descale", "v_descale")  # what a call may write


@dataclass(frozen=True)
class ScoreFunction:
    """A score modification before it becomes the public `ScoreMod`: `fn(score, b, h, q_idx, k_idx, *tensors)`.

    `score` is [B, H, Sq, Sk]; the int64 indices b [B, 1, 1, 1], h [1, H, 1, 1], q_idx [Sq, 1], k_idx [Sk]
    broadcast to it.
    """

    fn: Callable[..., Tensor]
    tensors: tuple[Tensor, ...] = ()


@dataclass(frozen=True)
class MaskFunction:
    """A mask function before it becomes the public `MaskMod`: `fn(b, h, q_idx, k_idx, *tensors)`, of indices as those
    of a `ScoreFunction`, whether pairs are visible: bool that broadcasts to [B, H, Sq, Sk].
    """

    fn: Callable[..., Tensor]
    tensors: tuple[Tensor, ...] = ()

    def public(self) -> Any:
        import flashtile  # as in `Case.run`

        return flashtile.MaskMod(self.fn, self.tensors)


class ExactSides(tuple[int | None, int | None]):
    """A window before it becomes the public `ExactWindow`: -1 is no longer unlimited."""


@dataclass
class Case:
    """A call of `function` with `arguments` by their public names, and the cotangents of its two results.

    `dout` and `dlse` have the shapes of out and lse. With both None, or with `forward_only`, there is no backward.
    Caches are in their state before the call.
    """

    function: str  # "attention", "attention_varlen" or "attention_with_kvcache"
    arguments: dict[str, Any]
    dout: Tensor | None = None
    dlse: Tensor | None = None
    seed: int = 0
    variation: int = 0
    description: str = field(default="")
    forward_only: bool = False
    constant: tuple[str, ...] = ()  # tensors without a gradient
    tangents: dict[str, Tensor] = field(default_factory=dict)  # for differentiable tensors; with one, forward mode runs

    def __post_init__(self) -> None:
        if not self.description:
            self.description = describe(self)

    @property
    def differentiates(self) -> bool:
        return not (self.forward_only or self.tangents) and (self.dout is not None or self.dlse is not None)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the result: q's; of queries of 8 bits, the requested one."""
        of_q: torch.dtype = self.arguments["q"].dtype
        return of_q if of_q.itemsize > 1 else self.arguments.get("out_dtype") or torch.bfloat16

    def differentiable(self) -> dict[str, Tensor]:
        """All floating tensors among the arguments that are not constant, by the name of their gradient without the
        leading "d".
        """
        named = {name: value for name, value in self.arguments.items() if isinstance(value, Tensor)}
        for n, tensor in enumerate(getattr(self.arguments.get("score_mod"), "tensors", ())):
            named[f"score_mod_{n}"] = tensor
        return {name: x for name, x in named.items() if x.is_floating_point() and name not in self.constant}

    def run(self, backend: str = "auto", **options: Any) -> dict[str, Tensor]:
        """Results and gradients of the public function, and the caches after the call.

        An input that the graph does not use is an error. The call gets copies of the caches with the same strides; a
        write outside of them is an error too.

        `options` are passed on, `deterministic=True` for example.
        """
        import flashtile  # the oracle and the tolerances must not depend on it

        leaves = {name: tensor.detach() for name, tensor in self.differentiable().items()}  # keeps the strides
        if self.tangents:
            return self._along_tangents(leaves, backend, options)
        if self.differentiates:
            leaves = {name: tensor.requires_grad_() for name, tensor in leaves.items()}
        arguments, caches = self._public(leaves)
        out, lse = getattr(flashtile, self.function)(**arguments, return_lse=True, backend=backend, **options)
        results = {"out": out.detach(), "lse": lse.detach()} | contents(caches)
        if self.differentiates:
            pairs = [(x, dx) for x, dx in ((out, self.dout), (lse, self.dlse)) if dx is not None]
            outputs, cotangents = zip(*pairs, strict=True)
            gradients = torch.autograd.grad(outputs, list(leaves.values()), cotangents)
            results |= {f"d{name}": gradient for name, gradient in zip(leaves, gradients, strict=True)}
        return results

    def _along_tangents(self, leaves: dict[str, Tensor], backend: str, options: dict[str, Any]) -> dict[str, Tensor]:
        """The results, and their tangents as "tout" and "tlse"."""
        import flashtile  # as in `run`

        def call(*moving: Tensor) -> Any:
            arguments, _ = self._public(leaves | dict(zip(self.tangents, moving, strict=True)))
            return getattr(flashtile, self.function)(**arguments, return_lse=True, backend=backend, **options)

        inputs = tuple(leaves[name] for name in self.tangents)
        (out, lse), (tout, tlse) = torch.func.jvp(call, inputs, tuple(self.tangents.values()))[:2]
        return {"out": out, "lse": lse, "tout": tout, "tlse": tlse}

    def _public(self, leaves: dict[str, Tensor]) -> tuple[dict[str, Any], dict[str, Guarded]]:
        """The public function's arguments with these differentiable tensors, and guarded copies of the caches."""
        import flashtile  # as in `run`

        arguments = {**self.arguments, **{name: leaf for name, leaf in leaves.items() if name in self.arguments}}
        score_mod: Any = arguments.get("score_mod")
        if hasattr(score_mod, "tensors"):
            tensors = {f"score_mod_{n}": tensor for n, tensor in enumerate(score_mod.tensors)} | leaves
            tensors = tuple(tensor for name, tensor in tensors.items() if name.startswith("score_mod_"))
            arguments["score_mod"] = flashtile.ScoreMod(score_mod.fn, tensors)
        if isinstance(mask := arguments.get("mask"), MaskFunction):
            arguments["mask"] = mask.public()
        if isinstance(arguments.get("window"), ExactSides):
            arguments["window"] = flashtile.ExactWindow(*arguments["window"])
        caches = {name: with_guard_bands(arguments[name]) for name in CACHES if arguments.get(name) is not None}
        return arguments | {name: guarded.tensor for name, guarded in caches.items()}, caches


def contents(caches: dict[str, Guarded]) -> dict[str, Tensor]:
    for name, guarded in caches.items():
        if not guarded.intact():
            raise RuntimeError(f"the call wrote outside of {name}")
    return {name: guarded.tensor for name, guarded in caches.items()}


SHAPED = ("q", "k", "v", *CACHES)
LISTED = (
    "cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k", "cache_seqlens", "cache_batch_idx", "leftpad_k",
    "rotary_start", "cu_seqlens_k_new",
)  # fmt: skip


def describe(case: Case) -> str:
    """Short text that identifies a problem."""
    arguments = {name: value for name, value in case.arguments.items() if value is not None}
    kind = {"attention": "dense", "attention_varlen": "varlen", "attention_with_kvcache": "kvcache"}[case.function]
    words = [kind, _dtype_name(case.arguments["q"].dtype)]
    for name in SHAPED:
        if name in arguments:
            x = arguments[name]
            words.append(f"{name}{list(x.shape)}" + ("" if x.is_contiguous() else f"@{x.stride()}"))
    for name in LISTED:
        if isinstance(arguments.get(name), Tensor):
            words.append(f"{name}={arguments[name].tolist()}")
    for name, value in arguments.items():
        if name in SHAPED or (name in LISTED and isinstance(value, Tensor)):
            continue
        if name == "score_mod" or isinstance(value, MaskFunction):
            fn: Any = getattr(value, "fn", value)
            words.append(f"{name}={fn.__name__}")
        elif isinstance(value, Tensor) and value.numel() == 1 and not value.is_floating_point():
            words.append(f"{name}=tensor({value.item()})")
        elif isinstance(value, Tensor):
            words.append(f"{name}:{_dtype_name(value.dtype)}{list(value.shape)}")
        elif isinstance(value, torch.dtype):
            words.append(f"{name}={_dtype_name(value)}")
        elif isinstance(value, ExactSides):
            words.append(f"{name}=exact{tuple(value)}".replace(" ", ""))
        elif value is not False and not (name == "dropout_p" and value == 0.0):
            words.append(name if value is True else f"{name}={value!r}".replace(" ", ""))
    words += [f"constant {name}" for name in case.constant if name in arguments]
    words += [f"moving {name}" for name in case.tangents]
    words.append(f"seed {case.seed}" + f" variation {case.variation}" * (case.variation > 0))
    return " ".join(words)


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.").replace("bfloat", "bf").replace("float", "fp")
