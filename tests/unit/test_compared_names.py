"""Trainers, layouts and makers are asked: their names are compared in few lines, named here."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from latentmake.backends import BACKENDS
from latentmake.config.architectures import ARCHITECTURES, WAN

PACKAGE = Path(__file__).resolve().parents[2] / "scripts" / "latentmake"
NAMES = {
    *BACKENDS,
    *("plain", "musubi", *(f"{x}-{y}" for x in ("musubi", "sdscripts") for y in ARCHITECTURES)),
    *ARCHITECTURES,
    "latentmake",
    "sdscripts",
    WAN.name,
}
CLASSES = {
    *("SdTrainer", "WanTrainer", "MusubiTrainer", "SdScriptsTrainer"),
    *("WAN", "GENERIC", "Scripts", "Strategies"),
}
OPTIONAL = {"scripts", "strategies"}  # facts of a program: "is there one" asks who it is
TABLES = {"config", "layouts", "backends"}  # tables have names as keys
FREE = {
    "models/checkpoints.py",  # tells the three families whose releases are one file
    # init writes for a trainer, which nobody can be asked for before
    *(f"trainers/init/{name}.py" for name in ("model_section", "new_config")),
}
COMPARED = [
    # Once each; all others ask these properties of a model.
    "config/models.py: self.layout == 'plain'",
    "config/models.py: self.layout == 'sdscripts'",
    "config/models.py: self.encoder != 'latentmake'",
    "config/models.py: self.encoder == 'musubi'",
    # Of values that are no model yet.
    "config/models.py: values.get('layout') == 'sdscripts'",
    "config/models.py: name == 'wan'",
    # Checks of a trainer's section with its run.
    "config/root.py: isinstance(trainer, MusubiTrainer)",
    "config/root.py: isinstance(trainer, WanTrainer)",
    "config/root.py: isinstance(trainer, SdScriptsTrainer)",
    "config/root.py: isinstance(trainer, SdScriptsTrainer)",
]
"""Module and comparison, once for each line."""


def _names(node: ast.AST) -> Iterator[str]:
    """Yield names of trainers, layouts and architectures in one side of a comparison."""
    match node:
        case ast.Constant(value=str(name)) if name in NAMES:
            yield name
        case ast.Name(id=name) | ast.Attribute(attr=name) if name in CLASSES:
            yield name
        case ast.Tuple(elts=parts) | ast.List(elts=parts) | ast.Set(elts=parts):
            for part in parts:
                yield from _names(part)


def _compared(tree: ast.AST, *, tables: bool) -> Iterator[str]:
    """Yield the comparisons in a module; `tables` includes tables by name."""
    for node in ast.walk(tree):
        match node:
            case ast.Compare(
                left=ast.Attribute(attr=name) | ast.Name(id=name),
                ops=[ast.Is() | ast.IsNot()],
                comparators=[ast.Constant(value=None)],
            ) if name in OPTIONAL:
                yield ast.unparse(node)
                continue
            case ast.Compare(left=left, comparators=right):
                sides = [left, *right]
            case ast.MatchValue(value=value):
                sides = [value]
            case ast.MatchClass(cls=value):
                sides = [value]
            case ast.Dict(keys=keys) if all(isinstance(key, ast.Constant) for key in keys):
                sides = [key for key in keys if key is not None]
                if not tables or not all(any(_names(side)) for side in sides):
                    continue  # a table of other things, one of which is called so too
            case ast.Call(func=ast.Name(id="isinstance"), args=[_, kind]):
                sides = [kind]
            case ast.Call(func=ast.Attribute(attr="startswith" | "endswith"), args=[value]):
                sides = [value]
            case _:
                continue
        if any(name for side in sides for name in _names(side)):
            yield ast.unparse(node)


def _is_free(module: Path) -> bool:
    """Whether a module belongs to what one of the names stands for, or chooses one."""
    return module.as_posix() in FREE or not NAMES.isdisjoint(module.with_suffix("").parts)


def test_names_are_compared_in_the_lines_named_here_alone() -> None:
    compared = [
        f"{module.as_posix()}: {comparison}"
        for module in (path.relative_to(PACKAGE) for path in sorted(PACKAGE.rglob("*.py")))
        if not _is_free(module)
        for comparison in _compared(
            ast.parse((PACKAGE / module).read_text(encoding="utf-8")),
            tables=module.with_suffix("").parts[0] not in TABLES,
        )
    ]
    assert sorted(compared) == sorted(COMPARED)
