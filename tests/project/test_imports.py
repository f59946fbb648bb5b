"""`import flashtile` is light, and imports inside the package point one way."""

import ast
import functools
import subprocess
import sys
import types
from collections.abc import Iterator
from typing import TypeGuard

import pytest
from modules import MODULES, PACKAGE

import flashtile

HEAVY = {
    "triton",
    "llvmlite",
    "numba",
    "matplotlib",
    "jinja2",
    "transformers",
    "diffusers",
    "numpy.testing",
}
LONGEST_IMPORT = 0.17  # of the time of `import torch`, both with bytecode

# Each line may import from the lines above it and from itself: a folder with its files, or a module.
LAYERS = (
    ("dynamo", "errors", "locks", "private_torch", "remember", "persistent", "processes", "supported", "text_table"),
    ("iomodel",),
    ("expression",),
    ("score_mods", "mask_mods", "block_mask"),
    ("call",),
    ("backend",),
    ("dispatch",),
    ("api",),
    ("testing", "as_arch"),
    ("bench",),
    ("verification", "calibrate", "soak", "progress", "prebuilt"),
    ("report",),
    ("cli",),
    ("nn",),
    ("distributed",),
    ("compat",),
    ("integrations",),
)
BACKENDS = ("hopper", "triton")  # of GPUs
# Modules that put the name of an import together, which only their callers know.
BY_NAME = {
    "",
    "backend.gpu.kernel",
    "cli",
    "compat",
    "compat.installation",
    "dispatch.passes",
    "integrations",
    "integrations.optional",
    "private_torch",
}


def python(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=True)


@pytest.fixture(scope="module")
def loaded() -> list[set[str]]:
    """Modules of a process: what `import flashtile` loads, and all after the host code of GPU backends has been
    imported, without backward and with it.
    """
    entries = ", ".join(f"flashtile.backend.{backend}.entry" for backend in BACKENDS)
    code = f"""
import sys, torch
before = set(sys.modules)
import flashtile
print(*(set(sys.modules) - before))
flashtile.nn.Attention, flashtile.compat.install  # at their first use
import {entries}
print(*sys.modules)
[x.backward for x in ({entries})]
print(*sys.modules)"""
    return [set(line.split()) for line in python("-c", code).stdout.splitlines()]


def test_import_loads_nothing_heavy(loaded: list[set[str]]) -> None:
    names, _, _ = loaded
    assert "flashtile.api.attention" in names
    assert not {name for name in names if name in HEAVY or name.split(".")[0] in HEAVY}
    outer = ("flashtile.testing", "flashtile.cli", "flashtile.bench", "flashtile.report", "flashtile.compat")
    outer += ("flashtile.integrations", "flashtile.nn", "flashtile.distributed")
    assert not {name for name in names if name.startswith(outer)}
    assert not {
        name
        for name in names
        if name.startswith("flashtile.backend.") and (name.endswith(".entry") or ".kernels" in name)
    }


def test_host_code_loads_no_kernels(loaded: list[set[str]]) -> None:
    """They import Triton, which only a kernel that has to be compiled needs. A forward pass loads no host code of
    backward but the values that plans compare.
    """
    _, forward, both = loaded
    for backend in BACKENDS:
        package = f"flashtile.backend.{backend}."
        code = {name for name in forward if name.startswith(package) and not name.endswith("_config")}
        assert not {name for name in code if "backward" in name}
        assert {f"{package}entry", f"{package}launch.backward"} <= both
    assert not {name for name in both if name.split(".")[0] == "triton" or ".kernels" in name}


def test_host_code_of_cpus_loads_no_compiler() -> None:
    """LLVM and the generators, which only a kernel that has to be compiled needs."""
    code = "import sys; from flashtile.backend.cpu import entry, targets; targets.usable_widths(); print(*sys.modules)"
    names = set(python("-c", code).stdout.split())
    assert "flashtile.backend.cpu.host_backward" in names
    if sys.platform == "linux":  # where the system lists the processor's features
        assert not {name for name in names if name.startswith(("llvmlite", "flashtile.backend.cpu.kernels"))}


def test_import_is_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The processor time that `import flashtile` adds to that of `import torch`, at best, with the bytecode that a
    first import leaves. Seconds would measure the machine: busy and idle ones differ by a factor of four.
    """
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    code = "import time; start = time.process_time(); import torch; "
    code += "middle = time.process_time(); import flashtile; print((time.process_time() - middle) / (middle - start))"
    shares = []
    while len(shares) < 5 and min(shares, default=LONGEST_IMPORT) >= LONGEST_IMPORT:
        shares.append(float(python("-c", code).stdout))
    assert min(shares) < LONGEST_IMPORT


# Directions ----------------------------------------------------------------------------------------------------------


@functools.cache
def imports_of(name: str, *, at_import: bool) -> frozenset[str]:
    """Modules of the package that a module imports, when it is imported itself or (`at_import=False`) ever."""
    path = MODULES[name]
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    package, found = [part for part in package if part], set()
    for node in statements(ast.parse(path.read_text()), at_import):
        targets = []
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = ["flashtile", *package[: len(package) - node.level + 1]] if node.level else []
            base += node.module.split(".") if node.module else []
            targets = [".".join([*base, alias.name]) for alias in node.names]
        elif is_import_by_name(node):
            targets = [name_of_import(node)]
        for target in targets:
            if target.split(".")[0] == "flashtile":
                inner = target.removeprefix("flashtile").removeprefix(".")
                found.add(inner if inner in MODULES else inner.rpartition(".")[0])
    return frozenset(found)


def is_import_by_name(node: ast.AST) -> TypeGuard[ast.Call]:
    return isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) == "import_module"


def name_of_import(node: ast.Call) -> str:
    """The module of an `import_module`; of a name that is put together, the text up to the first value."""
    first = node.args[0]
    if isinstance(first, ast.JoinedStr):
        first = first.values[0]
    return str(first.value) if isinstance(first, ast.Constant) else ""


def statements(node: ast.AST, at_import: bool) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        if at_import and isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        yield child
        yield from statements(child, at_import)


def layer_of(name: str) -> int | None:
    return next((n for n, layer in enumerate(LAYERS) if name.split(".")[0] in layer), None)


def test_every_module_has_a_layer() -> None:
    placed = {name: layer_of(name) for name in MODULES if name not in ("", "__main__")}
    assert None not in placed.values()
    assert set(placed.values()) == set(range(len(LAYERS)))


def test_no_public_name_is_also_a_module() -> None:
    """Else `import flashtile.explain` and `import flashtile`, in either order, would mean different things by it."""
    modules = set(flashtile.__all__) & MODULES.keys()
    assert all(isinstance(getattr(flashtile, name), types.ModuleType) for name in modules), modules


def test_imports_point_one_way() -> None:
    """At the top of a module and inside functions. (The planner loads a backend's entry by name, on first use.)"""
    wrong = []
    for name in MODULES:
        own = layer_of(name)
        for target in imports_of(name, at_import=False):
            other = layer_of(target)
            if own is not None and target and (other is None or other > own):
                wrong.append(f"{name} imports {target}")
    assert not wrong


def test_backends_do_not_import_one_another() -> None:
    """They share the modules of `backend` itself, and each kind its folder: `gpu`, `blockwise`."""
    shared = {"triton": {"gpu"}, "hopper": {"gpu"}, "tiled": {"blockwise"}, "reference": {"blockwise"}}
    folders = {path.parent.name for path in PACKAGE.glob("backend/*/__init__.py")}
    wrong = []
    for name in MODULES:
        own = name.split(".")[1:2]
        if name.split(".")[0] == "backend" and own and own[0] in folders:
            for target in imports_of(name, at_import=False):
                other = target.split(".")
                foreign = other[0] == "backend" and len(other) > 1 and other[1] in folders - {own[0]}
                if foreign and other[1] not in shared.get(own[0], ()):
                    wrong.append(f"{name} imports {target}")
    assert not wrong


def test_plans_need_no_launches() -> None:
    """A kernel is chosen by values alone; only what launches it imports what chooses it."""
    folders = [tuple(f"backend.{backend}.{x}" for x in ("plan", "launch", "kernels")) for backend in BACKENDS]
    for plan, *later in folders:
        chosen = {name: imports_of(name, at_import=False) for name in MODULES if name.startswith(plan)}
        assert len(chosen) > 3
        assert not {name: t for name, targets in chosen.items() for t in targets if t.startswith(tuple(later))}


def test_modules_by_a_name_that_is_put_together() -> None:
    """Other imports by name are seen as the statements are."""
    sources = {name: text for name, path in MODULES.items() if "import_module" in (text := path.read_text())}
    calls = {name: filter(is_import_by_name, ast.walk(ast.parse(text))) for name, text in sources.items()}
    assert {name for name, x in calls.items() for one in x if not isinstance(one.args[0], ast.Constant)} == BY_NAME


def test_no_cycles() -> None:
    """Neither when modules are imported, nor by imports inside of functions."""
    graph = {name: {t for t in imports_of(name, at_import=False) if t not in ("", name)} for name in MODULES}
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, " -> ".join((*path, name))
        if name not in done:
            for target in graph[name]:
                visit(target, (*path, name))
            done.add(name)

    for name in graph:
        visit(name, ())


def test_the_oracle_is_independent() -> None:
    """One mistake must not be in a backend and in what checks it: only `Case.run` calls the package."""
    for name in MODULES:
        if name.startswith("testing"):
            outside = {t for t in imports_of(name, at_import=False) if not t.startswith("testing")}
            assert outside <= ({""} if name == "testing.case" else set()), f"{name} imports {outside}"


def test_other_names_use_the_public_functions_alone() -> None:
    """So that layers and other libraries' names mean what flashtile's functions do, and nothing waits for them. The
    package itself, "", has the public names.
    """
    outer = ("nn", "compat", "integrations")
    shared = (
        "",
        "api.attention",
        "api.gradients",
        "api.kvcache",
        "api.latent",
        "api.row_max",
        "api.signatures",
        "api.varlen",
        "call.counting",
        "call.eight_bit",
        "call.sharding",
        "errors",
        "private_torch",
    )
    for name in MODULES:
        own = name.split(".")[0]
        for target in imports_of(name, at_import=False):
            other = target.split(".")[0]
            if own in outer:
                public = target in shared or (own, other) == ("integrations", "compat")
                assert other == own or public, f"{name} imports {target or 'flashtile'}"
            else:
                assert other not in outer, f"{name} imports {target}"


def test_commands_need_the_library_s_dependencies_alone() -> None:
    """Every command but `report` runs where nothing else is installed, and that one names its extra."""
    code = "import importlib, sys; sys.modules |= dict.fromkeys(sys.argv[1].split()); from flashtile import cli; "
    code += "[importlib.import_module(f'flashtile.cli.{name.replace(chr(45), chr(95))}') for name in cli.COMMANDS]; "
    code += "cli.main(['explain', '--seqlen-q', '8'])"
    missing = "click rich jinja2 matplotlib transformers diffusers triton numba flashtile_ladder"
    assert python("-c", code, missing).stdout.startswith("dense float32")


def test_nothing_but_the_command_line_imports_it() -> None:
    users = {name for name in MODULES for t in imports_of(name, at_import=False) if t.split(".")[0] == "cli"}
    assert all(name.startswith("cli") or name == "__main__" for name in users)
