"""`flashtile explain`: the plan of a call of a shape and its limit, or the kernels of all calls like it."""

from argparse import ArgumentParser, ArgumentTypeError
from typing import Any

import torch

from .. import explain as explain_call
from ..backend.gpu.installed import triton_version
from ..call.device import describe_device
from ..prebuilt.standard import StandardCall
from ..prebuilt.workload import compiled_kernels, lines_of
from .options import CommandError, UsageError, device, dtype, flag, integer, json_option, option, print_json


def window(text: str) -> tuple[int | None, int | None]:
    """`LEFT,RIGHT`; a side that is empty, `none` or -1 is unlimited."""
    sides = [side.strip().lower() for side in text.split(",")]
    try:
        left, right = (None if side in ("", "none") else int(side) for side in sides)
    except ValueError:
        raise ArgumentTypeError(
            f"{text!r} is not LEFT,RIGHT: two integers, or nothing for no limit, such as 127,0"
        ) from None
    return left, right


def arguments(parser: ArgumentParser) -> None:
    option(parser, "--batch", type=integer(0), default=1)
    option(parser, "--heads", type=integer(1), default=8, help="Query heads.")
    option(parser, "--heads-kv", type=integer(1), help="Key and value heads. [default: as many as query heads]")
    option(parser, "--seqlen-q", type=integer(0), default=4096)
    option(parser, "--seqlen-k", type=integer(0), help="[default: as --seqlen-q]")
    option(parser, "--head-dim", type=integer(1), default=64)
    option(parser, "--head-dim-v", type=integer(1), help="[default: as --head-dim]")
    option(parser, "--dtype", type=dtype, default="float32")
    option(parser, "--device", type=device, default="cpu")
    option(
        parser,
        "--causal",
        action="store_const",
        const="bottom_right",
        help="The last query sees every key.",
    )
    option(
        parser,
        "--top-left",
        dest="causal",
        action="store_const",
        const="top_left",
        help="Causal, with the first query seeing one key.",
    )
    option(
        parser,
        "--window",
        type=window,
        metavar="LEFT,RIGHT",
        help="Keys that a query sees to either side; empty is no limit.",
    )
    option(parser, "--softcap", type=float)
    option(parser, "--scale", type=float, help="[default: head_dim ** -0.5]")
    flag(parser, "--bias", help="A bias [1, heads, seqlen_q, seqlen_k].")
    flag(parser, "--alibi", help="ALiBi slopes, one for each head.")
    flag(parser, "--sinks", help="Attention sinks, one for each head.")
    option(parser, "--dropout", type=float, default=0.0, help="The probability of dropping a weight.")
    flag(parser, "--deterministic", help="The same bits for the same call.")
    flag(parser, "--batch-invariant", help="Bits of a row that depend on its own sequence alone.")
    option(parser, "--backend", default="auto", help="A backend by name, or auto.")
    flag(parser, "--kernels", help="Instead, list the kernels that such calls of all lengths and batches compile.")
    json_option(parser)


def run(as_json: bool, kernels: bool, **options: Any) -> None:
    """Show the plan of a call of this shape, its amount of work, and its limit.

    Runs no attention. Measures arithmetic and memory for a fifth of a second.
    """
    if kernels:
        list_kernels(as_json, options)
        return
    try:
        tensors = tensors_of(options)
    except RuntimeError as error:  # the allocator's, with advice in further lines
        raise CommandError(f"these tensors cannot be made: {str(error).splitlines()[0]}") from error
    explanation = explain_call(
        **tensors,
        **settings_of(options),
        backend=options["backend"],
    )
    if as_json:
        print_json(explanation.as_dict())
    else:
        print(str(explanation))


def settings_of(options: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call that are no tensors."""
    return {
        "causal": {None: False, "bottom_right": True, "top_left": "top_left"}[options["causal"]],
        "window": options["window"],
        "softcap": options["softcap"],
        "scale": options["scale"],
        "dropout_p": options["dropout"],
        "deterministic": options["deterministic"] or None,
        "batch_invariant": options["batch_invariant"],
    }


def list_kernels(as_json: bool, options: dict[str, Any]) -> None:
    """List the kernels of products that calls like this one compile, whatever their lengths and batch."""
    if torch.device(options["device"]).type != "cuda":
        raise UsageError("--kernels lists what Triton compiles for a GPU: --device cuda")
    if options["backend"] != "auto":
        raise UsageError("--kernels is about the backends that auto chooses; leave --backend out")
    if triton_version() is None:
        raise CommandError("--kernels needs Triton, which PyTorch's GPU builds bring")

    def call_of(batch: int, seqlen_q: int, seqlen_k: int) -> StandardCall:
        sizes = {"batch": batch, "seqlen_q": seqlen_q, "seqlen_k": seqlen_k, "device": "meta"}
        return StandardCall("attention", tensors_of(options | sizes) | settings_of(options), backward=True)

    try:
        found = compiled_kernels(call_of, describe_device(torch.device(options["device"])))
    except LookupError as error:
        raise CommandError(str(error)) from error
    lines = {kind: lines_of(kernels) for kind, kernels in found.items()}
    if as_json:
        print_json(lines)
        return
    for kind, of_kind in lines.items():
        print(f"kernels of {kind}: {len(of_kind)}", *of_kind, sep="\n  ")


def tensors_of(options: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Uninitialized tensors of the requested shapes: nothing reads or writes their memory."""
    batch, heads, seqlen_q, head_dim = (options[name] for name in ("batch", "heads", "seqlen_q", "head_dim"))
    heads_kv = options["heads_kv"] or heads
    seqlen_k = seqlen_q if options["seqlen_k"] is None else options["seqlen_k"]
    shapes = {
        "q": (batch, heads, seqlen_q, head_dim),
        "k": (batch, heads_kv, seqlen_k, head_dim),
        "v": (batch, heads_kv, seqlen_k, options["head_dim_v"] or head_dim),
    }
    shapes |= {"bias": (1, heads, seqlen_q, seqlen_k)} if options["bias"] else {}
    shapes |= {"alibi_slopes": (heads,)} if options["alibi"] else {}
    shapes |= {"sinks": (heads,)} if options["sinks"] else {}
    dtype, device = options["dtype"], options["device"]
    return {name: torch.empty(shape, dtype=dtype, device=device) for name, shape in shapes.items()}
