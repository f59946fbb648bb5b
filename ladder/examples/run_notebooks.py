"""Run notebooks of the course and store their outputs, or compare with those that are stored.

    python examples/run_notebooks.py            # runs and stores all
    python examples/run_notebooks.py --check    # compares: a cell whose output differs is an error
    python examples/run_notebooks.py 3          # chapter 3 alone

Cells run in this process, in one namespace for each notebook, as a kernel runs them: what is printed is stored, and the
value of a last line that is an expression.
"""

import ast
import contextlib
import io
import json
import linecache
import sys
from pathlib import Path
from typing import Any

from hosted import repository, with_address

FOLDER = Path(__file__).parent
CHAPTERS = sorted(FOLDER.glob("[1-9]_*.ipynb"))


def outputs_of(code: str, name: str, namespace: dict[str, Any]) -> tuple[str, Any]:
    """What a cell prints, and its last value or `None`."""
    linecache.cache[name] = len(code), None, code.splitlines(keepends=True), name  # Triton reads the source
    tree, value = ast.parse(code, name), None
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(tree, name, "exec"), namespace)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), name, "eval"), namespace)
    return printed.getvalue(), value


def run(notebook: dict[str, Any], name: str) -> list[list[dict[str, Any]]]:
    """Outputs of all cells of code, in the notebook's format; an assertion in a cell is the caller's error."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    made = []
    for number, cell in enumerate(code_cells(notebook), 1):
        printed, value = outputs_of("".join(cell["source"]), f"{name}, cell {number}", namespace)
        outputs: list[dict[str, Any]] = []
        if printed:
            outputs.append({"name": "stdout", "output_type": "stream", "text": printed.splitlines(keepends=True)})
        if value is not None:
            data = {"text/plain": repr(value).splitlines(keepends=True)}
            outputs.append({"data": data, "execution_count": number, "metadata": {}, "output_type": "execute_result"})
        made.append(outputs)
    return made


def code_cells(notebook: dict[str, Any]) -> list[dict[str, Any]]:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def differing(path: Path) -> list[int]:
    """Numbers of the cells whose outputs are not those that are stored."""
    notebook = json.loads(path.read_text(encoding="utf-8"))
    pairs = zip(run(notebook, path.name), code_cells(notebook), strict=True)
    return [number for number, (made, cell) in enumerate(pairs, 1) if made != cell["outputs"]]


def store(path: Path) -> None:
    notebook = json.loads(path.read_text(encoding="utf-8"))
    notebook = with_address(notebook, path.name, repository())
    for number, (cell, made) in enumerate(zip(code_cells(notebook), run(notebook, path.name), strict=True), 1):
        cell |= {"execution_count": number, "outputs": made}
    path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def main(words: list[str]) -> None:
    chosen = [path for path in CHAPTERS if not set(words) - {"--check"} or path.name[0] in words]
    wrong = {}
    for path in chosen:
        if "--check" in words:
            wrong |= {path.name: cells} if (cells := differing(path)) else {}
        else:
            store(path)
    if wrong:
        raise SystemExit(f"outputs differ from those that are stored, by notebook and cell: {wrong}")
    print(f"{len(chosen)} notebooks: {'as stored' if '--check' in words else 'stored'}")


if __name__ == "__main__":
    main(sys.argv[1:])
