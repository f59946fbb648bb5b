"""Docstrings and comments name what they are about: a noun, not "that of" and "those of", and no bare "of"."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator

import pytest
from modules import MODULES

CHAINS = re.compile(r"\b(that of|those of|of which)\b")
BARE = re.compile(r"#:? of\b")
# Sources of a GPU's kernels count in the digests of measured times, so that words alone are no reason to touch them.
KERNELS = re.compile(r"^backend\.(hopper|triton)\.kernels\b")
READ = sorted(name for name in MODULES if not KERNELS.search(name))
OWNERS = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def chains(source: str) -> Iterator[str]:
    """Docstrings with a chain of genitives, by their first line."""
    for node in ast.walk(ast.parse(source)) if CHAINS.search(source) else ():
        if isinstance(node, OWNERS) and CHAINS.search(text := ast.get_docstring(node) or ""):
            yield text.partition("\n")[0]


def bare(source: str) -> Iterator[str]:
    """Comments that begin with "of", but for lines that go on with a sentence."""
    before = -1  # line of the comment above, if that has a line of its own
    for token in tokenize.generate_tokens(io.StringIO(source).readline) if BARE.search(source) else ():
        if token.type == tokenize.COMMENT:
            alone = token.line.strip().startswith("#")
            if BARE.match(token.string) and not (alone and before == token.start[0] - 1):
                yield token.line.strip()
            before = token.start[0] if alone else -1


def test_what_is_found() -> None:
    source = '"""A list.\n\nAs that of q."""\n# one sentence\n# of two lines\nx = 1  # of keys\n'
    assert [*chains(source)] == ["A list."]
    assert [*bare(source)] == ["x = 1  # of keys"]


@pytest.mark.parametrize("kind", [chains, bare])
def test_sentences_have_nouns(kind) -> None:
    found = {name: [*kind(MODULES[name].read_text())] for name in READ}
    assert len(found) > 300
    assert not {name: lines for name, lines in found.items() if lines}
