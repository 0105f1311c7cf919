"""Folder, environment and sources of an external program; nothing of it is imported here.

The program is asked as for a training: by the same Python, in the same folder, with the same
variables.

Versions and forks of a trainer differ in the flags they know and in what they refuse. Importing
them to ask would load CUDA for minutes; a syntax tree answers in a second.
"""

from __future__ import annotations

import ast
import contextlib
import json
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path
from typing import NamedTuple, Self

import latentmake
from latentmake import digest
from latentmake.errors import TrainingError
from latentmake.files.workspace import is_windows
from latentmake.index.memo import Memo
from latentmake.training.findings import Finding


class Sources(NamedTuple):
    """Facts from a script and all that it imports from its own folders.

    Attributes:
        flags: declared ones; None where that cannot be told: the script does not declare
            `--dataset_config` with argparse, or computes names of flags.
        needs: packages of others that every run imports, by their first names.
        digest: of their names below the last folder, and of their content.
    """

    flags: list[str] | None
    needs: list[str]
    digest: str


class _Reader:
    """Reads a script, and all that it imports from some folders."""

    def __init__(self, script: Path, roots: Sequence[Path], without: Sequence[str]) -> None:
        self._script = script
        self._without = [roots[0] / name for name in without]
        self._roots = roots
        self._unreadable = False
        self._digests: dict[str, str] = {}
        self._parsed: dict[Path, ast.Module] = {}

    def facts(self) -> tuple[Sources, list[Path]]:
        """Return the facts, and the paths that they depend on."""
        paths = [*self._trees, *{path.parent for path in self._trees}]
        content = digest.of_value(sorted(self._digests.items()))
        return Sources(self._flags(), self._needs(), content), paths

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

    def _flags(self) -> list[str] | None:
        flags = set[str]()
        for call in (node for tree in self._trees.values() for node in ast.walk(tree)):
            if isinstance(call, ast.Call) and getattr(call.func, "attr", "") == "add_argument":
                names = [getattr(argument, "value", None) for argument in call.args]
                if not all(isinstance(name, str) for name in names):
                    return None
                flags.update(map(str, names))
        known = "--dataset_config" in flags and not self._unreadable
        return sorted(flag for flag in flags if flag.startswith("-")) if known else None

    def _needs(self) -> list[str]:
        named = {
            name.partition(".")[0]
            for path, tree in self._reach(everywhere=False).items()
            for name, base in _imports(tree, path, everywhere=False)
            if base is None
        }
        files = [path for root in self._roots for path in root.glob("*")]
        own = {path.stem for path in files if path.suffix == ".py" or path.is_dir()}
        return sorted(named - own - set(sys.stdlib_module_names))


def _imports(
    tree: ast.Module, path: Path, *, everywhere: bool
) -> Iterator[tuple[str, Path | None]]:
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


_SECONDS = 120.0  # a first look into a large environment on a network drive takes its time

# A module is found without running it, or the packages around it. What is installed or removed
# changes a folder of sys.path.
_FIND = """
import json, sys
from importlib.machinery import PathFinder
from importlib.util import find_spec
def place(name):
    first, *others = name.split(".")
    spec = find_spec(first)
    for other in others:
        inside = spec and spec.submodule_search_locations
        spec = PathFinder.find_spec(other, inside) if inside else None
    return spec and (spec.origin if spec.has_location else "")
print(json.dumps([{name: place(name) for name in sys.argv[1:]}, sys.path]))
"""


class Program(NamedTuple):
    """An external program.

    Attributes:
        section: of the configuration, which names its folder.
        package: folder below its own in which its scripts lie in some versions; "" for none.
        script: the one that trains.
        knows: what an installation that lacks that script would have to know.
    """

    name: str
    section: str
    package: str
    script: str
    knows: str


@dataclass
class Installation:
    """A program's folder and the Python that runs it; both are absolute.

    Links to that Python are kept: a virtual environment is found by the name it is called by.

    Attributes:
        scripts: folder in which its scripts lie.
        note: warning about the choice of Python, or "".
        memory: keeps what is found out about it.
    """

    program: Program
    folder: Path
    scripts: Path
    python: Path
    note: str
    memory: Memo

    @classmethod
    def locate(
        cls, program: Program, path: str, venv: str | None, memory: Memo | None = None
    ) -> Self:
        """Find the scripts and the Python of a program's folder.

        Args:
            program: which program.
            path: its folder.
            venv: its virtual environment; None looks for one in the folder.
            memory: keeps what is found out about it; None forgets it at the end.

        Raises:
            TrainingError: the folder, its scripts, or the Python of its environment are missing.
        """
        name, section, package, script, knows = program
        folder = Path(os.path.abspath(Path(path).expanduser()))  # noqa: PTH100
        for scripts in (folder / package, folder):
            if (scripts / script).is_file():
                found = _find_python(folder, venv, section)
                return cls(program, folder, scripts, *found, memory or Memo(None))
        if not folder.is_dir():
            fault, hint = f"the folder of {name} does not exist", f"correct `{section}.path`"
        else:
            fault = f"there is no {script} in this folder"
            hint = f"set `{section}.path` to the folder of {knows}, or update it"
        raise TrainingError(fault, where=path, hint=hint)

    def script(self, name: str) -> Path:
        """Return the path of one of its scripts; raises TrainingError without such a script."""
        for scripts in (self.scripts, self.folder):
            if (scripts / name).is_file():
                return scripts / name
        hint = f"update it, or correct `{self.program.section}.path`"
        raise TrainingError(f"{self.program.name} has no {name}", where=self.folder, hint=hint)

    def sources_of(self, script: str | None = None, without: Sequence[str] = ()) -> Sources:
        """Return facts from the sources of a script, by default the one that trains.

        Those in the folders `without` are left out.
        """
        script = script or self.program.script
        roots = [self.scripts, self.folder / "src", self.folder]
        find = _Reader(self.scripts / script, roots, without).facts
        question = ["sources 10", script, [str(root) for root in roots], *without]
        return Sources(*self.memory.remembered(question, find))

    def missing_flags(self, arguments: Sequence[str], script: str | None = None) -> list[str]:
        """Return the flags that a script, by default the one that trains, does not know."""
        known = self.sources_of(script).flags
        given = [each.partition("=")[0] for each in arguments if each.startswith("--")]
        return [flag for flag in dict.fromkeys(given) if known is not None and flag not in known]

    def environment(self) -> dict[str, str]:
        """Return the variables its scripts run with: none of ours, nor of Snakemake.

        Its output is unbuffered and UTF-8 (its messages are half Japanese) wherever it runs.
        """
        ours = Path(latentmake.__file__).resolve().parent.parent
        given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        paths = [path for path in given if path and Path(path).resolve() != ours]
        if self.program.package and (self.folder / self.program.package).is_dir():
            paths.insert(0, str(self.folder / "src"))
        variables = {
            name: value
            for name, value in os.environ.items()
            if not name.upper().startswith("SNAKEMAKE")
            and name not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
        }
        variables |= {"PYTHONUNBUFFERED": "1", "PYTHONIOENCODING": "utf-8"}
        if paths:
            variables["PYTHONPATH"] = os.pathsep.join(paths)
        home = self.python.parent.parent
        if (home / "pyvenv.cfg").is_file():
            variables["VIRTUAL_ENV"] = str(home)
            # What torch compiles kernels with is called by its bare name.
            programs = [str(self.python.parent), variables.get("PATH", "")]
            variables["PATH"] = os.pathsep.join(filter(None, programs))
        return variables

    def lacking(self, packages: Iterable[str]) -> list[str]:
        """Return the packages that its environment does not have, in order; see `modules`."""
        return [name for name, place in self.modules(packages).items() if place is None]

    def modules(self, modules: Iterable[str]) -> dict[str, str | None]:
        """Return name -> file of some modules, by their names; none is imported.

        None stands for one that its scripts could not import, "" for one that has no file.

        Raises:
            TrainingError: its Python cannot be run.
        """
        names, environment = sorted(set(modules)), self.environment()

        def find() -> tuple[dict[str, str | None], list[str | Path]]:
            try:
                done = subprocess.run(
                    [str(self.python), "-c", _FIND, *names],
                    env=environment,
                    cwd=self.scripts,  # where its scripts look for modules first
                    stdin=subprocess.DEVNULL,
                    capture_output=True,
                    timeout=_SECONDS,
                    check=True,
                )
                files, places = json.loads(done.stdout.splitlines()[-1])
            except (OSError, subprocess.SubprocessError, ValueError, LookupError) as error:
                reason = getattr(error, "strerror", None) or "it gives no answer"
                what = f"the Python of {self.program.name}'s environment cannot be used ({reason})"
                hint = f"set `{self.program.section}.venv` to its virtual environment"
                raise TrainingError(what, where=self.python, hint=hint) from None
            own = (self.scripts / name.replace(".", "/") for name in names)
            folders = [path.parent for path in own if path.parent.is_dir()]
            return files, [self.python, self.scripts, *folders, *filter(None, places)]

        paths = environment.get("PYTHONPATH", "")
        question = ["modules", str(self.python), str(self.scripts), names, paths]
        found: dict[str, str | None] = self.memory.remembered(question, find)
        return found


def _find_python(folder: Path, venv: str | None, section: str) -> tuple[Path, str]:
    """Return the Python of a program's environment, and a warning where it has none.

    `venv` may name that Python itself.
    """
    names = ("bin/python", "bin/python3", "Scripts/python.exe", "python.exe", "")
    bases = [Path.cwd(), folder] if venv is not None else [folder]
    places = [Path(venv).expanduser()] if venv is not None else [Path("venv"), Path(".venv")]
    for path in (base / place / name for place in places for base in bases for name in names):
        if path.is_file() and os.access(path, os.X_OK):
            return Path(os.path.abspath(path)), ""  # noqa: PTH100 -- resolve() would leave the venv
    if venv is not None:
        what, hint = "this virtual environment has no Python", f"correct `{section}.venv`"
        raise TrainingError(what, where=venv, hint=hint)
    return Path(sys.executable), (
        f"{folder} has no `venv` or `.venv`: it is run by {sys.executable}; "
        f"set `{section}.venv` where that is not meant"
    )


PROVEN = {"musubi_tuner": "30c658c", "sd_scripts": "48d368f"}
"""Section of the configuration -> commit of the program with which all tests passed."""


def flags(
    installation: Installation, arguments: Sequence[str], script: str | None = None
) -> Finding:
    """Check that a script, by default the one that trains, knows all flags of a command line."""
    what = "arguments" if script is None else f"arguments of {script}"
    if missing := installation.missing_flags(arguments, script):
        known = installation.sources_of(script).flags or ()
        near = " ".join(each for flag in missing for each in get_close_matches(flag, known, 1, 0.8))
        hint = f"did you mean {near}?" if near else "update it, or leave that out"
        note = f"this {installation.program.name} does not know {' '.join(missing)}: {hint}"
        return Finding(what, "failed", note)
    return Finding(what, "ok", "it knows all flags, as far as its sources tell")


def environment_finding(installation: Installation, packages: Iterable[str] = ()) -> Finding:
    """Check that its environment has what its script imports, and further packages.

    It raises a TrainingError if its Python cannot be run.
    """
    python = installation.python
    if lacks := installation.lacking({*installation.sources_of().needs, *packages, "accelerate"}):
        note = f"{python} lacks {', '.join(lacks)}: install it there"
        return Finding("environment", "failed", note)
    return Finding("environment", "ok", f"{python} has all that its script imports")


def network_finding(program: Installation, module: str, *, here: bool = True) -> Finding:
    """Check that a program has a module that makes networks; it is not imported.

    `here`: in its environment, too; else that may lie on another machine.
    """
    what, own = "network_module", program.scripts / f"{module.replace('.', '/')}.py"
    place = str(own) if own.is_file() else None
    if place is None and here:
        place = program.modules([module])[module]
    if place is None and not here and not own.parent.is_dir():
        return Finding(what, "ok", f"{module}: not in {program.program.name}, taken as it is")
    if place is None:
        names = [f"{module.rpartition('.')[0]}.{path.stem}" for path in own.parent.glob("*.py")]
        near = [f"did you mean {x}?" for x in get_close_matches(module, names, 1)]
        hint = near[0] if near else "correct it, or install it there"
        note = f"neither {program.program.name} nor its environment has {module}: {hint}"
        return Finding(what, "failed", note)
    if not (place and _MAKES_NETWORKS.search(Path(place).read_bytes())):
        return Finding(what, "failed", f"{module} makes no network: it has no `create_network`")
    return Finding(what, "ok", place)


_MAKES_NETWORKS = re.compile(rb"\bcreate_(arch_)?network\b")


def proven_commit(section: str, folder: Path) -> Finding:
    """Compare the commit of a program with the one that is proven; another is never an error.

    An update may rename a flag or change what a script writes, so that a report of a fault begins
    with the commit.
    """
    proven = PROVEN[section]
    git = ("git", "-C", str(folder))
    if not (found := (folder / ".git").exists() and said(*git, "rev-parse", "HEAD")):
        return Finding("commit", "warning", f"no git repository; {proven} is proven")
    edits = " with local changes" if said(*git, "diff", "--stat", "HEAD") else ""
    is_proven = found.startswith(proven)
    word = "proven" if is_proven else f"not proven; {proven} is"
    note = f"commit {found[:12]}{edits} ({word})"
    return Finding("commit", "ok" if is_proven and not edits else "warning", note)


def said(*command: str) -> str:
    """Return what a program prints; "" where it is missing or fails."""
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
        return "" if done.returncode else done.stdout.strip()
    return ""


def elsewhere(what: str, place: str) -> Finding:
    """Return the finding for a file missing on this machine."""
    if is_windows(place) or Path(place).is_absolute():
        return Finding(what, "ok", f"{place}: not on this machine, taken as it is")
    note = f"{place} does not exist here: correct it, or name the path on the trainer's machine"
    return Finding(what, "warning", note)
