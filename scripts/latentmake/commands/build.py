"""`latentmake build`: run Snakemake in this process, with Latentmake's Snakefile and messages."""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from latentmake import commandline
from latentmake.base.errors import ConfigError, first_line, nearest
from latentmake.commands.completion import DEFAULT
from latentmake.commands.project import HOME, check_directory, coloured, configurations, sections_of
from latentmake.config.document import check_file
from latentmake.entry import TOLD_AT_THE_END
from latentmake.request import word_and_run

if TYPE_CHECKING:
    from latentmake.session import Session


def build(
    context: typer.Context,
    targets: list[str],
    dry_run: bool = False,
    configfile: list[Path] | None = None,
    profile: str | None = None,
    directory: Path | None = None,
) -> None:
    """Run Snakemake for some targets, and raise typer.Exit with its status; see `latentmake.cli`.

    Raises:
        ConfigError: No configuration has the targets, or several have them; or Snakemake cannot
            read an option or a profile.
    """
    files = [path.absolute() for path in configfile or ()]
    check_directory(directory)
    os.chdir(directory or ".")
    names, configuration = _resolved(targets, files)
    arguments = [*names, "--quiet", "all", "--snakefile", str(HOME / "Snakefile")]
    if configuration != [DEFAULT]:
        arguments += ["--configfile", *(os.path.relpath(file) for file in configuration)]
    os.environ[TOLD_AT_THE_END] = "1"  # jobs inherit it: the last lines show their errors
    if dry_run:
        arguments.append("--dry-run")
    if profile:
        arguments += ["--profile", profile]
    raise typer.Exit(_snakemake([*arguments, *(context.obj or ())]))


# -- Snakemake ------------------------------------------------------------------------------------


def _snakemake(arguments: Sequence[str]) -> int:
    """Run Snakemake like its own command does, and return the exit status."""
    from snakemake.cli import args_to_api, parse_args

    sys.argv = ["snakemake", *_with_profiles(arguments)]  # the Snakefile and the plugin read it
    printed = io.StringIO()
    try:
        with contextlib.redirect_stderr(printed):  # Snakemake prints the names of its profiles
            parser, options = parse_args(sys.argv[1:])
    except SystemExit as end:
        if not end.code:
            return 0
        what = (printed.getvalue().strip() or "cannot be read").splitlines()[-1]
        if given := re.search(r"profile directory given \((.*?)\)", what):
            what, hint = "is no folder with a config.yaml", "name `slurm`, or a folder of your own"
            raise ConfigError(what, where=f"--profile {given[1]}", hint=hint) from None
        hint = "options after `--` are those of `snakemake --help`"
        raise ConfigError(what.rpartition("error: ")[2], hint=hint) from None
    except Exception as error:
        raise ConfigError(first_line(error), hint="check the profile") from None
    try:
        status = 0 if args_to_api(options, parser) else 1
    except KeyboardInterrupt:
        typer.echo("interrupted before the first job", err=True)
        return 130
    except SystemExit as end:  # the Snakefile reports a mistake
        if not isinstance(end.code, str):
            return end.code or 0
        typer.echo(re.sub("^error", coloured("error"), end.code), err=True)
        return 2
    return _ended(status, options)


def _ended(status: int, options: Any) -> int:
    """Print that there was nothing to do, if so, and return the exit status."""
    session = commandline.last_session()
    if session is None:
        return status
    if not status and not session.began and _is_idle(session, options):
        session.tell_idle()
    return 130 if session.interrupted else status


def _is_idle(session: Session, options: Any) -> bool:
    """Return whether a command that began no job had nothing to do."""
    if options.dryrun or commandline.is_partial(options):
        return session.idle
    commandline.check_idle(options)
    return not commandline.only_asks(options)


def _with_profiles(arguments: Sequence[str]) -> list[str]:
    """Return the arguments with names of Latentmake's own profiles replaced by their paths."""
    replaced: list[str] = []
    for word in arguments:
        option, _, name = word.rpartition("=") if word.startswith("--profile=") else ("", "", word)
        profile = HOME / "profiles" / name
        names_profile = option or replaced[-1:] == ["--profile"]
        if names_profile and not Path(name).exists() and profile.is_dir():
            word = f"{option}={profile}" if option else str(profile)
        replaced.append(word)
    return replaced


# -- the configuration ----------------------------------------------------------------------------


def _resolved(targets: Sequence[str], given: Sequence[Path]) -> tuple[list[str], list[Path]]:
    """Return the targets as rules name them, and the files of the configuration that has them.

    Raises:
        ConfigError: No configuration has all of the targets, or several have them.
    """
    for file in given:
        check_file(file)
    if given:
        sections = [sections_of(file) for file in given]
        runs = {run: None for of_file in sections for run in of_file.get("runs") or ()}
        return [_target(target, runs) for target in targets], [*given]
    files = configurations()
    having = [file for file in files if all(_has(files[file], target) for target in targets)]
    if len(having) > 1:
        what = f"several configurations have it: {', '.join(map(str, having))}"
        command = f"latentmake build {' '.join(targets)} -c {having[0]}"
        raise ConfigError(what, where=" ".join(targets), hint=f"name one: {command}")
    if not having:
        raise _unknown(targets, files)
    return [_target(target, files[having[0]]["runs"]) for target in targets], having


def _has(sections: Mapping[str, Any], target: str) -> bool:
    """Return whether a configuration has the run of a target, or the dataset of a cache file."""
    runs = sections.get("runs") or {}
    if target.startswith("cache/"):
        dataset, _, model = target.removeprefix("cache/").partition("/")
        models = sections.get("models") or ()
        return dataset in (*(sections.get("datasets") or ()), "_prompts") and (
            model.partition("/")[0] in models
        )
    return bool(runs) and (target == "all" or target in runs or word_and_run(target)[1] in runs)


def _target(target: str, runs: Iterable[str]) -> str:
    """Return a target as rules name it; the name of a run stands for its training."""
    is_target = word_and_run(target)[1] in runs
    return f"train_{target}" if target in runs and not is_target else target


def _unknown(targets: Sequence[str], files: Mapping[Path, Mapping[str, Any]]) -> ConfigError:
    """Return the error for targets that no configuration has, with the nearest run as a hint."""
    for file, sections in files.items():
        if not sections and file.parent == Path():
            check_file(file)  # a mistake in the file may be the reason
    runs = {run: file for file, sections in files.items() for run in sections.get("runs", ())}
    if not runs:
        hint = "write one: `latentmake init FOLDER`, or name it: -c FILE"
        return ConfigError("there is no configuration", where=Path.cwd(), hint=hint)
    existing = files.values()
    unknown = [name for name in targets if not any(_has(sections, name) for sections in existing)]
    if not unknown:
        hint = "run a command for each of them"
        return ConfigError("no configuration has all of them", where=" ".join(targets), hint=hint)
    target = unknown[0]
    name = word_and_run(target)[1] or target
    guess = nearest(name, runs)
    names_of_runs = ", ".join(f"{run} ({file})" for run, file in runs.items())
    hint = f"runs: {names_of_runs}"
    if guess:
        hint = f"did you mean `{target.replace(name, guess)}` of {runs[guess]}?"
    return ConfigError("no configuration here has this run", where=target, hint=hint)
