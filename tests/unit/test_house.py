"""The package is a house of layers without circles, of small modules and small functions."""

from __future__ import annotations

import ast
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import by_path
import pytest

ROOT = Path(__file__).resolve().parents[2]
house = by_path.load("tests/bench/house.py")
package = house.Package(ROOT / "scripts/latentmake")

FAN_OUT = 12
MODULE = range(60, 601)
MEDIAN, P90, LONGEST = 10, 35, 100
RECORDS = 14  # of `plan` and the modules at the root
LINES = {("plan",): 3550, ("session", "request", "cli"): 610}

HEAVY = {"torch", "numpy", "PIL", "av"}
HEAVY_FOLDERS = {"encode", "trainers"}
HEAVY_MODULES = {"pages.curves"}

# Each module but the package's own, which has its lazy interface.
MODULES = sorted(package.files.keys() - {""})
FOLDERS = sorted({house.folder_of(module) for module in MODULES})


def broken(folder: str) -> Iterator[str]:
    """Yield each law that a folder breaks, with the place."""
    lengths = []
    for module in MODULES:
        if house.folder_of(module) == folder:
            yield from (f"{module}: {fault}" for fault in _broken_by_module(module))
            functions = package.functions(module)
            lengths += [node.end_lineno - node.lineno + 1 for node in functions]
    lengths.sort()
    if lengths and statistics.median_low(lengths) > MEDIAN:
        yield f"functions have a median of {statistics.median_low(lengths)} lines"
    if lengths and lengths[int(len(lengths) * 0.9)] > P90:
        yield f"a tenth of the functions has {lengths[int(len(lengths) * 0.9)]} lines or more"
    for group, most in LINES.items():
        members = [module for module in MODULES if house.folder_of(module) in group]
        if folder in group and sum(map(package.lines, members)) > most:
            yield f"{' and '.join(group)}: more than {most} lines"


def _broken_by_module(module: str) -> Iterator[str]:
    initial = package.files[module].stem in ("__init__", "__main__")
    if (lines := package.lines(module)) not in MODULE and not initial:
        yield f"{lines} lines"
    if len(package.imports[module]) > FAN_OUT:
        yield f"imports {len(package.imports[module])} modules"
    for node in package.functions(module):
        if node.end_lineno - node.lineno >= LONGEST:
            yield f"{node.name} is too long"
    tree = package.trees[module]
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    if "__all__" in names:
        yield "has __all__"
    if initial and (others := _bound(tree.body) - names):
        yield f"passes on {', '.join(sorted(others))}"
    if house.folder_of(module) not in HEAVY_FOLDERS and module not in HEAVY_MODULES:
        heavy = {name.partition(".")[0] for name in _imported(house.at_import(tree))} & HEAVY
        yield from (f"imports {name}" for name in sorted(heavy))


def _imported(nodes: Iterator[ast.AST]) -> Iterator[str]:
    for node in nodes:
        match node:
            case ast.ImportFrom(module=str(name)):
                yield name
            case ast.Import(names=names):
                yield from (name.name for name in names)


def _bound(nodes: list[ast.stmt]) -> set[str]:
    """Return the names that statements import from this package."""
    return {
        alias.asname or alias.name
        for node in nodes
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("latentmake")
        for alias in node.names
    }


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_folder_keeps_the_laws_of_the_house(folder: str) -> None:
    assert not {*broken(folder)}


def test_the_folders_of_the_core_have_few_records() -> None:
    core = {folder for group in LINES for folder in group}
    done = [module for module in MODULES if house.folder_of(module) in core]
    classes = [each for module in done for each in package.classes(module)]
    records = [each.name for each in classes if house.is_record(each)]
    assert len(records) <= RECORDS, records


def test_imports_keep_the_contracts_of_pyproject() -> None:
    # A process of its own, because import-linter turns all loggers of its process off.
    command = [Path(sys.executable).with_name("lint-imports"), "--no-cache", "--no-logo"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout


def test_an_import_names_its_module_in_full() -> None:
    relative = [
        module
        for module, tree in package.trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.level
    ]
    assert not relative


def test_the_root_holds_few_modules() -> None:
    root = {path.stem for path in package.folder.glob("*.py")} - {"__init__"}
    named = {"backends", "entry"}
    assert root == named | {"__main__", "cli", "commandline", "graph", "request", "session"}
