"""Modules of Latentmake that one process imports, and that projects of its copies find imported.

A project has a copy of the package. Where its files are as they were when that process began, its
modules are those that were imported, under the paths of the project; else they are imported anew.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
import sys
from collections.abc import Iterable, Iterator
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

PACKAGE = "latentmake"
_PROGRAMS = ("__main__", "run", "driver", "run_published", "watchdog", "readers")
"""Modules that are run as programs, or in the environments of others."""

_Stamps = dict[str, tuple[int, int]]
_Held = tuple[Any, Any, type, str]
"""A dictionary or list, the key of a path in it, the path's type, and its end below the copy."""


class KeptModules(MetaPathFinder, Loader):
    """Imports all modules of a copy of the package, and gives them to an equal copy."""

    def __init__(self, scripts: Path) -> None:
        self._folder = scripts / PACKAGE
        self._stamps = _stamps(self._folder)
        sys.path.insert(0, str(scripts))
        package = importlib.import_module(PACKAGE)
        for found in pkgutil.walk_packages(package.__path__, f"{PACKAGE}."):
            if found.name.rpartition(".")[2] not in _PROGRAMS:
                importlib.import_module(found.name)
        sys.path.remove(str(scripts))
        ours = [name for name in sys.modules if name.partition(".")[0] == PACKAGE]
        self._modules = {name: sys.modules.pop(name) for name in ours}
        self._paths = list(_paths_in(self._modules.values(), str(scripts.parent)))
        sys.meta_path.insert(0, self)

    def probe(self, number: int) -> None:
        """Let trainings measure the loss at both ends so many times, each of which takes a pass."""
        self._modules[f"{PACKAGE}.trainers.loop.recipe"].Recipe.probes = number

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if fullname != PACKAGE:
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(fullname)
        if spec is not None and spec.origin and spec.loader:
            folder = Path(spec.origin).parent
            if _stamps(folder) == self._stamps:
                self._move(folder)
                spec.loader = self
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self._modules[PACKAGE]

    def exec_module(self, module: ModuleType) -> None:
        sys.modules.update(self._modules)

    def _move(self, folder: Path) -> None:
        """Give the modules, and the paths that they hold, the places of another copy."""
        root = str(folder.parents[1])
        for holder, name, kind, place in self._paths:
            holder[name] = kind(root + place)


def _paths_in(modules: Iterable[ModuleType], root: str) -> Iterator[_Held]:
    """Yield each path below a folder that modules and their specifications hold."""
    for module in modules:
        spec = module.__spec__
        assert spec is not None
        holders: list[tuple[Any, Iterable[tuple[Any, Any]]]] = [
            (vars(module), vars(module).items()),
            (vars(spec), [("origin", spec.origin)]),
        ]
        if (searched := spec.submodule_search_locations) is not None:
            module.__path__ = searched
            holders.append((searched, enumerate(searched)))
        for holder, items in holders:
            for name, value in items:
                if isinstance(value, (str, Path)) and str(value).startswith(f"{root}/"):
                    yield holder, name, type(value), str(value)[len(root) :]


def _stamps(folder: Path) -> _Stamps:
    """Return path -> size and mtime of the files of a copy, but for what Python compiles."""
    found: _Stamps = {}
    for place, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name != "__pycache__"]
        for name in names:
            path = os.path.join(place, name)
            stat = os.stat(path)
            found[os.path.relpath(path, folder)] = (stat.st_size, stat.st_mtime_ns)
    return found
