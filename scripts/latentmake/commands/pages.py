"""`latentmake captions` and `latentmake report`: write a page about the items of a run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import typer

from latentmake.base import atomic
from latentmake.commands.project import opened, show_page
from latentmake.pages.captions import read_cards
from latentmake.pages.cards import page_data
from latentmake.pages.page import write_page
from latentmake.pages.report import write_report


def captions(
    run: str,
    open_page: bool = False,
    as_json: bool = False,
    configfile: Sequence[Path] | None = None,
    directory: Path | None = None,
) -> None:
    """Write a page with every text of a run as it is encoded, its tokens, and what is cut off."""
    path = Path(f"reports/captions_{run}.html")
    with opened(configfile, directory) as project:
        project.run_names([run])
        cards = read_cards(project.facts, run)
        lines = [*cards.lines()]
        atomic.write(path.with_suffix(".jsonl"), "".join(lines).encode())
        data = page_data(project.facts, run, cards, path)
        write_page(path, "cards", f"Captions of {run}", data)
    for line in cards.notes:
        typer.echo(line, err=as_json)
    if as_json:
        typer.echo("".join(lines), nl=False)
        return
    for encoder in cards.encoders():
        cut = f"{encoder['cut']} of {encoder['texts']} texts are cut"
        typer.echo(f"{encoder['name']}: {cut}, the longest has {encoder['longest']} tokens")
    for fault in cards.faults:
        typer.echo(f"faulty: {fault}")
    show_page(path, open_page=open_page)


def report(
    run: str,
    open_page: bool = False,
    as_json: bool = False,
    configfile: Sequence[Path] | None = None,
    directory: Path | None = None,
) -> None:
    """Write a page with the caches of a run, its training, its buckets and its items."""
    path = Path(f"reports/report_{run}.html")
    with opened(configfile, directory) as project:
        (name,) = project.run_names([run])
        status = write_report(project.facts, project.plan([name]).runs[name], path)
    if as_json:
        typer.echo(json.dumps({"page": str(path), **status.model_dump(mode="json")}, indent=1))
        return
    show_page(path, open_page=open_page)


# -- a comparison ---------------------------------------------------------------------------------
