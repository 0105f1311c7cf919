"""Logger plugin `latentmake` for Snakemake: short lines for jobs that run on this machine.

The profiles select this plugin. Before Snakemake reads a profile, it imports every package on its
path whose name has this prefix. Therefore this package stands beside `latentmake` and does not
import it: the Snakefile may belong to another copy of `latentmake`. The only exception are errors
that end Snakemake before it reads a Snakefile.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import sys
from pathlib import Path
from typing import Any

from snakemake.logging import ColorizingTextHandler, DefaultFilter, DefaultFormatter, logger
from snakemake.settings.enums import Quietness
from snakemake_interface_logger_plugins.base import LogHandlerBase
from snakemake_interface_logger_plugins.common import LogEvent
from snakemake_interface_logger_plugins.settings import OutputSettingsLoggerInterface

# Snakemake's internal steps. The first line would appear in each dry run: Snakemake keeps no
# metadata of jobs here, and none is needed (see `rerun-triggers` in profiles/default).
_STEPS = re.compile(
    r".*provenance/metadata"
    r"|(Select jobs to|Execute \d+ jobs|Building DAG|Using shell|Rules claiming)"
    r"|(Assuming unrestricted|Conda environments: ignored)"
)
# Snakemake's last lines of a build. `latentmake.pages.outcome` prints its own instead.
_ENDS = re.compile(
    r"Complete log|Elapsed time|Exiting because a job execution failed"
    r"|WorkflowError:\s+At least one job did not complete|RuleException:\s+CalledProcessError"
)
_STOPS = re.compile(r"Terminating processes on user request")
_STOPPING = "stopping: jobs finish what they have in hand; Ctrl-C again ends them at once"
# Explanations after a dry run. The plan's table already contains the information.
_DRY = re.compile(r"Reasons:|.*The order of jobs\s+does not reflect")
_MOST_BYTES = 4_000_000  # largest part of a file that is searched
_FILES: dict[str, Any] = {"input": [], "output": [], "resources": {}}


class LogHandler(LogHandlerBase):
    """Print the lines of Snakemake, without its internal steps and jobs of single cache files.

    Jobs on this machine are shown without their files, and jobs on a cluster with them. A dry run
    shows jobs only with `--printshellcmds`. `--verbose` shows everything. `--quiet all`, which
    `latentmake build` sets, shows only where the log of each job is.
    """

    writes_to_stream = has_filter = has_formatter = True
    writes_to_file = needs_rulegraph = False

    def __post_init__(self) -> None:
        """Add a handler to Snakemake's logger.

        Snakemake calls `emit` in a separate thread. A line that `emit` prints could therefore come
        after the output of the job that the line announces. The added handler prints at once.
        """
        if any(_holds_code(word) for word in sys.argv):
            _explain_configuration()
        common, lines = self.common_settings, _Lines(self.common_settings)
        stream = sys.stdout if common.stdout else sys.stderr
        plain = common.nocolor or bool(os.environ.get("NO_COLOR"))
        handler = _Terminal(plain, stream, formatter=lines, filter=lines)
        if not lines.brief:
            handler.addFilter(
                DefaultFilter(
                    common.quiet,
                    common.debug_dag,
                    common.verbose,
                    common.dryrun,
                    common.printshellcmds,
                )
            )
        logger.addHandler(handler)

    def emit(self, record: logging.LogRecord) -> None:
        """Do nothing: the added handler has already printed the record."""


class _Terminal(ColorizingTextHandler):  # type: ignore[misc]  # Snakemake has no types
    """Handler that prints lines as Snakemake's does, and lets a Ctrl-C through."""

    last_msg_was_job_info: bool

    def emit(self, record: logging.LogRecord) -> None:
        """Print a line. Snakemake's own method would lose a signal that comes meanwhile."""
        with self._output_lock:
            try:
                begins = getattr(record, "event", None) == LogEvent.JOB_INFO
                blank = "\n" if begins and not self.last_msg_was_job_info else ""
                self.last_msg_was_job_info = begins
                if (line := self.format(record)) not in ("", "None"):
                    self.stream.write(f"{blank}{self.decorate(record, line)}\n")
                    self.flush()
            except BrokenPipeError:
                raise
            except Exception:
                self.handleError(record)


class _Lines(logging.Formatter):
    """Filter and formatter of the lines, which follow the options of the command line."""

    def __init__(self, settings: OutputSettingsLoggerInterface) -> None:
        super().__init__()
        self._default = DefaultFormatter(settings.quiet, settings.show_failed_logs)
        self._verbose = settings.verbose
        self.brief = Quietness.ALL in (settings.quiet or ()) and not settings.verbose
        self._short = not settings.verbose and not settings.dryrun
        self._plan_only = settings.dryrun and not settings.printshellcmds
        self._stops = False  # whether the user has stopped the build
        self._counted = False  # whether the table of a dry run's jobs was shown
        self._begun = set[int]()  # IDs of jobs: the executor of SLURM announces each job twice
        self._cache_files = set[int]()  # IDs of jobs that stand for single cache files
        self._last = -1  # ID of the job that ended last

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether a line is shown."""
        if record.levelno >= logging.ERROR and "latentmake.session" not in sys.modules:
            _explain_configuration()
        if str(record.msg).startswith("Nothing to be done") and "latentmake.session" in sys.modules:
            _check_idle()
        event = getattr(record, "event", None)
        if event == LogEvent.RESOURCES_INFO and hasattr(record, "nodes"):
            self._short = False  # jobs run on a cluster
        stops = _STOPS.match(str(record.msg)) is not None
        self._stops |= stops
        if self._verbose or stops:
            return True
        if _ENDS.match(str(record.msg)) or (self._plan_only and self._is_planned(record, event)):
            return False
        if self.brief:
            return self._is_brief(record, event)
        told = event == LogEvent.JOB_ERROR and self._short
        if told and (self._stops or _is_told(_log_of(record))):
            return False  # the job has said it, to the terminal
        if event == LogEvent.JOB_INFO and not getattr(record, "threads", 1):
            # The rule of a single cache file has 0 threads, because the job of its batch has
            # already written the file.
            self._cache_files.add(record.jobid)  # type: ignore[attr-defined]
            return False
        if event == LogEvent.JOB_FINISHED:
            self._last = record.job_id  # type: ignore[attr-defined]
        if event == LogEvent.PROGRESS and self._last in self._cache_files:
            return bool(record.done == record.total)  # type: ignore[attr-defined]
        finished = event == LogEvent.JOB_FINISHED and self._short
        return not finished and not _STEPS.match(str(record.msg))

    def _is_brief(self, record: logging.LogRecord, event: LogEvent | None) -> bool:
        """Return whether a line is one of the few: that a job begins, or again after an error."""
        if event == LogEvent.JOB_ERROR:
            self._begun.discard(getattr(record, "jobid", -1))
            return False
        if event != LogEvent.JOB_INFO:
            return record.levelno >= logging.ERROR
        again = record.jobid in self._begun  # type: ignore[attr-defined]
        self._begun.add(record.jobid)  # type: ignore[attr-defined]
        return not again and not self._plan_only and bool(_log_of(record))

    def _is_planned(self, record: logging.LogRecord, event: LogEvent | None) -> bool:
        """Return whether a line of a dry run repeats information of other lines."""
        again = event == LogEvent.RUN_INFO and self._counted
        self._counted |= event == LogEvent.RUN_INFO
        return again or event == LogEvent.JOB_INFO or _DRY.match(str(record.msg)) is not None

    def format(self, record: logging.LogRecord) -> str:
        """Return the text of a line.

        Other loggers get the same record, so it is copied, not changed.
        """
        if getattr(record, "exception", "") == "LockException":
            return _locked()
        if _STOPS.match(str(record.msg)):
            return _STOPPING
        if self.brief and getattr(record, "event", None) == LogEvent.JOB_INFO:
            log = _log_of(record)
            word, place = [*Path(log).with_suffix("").parts, "", ""][1:3]
            return f"{'training' if word == 'train' else word} of {place}: {log}"
        if self._short and getattr(record, "event", None) == LogEvent.JOB_INFO:
            record = logging.makeLogRecord(vars(record) | _FILES)
        return str(self._default.format(record))


def _log_of(record: logging.LogRecord) -> str:
    """Return the path of a job's log; "" if the job is not one of Latentmake's."""
    return next((log for log in getattr(record, "log", ()) if log.startswith("logs/")), "")


def _is_told(log: str) -> bool:
    """Return whether the log contains an error of the job, which the job has also printed."""
    with contextlib.suppress(OSError):
        return b"error: " in Path(log).read_bytes()[-_MOST_BYTES:] if log else False
    return False


def _locked() -> str:
    """Return a line about the build that has locked this folder."""
    if build := sys.modules.get("latentmake.plan.build_locks"):
        return f"error: {build.locked()}"
    return "error: another build has locked this folder; wait until it ends"


def _check_idle() -> None:
    """Exit with a line if there is something to do, see `latentmake.commandline.check_idle`."""
    from latentmake import commandline
    from latentmake.entry import exit_on_mistake

    # A project may have scripts of its own that are older than this plugin.
    sessions = getattr(commandline, "SESSIONS", {})
    if any(session.has_jobs for session in sessions.values()):
        with exit_on_mistake():
            commandline.check_idle()


def _explain_configuration() -> None:
    """Exit with a line about the first mistake in the files of `--configfile`, if there is one.

    Snakemake reads these files before the Snakefile. If one is missing, it prints a traceback.
    """
    if any(word.startswith("--configfile") for word in sys.argv):
        from latentmake.config.document import check_command

        check_command(sys.argv[1:])


def _holds_code(word: str) -> bool:
    """Return whether a word of the command line names a file with Python that Snakemake would run.

    Snakemake processes YAML files that contain `__use_yte__` with the template engine YTE.
    """
    path = Path(word.rpartition("=")[2])
    with contextlib.suppress(OSError, ValueError):
        return path.is_file() and b"__use_yte__" in path.read_bytes()[:_MOST_BYTES]
    return False
