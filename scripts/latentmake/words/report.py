"""`latentmake report`: a page with the caches, the training and the items of a run."""

from __future__ import annotations

from pathlib import Path

from latentmake.reports.report import write_report
from latentmake.words.project import ConfigFiles, Directory, Open, Run, opened
from latentmake.words.shown import show_page


def report(
    run: Run,
    open_page: Open = False,
    configfile: ConfigFiles = None,
    directory: Directory = None,
) -> None:
    """Write a page with the caches of a run, its training, its buckets and its items."""
    path = Path(f"reports/report_{run}.html")
    with opened(configfile, directory) as project:
        (name,) = project.run_names([run])
        write_report(project.facts, project.plan([name]).runs[name], path)
    show_page(path, open_page=open_page)
