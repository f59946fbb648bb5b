"""Exercises: the heart of a step is taken out, and `judge` says whether what a learner wrote there is right.

`exercises.toml` has the texts. The code is cut out of the step itself, so that it cannot drift from it: an exercise
names a function, and the first and the last line of its heart. A known mistake is a replacement within the heart.
"""

import ast
import functools
import importlib
import textwrap
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

HEADER = "# flashtile_ladder exercise "
EMPTY = 'raise NotImplementedError("your lines go here")'


@functools.cache
def source_of(path: Path, function: str) -> str:
    """A function of a file, as it is written there; `ast` takes milliseconds to find it."""
    text = path.read_text(encoding="utf-8")
    found = next(x for x in ast.parse(text).body if isinstance(x, ast.FunctionDef) and x.name == function)
    return ast.get_source_segment(text, found) or ""


@dataclass(frozen=True)
class Mistake:
    """A well-known wrong version of an exercise's function."""

    name: str  # a sentence without its full stop
    old: str  # occurs once in the heart
    new: str


@dataclass(frozen=True)
class Exercise:
    """One function of a step with its heart taken out."""

    name: str  # number of the step, then a or b
    title: str
    module: str
    function: str
    form: str  # how the judge calls it: softmax, forward, backward or tiled
    first: str  # the heart's first line, without its comment
    last: str
    text: str
    hints: tuple[str, ...]
    mistake: tuple[dict[str, str], ...] = ()
    keywords: dict[str, int] = field(default_factory=dict)  # small tiles, so that small probes have several
    lists: bool = False  # rows are lists of Python numbers
    masks: bool = False  # takes `mask`
    counted: bool = False  # touches HBM by slices alone

    @property
    def mistakes(self) -> list[Mistake]:
        return [Mistake(**table) for table in self.mistake]

    def step(self) -> ModuleType:
        return importlib.import_module(f"flashtile_ladder.{self.module}")

    def source(self) -> str:
        """The function, as the step has it."""
        return source_of(Path(self.step().__file__ or ""), self.function)

    def heart(self) -> str:
        """The lines that the exercise takes out, with their indentation.

        Raises:
            ValueError: the first or the last line is not in the function exactly once.
        """
        lines = self.source().splitlines()
        codes = [line.partition("  # ")[0].strip() if line.strip() else "" for line in lines]
        for mark in (self.first, self.last):
            if codes.count(mark) != 1:
                raise ValueError(f"exercise {self.name}: {mark!r} occurs {codes.count(mark)} times, not once")
        return "\n".join(lines[codes.index(self.first) : codes.index(self.last) + 1])

    def solution(self) -> str:
        return textwrap.dedent(self.heart())

    def empty(self) -> str:
        """The file that a learner fills in."""
        heart = self.heart()
        indent = heart[: len(heart) - len(heart.lstrip())]
        body = self.source().replace(heart, f"{indent}{EMPTY}")
        about = textwrap.fill(self.text, 110, initial_indent="# ", subsequent_indent="# ")
        lines = [
            f"{HEADER}{self.name}: {self.title}",
            "#",
            about,
            "#",
            f"# Judge it: python -m flashtile_ladder check exercise_{self.name}.py",
        ]
        return "\n".join([*lines, "", *self.imports(), "", "", body, ""])

    def imports(self) -> list[str]:
        """Import lines of the names that the function uses: the step's own imports, and the step's other functions."""
        step = self.step()
        tree = ast.parse(Path(step.__file__ or "").read_text(encoding="utf-8"))
        used = {node.id for node in ast.walk(ast.parse(self.source())) if isinstance(node, ast.Name)}
        lines, known = [], {self.function}
        for node in (x for x in tree.body if isinstance(x, ast.Import | ast.ImportFrom)):
            names = [alias for alias in node.names if (alias.asname or alias.name) in used]
            known |= {alias.asname or alias.name for alias in names}
            if names and isinstance(node, ast.ImportFrom):
                package = f"flashtile_ladder.{node.module}" if node.level else node.module
                lines.append(f"from {package} import {', '.join(alias.name for alias in names)}")
            elif names:
                lines.append(ast.unparse(ast.Import(names)))
        own = sorted(name for name in used - known if name in vars(step))
        return [*lines, *([f"from flashtile_ladder.{self.module} import {', '.join(own)}"] if own else [])]

    def with_mistake(self, mistake: Mistake) -> str:
        """The function's source with the mistake in it."""
        heart = self.heart()
        if heart.count(mistake.old) != 1:
            raise ValueError(f"exercise {self.name}: {mistake.old!r} occurs {heart.count(mistake.old)} times, not once")
        return self.source().replace(heart, heart.replace(mistake.old, mistake.new))

    def compiled(self, source: str) -> FunctionType:
        """The function that `source` defines, among the names of the step."""
        names: dict[str, Any] = dict(vars(self.step()))
        exec(compile(source, f"<exercise {self.name}>", "exec"), names)
        return names[self.function]


TABLES = tomllib.loads((Path(__file__).parent / "exercises.toml").read_text(encoding="utf-8"))["exercise"]
EXERCISES = {table["name"]: Exercise(**table) for table in TABLES}
