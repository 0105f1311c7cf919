"""Snakemake's command line, parsed a second time for facts that the Snakefile needs.

Snakemake 9.27 does not tell a Snakefile its targets, the executor, or whether it starts jobs at
all. This module calls Snakemake's own parser, which reads profiles too.
"""

from __future__ import annotations

import contextlib
import io
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from latentmake.base.errors import ConfigError, UserError

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
SESSIONS: dict[str, Session] = {}
"""Values of a configuration, as text -> its session in this process."""
_OURS = ("cache/", "reports/evaluate_", "runs/")


def read(arguments: Sequence[str] | None = None) -> Namespace:
    """Return the options of a command line, including the options of its profiles.

    None stands for the command line of this process. It counts as empty if this process is another
    program, which uses Snakemake as a library.
    """
    from snakemake.cli import parse_args

    if arguments is None:
        is_snakemake = Path(sys.argv[0]).stem in ("snakemake", "__main__")
        arguments = sys.argv[1:] if is_snakemake else []
    with contextlib.redirect_stderr(io.StringIO()):  # Snakemake has printed the profiles already
        options: Namespace = parse_args(list(arguments))[1]
    return options


def session_of(
    workflow: Any,
    options: Namespace,
    values: Mapping[str, object],
    side_by_side: int | None,
    files: Iterable[str | Path] = (),
) -> Session:
    """Return the session of a workflow. A module that is used several times is planned once.

    Args:
        workflow: Snakemake's workflow.
        options: options of its command line.
        values: the configuration.
        side_by_side: see `Session`.
        files: files of the configuration, for the lines of mistakes.
    """
    from latentmake.entry import exit_on_mistake
    from latentmake.session import Session

    name, is_main = repr(values), workflow.is_main_process
    if name not in SESSIONS:
        with exit_on_mistake():
            if SESSIONS:
                raise ConfigError(  # both would declare rules for all files in `runs`
                    "one workflow cannot use Latentmake with two configurations",
                    hint="write the runs of both into one",
                )
            if workflow.modifier.path_modifier.replace_prefix("runs/") != "runs/":
                raise ConfigError(  # jobs write to the paths of the plan, which have no prefix
                    "a module of Latentmake cannot have another place for its files",
                    hint="remove `prefix` and `replace_prefix`, or use --directory",
                )
            if is_main and deletes(options):
                from latentmake.plan.build_locks import alone

                _UNTIL_EXIT.enter_context(alone())
        targets, allowed = options.targets or [], [*(options.allowed_rules or ())]
        forced = sorted(options.forcerun or ())
        if is_module(workflow):
            rename = workflow.modifier.modify_rulename
            targets = own_targets(targets, rename, values.get("runs"))
            allowed = own_rules(allowed, rename)
            caches = [target for target in forced if target.startswith(_OURS)]
            forced = [*own_rules(forced, rename), *caches]
        forced += [f"--{name}" for name in ("forceall", "force") if getattr(options, name)]
        settings = map(str, options.config or [])
        prompts = [text[7:] for text in settings if text.startswith("prompt=")]
        SESSIONS[name] = Session(
            # The prompt exactly as the user wrote it, because Snakemake parses it as YAML.
            {**values, "prompt": prompts[-1]} if prompts else values,
            targets=targets,
            main=is_main and needs_plan(options),
            force=forced,
            read_only=only_asks(options),
            configfiles=options.configfile or [],
            home=Path(workflow.basedir),
            deployed=bool(workflow.deployment_settings.deployment_method),
            allowed=allowed,
            side_by_side=side_by_side,
            add_places=partial(add_places, files, options),
        )
        if is_module(workflow):
            SESSIONS[name].has_jobs = False  # a target of the user's own may need none of them
    return SESSIONS[name]


def add_places(files: Iterable[str | Path], options: Namespace, error: Exception) -> None:
    """Add to a mistake where the configuration sets its key, see `Places.add_to`."""
    from snakemake.cli import parse_config

    from latentmake.config.places import Places

    Places(files, parse_config(options.config)).add_to(error)


def is_remote(options: Namespace) -> bool:
    """Return whether jobs run on another machine; this works for dry runs too."""
    from snakemake_interface_executor_plugins.registry import ExecutorPluginRegistry

    executor = ExecutorPluginRegistry().get_plugin(options.executor or "local")
    return not executor.common_settings.local_exec


def needs_plan(options: Namespace) -> bool:
    """Return whether a command builds Snakemake's graph, which needs the plan."""
    return not any(getattr(options, name) for name in _WITHOUT_GRAPH.split())


def only_asks(options: Namespace) -> bool:
    """Return whether a command starts no job, such as a dry run, a summary or a report."""
    reports = (options.report or options.reporter) and not options.report_after_run
    return bool(reports or any(getattr(options, name) for name in _WITHOUT_JOBS.split()))


def is_partial(options: Namespace) -> bool:
    """Return whether a command leaves out jobs that its targets need."""
    return bool(options.until or options.omit_from or options.batch)


def check_idle(options: Namespace | None = None) -> None:
    """Refuse a build that has nothing to do, as Snakemake says, although its plan has jobs.

    If the inputs of a job cannot be determined and its outputs exist, Snakemake leaves out the job,
    and only `--debug-dag` shows the error.

    Args:
        options: options of the command line; None for those of this process.

    Raises:
        UserError: the plan has jobs.
    """
    session, options = last_session(), options or read()
    if session and session.has_jobs and not (only_asks(options) or is_partial(options)):
        is_brief = any(kind.name == "ALL" for kind in options.quiet or ())
        words = "-- --quiet progress --debug-dag" if is_brief else "--debug-dag"
        what, hint = "Snakemake left out the jobs of this plan", f"add `{words}` to see the error"
        raise UserError(what, hint=hint)


def kept(options: Namespace) -> list[str]:
    """Return files of earlier jobs that are no job's outputs.

    It is empty unless the command lists untracked files.
    """
    folders = ("logs", "benchmarks", "reports", "runs/*/previous", "runs/*/history")
    paths = (path for folder in folders for path in Path().glob(f"{folder}/**/*"))
    return [str(path) for path in paths if path.is_file()] if options.list_untracked else []


def deletes(options: Namespace) -> bool:
    """Return whether a command deletes outputs, so that no build may run meanwhile."""
    return bool(options.delete_all_output or options.delete_temp_output) and not options.dryrun


def check_targets(workflow: Any, session: Session) -> None:
    """Exit with one line at the first unknown target; a module does not know its user's targets."""
    if not is_module(workflow):
        session.check_targets(
            {rule.name for rule in workflow.rules if not rule.has_wildcards()},
            lambda target: any(rule.is_producer(target) for rule in workflow.rules),
        )


def prepare_jobs(workflow: Any, *, local: bool) -> None:
    """Prepare the jobs of a build for Ctrl-C, and for Snakemake's records and warnings.

    - `local` jobs ignore Ctrl-C. The build passes it on as SIGTERM, which ends even a program that
      is still importing modules without a traceback.
    - Orders and receipts are removed from the inputs that Snakemake records, because no later plan
      has the same ones. Scripts read them from `params`.
    - Files with a time in the future, from a camera with a wrong clock, are removed from these
      inputs, too. Snakemake lets a job fail whose outputs are older than an input.
    - The outputs of a rule without an action exist before it runs. Snakemake would warn about that.
    """
    from snakemake.iocontainers import InputFiles
    from snakemake.shell import shell

    now = time.time()
    if local:
        shell.prefix(f"{shell._get_process_prefix()} trap '' INT; ")
    for job in workflow.dag.needrun_jobs():
        if job.is_norun:
            workflow.dag.reason(job).missing_output.clear()
        if job.is_norun or "order" in job.params.keys():  # noqa: SIM118 -- no dictionary
            files = (file for file in job.input if not file.startswith(".latentmake/"))
            there = ((file, Path(file)) for file in files)
            job.input = InputFiles(
                file for file, path in there if not (path.exists() and path.stat().st_mtime > now)
            )


def failed_logs(workflow: Any) -> dict[str, str] | None:
    """Return rule -> log of the jobs that failed; None if a user ended the build.

    In that case jobs are still running, or no job is known to have failed.
    """
    scheduler = workflow.scheduler
    if scheduler.running or not scheduler.failed:
        return None
    return {job.name: next(map(str, job.log), "") for job in scheduler.failed}


def last_session() -> Session | None:
    """Return the session of the Snakefile that this process read last; None if it read none."""
    return next(reversed(SESSIONS.values()), None)


# -- modules --------------------------------------------------------------------------------------


def is_module(workflow: Any) -> bool:
    """Return whether the Snakefile that Snakemake reads now is a module of another Snakefile."""
    return not workflow.modifier.is_main_snakefile()


def own_rules(names: Iterable[str], rename: Callable[[str], str]) -> list[str]:
    """Return the names that rules have in this Snakefile; a module's user may have renamed them.

    `rename` maps our name of a rule to the user's (`use rule * from latentmake as lm_*`). Names of
    other rules are left out.
    """
    before, star, after = rename("*").partition("*")
    given = (name for name in names if star and name.startswith(before) and name.endswith(after))
    return [name[len(before) : len(name) - len(after)] for name in given]


def own_targets(targets: Iterable[str], rename: Callable[[str], str], runs: object) -> list[str]:
    """Translate the targets of a module's user into targets of this Snakefile; see `own_rules`.

    A target of the user's own becomes `all`, because it may need any of our files.
    """
    ends = tuple(f"_{run}" for run in runs) if isinstance(runs, Mapping) else ()
    own = []
    for target in targets:
        rule = (own_rules([target], rename) or ["all"])[0]
        if target.startswith(_OURS):
            own.append(target)
        else:
            own.append(rule if rule.endswith(ends) else "all")
    return own


def add_handlers(workflow: Any, **handlers: Callable[[], object]) -> None:
    """Make Snakemake call the handlers of a module (`onstart`, ...) before its user's handlers.

    Snakemake 9.27 calls only the handlers of the user's Snakefile, and has no interface for others.
    """
    if "onstart" not in vars(workflow):  # else the module is used several times
        for name, handler in handlers.items():
            _add_handler(workflow, name, handler)


def _add_handler(workflow: Any, name: str, first: Callable[[], object]) -> None:
    register = getattr(workflow, name)

    def follow(second: _Handler) -> None:
        setattr(workflow, f"_{name}", lambda log: (first(), second(log)))

    def register_and_follow(handler: _Handler) -> None:  # for handlers below the module
        register(handler)
        if not is_module(workflow):
            follow(handler)

    follow(getattr(workflow, f"_{name}"))  # handlers that the user set above the module
    setattr(workflow, name, register_and_follow)
