"""Train a small byte-level GPT on the English help text that ships with Python, and let it write.

    python examples/train_bytes.py                                   # flashtile, 300 steps, about a minute on two cores
    python examples/train_bytes.py --attention sdpa                  # the same losses within rounding
    python examples/train_bytes.py --dtype float64                   # where rounding stays small to the last step

Training calls `flashtile.attention`, the sample is written through `flashtile.attention_with_kvcache`. The model and
its training loop are in `flashtile.bench.byte_gpt`, which also serves `flashtile verify`, `bench` and `report` as a
source of real queries, keys and values.
"""

import time
from collections.abc import Iterator
from pathlib import Path

import click
import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from flashtile.bench.byte_gpt import ATTENTIONS, new_model, train


@click.command(context_settings={"show_default": True})
@click.option("--attention", type=click.Choice(tuple(ATTENTIONS)), default="flashtile")
@click.option("--steps", type=click.IntRange(1), default=300)
@click.option("--batch", type=click.IntRange(1), default=8)
@click.option("--seqlen", type=click.IntRange(2), default=128)
@click.option("--seed", type=int, default=0)
@click.option("--device", default="cpu")
@click.option("--dtype", type=click.Choice(("float32", "float64")), default="float32")
@click.option("--prompt", default="The statement ")
@click.option("--sample", type=click.IntRange(0), default=300, help="Bytes to write after training.")
@click.option("--losses", type=click.Path(dir_okay=False, path_type=Path), help="Write the loss of each step here.")
def main(
    attention: str,
    steps: int,
    batch: int,
    seqlen: int,
    seed: int,
    device: str,
    dtype: str,
    prompt: str,
    sample: int,
    losses: Path | None,
) -> None:
    """Train a byte-level GPT on Python's help topics, then print a sample of what it writes."""
    model = new_model(seed, device, getattr(torch, dtype))
    found, start = [], time.perf_counter()
    for loss in with_progress(train(model, ATTENTIONS[attention], steps, batch=batch, seqlen=seqlen, seed=seed), steps):
        found.append(loss)
    seconds = time.perf_counter() - start
    for step in sorted({0, *range(steps // 10 - 1, steps, steps // 10 or steps), steps - 1} - {-1}):
        click.echo(f"step {step + 1:5}   loss {found[step]:.6f}")
    click.echo(f"{attention}: {steps * batch * seqlen / seconds:,.0f} tokens/s in training, {seconds:.1f} s")
    if losses is not None:
        losses.write_text("step,loss\n" + "".join(f"{n},{loss!r}\n" for n, loss in enumerate(found, 1)))
    if sample:
        start = time.perf_counter()
        written = bytes(model.generate(prompt.encode(), sample, seed=seed))
        rate = sample / (time.perf_counter() - start)
        click.echo(
            f"\n{prompt}{written.decode(errors='replace')}\n\n{rate:,.0f} bytes/s in generation, with a KV cache"
        )


def with_progress(losses: Iterator[float], steps: int) -> Iterator[float]:
    """A bar with the latest loss, on stderr, where that is a terminal."""
    console = Console(stderr=True)
    columns = (TextColumn("training"), BarColumn(), TextColumn("{task.fields[loss]}"), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=steps, loss="")
        for loss in losses:
            bar.update(task, advance=1, loss=f"loss {loss:.3f}")
            yield loss


if __name__ == "__main__":
    main()
