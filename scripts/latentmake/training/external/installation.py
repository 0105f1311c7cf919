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
from difflib import get_close_matches
from pathlib import Path
from typing import NamedTuple, Self

import latentmake
from latentmake.errors import TrainingError
from latentmake.index.memo import Memo
from latentmake.training.external.cli_flags import Sources

_SECONDS = 120.0  # a first look into a large environment on a network drive takes its time

# A package is found without running it. What is installed or removed changes a folder of sys.path.
_FIND = """
import json, sys
from importlib.util import find_spec
print(json.dumps([[name for name in sys.argv[1:] if find_spec(name) is None], sys.path]))
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
        for scripts in (folder / package, folder):
            if (scripts / script).is_file():
                return cls(program, folder, scripts, *_find_python(folder, venv, section), memory)
        if not folder.is_dir():
            fault, hint = f"the folder of {name} does not exist", f"correct `{section}.path`"
        else:
            within = f" or in its {package}" if package else ""
            old = "update it, or " if package and (folder / package).is_dir() else ""
            fault = f"there is no {script} in this folder{within}"
            hint = f"{old}set `{section}.path` to the folder of {knows}"
        raise TrainingError(fault, where=path, hint=hint)

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
        given = [each.partition("=")[0] for each in arguments if each.startswith("--")]
        return [flag for flag in dict.fromkeys(given) if known is not None and flag not in known]

    def near(self, flags: Sequence[str], script: str | None = None) -> str:
        """Return the flags of a script that flags it does not know may be meant for."""
        known = self.sources_of(script or self.program.script).flags or ()
        return " ".join(each for flag in flags for each in get_close_matches(flag, known, 1, 0.8))

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
        """Return the packages that its environment does not have, in order; none is imported.

        Raises:
            TrainingError: its Python cannot be run.
        """
        names, environment = sorted(set(packages)), self.environment()

        def find() -> tuple[list[str], list[str | Path]]:
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
                lacks, places = json.loads(done.stdout.splitlines()[-1])
            except (OSError, subprocess.SubprocessError, ValueError, LookupError) as error:
                reason = getattr(error, "strerror", None) or "it gives no answer"
                raise TrainingError(
                    f"the Python of {self.program.name}'s environment cannot be used ({reason})",
                    where=self.python,
                    hint=f"set `{self.program.section}.venv` to its virtual environment",
                ) from None
            return lacks, [self.python, self.scripts, *filter(None, places)]

        if self.memory is None:
            return find()[0]
        paths = environment.get("PYTHONPATH", "")
        question = ["packages", str(self.python), str(self.scripts), names, paths]
        found: list[str] = self.memory.remembered(question, find)
        return found

    def launcher(self, options: Sequence[str]) -> list[str] | None:
        """Return the beginning of a command that launches a script; None without accelerate."""
        if self.lacking(["accelerate"]):
            return None
        return [str(self.python), "-m", "accelerate.commands.launch", *options]


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
