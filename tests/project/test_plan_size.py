"""The size of plan code, which may only shrink.

Plan code says which of a backend's kernels runs a pass: tables of tiles, candidates, counts, time, and the choice among
backends. A line counts whatever is in it. A name is one in capitals that a module defines at its top: a constant or a
table. What `flashtile calibrate` writes to `rates/` is data, and does not count.
"""

import ast
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "src" / "flashtile"
FOLDERS = ("backend/hopper/plan", "backend/triton/plan")
FILES = (
    *(f"backend/gpu/{name}.py" for name in ("chips", "cost", "decoding", "rates", "waves")),
    "backend/cpu_cost.py", "backend/cpu/rates.py", "backend/hopper/tile_config.py", "backend/hopper/backward_config.py",
    "backend/triton/tile_config.py", "backend/triton/score_blocks.py", "call/plan.py", "dispatch/planner.py",
)  # fmt: skip
MOST_FILES, MOST_LINES, MOST_NAMES = 25, 3373, 137
SLACK = 40  # lines: with fewer than that, `MOST_LINES` is to be lowered


def plan_code() -> dict[str, str]:
    """Text by name of file."""
    files = [file for folder in FOLDERS for file in sorted((PACKAGE / folder).glob("*.py"))]
    files += [PACKAGE / name for name in FILES]
    return {str(file.relative_to(PACKAGE)): file.read_text() for file in files}


def names(text: str) -> list[str]:
    """Names in capitals that a module assigns at its top."""
    statements = ast.parse(text).body
    targets = [x for s in statements if isinstance(s, ast.Assign) for x in s.targets]
    targets += [s.target for s in statements if isinstance(s, ast.AnnAssign)]
    found = [node.id for x in targets for node in ast.walk(x) if isinstance(node, ast.Name)]
    return [name for name in found if name.isupper()]


def test_plan_code_only_shrinks() -> None:
    code = plan_code()
    lines = {name: len(text.splitlines()) for name, text in code.items()}
    constants = {name: len(names(text)) for name, text in code.items()}
    assert len(code) <= MOST_FILES
    assert MOST_LINES - SLACK < sum(lines.values()) <= MOST_LINES, lines
    assert MOST_NAMES - SLACK // 10 < sum(constants.values()) <= MOST_NAMES, constants


def test_names_are_found() -> None:
    found = names("ONE, two = 1, 2\nTHREE: int = 3\ndef f():\n    FOUR = 4\n_FIVE = 5")
    assert sorted(found) == ["ONE", "THREE", "_FIVE"]
