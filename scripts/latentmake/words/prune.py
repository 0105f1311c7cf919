"""`latentmake prune`: files that no configuration names any more."""

from __future__ import annotations

import contextlib
import json
from typing import Annotated

import typer

from latentmake.config.mistakes import refuse_unknown
from latentmake.files.disk import human
from latentmake.files.removal import ListedFile, freed
from latentmake.plan.prune import Pruning, find, prunable
from latentmake.words.project import ConfigFiles, Directory, Json, alone, opened
from latentmake.words.shown import printable, table

_SHOWN = 10


def prune(
    datasets: Annotated[
        list[str] | None,
        typer.Argument(metavar="DATASET", help="Folders of cache/.", show_default="all"),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Remove what is listed.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="List each file.")] = False,
    as_json: Json = False,
    configfile: ConfigFiles = None,
    directory: Directory = None,
) -> None:
    """List caches that the configuration does not name any more, or remove them with --yes."""
    with opened(configfile, directory, encoders=True) as project:
        known = prunable(project.config)
        for name in datasets or ():
            refuse_unknown("dataset", name, known, "prune")
        with alone() if yes else contextlib.nullcontext():
            found = [(name, find(project.facts, name)) for name in datasets or known]
            if as_json:
                typer.echo(json.dumps([_values(name, each) for name, each in found], indent=1))
            for name, each in () if as_json else found:
                _show(name, each, verbose=verbose)
            if yes:
                removed = [file for _, each in found for file in each.remove()]
                typer.echo(f"removed {_amount(removed)}", err=as_json)
            elif not as_json and any(each.groups for _, each in found):
                typer.echo("nothing is removed yet; to remove these files, add --yes")


def _values(name: str, found: Pruning) -> dict[str, object]:
    groups = [
        {"what": what, "why": why, "files": [file.path for file in files]}
        for (what, why), files in found.groups.items()
    ]
    return {"dataset": name, "groups": groups, "left": found.left, "bytes": freed(found.files)}


def _show(name: str, found: Pruning, *, verbose: bool) -> None:
    rows = [
        [what, str(len(files)), human(freed(files)), why]
        for (what, why), files in found.groups.items()
    ]
    if rows:
        headers = ["to be removed", "files", "bytes", "reason"]
        table(headers, rows, numbers=headers[1:3])
    for file in found.files if verbose else ():
        typer.echo(printable(f"{human(file.size):>10} {file.path}"))
    shown = [*found.left.items()][: None if verbose else _SHOWN]
    for path, why in shown:
        typer.echo(printable(f"left: {path}: {why}"))
    if more := len(found.left) - len(shown):
        typer.echo(f"left: {more} more; --verbose lists them")
    typer.echo(f"{name}: " + (f"{_amount(found.files)} to be removed" if rows else "nothing"))


def _amount(files: list[ListedFile]) -> str:
    return f"{len(files)} file{'s' * (len(files) != 1)}, {human(freed(files))}"
