"""`latentmake compare`: sample pictures and clips of runs, side by side on a page."""

from __future__ import annotations

from typing import Annotated

import typer

from latentmake.words.project import ConfigFiles, Directory, Open, opened


def compare(
    runs: Annotated[list[str], typer.Argument(metavar="RUN...", help="Runs with sample pictures.")],
    open_page: Open = False,
    configfile: ConfigFiles = None,
    directory: Directory = None,
) -> None:
    """Write a page with the sample pictures and clips of runs; nothing is trained."""
    from latentmake.reports.comparison import page_path, pictured, write_comparison

    with opened(configfile, directory) as project:
        found = [pictured(project.config, name) for name in project.run_names(runs)]
        path = page_path([run.name for run in found])
        write_comparison(found, path, typer.echo)
        if open_page:
            typer.launch(path.absolute().as_uri())
