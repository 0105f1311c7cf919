"""Folder and environment of an external program; nothing of it is imported here.

It is asked as for a training: by the same Python, in the same folder, with the same variables.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Self

import latentmake
from latentmake.errors import TrainingError
from latentmake.index.memo import Memo
from latentmake.training.external.cli_flags import Sources

_SECONDS = 120.0  # a first look into a large environment on a network drive takes its time

# A package is found without running it; inside of it only the file is looked for, since finding it
# the usual way would run the package.
_FIND = """
import importlib.util, json, os, sys
found = {}
for name in json.loads(sys.argv[1]):
    first, *rest = name.split(".")
    try:
        spec = importlib.util.find_spec(first)
    except Exception:
        spec = None
    there = spec is not None
    if there and rest:
        places = [os.path.join(place, *rest) for place in spec.submodule_search_locations or ()]
        there = any(os.path.isfile(place + ".py") or os.path.isdir(place) for place in places)
    found[name] = there
print(json.dumps([found, sys.path]))
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
        memory: keeps what is found out about it; None asks anew.
    """

    program: Program
    folder: Path
    scripts: Path
    python: Path
    note: str
    memory: Memo | None
    _sources: dict[tuple[str, ...], Sources] = field(default_factory=dict)

    @classmethod
    def locate(
        cls, program: Program, path: str, venv: str | None, memory: Memo | None = None
    ) -> Self:
        """Find the scripts and the Python of a program's folder.

        Args:
            program: which program.
            path: its folder.
            venv: its virtual environment; None looks for one in the folder.
            memory: keeps what is found out about it; None asks anew.

        Raises:
            TrainingError: the folder, its scripts, or the Python of its environment are missing.
        """
        name, section, package, script, knows = program
        folder = Path(os.path.abspath(Path(path).expanduser()))  # noqa: PTH100
        if not folder.is_dir():
            raise TrainingError(
                f"the folder of {name} does not exist",
                where=path,
                hint=f"correct `{section}.path`",
            )
        for scripts in (folder / package, folder):
            if (scripts / script).is_file():
                python, note = _find_python(folder, venv, section)
                return cls(program, folder, scripts, python, note, memory)
        within = f" or in its {package}" if package else ""
        old = "update it, or " if package and (folder / package).is_dir() else ""
        raise TrainingError(
            f"there is no {script} in this folder{within}",
            where=path,
            hint=f"{old}set `{section}.path` to the folder of {knows}",
        )

    def script(self, name: str) -> Path:
        """Return the path of one of its scripts; raises TrainingError without such a script."""
        for scripts in (self.scripts, self.folder):
            if (scripts / name).is_file():
                return scripts / name
        raise TrainingError(
            f"{self.program.name} has no {name}",
            where=self.folder,
            hint=f"update it, or correct `{self.program.section}.path`",
        )

    @property
    def sources(self) -> Sources:
        """Facts from the sources of its training script."""
        return self.sources_of(self.program.script)

    def sources_of(self, script: str, without: Sequence[str] = ()) -> Sources:
        """Return facts from the sources of one of its scripts, `without` those in some folders."""
        asked = (script, *without)
        if asked not in self._sources:
            roots = [self.scripts, self.folder / "src", self.folder]
            self._sources[asked] = Sources.read(
                self.scripts / script, roots, self.memory, without=without
            )
        return self._sources[asked]

    def missing_flags(self, arguments: Sequence[str], script: str | None = None) -> list[str]:
        """Return the flags that a script, by default the one that trains, does not know."""
        known = self.sources_of(script or self.program.script).flags
        if known is None:
            return []
        given = [each.partition("=")[0] for each in arguments if each.startswith("--")]
        return [flag for flag in dict.fromkeys(given) if flag not in known]

    def environment(self) -> dict[str, str]:
        """Return the variables its scripts run with: none of ours, nor of Snakemake.

        Its output is unbuffered and UTF-8 (its messages are half Japanese) wherever it runs.
        """
        ours = Path(latentmake.__file__).resolve().parent.parent
        paths = [
            path
            for path in os.environ.get("PYTHONPATH", "").split(os.pathsep)
            if path and Path(path).resolve() != ours
        ]
        package = self.program.package
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
            # What torch compiles kernels with is called by its bare name.
            programs = [str(self.python.parent), variables.get("PATH", "")]
            variables["PATH"] = os.pathsep.join(filter(None, programs))
        return variables

    def can_import(self, modules: Iterable[str]) -> dict[str, bool]:
        """Return which modules its environment has; none of them is imported.

        Dotted names are looked for as files of their package.

        Raises:
            TrainingError: its Python cannot be run.
        """
        names = sorted(set(modules))

        def find() -> tuple[dict[str, bool], list[str]]:
            reason = "it gives no answer"
            try:
                done = subprocess.run(
                    [str(self.python), "-c", _FIND, json.dumps(names)],
                    env=self.environment(),
                    cwd=self.scripts,  # where its scripts look for modules first
                    stdin=subprocess.DEVNULL,
                    capture_output=True,
                    timeout=_SECONDS,
                    check=False,
                )
                found, places = json.loads(done.stdout.splitlines()[-1])
                there = {name: bool(found[name]) for name in names}
                # A package that is installed or removed changes the folder that holds it.
                return there, [self.python, self.scripts, *filter(None, places)]
            except OSError as error:
                reason = error.strerror or str(error)
            except (subprocess.TimeoutExpired, ValueError, LookupError, TypeError):
                pass
            raise TrainingError(
                f"the Python of {self.program.name}'s environment cannot be used ({reason})",
                where=self.python,
                hint=f"set `{self.program.section}.venv` to its virtual environment",
            )

        python, scripts = str(self.python), str(self.scripts)
        paths = self.environment().get("PYTHONPATH", "")
        question = ["modules", python, scripts, names, paths]
        found: dict[str, bool] = (
            self.memory.remembered(question, find) if self.memory else find()[0]
        )
        return found

    def launcher(self, options: Sequence[str]) -> list[str] | None:
        """Return the beginning of a command that launches a script; None without accelerate."""
        module = "accelerate.commands.launch"
        if self.can_import([module])[module]:
            return [str(self.python), "-m", module, *options]
        for name in ("accelerate", "accelerate.exe"):
            program = self.python.with_name(name)
            if program.is_file() and os.access(program, os.X_OK):
                return [str(program), "launch", *options]
        return None


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
        raise TrainingError(
            "this virtual environment has no Python",
            where=venv,
            hint=f"correct `{section}.venv`",
        )
    return Path(sys.executable), (
        f"{folder} has no `venv` or `.venv`: it is run by {sys.executable}; "
        f"set `{section}.venv` where that is not meant"
    )
