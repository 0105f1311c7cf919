"""The project that a word of the command asks about, and how words print what they found.

The configuration is the one that Snakemake would read in this folder: its default file or the files
of `-c`, and the values of a profile.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer
from tabulate import tabulate

from latentmake import backends, commandline
from latentmake.config.document import check_file
from latentmake.config.root import Config, parse
from latentmake.errors import ConfigError, nearest
from latentmake.files.workspace import check_folder
from latentmake.plan.facts import Facts
from latentmake.plan.planner import make_plan, many_objects
from latentmake.plan.run_plan import Plan
from latentmake.words import completion
from latentmake.words.completion import DEFAULT

_COLOURS = {"ok": "green", "fresh": "green", "warning": "yellow", "stale": "yellow"}
_COLOURS |= {"edited": "yellow", "previous": "blue"}

HOME = Path(__file__).resolve().parents[3]
"""Folder of the Snakefile."""


@dataclass
class Project:
    """A project, as a word asks about it.

    Attributes:
        config: its configuration.
        facts: of its files; plans made with them write no order.
    """

    config: Config
    facts: Facts

    def run_names(self, names: Sequence[str] | None) -> list[str]:
        """Return the runs that a word names, all where it names none; ConfigError of another."""
        for name in names or ():
            if name not in self.config.runs:
                guess = nearest(name, self.config.runs)
                known = ", ".join(self.config.runs)
                hint = f"did you mean `{guess}`?" if guess else f"runs: {known}"
                for file, sections in configurations().items():
                    if name in sections.get("runs", ()):
                        hint = f"{file} has it: add -c {file}"
                raise ConfigError("there is no such run", where=name, hint=hint)
        return list(dict.fromkeys(names or self.config.runs))

    def plan(self, runs: Sequence[str], generated: Sequence[str] = ()) -> Plan:
        """Plan some runs, all of their caches and their trainings, and write nothing.

        The prompts of clips that `generated` runs draw are among their caches.
        """
        with many_objects():
            plan = make_plan(self.facts, runs, generated=generated)
            for run in plan.runs.values():
                backends.plan_training(self.facts, run, train=False)
        return plan


@contextlib.contextmanager
def opened(
    configfile: Sequence[Path] | None, directory: Path | None, *, encoders: bool | None = None
) -> Iterator[Project]:
    """Open the project of a folder; what was learnt about its files is kept at the end.

    Args:
        configfile: files of `-c`.
        directory: folder to change to; None stands for the working folder.
        encoders: whether the word needs the encoders of models here; None leaves it to
            `publish.caches`.

    Raises:
        UserError: the configuration, or the folder, cannot be used.
    """
    files = [path.absolute() for path in configfile or ()]
    values, found = _values(files, directory)
    config = parse(values)
    check_folder(HOME, dry=True)
    needed = config.publish.caches if encoders is None else encoders
    facts = backends.facts_of(config, encoders=needed, asks=True)
    for file in configfile or found:
        facts.options += ("-c", str(file))
    try:
        yield Project(facts.config, facts)
    finally:
        facts.memo.save()


def _values(
    files: Sequence[Path], directory: Path | None
) -> tuple[dict[str, object], Sequence[Path]]:
    """Return the configuration as Snakemake would read it, and change to the project's folder.

    The other value is the file that was found in the folder, where none was named.
    """
    # Only these read profiles and merge files exactly as Snakemake does.
    from snakemake.cli import parse_config
    from snakemake.common.configfile import load_configfile
    from snakemake.utils import update_config

    arguments = ["--snakefile", str(HOME / "Snakefile")]
    check_directory(directory)
    if directory is not None:
        arguments += ["--directory", str(directory)]
    if files:
        arguments += ["--configfile", *map(str, files)]
    for file in files:
        check_file(file)
    asked = commandline.read(arguments)
    named = [Path(each).absolute() for each in asked.configfile or ()]
    os.chdir(asked.directory or ".")
    values: dict[str, object] = {}
    found = [] if named or DEFAULT.exists() else _only_one()
    for file in named or found or [DEFAULT]:
        check_file(file)
        update_config(values, load_configfile(file))
    update_config(values, parse_config(asked.config))
    return values, found


def _only_one() -> list[Path]:
    """Return the configuration of this folder, if it has one; ConfigError of several."""
    found = [file for file, sections in configurations().items() if sections]
    if len(found) > 1:
        what = f"several configurations are here: {', '.join(map(str, found))}"
        raise ConfigError(what, where=Path.cwd(), hint=f"name one: -c {found[0]}")
    return found


def configurations() -> dict[Path, Mapping[str, Any]]:
    """Return the files of this folder that may be configurations -> their sections."""
    return {file: sections_of(file) for file in completion.files(Path())}


def sections_of(file: Path) -> Mapping[str, Any]:
    """Return the sections of a configuration; none where it has no runs."""
    values = completion.sections(file)
    return values if isinstance(values.get("runs"), dict) else {}


def check_directory(directory: Path | None) -> None:
    """Refuse a folder of `--directory` that is not there, by ConfigError."""
    if directory is not None and not directory.is_dir():
        raise ConfigError("there is no such folder", where=directory, hint="check --directory")


def table(
    headers: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: Collection[str] = ()
) -> None:
    """Print rows under their headers; the columns of `numbers` are aligned to the right."""
    sides = ["right" if header in numbers else "left" for header in headers]
    typer.echo(tabulate([*rows], headers=headers, disable_numparse=True, colalign=sides))


def say(label: str, line: str) -> None:
    """Print a line of a word that writes files, behind what it is about: `found`, `next`."""
    typer.echo(f"{label:<9}{line}")


def coloured(verdict: str) -> str:
    """Return a verdict in its colour, which `typer.echo` leaves out where no terminal shows it."""
    if os.environ.get("NO_COLOR"):
        return verdict
    return typer.style(verdict, fg=_COLOURS.get(verdict, "red"))


def printable(line: str) -> str:
    """Return a line in which bytes of a file name that are not UTF-8 are escaped."""
    return line.encode("utf-8", "backslashreplace").decode()


def show_page(path: Path, *, open_page: bool) -> None:
    """Print the path of a page that was written, and open it in a browser where asked to."""
    typer.echo(path)
    if open_page:
        typer.launch(path.absolute().as_uri())
