"""The package stands alone: it imports nothing of flashtile but in one module, and runs without it."""

import ast
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import flashtile_ladder

PACKAGE = Path(flashtile_ladder.__file__).parent
PROJECT = Path(__file__).parents[1] / "pyproject.toml"


NEW_STEPS = ("step08_triton_backward.py", "step09_cuda_stages.cu", "step09_hopper.py", "_host/gluon_or_not.py")
EMULATION = ("_host/emulation.h", "_host/emulation.py", "_host/gluon_emulation.py")
APART = ("cli", "iomodel", "exercises")  # the command of all tables, the model of bytes, the judge
CODE = (".py", ".cpp", ".cu", ".cuh", ".h")
MOST_LINES = 6126  # 5,300 is wanted


def test_the_course_does_not_grow() -> None:
    """All lines, blank ones too, of the steps, `_host`, `related` and `measure`, without emulation and new steps."""
    names = {path.relative_to(PACKAGE).as_posix(): path for path in PACKAGE.rglob("*") if path.suffix in CODE}
    assert set(NEW_STEPS) | set(EMULATION) <= set(names)
    counted = [path for name, path in names.items() if name not in (*NEW_STEPS, *EMULATION)]
    counted = [path for path in counted if path.relative_to(PACKAGE).parts[0] not in APART]
    assert sum(len(path.read_text(encoding="utf-8").splitlines()) for path in counted) <= MOST_LINES


def imported(path: Path) -> set[str]:
    """The outermost names of everything that a file imports."""
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom) and not node.level}
    return {name.partition(".")[0] for name in names}


def imported_from(path: Path) -> list[str]:
    """Relative imports, as they are written."""
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    return [f"{node.module or ''}." for node in nodes if isinstance(node, ast.ImportFrom) and node.level]


def test_one_module_looks_for_flashtile() -> None:
    users = {str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py") if "flashtile" in imported(path)}
    assert users == {str(Path("cli", "library.py"))}


def test_steps_import_no_command() -> None:
    """They are read one by one."""
    folders = (PACKAGE, *(PACKAGE / name for name in ("_host", "related", "measure")))
    for path in (path for folder in folders for path in folder.glob("*.py")):
        assert "cli import" not in path.read_text(encoding="utf-8"), path
        assert "cli." not in "".join(imported_from(path)), path


def test_dependencies_are_those_that_are_imported() -> None:
    project = tomllib.loads(PROJECT.read_text(encoding="utf-8"))["project"]
    lists = [project["dependencies"], *project["optional-dependencies"].values()]
    declared = {name.split(">")[0] for names in lists for name in names} | {"flashtile", "triton"}
    used = {name for path in PACKAGE.rglob("*.py") for name in imported(path)} - sys.stdlib_module_names - {"", "cuda"}
    assert used <= declared, used - declared
    assert project["scripts"] == {"flashtile-ladder": "flashtile_ladder.cli.command:main"}


def test_it_runs_without_flashtile() -> None:
    """The last step is PyTorch's own attention then, and what flashtile alone knows is left out."""
    code = "import sys; sys.modules['flashtile'] = None; import torch; from flashtile_ladder.cli import report; "
    code += "report.amount = lambda *_: report.Amount(('stack', 'intensity'), (8,), (64,), 0.0); "
    code += "from flashtile_ladder.cli import stack; steps = stack.stack_steps; "
    code += "stack.stack_steps = lambda device: {name: x for name, x in steps(device).items() if name[:2] in '4 11'}; "
    code += "tables = list(report.tables(torch.device('cpu'), True)); "
    code += "print([row['step'] for row in tables[0].rows], [row['algorithm'] for row in tables[1].rows])"
    path = os.pathsep.join([str(PACKAGE.parent), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=os.environ | {"PYTHONPATH": path}
    )
    assert done.returncode == 0, done.stderr
    assert "11 PyTorch's SDPA" in done.stdout
    assert "each matrix once" in done.stdout
    assert "tiled" not in done.stdout
