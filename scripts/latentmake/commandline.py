"""Command line of Snakemake, read a second time: what a Snakefile has to know of it.

Snakemake 9.27 tells a Snakefile neither its targets, nor the executor, nor whether it starts jobs
at all. This module asks Snakemake's own parser, which reads profiles too.
"""

from __future__ import annotations

import contextlib
import io
import sys
from argparse import Namespace
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from latentmake.entry import exit_on_mistake
from latentmake.errors import ConfigError

if TYPE_CHECKING:
    from latentmake.session import Session

_WITHOUT_GRAPH = "cleanup_metadata lint list_rules list_target_rules print_compilation unlock"
_WITHOUT_JOBS = (
    "archive cleanup_shadow conda_cleanup_envs conda_create_envs_only container_cleanup_images "
    "containerize d3dag dag delete_all_output delete_temp_output detailed_summary dryrun filegraph "
    "generate_unit_tests list_changes list_conda_envs list_input_changes list_params_changes "
    f"list_untracked rulegraph summary {_WITHOUT_GRAPH}"
)
_Handler = Callable[[object], object]
_UNTIL_EXIT = contextlib.ExitStack()
_SESSIONS: dict[str, Session] = {}
_OURS = ("cache/", "reports/evaluate_", "runs/")


def read(arguments: Sequence[str] | None = None) -> Namespace:
    """Return the options of a command line with those of its profiles.

    None stands for the command line of this process; of another program than Snakemake, which uses
    it as a library, that is empty.
    """
    from snakemake.cli import parse_args

    if arguments is None:
        called = Path(sys.argv[0]).stem in ("snakemake", "__main__")
        arguments = sys.argv[1:] if called else []
    with contextlib.redirect_stderr(io.StringIO()):  # Snakemake has printed the profiles already
        found: Namespace = parse_args(list(arguments))[1]
    return found


def session_of(
    workflow: Any, options: Namespace, values: Mapping[str, object], side_by_side: int | None
) -> Session:
    """Return the session of a workflow; a module that is used several times is planned once.

    Args:
        workflow: of Snakemake.
        options: of its command line.
        values: the configuration.
        side_by_side: as of `Session`.
    """
    from latentmake.session import Session

    name, is_main = repr(values), workflow.is_main_process
    if name not in _SESSIONS:
        with exit_on_mistake():
            if _SESSIONS:
                raise ConfigError(  # both would have the rules of all files in `runs`
                    "one workflow cannot use Latentmake with two configurations",
                    hint="write the runs of both into one",
                )
            if workflow.modifier.path_modifier.replace_prefix("runs/") != "runs/":
                raise ConfigError(  # whose jobs write the files that a plan names
                    "a module of Latentmake cannot have another place for its files",
                    hint="remove `prefix` and `replace_prefix`, or use --directory",
                )
            if is_main and deletes(options):
                from latentmake.plan.build import alone

                _UNTIL_EXIT.enter_context(alone())
        targets, allowed = options.targets or [], [*(options.allowed_rules or ())]
        forced = sorted(options.forcerun or ())
        if is_module(workflow):
            rename = workflow.modifier.modify_rulename
            targets = own_targets(targets, rename, values.get("runs"))
            allowed = own_rules(allowed, rename)
            forced = [*own_rules(forced, rename), *(x for x in forced if x.startswith(_OURS))]
        forced += ["--forceall"] * options.forceall + ["--force"] * options.force
        text = [x[7:] for x in map(str, options.config or []) if x.startswith("prompt=")]
        _SESSIONS[name] = Session(
            # The prompt as it was written: Snakemake takes it for YAML.
            {**values, "prompt": text[-1]} if text else values,
            targets=targets,
            main=is_main and needs_plan(options),
            force=forced,
            asks=only_asks(options),
            configfiles=options.configfile or [],
            home=Path(workflow.basedir),
            deployed=bool(workflow.deployment_settings.deployment_method),
            allowed=allowed,
            side_by_side=side_by_side,
        )
    return _SESSIONS[name]


def is_remote(options: Namespace) -> bool:
    """Return whether jobs run on another machine: a dry run knows it as well as a build."""
    from snakemake_interface_executor_plugins.registry import ExecutorPluginRegistry

    executor = ExecutorPluginRegistry().get_plugin(options.executor or "local")
    return not executor.common_settings.local_exec


def needs_plan(options: Namespace) -> bool:
    """Return whether a command builds Snakemake's graph, of which the plan is a part."""
    return not any(getattr(options, name) for name in _WITHOUT_GRAPH.split())


def only_asks(options: Namespace) -> bool:
    """Return whether a command starts no job, such as a dry run, a summary or a report."""
    reports = (options.report or options.reporter) and not options.report_after_run
    return bool(reports or any(getattr(options, name) for name in _WITHOUT_JOBS.split()))


def kept(options: Namespace) -> list[str]:
    """Return files of earlier jobs that no job has as outputs, if untracked files are listed."""
    folders = ("logs", "benchmarks", "reports", "runs/*/previous")
    found = (path for folder in folders for path in Path().glob(f"{folder}/**/*"))
    return [str(path) for path in found if path.is_file()] if options.list_untracked else []


def deletes(options: Namespace) -> bool:
    """Return whether a command deletes outputs, which no build may be making meanwhile."""
    return bool(options.delete_all_output or options.delete_temp_output) and not options.dryrun


def check_targets(workflow: Any, session: Session) -> None:
    """Exit with one line at the first unknown target; a module does not know its user's."""
    if not is_module(workflow):
        session.check_targets(
            {each.name for each in workflow.rules if not each.has_wildcards()},
            lambda target: any(each.is_producer(target) for each in workflow.rules),
        )


def prepare_jobs(workflow: Any, *, local: bool) -> None:
    """Prepare the jobs of a build for what Snakemake says and notes of them, and for Ctrl-C.

    `local` ones ignore it: the build passes it on as SIGTERM, which ends a program amid its imports
    without a traceback.
    Its records of inputs get no orders and receipts, which no later plan has again; the scripts of
    those rules read them from `params`. A rule without an action has its outputs before it runs,
    which Snakemake would warn of.
    """
    from snakemake.iocontainers import InputFiles
    from snakemake.shell import shell

    if local:
        shell.prefix(f"{shell._get_process_prefix()} trap '' INT; ")
    for job in workflow.dag.needrun_jobs():
        if job.is_norun:
            workflow.dag.reason(job).missing_output.clear()
        if job.is_norun or "order" in job.params.keys():  # noqa: SIM118 -- no dictionary
            job.input = InputFiles(x for x in job.input if not x.startswith(".latentmake/"))


def failed_logs(workflow: Any) -> dict[str, str] | None:
    """Return the rules of the jobs that failed, with their logs; None if a user ended the build.

    Then Snakemake has jobs left that run, or that it has not heard of.
    """
    scheduler = workflow.scheduler
    if scheduler.running or not scheduler.failed:
        return None
    return {job.name: next(map(str, job.log), "") for job in scheduler.failed}


def last_session() -> Session | None:
    """Return the session of the Snakefile that this process has read; None before it has."""
    return next(reversed(_SESSIONS.values()), None)


# -- modules --------------------------------------------------------------------------------------


def is_module(workflow: Any) -> bool:
    """Return whether the Snakefile that Snakemake reads now is a module of another one."""
    return not workflow.modifier.is_main_snakefile()


def own_rules(names: Iterable[str], rename: Callable[[str], str]) -> list[str]:
    """Return rules by the names of this Snakefile, which a module's user may have renamed.

    `rename` returns the user's name for one of ours (`use rule * from latentmake as lm_*`). Names
    that are none of ours are left out.
    """
    before, star, after = rename("*").partition("*")
    given = (name for name in names if star and name.startswith(before) and name.endswith(after))
    return [name[len(before) : len(name) - len(after)] for name in given]


def own_targets(targets: Iterable[str], rename: Callable[[str], str], runs: object) -> list[str]:
    """Return what targets of a module's user ask of this Snakefile; see `own_rules`.

    Everything stands for a target of the user's own, because it may need any of our files.
    """
    ends = tuple(f"_{run}" for run in runs) if isinstance(runs, Mapping) else ()
    found = []
    for target in targets:
        rule = (own_rules([target], rename) or ["all"])[0]
        found.append(target if target.startswith(_OURS) else rule if rule.endswith(ends) else "all")
    return found


def add_handlers(workflow: Any, **handlers: Callable[[], object]) -> None:
    """Let Snakemake call handlers of a module (`onstart`, ...) before those of its user.

    Snakemake 9.27 calls only those of the user's Snakefile, and has no door for others.
    """
    if "onstart" in vars(workflow):
        return  # the module is used several times
    for name, handler in handlers.items():
        follow = partial(_follow, workflow, f"_{name}", handler)
        follow(getattr(workflow, f"_{name}"))  # of the lines above the module
        setattr(workflow, name, partial(_register, workflow, getattr(workflow, name), follow))


def _follow(workflow: Any, name: str, first: Callable[[], object], second: _Handler) -> None:
    setattr(workflow, name, lambda log: (first(), second(log)))


def _register(
    workflow: Any,
    register: Callable[[_Handler], object],
    follow: Callable[[_Handler], None],
    handler: _Handler,
) -> None:
    """Register a handler that stands below the module."""
    register(handler)
    if not is_module(workflow):
        follow(handler)
