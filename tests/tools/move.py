"""Move and merge modules by a map: `python tests/tools/move.py MAP.json`, from the repository.

The map names modules and definitions in full, old names as they are before the move:

    {"package": "latentmake",
     "modules": {"latentmake.new": ["latentmake.old", "latentmake.other"]},
     "definitions": {"latentmake.old.name": "latentmake.new"},
     "renames": {"latentmake.old.name": "new_name"},
     "docstrings": {"latentmake.new": "The docstring of a module or a package."}}

Imports and uses are rewritten in all Python files; strings, comments and text files get the new
names of modules and of their files. The tool refuses equal names in one module and circles of
imports. A second run changes nothing. On another branch it moves what is still in its old place.
"""

from __future__ import annotations

import ast
import builtins
import json
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import cached_property
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import libcst as cst

SOURCE = "scripts"  # the folder that holds the package
TEXTS = {".md", ".toml", ".smk", ".yml", ".yaml", ".sh", ""}
HISTORY = {"CHANGELOG.md", "LICENSE"}

_FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_COMPREHENSION = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


class Refusal(Exception):
    """Mistakes of the map, a line each."""


class Scope(NamedTuple):
    """Names that a module, class or function binds: its own, and imports as local -> full name."""

    names: set[str]
    imports: dict[str, str]
    is_class: bool = False


def scope_of(body: Iterable[ast.AST], is_class: bool = False, deep: bool = False) -> Scope:
    """Return what a body binds; `deep` with the bodies of functions and classes in it."""
    scope, outer, rest = Scope(set(), {}, is_class), set(), list(body)
    while rest:
        node = rest.pop()
        match node:
            case ast.ImportFrom(module=str(module), names=names):
                scope.imports.update({n.asname or n.name: f"{module}.{n.name}" for n in names})
            case ast.Import(names=names):
                full = {n.asname or n.name.partition(".")[0]: n for n in names}
                scope.imports.update({k: n.name if n.asname else k for k, n in full.items()})
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                scope.names.add(node.name)
                if not deep:
                    continue
            case ast.Global(names=names) | ast.Nonlocal(names=names):
                outer.update(names)
            case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name):
                scope.names.add(name)
            case ast.ExceptHandler(name=str(name)) | ast.MatchAs(name=str(name)):
                scope.names.add(name)
            case ast.MatchStar(name=str(name)) | ast.MatchMapping(rest=str(name)):
                scope.names.add(name)
        if deep or not isinstance(node, (ast.Lambda, *_COMPREHENSION)):
            rest += ast.iter_child_nodes(node)
    scope.names.difference_update(outer)
    return scope


def loaded(body: Iterable[ast.AST], at_import: bool = False) -> set[str]:
    """Return the names that a body uses; of `at_import`, those outside of functions."""
    found, rest = set(), list(body)
    while rest:
        node = rest.pop()
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            found.add(node.id)
        children = list(ast.iter_child_nodes(node))
        if at_import and isinstance(node, _FUNCTION):
            body = node.body if isinstance(node.body, list) else [node.body]
            children = [child for child in children if child not in body]
        rest += children
    return found


class Module:
    """A module as it stands before the move."""

    def __init__(self, path: Path) -> None:
        """Read a file of Python."""
        self.path = path
        self.is_package = path.name == "__init__.py"
        self.text = path.read_text(encoding="utf-8")
        self.tree = ast.parse(self.text)
        self.scope = scope_of(self.tree.body)

    @property
    def is_empty(self) -> bool:
        """Whether nothing but a docstring is left of it."""
        return not self.scope.names and not self.scope.imports


class Plan:
    """The map, and the package that it changes."""

    def __init__(self, values: dict[str, dict[str, str]], root: Path) -> None:
        """Read the package; the map's groups stay in their order."""
        self.package = str(values.get("package", "latentmake"))
        self.root, self.source = root, root / SOURCE
        self.groups: dict[str, list[str]] = {k: list(v) for k, v in values["modules"].items()}
        self.homes = {old: new for new, olds in self.groups.items() for old in olds}
        self.moved, self.renames = values.get("definitions", {}), values.get("renames", {})
        self.docstrings = values.get("docstrings", {})
        paths = sorted((self.source / self.package).rglob("*.py"))
        self.modules = {self.name_of(path): Module(path) for path in paths}
        self.known = set(self.modules) | set(self.homes) | set(self.groups)
        self.mistakes: list[str] = []

    def name_of(self, path: Path) -> str:
        """Return a module's full name."""
        parts = path.relative_to(self.source).with_suffix("").parts
        return ".".join(parts).removesuffix(".__init__")

    def path_of(self, module: str) -> Path:
        """Return the file of a new module."""
        return self.source.joinpath(*module.split(".")).with_suffix(".py")

    def exists(self, module: str) -> bool:
        """Return whether a module is still to be moved, or is there to be merged with."""
        return module in self.modules and not self.modules[module].is_empty

    def is_done(self, module: str) -> bool:
        """Return whether others were merged into a module by an earlier run."""
        olds = self.groups.get(module, [])
        return len(olds) > 1 and not any(self.exists(old) for old in olds if old != module)

    def check(self) -> None:
        """Raise the mistakes that were found."""
        if self.mistakes:
            raise Refusal("\n".join(dict.fromkeys(self.mistakes)))

    def may_name(self, text: str) -> bool:
        """Return whether a text may name what moves; to read it as Python takes long."""
        return any(word in text for word in self._words)

    @cached_property
    def _words(self) -> set[str]:
        names = {old for old, new in self.homes.items() if old != new} | self.renamed
        parents = {f"from {name.rpartition('.')[0]} import" for name in names}
        return names | parents | {name.replace(".", "/") for name in names}

    @cached_property
    def renamed(self) -> set[str]:
        """Modules that definitions leave, or that give them other names."""
        return {key.rpartition(".")[0] for key in [*self.moved, *self.renames]}

    def _holds(self, module: str, name: str) -> bool:
        return module in self.modules and name in self.modules[module].scope.names

    def home(self, module: str, name: str) -> str:
        """Return the new module of a definition."""
        key = f"{module}.{name}"
        if key in self.moved and not (self.is_done(module) and self._holds(module, name)):
            return self.moved[key]
        return self.homes.get(module, module)

    def resolve(self, full: str) -> tuple[str, list[str]]:
        """Return the new module of a full name, and what is left of the name: none of a module."""
        parts = full.split(".")
        module, rest = "", parts
        for count in range(len(parts), 0, -1):
            module, rest = ".".join(parts[:count]), parts[count:]
            if module in self.known:
                break
        else:
            return full, []
        if not rest:
            stays = any(
                new.startswith(f"{module}.") for new in [*self.groups, *self.moved.values()]
            )
            return module if stays else self.homes.get(module, module), []
        name, *more = rest
        old = self.modules.get(module)
        listed = module in self.homes and (old is None or old.is_package)
        if listed and old is not None and name in old.scope.imports:
            found, names = self.resolve(old.scope.imports[name])
            return found, names + more
        if listed and not self._holds(module, name):
            near = [m for m in self.groups if m.rpartition(".")[0] == module]
            homes = [m for m in near if self._holds(m, name)]
            if len(homes) == 1:  # of a package whose `__init__` named it before
                return homes[0], rest
        key = f"{module}.{name}"
        if key in self.renames and not (self.is_done(module) and self._holds(module, name)):
            name = self.renames[key]
        return self.home(module, rest[0]), [name, *more]

    def targets(self) -> dict[str, list[str]]:
        """Return the modules to write anew, each with the old ones that have a part of it."""
        olds = {old for old in self.homes if self.exists(old) and not self.is_done(old)}
        for module, _, name in (key.rpartition(".") for key in self.moved):
            if self._holds(module, name) and not self.is_done(module):
                olds.add(module)
        found: dict[str, set[str]] = defaultdict(set)
        for old in olds:
            homes = {self.home(old, name) for name in self.modules[old].scope.names - {"__all__"}}
            for new in homes | {self.homes.get(old, old)}:
                found[new].add(old)
        for new, parts in found.items():
            if self.exists(new) and self.homes.get(new, new) == new:
                parts.add(new)
        order = list(self.homes)

        def place(new: str, old: str) -> tuple[bool, int, str]:
            return self.homes.get(old, old) != new, order.index(old) if old in order else -1, old

        return {
            new: sorted(parts, key=lambda old: place(new, old))
            for new, parts in sorted(found.items())
        }

    def text(self, text: str, breaks: bool = True) -> str:
        """Rewrite the names of modules and of their files in a text."""
        if self.package not in text:
            return text
        modules: dict[str, str] = {}

        def line(match: re.Match[str]) -> str:
            found: dict[str, list[str]] = defaultdict(list)
            for name in re.split(r"[\s,()]+", match[2].strip("() \n,")):
                module, rest = self.resolve(f"{match[1]}.{name}")
                if len(rest) > 1:  # of a module that is not there
                    return match[0]
                base, _, last = module.rpartition(".")
                found[module if rest else base].append(rest[0] if rest else last)
                if not rest and last != name:
                    modules[name] = f"{match[1]}.{name}"
            if list(found) == [match[1]] and not modules:
                return match[0]
            lines = [f"from {module} import {', '.join(names)}" for module, names in found.items()]
            indent = re.search(r"[ \t]*$", text[: match.start()])
            return ("\n" + indent[0] if breaks and indent else "; ").join(lines)

        package = re.escape(self.package)
        text = re.sub(rf"from ({package}[\w.]*) import (\([^)]*\)|\w+(?:, *\w+)*)", line, text)

        def used(match: re.Match[str]) -> str:
            module, rest = self.resolve(f"{modules[match[1]]}.{match[2]}")
            return ".".join([module.rpartition(".")[2], *rest])

        if modules:
            text = re.sub(rf"(?<![\w./])({'|'.join(modules)})\.(\w+)", used, text)

        def dotted(match: re.Match[str]) -> str:
            module, rest = self.resolve(match[0])
            return ".".join([module, *rest])

        def path(match: re.Match[str]) -> str:
            old = match[0].removesuffix(".py").replace("/", ".").removesuffix(".__init__")
            new = self.homes.get(old, old)
            return match[0] if new == old else new.replace(".", "/") + ".py"

        text = re.sub(rf"(?<![\w./-]){package}(?:\.[A-Za-z_]\w*)+", dotted, text)
        return re.sub(rf"\b{package}(?:/\w+)+\.py\b", path, text)


class Rewriter(cst.CSTTransformer):
    """Rewrites one file, or the part of a module that comes to stand in the module `home`."""

    def __init__(self, plan: Plan, tree: cst.Module, whole: str, name: str, home: str) -> None:
        """Take a file's tree, its whole text, its own full name and the new one."""
        super().__init__()
        self.plan, self.tree, self.name, self.home = plan, tree, name, home
        parsed = ast.parse(whole)
        self.scopes: list[Scope | cst.CSTNode] = [scope_of(parsed.body)]
        self.needed: set[tuple[str, str]] = set()  # own names that come to stand elsewhere
        self.skipped: set[cst.CSTNode] = set()  # attributes and keywords
        self.roots: set[cst.CSTNode] = set()  # names before attributes
        self.bound = scope_of(parsed.body, deep=True).names
        self.uses: dict[str, set[str]] = defaultdict(set)  # local name -> attributes
        proposed: dict[str, set[str]] = defaultdict(set)  # new local name -> new full names
        imported: dict[str, set[str]] = defaultdict(set)
        roots = set()
        for node in ast.walk(parsed):
            if isinstance(node, ast.Attribute):
                first, *others = _chain(node) or [""]
                self.uses[first].add(".".join(others))
                roots.add(id(node.value))
            elif isinstance(node, ast.Import | ast.ImportFrom):
                for local, full in scope_of([node]).imports.items():
                    imported[local].add(full)
                    module, rest = plan.resolve(full)
                    plain = self.is_ours(full) and full.endswith(f".{local}")
                    new = ".".join([module, *rest])
                    proposed[new.rpartition(".")[2] if plain else local].add(new)
        self.proposed = proposed
        names = [n for n in ast.walk(parsed) if isinstance(n, ast.Name) and id(n) not in roots]
        self.bare = {node.id for node in names if isinstance(node.ctx, ast.Load)}
        own = self.scope(0).names if name in plan.known else set()
        self.changing = {each for each in own if plan.resolve(f"{name}.{each}") != (home, [each])}
        self.changing |= {
            local for local, fulls in imported.items() if any(map(self.is_ours, fulls))
        }

    def is_ours(self, full: str) -> bool:
        """Return whether a full name is of the package."""
        return f"{full}.".startswith(f"{self.plan.package}.")

    def local(self, full: str, local: str) -> str | None:
        """Return the name of an import after the move; None: import its names one by one."""
        module, rest = self.plan.resolve(full)
        name = rest[0] if rest else module.rpartition(".")[2]
        if rest and module == self.home:
            return name
        if local == name or not full.endswith(f".{local}"):
            return local
        if name not in self.bound and len(self.proposed[name]) == 1:
            return name
        if rest or local in self.bare:
            return local
        ones = [self.plan.resolve(f"{full}.{use}")[1] for use in self.uses[local]]
        taken = self.bound | set(self.proposed)
        return local if any(one and one[0] in taken for one in ones) else None

    def scope(self, place: int) -> Scope:
        """Return a scope that the rewriter is in, from outside in; read when it is asked for."""
        node = self.scopes[place]
        if isinstance(node, cst.CSTNode):
            code = self.tree.code_for_node(node).strip()
            is_block = isinstance(node, cst.FunctionDef | cst.ClassDef)
            made: ast.AST = ast.parse(code if is_block else f"({code})").body[0]
            made = made.value if isinstance(made, ast.Expr) else made
            node = scope_of(ast.iter_child_nodes(made), is_class=isinstance(made, ast.ClassDef))
            self.scopes[place] = node
        return node

    def lookup(self, name: str) -> str | None:
        """Return the full name of what a name stands for here; None where it stays as it is."""
        if name not in self.changing:
            return None
        for place in reversed(range(len(self.scopes))):
            scope = self.scope(place)
            if scope.is_class and place < len(self.scopes) - 1:
                continue
            if name in scope.imports:
                return scope.imports[name] if self.is_ours(scope.imports[name]) else None
            if name in scope.names:
                return f"{self.name}.{name}" if place == 0 else None
        return None

    def plain(self, name: str) -> cst.Name:
        """Return a name of the module, which no local one may hide."""
        scopes = [self.scope(place) for place in range(1, len(self.scopes))]
        if any(name in scope.names for scope in scopes if not scope.is_class):
            self.plan.mistakes.append(f"{self.name}: a local `{name}` hides the one of its module")
        return cst.Name(name)

    def on_visit(self, node: cst.CSTNode) -> bool:
        """Open scopes; leave imports to their line, attributes and keywords alone."""
        if isinstance(node, _SCOPES):
            self.scopes.append(node)
        elif isinstance(node, cst.Attribute):
            self.skipped.add(node.attr)
            self.roots.add(node.value)
        elif isinstance(node, cst.Arg) and node.keyword:
            self.skipped.add(node.keyword)
        return not isinstance(node, cst.Import | cst.ImportFrom)

    def on_leave(self, original: cst.CSTNode, updated: cst.CSTNode) -> object:  # type: ignore[override]
        """Rewrite a node."""
        match original, updated:
            case cst.Name(), cst.Name() if original not in self.skipped:
                return self._name(original, updated)
            case cst.Attribute(), cst.Attribute():
                return self._attribute(original, updated)
            case cst.Call(), cst.Call():
                return self._call(original, updated)
            case cst.SimpleStatementLine(), cst.SimpleStatementLine():
                return self._line(original, updated)
            case _, cst.SimpleString(value=text):
                return updated.with_changes(value=self.plan.text(text, text.endswith('"""')))
            case _, cst.FormattedStringText(value=text) | cst.Comment(value=text):
                return updated.with_changes(value=self.plan.text(text, breaks=False))
        if isinstance(original, _SCOPES):
            self.scopes.pop()
        return updated

    def _name(self, original: cst.Name, updated: cst.Name) -> cst.Name:
        full = self.lookup(original.value)
        if full is None:
            return updated
        module, rest = self.plan.resolve(full)
        if not rest and original in self.roots:
            return updated  # `_attribute` rewrites it
        if full == f"{self.name}.{original.value}":
            if module != self.home:
                self.needed.add((module, rest[0]))
            return updated if rest == [original.value] else self.plain(rest[0])
        if not rest and module == self.home:
            self.plan.mistakes.append(f"{self.name}: `{original.value}`, now itself, is no value")
        local = self.local(full, original.value)
        return updated if local in (None, original.value) else self.plain(str(local))

    def _full(self, node: cst.BaseExpression) -> tuple[str, str, list[str]]:
        """Return the first name of a chain, the full name of its module, and the attributes."""
        rest: list[str] = []
        while isinstance(node, cst.Attribute):
            rest.insert(0, node.attr.value)
            node = node.value
        first = node.value if isinstance(node, cst.Name) else ""
        full = self.lookup(first) if first else None
        if full is None or self.plan.resolve(full)[1]:
            return first, "", rest
        return first, full, rest

    def _attribute(self, original: cst.Attribute, updated: cst.Attribute) -> cst.BaseExpression:
        if not isinstance(original.value, cst.Name | cst.Attribute):
            return updated
        first, full, attributes = self._full(original)
        if not full:
            return updated
        module, rest = self.plan.resolve(".".join([full, *attributes]))
        if full == self.plan.package and first == full and len(rest) < 2:
            return cst.parse_expression(".".join([module, *rest]))
        if len(rest) != 1:
            return updated  # its inner part is rewritten
        local = self.local(full, first)
        if module == self.home or local is None or module != self.plan.resolve(full)[0]:
            return self.plain(rest[0])
        return updated.with_changes(value=cst.Name(local), attr=cst.Name(rest[0]))

    def _call(self, original: cst.Call, updated: cst.Call) -> cst.Call:
        """Rewrite the name in `setattr(module, "name", ...)`, as tests patch it."""
        match original.args:
            case [
                cst.Arg(value=cst.Name() as value),
                cst.Arg(value=cst.SimpleString() as text),
                *_,
            ]:
                first, full, _ = self._full(value)
                old = ast.literal_eval(text.value)
                if not full or not isinstance(old, str) or not old.isidentifier():
                    return updated
                module, rest = self.plan.resolve(f"{full}.{old}")
                if module != self.plan.resolve(full)[0]:
                    self.plan.mistakes.append(
                        f"{self.name}: patch `{first}.{old}` by its full name"
                    )
                name = cst.SimpleString(f'"{rest[0] if rest else old}"')
                second = updated.args[1].with_changes(value=name)
                return updated.with_changes(args=[updated.args[0], second, *updated.args[2:]])
        return updated

    def _line(
        self, original: cst.SimpleStatementLine, updated: cst.SimpleStatementLine
    ) -> cst.BaseStatement | cst.FlattenSentinel[cst.BaseStatement] | cst.RemovalSentinel:
        if not isinstance(original.body[0], cst.Import | cst.ImportFrom):
            return updated
        node = ast.parse(self.tree.code_for_node(original.body[0])).body[0]
        old = {(alias.name, alias.asname) for alias in getattr(node, "names", [])}
        found = self._imports(node)
        if isinstance(node, ast.ImportFrom) and found == {str(node.module): old}:
            return updated
        if isinstance(node, ast.Import) and found == {"": old}:
            return updated
        lines = []
        for module, names in sorted(found.items()):
            words = sorted(f"{name} as {local}" if local else name for name, local in names)
            text = f"import {', '.join(words)}"
            lines.append(cst.parse_statement(f"from {module} {text}" if module else text))
        if not lines:
            return cst.RemoveFromParent()
        lines = [
            line.with_changes(trailing_whitespace=updated.trailing_whitespace) for line in lines
        ]
        lines[0] = lines[0].with_changes(leading_lines=updated.leading_lines)
        return cst.FlattenSentinel(lines)

    def _imports(self, node: ast.AST) -> dict[str, set[tuple[str, str | None]]]:
        """Return the new imports of an import statement: module -> names and their local names."""
        found: dict[str, set[tuple[str, str | None]]] = defaultdict(set)
        for alias in getattr(node, "names", []):
            if isinstance(node, ast.Import):
                module, _ = self.plan.resolve(alias.name)
                found[""].add((module, alias.asname))
                continue
            full = f"{getattr(node, 'module', '')}.{alias.name}"
            if not self.is_ours(full) or len(self.plan.resolve(full)[1]) > 1:
                found[getattr(node, "module", "")].add((alias.name, alias.asname))
                continue
            before = alias.asname or alias.name
            module, rest = self.plan.resolve(full)
            local = self.local(full, before)
            if rest and module != self.home:
                found[module].add((rest[0], None if local == rest[0] else local))
            if rest:
                continue
            for use in self.uses[before]:
                place, names = self.plan.resolve(f"{full}.{use}")
                if len(names) == 1 and place != self.home and (local is None or place != module):
                    found[place].add((names[0], None))
            base, _, last = module.rpartition(".")
            if module != self.home and local is not None:
                found[base].add((last, None if local == last else local))
        return dict(found)


_SCOPES = (
    cst.FunctionDef,
    cst.ClassDef,
    cst.Lambda,
    cst.ListComp,
    cst.SetComp,
    cst.DictComp,
    cst.GeneratorExp,
)


def _chain(node: ast.expr) -> list[str]:
    if isinstance(node, ast.Attribute):
        before = _chain(node.value)
        return [*before, node.attr] if before else []
    return [node.id] if isinstance(node, ast.Name) else []


class Piece:
    """The part of an old module that comes to stand in a new one, rewritten."""

    def __init__(self, plan: Plan, old: str, new: str) -> None:
        """Cut it out of the old module."""
        module = plan.modules[old]
        tree = cst.parse_module(module.text)
        body, last = [], plan.homes.get(old, old)
        for statement in tree.body:
            made = ast.parse(tree.code_for_node(statement)).body
            names = scope_of(made).names
            if names == {"__all__"}:
                continue
            homes = {plan.home(old, name) for name in names}
            if len(homes) > 1:
                plan.mistakes.append(f"{old}: {', '.join(sorted(names))} cannot be parted")
            # A text below a constant describes it.
            is_text = isinstance(made[0], ast.Expr) and isinstance(made[0].value, ast.Constant)
            last = min(homes) if homes else last if is_text else plan.homes.get(old, old)
            if last == new or _imports_only(made):
                body.append(statement)
        rewriter = Rewriter(plan, tree, module.text, old, new)
        tree = tree.with_changes(body=body).visit(rewriter)
        self.docstring = ast.get_docstring(module.tree, clean=False)
        self.imports = [f"from {place} import {name}" for place, name in sorted(rewriter.needed)]
        self.typing: list[str] = []
        self.body: list[str] = []
        self.main: list[str] = []
        for place, statement in enumerate(tree.body):
            code = tree.code_for_node(statement)
            made = ast.parse(code).body
            match made[0]:
                case ast.Import() | ast.ImportFrom():
                    self.imports.append(code.strip("\n"))
                case ast.If(body=lines) if _imports_only(made):
                    self.typing += [ast.unparse(line) for line in lines if hasattr(line, "names")]
                case ast.If(test=ast.Compare(left=ast.Name(id="__name__"))):
                    self.main.append(code)
                case ast.Expr(value=ast.Constant(value=str())) if place == 0 and self.docstring:
                    continue
                case _:
                    self.body.append(code)
        parsed = ast.parse("".join([*self.body, *self.main]))
        self.name, self.names = old, scope_of(parsed.body).names
        self.loaded = loaded(parsed.body)
        self.at_import = loaded(parsed.body, at_import=True)
        words = set(re.findall(r"\w+", "".join([*self.body, *self.main])))
        self.imports = [
            line
            for line in self.imports
            if _bound(line) & (words | {"annotations", "TYPE_CHECKING"})
        ]
        self.typing = [line for line in self.typing if _bound(line) & words]
        full = scope_of([ast.parse("\n".join([*self.imports, *self.typing]))]).imports
        self.local = {name: full[name] for name in full if name in words}


def _bound(line: str) -> set[str]:
    return set(scope_of([ast.parse(line.strip())]).imports)


def _imports_only(body: list[ast.stmt]) -> bool:
    match body[0]:
        case ast.If(test=ast.Name(id="TYPE_CHECKING"), body=lines, orelse=[]):
            return all(isinstance(line, ast.Import | ast.ImportFrom | ast.Pass) for line in lines)
    return isinstance(body[0], ast.Import | ast.ImportFrom)


def ordered(pieces: list[Piece]) -> list[Piece]:
    """Return pieces so that code that runs at import stands after what it needs."""
    for way in ("loaded", "at_import"):
        before = {
            piece.name: [q.name for q in pieces if q is not piece and q.names & getattr(piece, way)]
            for piece in pieces
        }
        try:
            TopologicalSorter(before).prepare()
        except CycleError:
            continue
        named, found = {piece.name: piece for piece in pieces}, dict[str, Piece]()

        def put(name: str) -> None:
            for other in before[name]:  # noqa: B023
                put(other)
            found.setdefault(name, named[name])  # noqa: B023

        for piece in pieces:
            put(piece.name)
        return list(found.values())
    raise Refusal(f"code that runs at import needs the other module's: {before}")


def collisions(new: str, pieces: list[Piece]) -> Iterator[str]:
    """Yield the names that mean two things in a new module."""
    meanings: dict[str, dict[str, str]] = defaultdict(dict)
    for piece in pieces:
        for name in piece.names:
            meanings[name].setdefault(f"{piece.name}.{name}", piece.name)
        for name, full in piece.local.items():
            meanings[name].setdefault(full, piece.name)
        for name in piece.loaded & set(dir(builtins)) - piece.names - set(piece.local):
            meanings[name].setdefault(f"builtins.{name}", piece.name)
    for name, found in sorted(meanings.items()):
        if len(found) > 1:
            yield f"{new}: `{name}` is {' and '.join(sorted(found))}"


def merged(plan: Plan, new: str, olds: list[str]) -> str:
    """Return the text of a new module."""
    pieces = [Piece(plan, old, new) for old in olds]
    if doubles := list(collisions(new, pieces)):
        plan.mistakes += doubles
        return ""
    pieces = ordered(pieces)
    first = next((piece for piece in pieces if piece.name == olds[0]), pieces[0])
    docstring = plan.docstrings.get(new) or first.docstring or ""
    imports = [line for piece in pieces for line in piece.imports]
    typing = [line for piece in pieces for line in piece.typing]
    lines = [f'"""{docstring}"""\n', *dict.fromkeys(imports)]
    if typing:
        lines += ["if TYPE_CHECKING:", *(f"    {line}" for line in dict.fromkeys(typing))]
    body = [code for piece in pieces for code in piece.body]
    return "\n".join(lines) + "\n" + "".join(body + [code for p in pieces for code in p.main])


def moved(plan: Plan) -> dict[Path, str | None]:
    """Return the files that change, with their new texts; None: the file goes.

    Raises:
        Refusal: names that collide, or circles of imports.
    """
    texts: dict[Path, str | None] = {}
    targets = plan.targets()
    for new, olds in targets.items():
        texts[plan.path_of(new)] = merged(plan, new, olds)
    plan.check()
    kept = {plan.path_of(new) for new in plan.groups}
    for old in plan.homes:
        if old in plan.modules and plan.modules[old].path not in kept:
            texts[plan.modules[old].path] = None
    for path in _files(plan.root):
        if path in texts or path.name in HISTORY or path == Path(__file__).resolve():
            continue
        text = path.read_text(encoding="utf-8")
        if not plan.may_name(text):
            continue
        if path.suffix == ".py":
            name = plan.name_of(path) if path.is_relative_to(plan.source) else str(path)
            tree = cst.parse_module(text)
            made = tree.visit(Rewriter(plan, tree, text, name, name)).code
        else:
            made = plan.text(text)
        if made != text:
            texts[path] = made
    plan.check()
    _packages(plan, texts)
    _no_circle(plan, texts)
    old_texts = {path: path.read_text(encoding="utf-8") for path in texts if path.exists()}
    return {path: text for path, text in texts.items() if text != old_texts.get(path)}


def _files(root: Path) -> list[Path]:
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=root, capture_output=True, check=True).stdout.decode()
    paths = [root / name for name in names.split("\0") if name]
    readable = TEXTS | {".py"}
    return sorted(p for p in paths if p.is_file() and not p.is_symlink() and p.suffix in readable)


def _packages(plan: Plan, texts: dict[Path, str | None]) -> None:
    """Give each package of the new house an `__init__` that holds a docstring, and end others."""
    paths = {module.path for module in plan.modules.values()} | set(texts)
    paths = {path for path in paths if path.is_relative_to(plan.source / plan.package)}
    left = {path for path in paths if texts.get(path, "") is not None}
    for path in sorted(paths):
        folder = path.parent
        start, name = folder / "__init__.py", plan.name_of(folder / "__init__.py")
        full = any(each != start and each.is_relative_to(folder) for each in left)
        if not full and start in paths and path != start:
            texts[start] = None
        elif full and start not in left:
            old = ast.get_docstring(plan.modules[name].tree) if name in plan.modules else None
            text = plan.docstrings.get(name) or old or f"{folder.name.capitalize()}."
            texts[start] = f'"""{text.splitlines()[0]}"""\n'


def _no_circle(plan: Plan, texts: dict[Path, str | None]) -> None:
    paths = {module.path for module in plan.modules.values()} | set(texts)
    graph: dict[str, set[str]] = {}
    for path in paths:
        text = texts[path] if path in texts else path.read_text(encoding="utf-8")
        if text is not None and path.suffix == ".py" and path.is_relative_to(plan.source):
            nodes = [node for node in ast.walk(ast.parse(text)) if hasattr(node, "names")]
            fulls = {full for node in nodes for full in scope_of([node]).imports.values()}
            graph[plan.name_of(path)] = fulls | {full.rpartition(".")[0] for full in fulls}
    names = set(graph) - {plan.package}
    try:
        TopologicalSorter({m: (found & names) - {m} for m, found in graph.items()}).prepare()
    except CycleError as error:
        raise Refusal("a circle: " + " -> ".join(reversed(error.args[1]))) from None


def move(values: dict[str, dict[str, str]], root: Path) -> list[Path]:
    """Carry out a map in a repository; return the files that changed."""
    plan = Plan(values, root)
    texts = moved(plan)
    for path, text in texts.items():
        if text is None:
            path.unlink()
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    written = [str(path) for path, text in texts.items() if text and path.suffix == ".py"]
    ruff = Path(sys.executable).with_name("ruff")
    for options in (["check", "--fix", "--exit-zero", "--select", "I,F401,F811"], ["format"]):
        if written:
            subprocess.run([ruff, *options, "--quiet", *written], cwd=root, check=True)
    return sorted(texts)


def main() -> int:
    """Carry out `python tests/tools/move.py MAP.json`; return the exit status."""
    values = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    try:
        changed = move(values, Path.cwd().resolve())
    except Refusal as refusal:
        print(refusal, file=sys.stderr)
        return 1
    print(f"{len(changed)} files changed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
