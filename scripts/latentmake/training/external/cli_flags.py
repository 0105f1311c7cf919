"""Facts from a trainer's own sources, read as text and never imported.

Versions and forks of a trainer differ in the flags they know and in what they refuse. Importing
them to ask would load CUDA for minutes; a syntax tree answers in a second.
"""

from __future__ import annotations

import ast
import os
import re
import sys
import warnings
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from latentmake import digest
from latentmake.index.memo import Memo, remembered

__all__ = ["Sources"]

_MAX_FILES = 2000
# As `ast.unparse` writes them: a condition on sage attention alone, an end of the program.
_SAGE = re.compile(
    r"(\w+\.)*sage_attn( (is|==) True)?|getattr\(\w+, 'sage_attn'(, \w+)?\)|'--sage_attn' in .+"
)
_ENDS = re.compile(r"raise\b|([\w.]+\.)?(error|exit|_exit|quit)\(")


class Sources:
    """A script and all that it imports from its own folders, `roots`, in their order."""

    def __init__(self, script: Path, roots: Sequence[Path], memory: Memo | None = None) -> None:
        self._script = script
        self._roots = roots
        self._memory = memory
        self._unreadable = False
        self._digests: dict[str, str] = {}

    @cached_property
    def _facts(self) -> dict[str, Any]:
        def find() -> tuple[dict[str, Any], Iterable[Path]]:
            flags = self._flags()
            facts = {
                "flags": None if flags is None else sorted(flags),
                "refuses_sage": self._refuses_sage(),
                "demands_precision": self._demands_precision(),
                "needs": sorted(self._needs()),
                "dataset_keys": sorted(self._dataset_keys()),
                "files": sorted(map(str, self._trees)),
                "digest": digest.of_value(sorted(self._digests.items())),
            }
            return facts, [*self._trees, *{path.parent for path in self._trees}]

        question = ["sources 2", str(self._script), [str(root) for root in self._roots]]
        facts: dict[str, Any] = remembered(self._memory, question, find)
        return facts

    @property
    def flags(self) -> frozenset[str] | None:
        """The flags that are declared; None where that cannot be told.

        It cannot where the script does not declare `--dataset_config` with argparse, takes what it
        does not know, or computes the names of its flags.
        """
        flags = self._facts["flags"]
        return None if flags is None else frozenset(flags)

    @property
    def refuses_sage(self) -> bool:
        """Whether a condition on `sage_attn` alone ends the program."""
        return bool(self._facts["refuses_sage"])

    @property
    def demands_precision(self) -> bool:
        """Whether it asserts that `mixed_precision` is the DiT's number format."""
        return bool(self._facts["demands_precision"])

    @property
    def needs(self) -> frozenset[str]:
        """Packages of others that every run imports, by their first names."""
        return frozenset(self._facts["needs"])

    @property
    def dataset_keys(self) -> frozenset[str] | None:
        """Keys of its dataset TOML's schema; None without such a schema."""
        return frozenset(self._facts["dataset_keys"]) or None

    @property
    def digest(self) -> str:
        """Digest of these files' names below the last root and of their content."""
        return str(self._facts["digest"])

    @cached_property
    def _trees(self) -> dict[Path, ast.Module]:
        return self._reach(everywhere=True)

    def _reach(self, *, everywhere: bool) -> dict[Path, ast.Module]:
        """Parse the script and what it imports; `everywhere`: also inside of functions."""
        found: dict[Path, ast.Module] = {}
        waiting = [self._script]
        while waiting and len(found) < _MAX_FILES:
            path = waiting.pop()
            if path in found:
                continue
            try:
                code = path.read_bytes()
                self._digests[os.path.relpath(path, self._roots[-1])] = digest.of_bytes(code)
                with warnings.catch_warnings(action="ignore"):  # of code that is not ours
                    tree = ast.parse(code)
            except (OSError, SyntaxError, ValueError, RecursionError):
                self._unreadable = True
                continue
            if path != self._script:  # imported, so that what it does as a program is not done
                tree.body = [node for node in tree.body if not _is_main(node)]
            found[path] = tree
            for name, base in _imports(found[path], path, everywhere=everywhere):
                waiting.extend(self._files(name, [base] if base else self._roots))
        return found

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

    def _calls(self, attribute: str) -> Iterator[tuple[Path, ast.Call]]:
        for path, tree in self._trees.items():
            for node in ast.walk(tree):
                match node:
                    case ast.Call(func=ast.Attribute(attr=name)) if name == attribute:
                        yield path, node

    def _flags(self) -> frozenset[str] | None:
        flags: set[str] = set()
        declaring: set[Path] = {self._script}
        for path, call in self._calls("add_argument"):
            for name in call.args:
                if not (isinstance(name, ast.Constant) and isinstance(name.value, str)):
                    return None
                flags.add(name.value)
                if name.value == "--dataset_config":
                    declaring.add(path)
            if any("BooleanOptionalAction" in ast.dump(each.value) for each in call.keywords):
                flags |= {f"--no-{flag.removeprefix('--')}" for flag in tuple(flags)}
        lenient = any(path in declaring for path, _ in self._calls("parse_known_args"))
        if "--dataset_config" not in flags or lenient or self._unreadable:
            return None
        return frozenset(flag for flag in flags if flag.startswith("-"))

    def _dataset_keys(self) -> Iterator[str]:
        """Yield the keys of all dictionaries of the class `ConfigSanitizer`, wrapped ones too."""
        for tree in self._trees.values():
            for node in tree.body:
                if isinstance(node, ast.ClassDef) and node.name == "ConfigSanitizer":
                    tables = (each for each in ast.walk(node) if isinstance(each, ast.Dict))
                    for key in (key for table in tables for key in table.keys):
                        name = key.args[0] if isinstance(key, ast.Call) and key.args else key
                        if isinstance(name, ast.Constant) and isinstance(name.value, str):
                            yield name.value

    def _refuses_sage(self) -> bool:
        for tree in self._trees.values():
            for node in ast.walk(tree):
                match node:
                    case ast.If(test=ast.BoolOp(op=ast.Or(), values=parts), body=body):
                        pass
                    case ast.If(test=part, body=body):
                        parts = [part]
                    case ast.Assert(test=ast.UnaryOp(op=ast.Not(), operand=part)):
                        parts, body = [part], [ast.Raise()]
                    case _:
                        continue
                if any(_SAGE.fullmatch(ast.unparse(part)) for part in parts) and any(
                    _ENDS.match(ast.unparse(statement)) for statement in body
                ):
                    return True
        return False

    def _demands_precision(self) -> bool:
        return any(
            isinstance(node, ast.Assert) and "'mixed_precision'" in ast.dump(node.test)
            for tree in self._trees.values()
            for node in ast.walk(tree)
        )

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

    @cached_property
    def extends_path(self) -> bool:
        """Whether the script changes where modules are looked for."""
        return "sys.path" in self._script.read_text(encoding="utf-8", errors="replace")

    def mentions(self, word: str) -> bool:
        """Whether a word stands anywhere in the sources."""
        return any(
            word in Path(path).read_text(encoding="utf-8", errors="replace")
            for path in self._facts["files"]
        )


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
