"""Write docs/api.md from the signatures and docstrings of the public names: `python docs/make_api.py`.

A test compares the file with what this makes, so that it cannot go stale.
"""

import inspect
import re
import textwrap
from operator import attrgetter
from pathlib import Path
from typing import Any

import flashtile
import flashtile.distributed

PAGE = Path(__file__).with_name("api.md")
GROUPS = {
    "Functions": (
        "attention",
        "attention_varlen",
        "attention_with_kvcache",
        "merge_attention",
        "quantize_kv",
        "hadamard",
        "pack_latent_rows",
        "unpack_latent_rows",
        "explain",
        "prepare",
        "calls",
        "backends",
    ),
    "Classes": (
        "ScoreMod",
        "MaskMod",
        "BlockMask",
        "ExactWindow",
        "Explanation",
        "QuantizedKV",
        "PackedLatentRows",
        "Prepared",
        "CallCounts",
        "CallCount",
        "BackendStatus",
    ),
    "Score modifications": tuple(f"score_mods.{name}" for name in flashtile.score_mods.__all__),
    "Mask functions": tuple(f"mask_mods.{name}" for name in flashtile.mask_mods.__all__),
    "Many ranks": tuple(
        f"distributed.{name}" for name in sorted(flashtile.distributed.__all__, key=lambda x: (x[0].isupper(), x))
    ),
    "Errors and warnings": ("AttentionError", "ArgumentError", "BackendError", "AttentionWarning"),
}
INTRODUCTION = """\
# API

Every public name of `flashtile`, made from the docstrings by `python docs/make_api.py`. [contract.md](contract.md) has
the formula, shapes and error bounds, [index.md](index.md) the other pages.
"""
SECTION = re.compile(r"^(Example|Args|Attributes|Returns|Raises):\n((?:    .*\n|\n)+)", re.MULTILINE)
ENTRY = re.compile(r"^(\w[\w, ]*): (.*)$")


def page() -> str:
    parts = [INTRODUCTION]
    for group, names in GROUPS.items():
        parts += [f"## {group}\n", *(f"### {name}\n\n{described(name, attrgetter(name)(flashtile))}" for name in names)]
    return "\n".join(parts)


def described(name: str, value: Any) -> str:
    """One public name: how it is called, and its docstring as Markdown."""
    text = inspect.cleandoc(value.__doc__) + "\n"
    text = SECTION.sub(lambda found: section(found[1], textwrap.dedent(found[2]).strip()), text)
    return call(name, value) + re.sub(r"\n{3,}", "\n\n", text).rstrip("\n") + "\n"


def call(name: str, value: Any) -> str:
    """The signature without types, which the arguments' descriptions have; nothing for what no user calls."""
    if inspect.isclass(value) and name not in ("ScoreMod", "MaskMod"):
        return ""
    signature = inspect.signature(value)
    untyped = [x.replace(annotation=inspect.Parameter.empty) for x in signature.parameters.values()]
    bare = signature.replace(parameters=untyped, return_annotation=inspect.Signature.empty)
    start = f"flashtile.{name}("
    wrapped = textwrap.fill(f"{start}{str(bare)[1:]}", 100, subsequent_indent=" " * len(start))
    return f"```\n{wrapped}\n```\n\n"


def section(title: str, body: str) -> str:
    if title == "Example":
        return f"```pycon\n{body}\n```\n\n"
    if title == "Returns":
        return textwrap.fill(f"**Returns** {' '.join(body.split())}", 120, break_on_hyphens=False) + "\n\n"
    entries: list[str] = []
    for line in body.splitlines():
        if found := ENTRY.match(line):
            entries.append(f"- `{found[1]}`: {found[2]}")
        else:
            entries[-1] += f" {line.strip()}"
    filled = [textwrap.fill(x, 120, subsequent_indent="  ", break_on_hyphens=False) for x in entries]
    return f"**{title}**\n\n" + "\n".join(filled) + "\n\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
