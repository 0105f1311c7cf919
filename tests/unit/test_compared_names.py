"""Trainers, layouts and architectures are asked: their names are compared in few places."""

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
    "sdscripts",
    WAN.name,
}
CLASSES = {"SdTrainer", "WanTrainer", "MusubiTrainer", "SdScriptsTrainer", "WAN", "GENERIC"}
# Where names are told apart: tables, and what belongs to one trainer, layout or architecture.
FREE = {"config", "layouts", "backends"}
FREE_MODULES = {
    "models/checkpoints.py",  # tells the three families whose releases are one file
    # init writes for a trainer, which nobody can be asked for before
    *(f"trainers/init/{name}.py" for name in ("model_section", "new_config")),
}


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


def _compared(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case ast.Compare(left=left, comparators=right):
                sides = [left, *right]
            case ast.MatchValue(value=value):
                sides = [value]
            case ast.MatchClass(cls=value):
                sides = [value]
            case ast.Dict(keys=keys) if all(isinstance(key, ast.Constant) for key in keys):
                sides = [key for key in keys if key is not None]
                if not all(any(_names(side)) for side in sides):
                    continue  # a table of other things, one of which is called so too
            case ast.Call(func=ast.Name(id="isinstance"), args=[_, kind]):
                sides = [kind]
            case ast.Call(func=ast.Attribute(attr="startswith" | "endswith"), args=[value]):
                sides = [value]
            case _:
                continue
        for side in sides:
            yield from _names(side)


def _is_free(module: Path) -> bool:
    """Whether a module belongs to tables of names, or to what one of them stands for."""
    parts = module.with_suffix("").parts
    free = parts[0] in FREE or module.as_posix() in FREE_MODULES
    return free or not NAMES.isdisjoint(parts)


def test_names_are_compared_where_they_belong_alone() -> None:
    compared = {
        (module.as_posix(), name)
        for module in (path.relative_to(PACKAGE) for path in sorted(PACKAGE.rglob("*.py")))
        if not _is_free(module)
        for name in _compared(ast.parse((PACKAGE / module).read_text(encoding="utf-8")))
    }
    assert not compared
