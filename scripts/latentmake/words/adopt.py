"""`latentmake adopt`: caches of other programs, taken over in place of encoding."""

from __future__ import annotations

from typing import Annotated

import typer

from latentmake.files.workspace import usable_cores
from latentmake.plan.build import alone
from latentmake.words.project import ConfigFiles, Directory, opened


def adopt(
    runs: Annotated[list[str], typer.Argument(metavar="RUN...", help="Runs of the configuration.")],
    configfile: ConfigFiles = None,
    directory: Directory = None,
) -> None:
    """Take over caches that other programs made of a run's items; nothing is encoded."""
    from latentmake.exchange.adoption import Format
    from latentmake.exchange.adoption import adopt as adopt_files
    from latentmake.exchange.ai_training.plan import plan_adopt
    from latentmake.exchange.trainer_caches import TrainerCaches

    with opened(configfile, directory, encoders=True) as project, alone():
        facts, names = project.facts, project.run_names(runs)
        plans = project.plan(names).runs
        for name in names:
            run = project.config.runs[name]
            theirs = facts.layout(run.model).external
            form: Format = (
                TrainerCaches.of(project.config, name, run)
                if theirs
                else plan_adopt(facts, plans[name], run)
            )
            adopt_files(plans[name], form, say=typer.echo, threads=usable_cores())
