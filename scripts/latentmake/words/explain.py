"""`latentmake explain`: where a cache file comes from, and why it is stale."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from latentmake.plan.explain import explain as explanations
from latentmake.reports.explanation import explanation_text, explanation_values
from latentmake.words.project import ConfigFiles, Directory, Json, opened


def explain(
    path: Annotated[
        str,
        typer.Argument(metavar="PATH", help="A cache file, or an image or caption of a dataset."),
    ],
    as_json: Json = False,
    configfile: ConfigFiles = None,
    directory: Directory = None,
) -> None:
    """Say where a cache file comes from, and why it is fresh or stale."""
    with opened(configfile, directory, encoders=True) as project:
        found = explanations(project.facts, path)
    if as_json:
        typer.echo(json.dumps([*map(explanation_values, found)], indent=1))
    else:
        typer.echo(explanation_text(found), nl=False)
