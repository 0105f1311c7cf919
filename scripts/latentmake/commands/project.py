"""Facts about the project that a command works on, and functions that print results.

The configuration is the one that Snakemake would read in this folder: its default file or the files
of `-c`, and the values of a profile.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import typer
from tabulate import tabulate

from latentmake import backends, commandline
from latentmake.base.errors import ConfigError, UserError, nearest
from latentmake.base.machine import many_objects
from latentmake.base.workspace import check_folder
from latentmake.commands import completion
from latentmake.commands.completion import DEFAULT
from latentmake.config.document import check_file
from latentmake.config.root import Config, parse
from latentmake.plan.facts import Facts
from latentmake.plan.manifest import result_folder
from latentmake.plan.planner import make_plan
from latentmake.plan.run_plan import Plan

_COLOURS = {"ok": "green", "fresh": "green", "warning": "yellow", "stale": "yellow"}
_COLOURS |= {"edited": "yellow", "previous": "blue"}

HOME = Path(__file__).resolve().parents[3]
"""Folder that contains the Snakefile."""


def run_names(config: Config, names: Sequence[str] | None) -> list[str]:
    """Return the named runs, or all runs if none is named.

    Raises:
        ConfigError: A name is not a run of the configuration.
    """
    for name in names or ():
        if name not in config.runs:
            guess = nearest(name, config.runs)
            hint = f"did you mean `{guess}`?" if guess else f"runs: {', '.join(config.runs)}"
            for file, sections in configurations().items():
                if name in sections.get("runs", ()):
                    hint = f"{file} has it: add -c {file}"
            raise ConfigError("there is no such run", where=name, hint=hint)
    return list(dict.fromkeys(names or config.runs))


def present_plan(facts: Facts, runs: Sequence[str], *, batched: bool = False) -> Plan:
    """Plan these runs as `plan_of` does, without prompts that wait for another training."""
    plan = plan_of(facts, runs, batched=batched)
    plan.leave_out_prompts([name for name in runs if facts.config.runs[name].trainer is None])
    return plan


def plan_of(
    facts: Facts, runs: Sequence[str], generated: Sequence[str] = (), *, batched: bool = False
) -> Plan:
    """Plan all caches and the trainings of these runs, without writing anything.

    For the runs in `generated`, the caches include the prompts of `generate`. The plan has orders
    only if it is `batched`.
    """
    with many_objects():
        plan = make_plan(facts, runs, generated=generated, batched=batched)
        for run in plan.runs.values():
            backends.plan_training(facts, run, train=False)
    return plan


@contextlib.contextmanager
def opened(
    configfile: Sequence[Path] | None, directory: Path | None, *, encoders: bool | None = None
) -> Iterator[Facts]:
    """Yield the facts about the project of a folder. At the end, the memo of its files is saved.

    Plans that use these facts write no orders.

    Args:
        configfile: files of `-c`.
        directory: folder to change to; None for the working folder.
        encoders: whether the command needs the models' encoders on this machine; None uses the
            value of `publish.caches`.

    Raises:
        UserError: The configuration or the folder cannot be used.
    """
    files = [path.absolute() for path in configfile or ()]
    values, default, add_places = _values(files, directory)
    try:
        config = parse(values)
        check_folder(HOME, dry=True)
        needed = config.publish.caches if encoders is None else encoders
        facts = backends.facts_of(config, encoders=needed, read_only=True)
        facts.values = values
        for file in configfile or default:
            facts.options += ("-c", str(file))
        try:
            yield facts
        finally:
            facts.memo.save()
    except UserError as error:
        add_places(error)
        raise


def _values(
    files: Sequence[Path], directory: Path | None
) -> tuple[dict[str, object], Sequence[Path], Callable[[Exception], None]]:
    """Return the configuration as Snakemake would read it, and change to the project's folder.

    The second value is the only configuration file of the folder, if no file is named and there is
    no `config/config.yaml`. Otherwise it is empty. The third adds places to mistakes.
    """
    # Snakemake's own functions, so that profiles and merged files have exactly the same result.
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
    options = commandline.read(arguments)
    named = [Path(file).absolute() for file in options.configfile or ()]
    os.chdir(options.directory or ".")
    values: dict[str, object] = {}
    default: list[Path] = []
    if not named and not DEFAULT.exists():
        default = [file for file, sections in configurations().items() if sections]
    if len(default) > 1:
        what = f"several configurations are here: {', '.join(map(str, default))}"
        raise ConfigError(what, where=Path.cwd(), hint=f"name one: -c {default[0]}")
    read = named or default or [DEFAULT]
    for file in read:
        check_file(file)
        update_config(values, load_configfile(file))
    update_config(values, parse_config(options.config))
    return values, default, partial(commandline.add_places, read, options)


def configurations() -> dict[Path, Mapping[str, Any]]:
    """Return file -> sections, for the files of this folder that may be configurations."""
    return {file: sections_of(file) for file in completion.files(Path())}


def sections_of(file: Path) -> Mapping[str, Any]:
    """Return the sections of a configuration; no sections if it has no runs."""
    values = completion.sections(file)
    return values if isinstance(values.get("runs"), dict) else {}


def is_used(run: str, file: Path) -> bool:
    """Whether a name belongs to a run of another configuration, or to an earlier result.

    If the configuration at the path `file` has the run, the result is its own.
    """
    if run in sections_of(file).get("runs", {}):
        return False
    others = (sections for path, sections in configurations().items() if path != file)
    result = result_folder(run) / "training.json"
    return result.is_file() or any(run in sections.get("runs", {}) for sections in others)


def check_directory(directory: Path | None) -> None:
    """Raise ConfigError if the folder of `--directory` does not exist."""
    if directory is not None and not directory.is_dir():
        raise ConfigError("there is no such folder", where=directory, hint="check --directory")


def table(
    headers: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: Collection[str] = ()
) -> None:
    """Print rows under their headers; the columns of `numbers` are aligned to the right."""
    sides = ["right" if header in numbers else "left" for header in headers]
    typer.echo(tabulate([*rows], headers=headers, disable_numparse=True, colalign=sides))


def print_json(values: object) -> None:
    """Print values as JSON, for `--json`."""
    typer.echo(json.dumps(values, indent=1))


def say(label: str, line: str) -> None:
    """Print a line of a command that writes files, after a label such as `found` or `next`."""
    typer.echo(f"{label:<9}{line}")


def show_page(path: Path, *, opens: bool = True, err: bool = False) -> None:
    """Print the path of a page, and open it in a browser if it `opens`; `err` prints to stderr."""
    typer.echo(path, err=err)
    if opens:
        typer.launch(path.absolute().as_uri())


def coloured(verdict: str) -> str:
    """Return a verdict in its colour; `typer.echo` removes the colour if stdout is no terminal."""
    if os.environ.get("NO_COLOR"):
        return verdict
    return typer.style(verdict, fg=_COLOURS.get(verdict, "red"))


def printable(line: str) -> str:
    """Return a line with the bytes of file names that are not UTF-8 escaped."""
    return line.encode("utf-8", "backslashreplace").decode()
