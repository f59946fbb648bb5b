"""`flashtile explain`: the plan of a call of a shape, and its limit."""

from typing import Any

import click
import torch

from .. import explain as explain_call
from .options import Device, Dtype, json_option, print_json


class Window(click.ParamType):
    """`LEFT,RIGHT`; a side that is empty, `none` or -1 is unlimited."""

    name = "left,right"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if isinstance(value, tuple):
            return value
        sides = [side.strip().lower() for side in value.split(",")]
        try:
            left, right = (None if side in ("", "none") else int(side) for side in sides)
        except ValueError:
            self.fail(f"{value!r} is not LEFT,RIGHT: two integers, or nothing for no limit, such as 127,0", param, ctx)
        return left, right


@click.command()
@click.option("--batch", type=click.IntRange(0), default=1)
@click.option("--heads", type=click.IntRange(1), default=8, help="Query heads.")
@click.option("--heads-kv", type=click.IntRange(1), help="Key and value heads.  [default: as many as query heads]")
@click.option("--seqlen-q", type=click.IntRange(0), default=4096)
@click.option("--seqlen-k", type=click.IntRange(0), help="[default: as --seqlen-q]")
@click.option("--head-dim", type=click.IntRange(1), default=64)
@click.option("--head-dim-v", type=click.IntRange(1), help="[default: as --head-dim]")
@click.option("--dtype", type=Dtype(), default="float32")
@click.option("--device", type=Device(), default="cpu")
@click.option("--causal", "causal", flag_value="bottom_right", help="The last query sees every key.")
@click.option("--top-left", "causal", flag_value="top_left", help="Causal, with the first query seeing one key.")
@click.option("--window", type=Window(), help="LEFT,RIGHT: keys that a query sees to either side; empty is no limit.")
@click.option("--softcap", type=float)
@click.option("--scale", type=float, help="[default: head_dim ** -0.5]")
@click.option("--bias", is_flag=True, help="A bias [1, heads, seqlen_q, seqlen_k].")
@click.option("--alibi", is_flag=True, help="ALiBi slopes, one for each head.")
@click.option("--sinks", is_flag=True, help="Attention sinks, one for each head.")
@click.option("--dropout", type=float, default=0.0, help="The probability of dropping a weight.")
@click.option("--deterministic", is_flag=True, help="The same bits for the same call.")
@click.option("--backend", default="auto", help="A backend by name, or auto.")
@json_option
def explain(as_json: bool, **options: Any) -> None:
    """Show the plan of a call of this shape, its amount of work, and its limit.

    Runs no attention. Measures arithmetic and memory for a fifth of a second.
    """
    try:
        tensors = tensors_of(options)
    except RuntimeError as error:  # the allocator's, with advice in further lines
        raise click.ClickException(f"these tensors cannot be made: {str(error).splitlines()[0]}") from error
    explanation = explain_call(
        **tensors,
        causal={None: False, "bottom_right": True, "top_left": "top_left"}[options["causal"]],
        window=options["window"],
        softcap=options["softcap"],
        scale=options["scale"],
        dropout_p=options["dropout"],
        deterministic=options["deterministic"] or None,
        backend=options["backend"],
    )
    if as_json:
        print_json(explanation.as_dict())
    else:
        click.echo(str(explanation))


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
