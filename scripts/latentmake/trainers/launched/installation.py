"""Folder, environment and sources of an external program, which is never imported here.

Its environment is examined as a training would run: with the same Python, in the same folder, with
the same environment variables.

Versions and forks of a trainer accept different flags. To import one and ask would load CUDA for
minutes, so its sources are parsed instead, which takes a second.
"""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Self

import latentmake
from latentmake.base import digest
from latentmake.base.errors import TrainingError
from latentmake.base.machine import said
from latentmake.base.paths import is_windows
from latentmake.config.machines import ExternalProgram
from latentmake.data.memo import Memo
from latentmake.runs.findings import Finding

Facts = tuple[list[str] | None, list[str], str]
"""Facts from a script and all modules that it imports from its own folders.

The flags that it declares (None if unknown, because it does not declare `--dataset_config` with
argparse, or computes names of flags), the top-level names of other packages that every run imports,
and a digest of the files' content and of their names below the last folder.
"""


def _read(script: Path, roots: Sequence[Path], without: Sequence[Path]) -> tuple[Facts, list[Path]]:
    """Return the facts from a script, and the paths on which they depend.

    It finds its modules in the folders `roots`. Modules in the folders `without` are ignored.
    """
    trees: dict[Path, ast.Module] = {}
    digests: dict[str, str] = {}
    waiting, is_complete = [script], True
    while waiting:
        path = waiting.pop()
        if path in trees or any(folder in path.parents for folder in without):
            continue
        try:
            code = path.read_bytes()
            digests[os.path.relpath(path, roots[-1])] = digest.of_bytes(code)
            with warnings.catch_warnings(action="ignore"):  # the code is not ours to correct
                tree = trees[path] = ast.parse(code)
        except (OSError, SyntaxError, ValueError, RecursionError):
            is_complete = False
            continue
        if path != script:  # an imported module does not run its main block
            tree.body = [node for node in tree.body if not _is_main(node)]
        for name, base in _imports(ast.walk(tree), path):
            waiting.extend(_files(name, [base] if base else roots))
    flags = _flags(trees.values()) if is_complete else None
    content = digest.of_value(sorted(digests.items()))
    paths = [*trees, *{path.parent for path in trees}]
    return (flags, _needs(script, trees, roots), content), paths


def _files(name: str, roots: Sequence[Path]) -> list[Path]:
    """Return the program's own files that an import of a dotted name would run."""
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


def _flags(trees: Iterable[ast.Module]) -> list[str] | None:
    flags = set[str]()
    for call in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(call, ast.Call) and getattr(call.func, "attr", "") == "add_argument":
            names = [getattr(argument, "value", None) for argument in call.args]
            if not all(isinstance(name, str) for name in names):
                return None
            flags.update(map(str, names))
    if "--dataset_config" not in flags:
        return None
    return sorted(flag for flag in flags if flag.startswith("-"))


def _needs(script: Path, trees: Mapping[Path, ast.Module], roots: Sequence[Path]) -> list[str]:
    """Return the packages that a run imports in any case: imports inside functions do not count."""
    reached, named, waiting = set[Path](), set[str](), [script]
    while waiting:
        path = waiting.pop()
        if path in reached or path not in trees:
            continue
        reached.add(path)
        for name, base in _imports(trees[path].body, path):
            waiting.extend(_files(name, [base] if base else roots))
            if base is None:
                named.add(name.partition(".")[0])
    files = [path for root in roots for path in root.glob("*")]
    own = {path.stem for path in files if path.suffix == ".py" or path.is_dir()}
    return sorted(named - own - set(sys.stdlib_module_names))


def _imports(nodes: Iterable[ast.AST], path: Path) -> Iterator[tuple[str, Path | None]]:
    """Yield the modules that nodes of a file import, and the folder of a relative import."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from ((alias.name, None) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = path.parents[node.level - 1] if 0 < node.level <= len(path.parents) else None
            if node.module:
                yield node.module, base
            # The imported name may be a module of that package.
            prefix = f"{node.module}." if node.module else ""
            yield from ((f"{prefix}{alias.name}", base) for alias in node.names)


def _is_main(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and "id='__name__'" in ast.dump(node.test)


_SECONDS = 120.0  # the first search of a large environment on a network drive is slow

# Program that finds modules without importing them or their packages. It also returns sys.path: an
# installed or removed package changes one of its folders, so a remembered answer becomes invalid.
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


_PROGRAMS = {"musubi_tuner": ("musubi-tuner", "src/musubi_tuner"), "sd_scripts": ("sd-scripts", "")}
"""Section of the configuration -> name of the program, and folder of its scripts in some versions.

The folder is a path below the program's folder; "" stands for none.
"""


@dataclass
class Installation:
    """A program's folder and the Python that runs it, both as absolute paths.

    A link to that Python is not resolved, because Python finds a virtual environment by the path
    under which it is called.

    Attributes:
        section: section of the configuration that names the program's folder.
        training: path of the training script.
        note: warning about the choice of Python, or "".
        memory: memo of facts about the program.
    """

    section: str
    folder: Path
    training: Path
    python: Path
    note: str
    memory: Memo

    @classmethod
    def locate(
        cls,
        section: str,
        settings: ExternalProgram | None,
        script: str,
        needed: str,
        memory: Memo | None = None,
    ) -> Self:
        """Find the scripts and the Python of a program's folder.

        Args:
            section: section of the configuration.
            settings: values of the section; None if the configuration has none.
            script: name of the training script.
            needed: description of an installation that has the script, for an error message.
            memory: memo of facts about the program; None keeps them in memory only.

        Raises:
            TrainingError: the folder, its scripts, or the Python of its environment are missing.
        """
        if settings is None:
            note = f"the configuration does not say where it lies: set `{section}.path`"
            raise TrainingError(note)
        name, package = _PROGRAMS[section]
        folder = Path(os.path.abspath(Path(settings.path).expanduser()))  # noqa: PTH100
        for training in (folder / package / script, folder / script):
            if training.is_file():
                python, note = _find_python(folder, settings.venv, section)
                return cls(section, folder, training, python, note, memory or Memo(None))
        if not folder.is_dir():
            fault, hint = f"the folder of {name} does not exist", f"correct `{section}.path`"
        else:
            fault = f"there is no {script} in this folder"
            hint = f"set `{section}.path` to the folder of {needed}, or update it"
        raise TrainingError(fault, where=settings.path, hint=hint)

    @property
    def name(self) -> str:
        """Name of the program."""
        return _PROGRAMS[self.section][0]

    @property
    def scripts(self) -> Path:
        """Folder of the program's scripts."""
        return self.training.parent

    def script(self, name: str) -> Path:
        """Return the path of one of the program's scripts; raises TrainingError if it has none."""
        for scripts in (self.scripts, self.folder):
            if (scripts / name).is_file():
                return scripts / name
        hint = f"update it, or correct `{self.section}.path`"
        raise TrainingError(f"{self.name} has no {name}", where=self.folder, hint=hint)

    def sources_of(self, script: str | None = None, without: Sequence[str] = ()) -> Facts:
        """Return facts from the sources of a script, by default the training script.

        Sources in the folders `without` are ignored.
        """
        script = script or self.training.name
        roots = [self.scripts, self.folder / "src", self.folder]
        ignored = [self.scripts / name for name in without]
        question = ["sources 10", script, [str(root) for root in roots], *without]
        flags, needs, content = self.memory.remembered(
            question, partial(_read, self.scripts / script, roots, ignored)
        )
        return flags, needs, content

    def environment(self) -> dict[str, str]:
        """Return the environment variables of the scripts, without ours and Snakemake's.

        The output is unbuffered, and UTF-8 in any locale, because many messages are Japanese.
        """
        ours = Path(latentmake.__file__).resolve().parent.parent
        given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        paths = [path for path in given if path and Path(path).resolve() != ours]
        package = _PROGRAMS[self.section][1]
        if package and (self.folder / package).is_dir():
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
            # torch calls the program that compiles kernels by its bare name.
            programs = [str(self.python.parent), variables.get("PATH", "")]
            variables["PATH"] = os.pathsep.join(filter(None, programs))
        return variables

    def lacking(self, packages: Iterable[str]) -> list[str]:
        """Return the packages that the environment lacks, sorted; see `modules`."""
        return [name for name, place in self.modules(packages).items() if place is None]

    def modules(self, modules: Iterable[str]) -> dict[str, str | None]:
        """Return name -> file of some modules, without importing them.

        The file is None if the scripts cannot import the module, and "" if the module has no file.

        Raises:
            TrainingError: the program's Python cannot be run.
        """
        names, environment = sorted(set(modules)), self.environment()

        def find() -> tuple[dict[str, str | None], list[str | Path]]:
            try:
                done = subprocess.run(
                    [str(self.python), "-c", _FIND, *names],
                    env=environment,
                    cwd=self.scripts,  # scripts look for modules in their own folder first
                    stdin=subprocess.DEVNULL,
                    capture_output=True,
                    timeout=_SECONDS,
                    check=True,
                )
                files, places = json.loads(done.stdout.splitlines()[-1])
            except (OSError, subprocess.SubprocessError, ValueError, LookupError) as error:
                reason = getattr(error, "strerror", None) or "it gives no answer"
                what = f"the Python of {self.name}'s environment cannot be used ({reason})"
                hint = f"set `{self.section}.venv` to its virtual environment"
                raise TrainingError(what, where=self.python, hint=hint) from None
            own = (self.scripts / name.replace(".", "/") for name in names)
            folders = [path.parent for path in own if path.parent.is_dir()]
            return files, [self.python, self.scripts, *folders, *filter(None, places)]

        paths = environment.get("PYTHONPATH", "")
        question = ["modules", str(self.python), str(self.scripts), names, paths]
        files: dict[str, str | None] = self.memory.remembered(question, find)
        return files


def _find_python(folder: Path, venv: str | None, section: str) -> tuple[Path, str]:
    """Return the Python of a program's environment, or ours and a warning if it has none.

    `venv` may be the path of that Python itself. Raises TrainingError if `venv` has no Python.
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
"""Section of the configuration -> commit of the program that passed all tests."""


def flags(
    installation: Installation, arguments: Sequence[str], script: str | None = None
) -> Finding:
    """Check that a script, by default the training script, declares all flags of a command."""
    what = "arguments" if script is None else f"arguments of {script}"
    declared, _, _ = installation.sources_of(script)
    given = [text.partition("=")[0] for text in arguments if text.startswith("--")]
    accepted = given if declared is None else declared
    if missing := [flag for flag in dict.fromkeys(given) if flag not in accepted]:
        matches = (get_close_matches(flag, accepted, 1, 0.8) for flag in missing)
        near = " ".join(match for flags_near in matches for match in flags_near)
        hint = f"did you mean {near}?" if near else "update it, or leave that out"
        note = f"this {installation.name} does not know {' '.join(missing)}: {hint}"
        return Finding(what, "failed", note)
    return Finding(what, "ok", "it knows all flags, as far as its sources tell")


def environment_finding(installation: Installation, packages: Iterable[str]) -> Finding:
    """Check that a program's environment has the imports of its script, and further packages.

    Raises:
        TrainingError: the program's Python cannot be run.
    """
    python = installation.python
    _, needs, _ = installation.sources_of()
    if missing := installation.lacking({*needs, *packages, "accelerate"}):
        note = f"{python} lacks {', '.join(missing)}: install it there"
        return Finding("environment", "failed", note)
    return Finding("environment", "ok", f"{python} has all that its script imports")


def network_finding(program: Installation, module: str, *, here: bool = True) -> Finding:
    """Check that a program has a module that creates networks, without importing it.

    Args:
        program: installation of the program.
        module: dotted name of the module.
        here: whether the program's environment is on this machine and is searched, too.
    """
    what, own = "network_module", program.scripts / f"{module.replace('.', '/')}.py"
    place = str(own) if own.is_file() else None
    if place is None and here:
        place = program.modules([module])[module]
    if place is None and not here and not own.parent.is_dir():
        return Finding(what, "ok", f"{module}: not in {program.name}, taken as it is")
    if place is None:
        names = [f"{module.rpartition('.')[0]}.{path.stem}" for path in own.parent.glob("*.py")]
        near = [f"did you mean {match}?" for match in get_close_matches(module, names, 1)]
        hint = near[0] if near else "correct it, or install it there"
        note = f"neither {program.name} nor its environment has {module}: {hint}"
        return Finding(what, "failed", note)
    if not (place and _MAKES_NETWORKS.search(Path(place).read_bytes())):
        return Finding(what, "failed", f"{module} makes no network: it has no `create_network`")
    return Finding(what, "ok", place)


_MAKES_NETWORKS = re.compile(rb"\bcreate_(arch_)?network\b")


def proven_commit(section: str, folder: Path) -> Finding:
    """Compare a program's commit with the proven one; another commit is never an error.

    An update may rename a flag or change the files of a script. So a report of a fault needs the
    commit.
    """
    proven = PROVEN[section]
    git = ("git", "-C", str(folder))
    # Without `.git` git would report the commit of a repository around the folder.
    if not (commit := (folder / ".git").exists() and said(*git, "rev-parse", "HEAD")):
        return Finding("commit", "warning", f"no git repository; {proven} is proven")
    edits = " with local changes" if said(*git, "diff", "--stat", "HEAD") else ""
    is_proven = commit.startswith(proven)
    word = "proven" if is_proven else f"not proven; {proven} is"
    note = f"commit {commit[:12]}{edits} ({word})"
    return Finding("commit", "ok" if is_proven and not edits else "warning", note)


def elsewhere(what: str, place: str) -> Finding:
    """Return the finding about a file that is missing on this machine."""
    if is_windows(place) or Path(place).is_absolute():
        return Finding(what, "ok", f"{place}: not on this machine, taken as it is")
    note = f"{place} does not exist here: correct it, or name the path on the trainer's machine"
    return Finding(what, "warning", note)
