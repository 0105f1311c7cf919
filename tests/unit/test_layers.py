"""The package's folders are layers: a module imports its own folder and what stands below it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "scripts" / "latentmake"

# From the lowest to the highest. Those of one line are siblings: neither imports the other.
LAYERS = (
    ("errors", "progress", "regular"),
    ("digest",),
    ("config",),
    ("geometry",),
    ("files",),
    ("layouts", "index"),
    ("sources", "models"),
    ("plan",),
    ("caches",),
    ("training",),
    ("training.loop",),
    ("training.sd", "training.wan", "training.external", "exchange"),
    ("training.external.musubi", "training.external.sdscripts"),
    ("reports",),
    ("backends", "session", "entry"),
    ("words",),
    ("cli",),
    ("__main__",),
)
LEVEL = {folder: level for level, layer in enumerate(LAYERS) for folder in layer}
TOP = ("backends", "session", "entry")


def _module(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")


MODULES = {_module(path): path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py"}


def _imports(module: str) -> Iterator[str]:
    """Yield the modules of the package that a module imports anywhere, functions included."""
    for node in ast.walk(ast.parse(MODULES[module].read_text(encoding="utf-8"))):
        match node:
            case ast.ImportFrom(module=str(base), names=names, level=0):
                found = [f"{base}.{name.name}" for name in names]
            case ast.Import(names=names):
                found = [name.name for name in names]
            case ast.ImportFrom():
                pytest.fail(f"{module} has a relative import")
            case _:
                continue
        for name in found:
            top, _, inner = name.partition(".")
            if top != "latentmake":
                continue
            if inner not in MODULES:
                inner = inner.rpartition(".")[0]
            if inner in MODULES and inner != module:
                yield inner


def _folder(module: str) -> str:
    names = module.split(".")
    found = (".".join(names[:count]) for count in range(len(names), 0, -1))
    folder = next((name for name in found if name in LEVEL), None)
    assert folder is not None, f"{module} stands in no layer"
    return folder


def test_a_module_imports_its_own_folder_and_what_stands_below_it() -> None:
    upwards = {
        (module, other)
        for module in MODULES
        for other in _imports(module)
        if _folder(module) != _folder(other)
        and LEVEL[_folder(other)] >= LEVEL[_folder(module)]
        and not {_folder(module), _folder(other)} <= set(TOP)
    }
    assert not upwards


def test_no_modules_import_each_other_in_a_circle() -> None:
    graph = {module: set(_imports(module)) for module in MODULES}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_the_root_holds_few_modules() -> None:
    root = {path.stem for path in PACKAGE.glob("*.py")} - {"__init__"}
    named = {"backends", "digest", "entry", "errors", "progress", "regular", "session"}
    assert root == named | {"__main__", "cli"}
