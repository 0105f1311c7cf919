"""`latentmake captions`: every text of a run as it is encoded, and what is cut off."""

from __future__ import annotations

from pathlib import Path

import typer

from latentmake.reports.report import caption_lines, write_captions
from latentmake.words.project import ConfigFiles, Directory, Json, Open, Run, opened
from latentmake.words.shown import show_page


def captions(
    run: Run,
    open_page: Open = False,
    as_json: Json = False,
    configfile: ConfigFiles = None,
    directory: Directory = None,
) -> None:
    """Write a page with every text of a run as it is encoded, its tokens, and what is cut off."""
    path = Path(f"reports/captions_{run}.html")
    with opened(configfile, directory) as project:
        project.run_names([run])
        found = write_captions(project.facts, run, path)
    if as_json:
        for line in caption_lines(found):
            typer.echo(line, nl=False)
        return
    for line in found.notes:
        typer.echo(line)
    for each in found.encoders():
        cut = f"{each['cut']} of {each['texts']} texts are cut"
        typer.echo(f"{each['name']}: {cut}, the longest has {each['longest']} tokens")
    for fault in found.faults:
        typer.echo(f"faulty: {fault}")
    show_page(path, open_page=open_page)
