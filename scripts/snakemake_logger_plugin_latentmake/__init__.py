"""Logger plugin `latentmake` for Snakemake: short lines for jobs that run on this machine.

The profiles choose it. Snakemake imports each package on its path whose name has this prefix,
before it reads a profile. So this package lies beside `latentmake`, and does not import it, unless
Snakemake ends before it has read a Snakefile, which may be that of another copy.
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
from snakemake_interface_logger_plugins.base import LogHandlerBase
from snakemake_interface_logger_plugins.common import LogEvent
from snakemake_interface_logger_plugins.settings import OutputSettingsLoggerInterface

# Steps of Snakemake. It keeps no records here (see profiles/default), on which it would remark in
# each dry run.
_STEPS = re.compile(
    r".*provenance/metadata"
    r"|(Select jobs to|Execute \d+ jobs|Building DAG|Using shell|Rules claiming)"
    r"|(Assuming unrestricted|Conda environments: ignored)"
)
_MOST_BYTES = 4_000_000
_FILES: dict[str, Any] = {"input": [], "output": [], "resources": {}}


class LogHandler(LogHandlerBase):
    """Print the lines of Snakemake, without its own steps and those of single cache files.

    Jobs on this machine are shown without their files. Dry runs and jobs on a cluster show
    them; `--verbose` shows everything.
    """

    writes_to_stream = has_filter = has_formatter = True
    writes_to_file = needs_rulegraph = False

    def __post_init__(self) -> None:
        """Add a handler to Snakemake's logger.

        Snakemake calls `emit` in a thread of its own, so that a line could be printed after the
        output of the job that it announces.
        """
        if any(_holds_code(word) for word in sys.argv):
            _explain_configuration()
        asked, lines = self.common_settings, _Lines(self.common_settings)
        stream = sys.stdout if asked.stdout else sys.stderr
        plain = asked.nocolor or bool(os.environ.get("NO_COLOR"))
        handler = ColorizingTextHandler(plain, stream, formatter=lines, filter=lines)
        handler.addFilter(
            DefaultFilter(
                asked.quiet, asked.debug_dag, asked.verbose, asked.dryrun, asked.printshellcmds
            )
        )
        logger.addHandler(handler)

    def emit(self, record: logging.LogRecord) -> None:
        """Do nothing: the record is printed already."""


class _Lines(logging.Formatter):
    """Filter and formatter of the lines, by the options of the command line."""

    def __init__(self, asked: OutputSettingsLoggerInterface) -> None:
        super().__init__()
        self._default = DefaultFormatter(asked.quiet, asked.show_failed_logs)
        self._verbose = asked.verbose
        self._short = not asked.verbose and not asked.dryrun
        self._cache_files = set[int]()  # numbers of their jobs
        self._last = -1  # number of the job that ended last

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether a line is shown."""
        if record.levelno >= logging.ERROR and "latentmake.session" not in sys.modules:
            _explain_configuration()
        event = getattr(record, "event", None)
        if event == LogEvent.RESOURCES_INFO and hasattr(record, "nodes"):
            self._short = False  # jobs run on a cluster
        if self._verbose:
            return True
        if event == LogEvent.JOB_INFO and not getattr(record, "threads", 1):
            # The rule of a cache file takes no thread: a job has written the file.
            self._cache_files.add(record.jobid)  # type: ignore[attr-defined]
            return False
        if event == LogEvent.JOB_FINISHED:
            self._last = record.job_id  # type: ignore[attr-defined]
        if event == LogEvent.PROGRESS and self._last in self._cache_files:
            return bool(record.done == record.total)  # type: ignore[attr-defined]
        finished = event == LogEvent.JOB_FINISHED and self._short
        return not finished and not _STEPS.match(str(record.msg))

    def format(self, record: logging.LogRecord) -> str:
        """Return a line as Snakemake writes it. Other loggers get the same record, unchanged."""
        if self._short and getattr(record, "event", None) == LogEvent.JOB_INFO:
            record = logging.makeLogRecord(vars(record) | _FILES)
        return str(self._default.format(record))


def _explain_configuration() -> None:
    """End with a line about the first mistake in the files of `--configfile`, if there is one.

    Snakemake reads them before the Snakefile, and answers a missing one with a traceback.
    """
    if any(each.startswith("--configfile") for each in sys.argv):
        from latentmake.config.document import check_command

        check_command(sys.argv[1:])


def _holds_code(word: str) -> bool:
    """Return whether a word of the command line names a file whose Python Snakemake would run."""
    path = Path(word.rpartition("=")[2])
    with contextlib.suppress(OSError, ValueError):
        return path.is_file() and b"__use_yte__" in path.read_bytes()[:_MOST_BYTES]
    return False
