"""Exercises: the heart of a step is taken out, and `judge` says whether what a learner wrote there is right.

`exercises.toml` has the texts. The code is cut out of the step itself, so that it cannot drift from it: an exercise
names a function, and the first and the last line of its heart. A known mistake is a replacement within the heart.

A file of Python has the function alone, and imports the rest of the step; one of C++ or CUDA is the whole step.
"""

import ast
import functools
import importlib
import linecache
import re
import runpy
import textwrap
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from .. import STEPS

HEADER = " flashtile_ladder exercise "
COMMENTS = {".py": "#", ".cpp": "//", ".cu": "//"}
EMPTY = {
    ".py": 'raise NotImplementedError("your lines go here")',
    ".cpp": "#error your lines go here",
    ".cu": "#error your lines go here",
}
PACKAGE = Path(__file__).parents[1]


@functools.cache
def source_of(path: Path, function: str) -> str:
    """A function of a file with its decorators, or a struct, as it is written there."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".py":
        found = re.search(rf"^(?:struct|extern)[^\n;]* {function}[ (].*?^\}}", text, re.DOTALL | re.MULTILINE)
        return found[0] if found else ""
    node = next(x for x in ast.parse(text).body if isinstance(x, ast.FunctionDef) and x.name == function)
    first = min(x.lineno for x in (node, *node.decorator_list))
    return "\n".join(text.splitlines()[first - 1 : node.end_lineno])


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
    form: str  # how the judge calls it: softmax, forward, backward, tiled, triton, gluon, predict, variant or order
    first: str  # the heart's first line, without its comment
    last: str
    text: str
    hints: tuple[str, ...]
    mistake: tuple[dict[str, str], ...] = ()
    keywords: dict[str, int] = field(default_factory=dict)  # small tiles, so that small probes have several
    lists: bool = False  # rows are lists of Python numbers
    masks: bool = False  # takes `mask`
    counted: bool = False  # touches HBM by slices alone
    causal: bool = True  # takes `causal`
    single: bool = False  # computes in float32
    tile: tuple[int, int] = (0, 0)  # rows and keys of a kernel's tiles, from which its probes follow
    d: int = 0  # the one head dimension that a kernel is compiled for

    @property
    def mistakes(self) -> list[Mistake]:
        return [Mistake(**table) for table in self.mistake]

    @property
    def path(self) -> Path:
        """The step's file."""
        return PACKAGE / next((x.file for x in STEPS if x.module == self.module), f"{self.module.replace('.', '/')}.py")

    @property
    def language(self) -> str:
        """The ending of the step's file: .py, .cpp or .cu."""
        return self.path.suffix

    @property
    def file(self) -> str:
        """The file that a learner fills in."""
        return f"exercise_{self.name}{self.language}"

    def step(self) -> ModuleType:
        return importlib.import_module(f"flashtile_ladder.{self.module}")

    def source(self) -> str:
        """The function, as the step has it."""
        return source_of(self.path, self.function)

    def heart(self) -> str:
        """The lines that the exercise takes out, with their indentation.

        Raises:
            ValueError: the first or the last line is not in the function exactly once.
        """
        lines = self.source().splitlines()
        places = []
        for mark in (self.first, self.last):
            found = [i for i, line in enumerate(lines) if mark in (line.strip(), self.code(line))]
            if len(found) != 1:
                raise ValueError(f"exercise {self.name}: {mark!r} occurs {len(found)} times, not once")
            places += found
        return "\n".join(lines[places[0] : places[1] + 1])

    def code(self, line: str) -> str:
        """A line without its comment."""
        return line.partition(f"  {COMMENTS[self.language]} ")[0].strip()

    def solution(self) -> str:
        return textwrap.dedent(self.heart())

    def empty(self) -> str:
        """The file that a learner fills in."""
        mark, heart = COMMENTS[self.language], self.heart()
        indent = heart[: len(heart) - len(heart.lstrip())]
        body = self.source().replace(heart, f"{indent}{EMPTY[self.language]}")
        about = textwrap.fill(self.text, 110, initial_indent=f"{mark} ", subsequent_indent=f"{mark} ")
        judge = f"{mark} Judge it: python -m flashtile_ladder check {self.file}"
        lines = [f"{mark}{HEADER}{self.name}: {self.title}", mark, about, mark, judge, ""]
        if self.language == ".py":
            return "\n".join([*lines, *self.imports(), "", "", body, ""])
        code = re.sub(r"\A(?://.*\n)+", "", self.path.read_text(encoding="utf-8"))  # without its first comment
        return "\n".join([*lines, code.replace(self.source(), body).lstrip("\n")])

    def imports(self) -> list[str]:
        """Import lines of the names that the function uses: the step's own imports, and the step's other functions."""
        step = self.step()
        tree = ast.parse(self.path.read_text(encoding="utf-8"))
        nodes = list(ast.walk(ast.parse(self.source())))
        used = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
        used -= {node.arg for node in nodes if isinstance(node, ast.arg)}
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

    def compiled(self, source: str) -> Callable[..., Any]:
        """The function that `source` defines, among the rest of the step."""
        if self.language != ".py":
            return self.built(self.path.read_text(encoding="utf-8").replace(self.source(), source))
        names: dict[str, Any] = dict(vars(self.step()))
        name = f"<exercise {self.name} {hash(source)}>"
        linecache.cache[name] = len(source), None, source.splitlines(keepends=True), name  # Triton reads the source
        exec(compile(source, name, "exec"), names)
        return names[self.function]

    def built(self, text: str) -> Callable[..., Any]:
        """`attention` or `backward` of a step of C++ or CUDA whose file has this text.

        Raises:
            CompilerError: it does not compile, or there is no compiler.
        """
        from .._host import cpp, cuda_steps

        if self.language == ".cpp":
            cpp.library(cpp.O2, text)
            keywords = {"flags": cpp.O2, "graph": self.function == "Graph", "text": text}
            return functools.partial(getattr(cpp, "attention" if self.form == "forward" else "backward"), **keywords)
        step = cuda_steps.STEPS[self.module]
        changes: dict[str, Any] = {"replaced": (self.path.read_text(encoding="utf-8"), text), "HEAD_DIMS": (self.d,)}
        return emulated(replace(step, macros=step.macros | self.keywords, **changes), self.d)

    def of_file(self, path: Path) -> Callable[..., Any] | None:
        """The function in the file of a learner, or `None`."""
        if self.language != ".py":
            return self.built(path.read_text(encoding="utf-8"))
        return runpy.run_path(str(path)).get(self.function)


def emulated(step: Any, d: int) -> Callable[..., Any]:
    """`attention` of a step of CUDA in the emulation, compiled now; N decides in which order the threads go."""
    from .._host import emulation

    emulation.compiled(step.source_for(d), 0)

    def attention(*arguments: Any) -> Any:
        with emulation.emulation(list(emulation.ORDERS)[len(arguments[0]) % len(emulation.ORDERS)]):
            return step.attention(*arguments)

    return attention


TABLES = tomllib.loads((Path(__file__).parent / "exercises.toml").read_text(encoding="utf-8"))["exercise"]
EXERCISES = {table["name"]: Exercise(**table) for table in TABLES}
