"""Facts from a trainer's own sources, read as text and never imported.

Versions and forks of a trainer differ in the flags they know and in what they refuse. Importing
them to ask would load CUDA for minutes; a syntax tree answers in a second.
"""

from __future__ import annotations

import ast
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from latentmake import digest
from latentmake.index.memo import Memo


@dataclass(frozen=True)
class Sources:
    """Facts from a script and all that it imports from its own folders.

    Attributes:
        flags: declared ones; None where that cannot be told: the script does not declare
            `--dataset_config` with argparse, takes unknown flags, or computes their names.
        needs: packages of others that every run imports, by their first names.
        files: their paths.
        digest: of their names below the last folder, and of their content.
    """

    flags: frozenset[str] | None
    needs: frozenset[str]
    files: frozenset[str]
    digest: str

    @classmethod
    def read(
        cls,
        script: Path,
        roots: Sequence[Path],
        memory: Memo | None = None,
        *,
        without: Sequence[str] = (),
    ) -> Sources:
        """Read the sources of a script.

        Args:
            script: the program.
            roots: folders in which its imports are looked for, in order.
            memory: keeps the facts, until one of the files or folders changes.
            without: folders below the first of the roots whose modules are not read.
        """

        def find() -> tuple[dict[str, Any], list[Path]]:
            return _Reader(script, roots, without).facts()

        question = ["sources 8", str(script), [str(root) for root in roots], *without]
        facts: dict[str, Any] = memory.remembered(question, find) if memory else find()[0]
        lists = {key: frozenset(each) for key, each in facts.items() if isinstance(each, list)}
        return cls(**{**facts, **lists})

    def mentions(self, word: str) -> bool:
        """Whether a word stands anywhere in the sources."""
        return any(
            word in Path(path).read_text(encoding="utf-8", errors="replace") for path in self.files
        )


class _Reader:
    """Reads a script, and all that it imports from some folders."""

    def __init__(self, script: Path, roots: Sequence[Path], without: Sequence[str] = ()) -> None:
        self._script = script
        self._without = [roots[0] / name for name in without]
        self._roots = roots
        self._unreadable = False
        self._digests: dict[str, str] = {}
        self._parsed: dict[Path, ast.Module] = {}

    def facts(self) -> tuple[dict[str, Any], list[Path]]:
        """Return the facts as JSON values, and the paths that they depend on."""
        flags = self._flags()
        facts = {
            "flags": None if flags is None else sorted(flags),
            "needs": sorted(self._needs()),
            "files": sorted(map(str, self._trees)),
            "digest": digest.of_value(sorted(self._digests.items())),
        }
        return facts, [*self._trees, *{path.parent for path in self._trees}]

    @cached_property
    def _trees(self) -> dict[Path, ast.Module]:
        return self._reach(everywhere=True)

    def _reach(self, *, everywhere: bool) -> dict[Path, ast.Module]:
        """Parse the script and what it imports; `everywhere`: also inside of functions."""
        found: dict[Path, ast.Module] = {}
        waiting = [self._script]
        while waiting:
            path = waiting.pop()
            if path in found or any(each in path.parents for each in self._without):
                continue
            try:
                found[path] = self._parse(path)
            except (OSError, SyntaxError, ValueError, RecursionError):
                self._unreadable = True
                continue
            for name, base in _imports(found[path], path, everywhere=everywhere):
                waiting.extend(self._files(name, [base] if base else self._roots))
        return found

    def _parse(self, path: Path) -> ast.Module:
        if path not in self._parsed:
            code = path.read_bytes()
            self._digests[os.path.relpath(path, self._roots[-1])] = digest.of_bytes(code)
            with warnings.catch_warnings(action="ignore"):  # of code that is not ours
                tree = ast.parse(code)
            if path != self._script:  # imported, so that what it does as a program is not done
                tree.body = [node for node in tree.body if not _is_main(node)]
            self._parsed[path] = tree
        return self._parsed[path]

    def _files(self, name: str, roots: Sequence[Path]) -> list[Path]:
        """Return the files that importing a dotted name would run, as far as they are its own."""
        for root in roots:
            files: list[Path] = []
            place = root
            for part in name.split("."):
                place = place / part
                if (package := place / "__init__.py").is_file():
                    files.append(package)
            if (module := place.with_name(f"{place.name}.py")).is_file():
                files.append(module)
            if files:
                return files
        return []

    def _flags(self) -> frozenset[str] | None:
        flags: set[str] = set()
        declaring, lenient = {self._script}, set[Path]()
        for path, tree in self._trees.items():
            for call in ast.walk(tree):
                if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute)):
                    continue
                if call.func.attr == "parse_known_args":
                    lenient.add(path)
                elif call.func.attr == "add_argument":
                    names = [x.value if isinstance(x, ast.Constant) else None for x in call.args]
                    if not all(isinstance(name, str) for name in names):
                        return None
                    flags.update(map(str, names))
                    if any("BooleanOptionalAction" in ast.dump(x.value) for x in call.keywords):
                        flags |= {f"--no-{str(name).removeprefix('--')}" for name in names}
                    if "--dataset_config" in names:
                        declaring.add(path)
        if "--dataset_config" not in flags or declaring & lenient or self._unreadable:
            return None
        return frozenset(flag for flag in flags if flag.startswith("-"))

    def _needs(self) -> frozenset[str]:
        named = {
            name.partition(".")[0]
            for path, tree in self._reach(everywhere=False).items()
            for name, base in _imports(tree, path, everywhere=False)
            if base is None
        }
        own = {
            name
            for name in named
            if any(
                (root / name).is_dir() or (root / f"{name}.py").is_file() for root in self._roots
            )
        }
        return frozenset(named - own - set(sys.stdlib_module_names))


def _imports(
    tree: ast.Module, path: Path, *, everywhere: bool
) -> Iterator[tuple[str, Path | None]]:
    """Yield dotted names that are imported, with the folder they are relative to, if any."""
    for node in ast.walk(tree) if everywhere else tree.body:
        if isinstance(node, ast.Import):
            yield from ((alias.name, None) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = path.parents[node.level - 1] if 0 < node.level <= len(path.parents) else None
            if node.module:
                yield node.module, base
            # What is imported may be a module of that package.
            prefix = f"{node.module}." if node.module else ""
            yield from ((f"{prefix}{alias.name}", base) for alias in node.names)


def _is_main(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and "id='__name__'" in ast.dump(node.test)
