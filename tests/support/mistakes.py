"""A mistake in source text, whose place is found by syntax: line breaks, blanks and comments there may change."""

import itertools
import re

TOKEN = re.compile(r"#[^\n]*|\w+|[^\w\s]")
GAP = r"(?:\s|#[^\n]*)*"  # between two tokens
CLOSING = (")", "]", "}")


def with_mistake(source: str, name: str, old: str, new: str) -> str:
    """`source` with the only occurrence of the tokens of `old` replaced by `new`. White space around them stays.

    A comment in `old` is a token, too, which tells its place from others. A comma may stand before a closing bracket.
    """
    places = [*pattern(old).finditer(source)]
    assert len(places) == 1, f"{name}: the source has moved on, so the bug has to follow it ({len(places)} places)"
    [place] = places
    return source[: place.start()] + dedented(new, old) + source[place.end() :]


def pattern(old: str) -> re.Pattern[str]:
    tokens = TOKEN.findall(old)
    parts = [re.escape(tokens[0])]
    for before, token in itertools.pairwise(tokens):
        words = is_word(before) and is_word(token)
        comma = ",?" + GAP if token in CLOSING and before != "," else ""
        parts.append((r"\s" if words else "") + GAP + comma + re.escape(token))
    before, after = (r"(?<!\w)" if is_word(tokens[0]) else "", r"(?!\w)" if is_word(tokens[-1]) else "")
    return re.compile(before + "".join(parts) + after)


def is_word(token: str) -> bool:
    return token[0].isalnum() or token[0] == "_"


def dedented(new: str, old: str) -> str:
    """`new` without the white space that `old` has at its ends, which stays in the source."""
    first, last = old[: len(old) - len(old.lstrip())], old[len(old.rstrip()) :]
    return new.removeprefix(first).removesuffix(last)
