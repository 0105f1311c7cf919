"""The logger plugin `latentmake` prints short lines; other plugins get the same events in full."""

from __future__ import annotations

import io
import logging
import types
from pathlib import Path
from typing import Any

import pytest
from snakemake.logging import ColorizingTextHandler, LoggerManager, logger
from snakemake.settings.enums import Quietness
from snakemake.settings.types import OutputSettings
from snakemake_interface_logger_plugins.base import LogHandlerBase
from snakemake_interface_logger_plugins.common import LogEvent
from snakemake_interface_logger_plugins.registry import LoggerPluginRegistry

JOB: dict[str, Any] = {
    **{"event": LogEvent.JOB_INFO, "rule_name": "encode", "rule_msg": None, "jobid": 1},
    **{"local": True, "is_checkpoint": False, "indent": False, "wildcards": {}, "priority": 0},
    **{"input": ["order.json"], "output": ["receipt.json"], "log": ["encode.log"], "threads": 1},
    **{"benchmark": None, "reason": "stale", "resources": {"gpu": 1}},
}
ERROR: dict[str, Any] = {"msg": None, "conda_env": None, "shellcmd": None, "aux": {}}
FAILED = {**JOB, **ERROR, "event": LogEvent.JOB_ERROR}
FINISHED = {"event": LogEvent.JOB_FINISHED, "job_id": 1}
NODES = {"event": LogEvent.RESOURCES_INFO, "nodes": 32}
SHORT = ["localrule encode:", "    log: encode.log", "    jobid: 1"]
FULL = [
    *("localrule encode:", "    input: order.json", "    output: receipt.json"),
    *("    log: encode.log", "    jobid: 1", "    resources: gpu=1"),
]


class Probe(LogHandlerBase):
    """A plugin of another program, which keeps what it gets."""

    writes_to_stream = writes_to_file = needs_rulegraph = False
    has_filter = has_formatter = True
    records: list[logging.LogRecord] = []  # noqa: RUF012

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = LoggerPluginRegistry()
    monkeypatch.setattr(registry, "plugins", dict(registry.plugins))
    monkeypatch.setattr(Probe, "records", [])
    registry.register_plugin(
        "snakemake_logger_plugin_probe",
        types.SimpleNamespace(LogHandler=Probe),  # type: ignore[arg-type]
    )


def log(*events: dict[str, Any], **options: Any) -> None:
    """Log events as a build does that uses both plugins."""
    names = ("latentmake", "probe")
    plugins = {name: LoggerPluginRegistry().get_plugin(name).get_settings(None) for name in names}
    options = {"quiet": {Quietness.HOST, Quietness.REASON}, **options}
    manager = LoggerManager(logger, OutputSettings(log_handler_settings=plugins, **options))
    for event in events:
        extra = dict(event)
        level = logging.ERROR if "exception" in extra else logging.INFO
        logger.log(level, extra.pop("msg", "a line"), extra=extra)
    manager.stop()


def lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if line and not line.startswith("[")]


def test_a_local_job_is_shown_without_its_files_and_other_plugins_get_them(
    capsys: pytest.CaptureFixture[str],
) -> None:
    log({"msg": "Select jobs to execute..."}, JOB, FINISHED, {"msg": "another line"})
    assert lines(capsys.readouterr().err) == [*SHORT, "another line"]
    step, job, finished, _ = Probe.records
    assert step.getMessage() == "Select jobs to execute..."
    assert JOB.items() <= vars(job).items() and FINISHED.items() <= vars(finished).items()


@pytest.mark.parametrize("quiet", [Quietness.REASON, Quietness.PROGRESS])
def test_a_job_on_a_cluster_is_shown_with_its_files(
    quiet: Quietness, capsys: pytest.CaptureFixture[str]
) -> None:
    log(NODES, JOB, FINISHED, quiet={quiet, Quietness.REASON})
    progress = [] if quiet == Quietness.PROGRESS else ["a line"]
    assert lines(capsys.readouterr().err) == [*progress, *FULL, *progress]


def test_a_dry_run_shows_jobs_and_their_files_where_it_is_asked_to(
    capsys: pytest.CaptureFixture[str],
) -> None:
    counts = {"event": LogEvent.RUN_INFO, "msg": "Job stats:"}
    reasons = {"msg": "Reasons:\n    (check individual jobs above for details)"}
    log(counts, JOB, counts, reasons, dryrun=True)
    assert lines(capsys.readouterr().err) == ["Job stats:"]
    asked = {"dryrun": True, "stdout": True, "printshellcmds": True}
    log({"msg": "Building DAG of jobs..."}, JOB, **asked)
    printed = capsys.readouterr()
    assert lines(printed.out) == FULL and not printed.err


def test_nothing_is_left_out_of_verbose_lines(capsys: pytest.CaptureFixture[str]) -> None:
    log({"msg": "Building DAG of jobs..."}, JOB, FINISHED, verbose=True)
    assert lines(capsys.readouterr().err)[-8:] == ["Building DAG of jobs...", *FULL, "a line"]


def test_a_job_is_announced_once_and_again_after_an_error(
    capsys: pytest.CaptureFixture[str],
) -> None:
    job = {**JOB, "log": ["logs/text/cats/1.log"]}
    log(job, job, {**FAILED, "log": job["log"]}, job, quiet={Quietness.ALL})
    assert lines(capsys.readouterr().err) == ["text of cats: logs/text/cats/1.log"] * 2


def test_a_signal_that_comes_while_a_line_is_printed_is_not_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Interrupting(io.StringIO):
        def write(self, text: str) -> int:
            raise KeyboardInterrupt

    monkeypatch.setattr("sys.stderr", Interrupting())
    with pytest.raises(KeyboardInterrupt):
        log(JOB)


def test_a_stopped_build_says_so_and_shows_no_errors_of_its_jobs(
    capsys: pytest.CaptureFixture[str],
) -> None:
    stops = {"msg": "Terminating processes on user request, this might take some time."}
    log(JOB, stops, {**FAILED, "log": []})
    said = "stopping: jobs finish what they have in hand; Ctrl-C again ends them at once"
    assert lines(capsys.readouterr().err) == [*SHORT, said]


def test_the_log_of_a_failed_job_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "encode.log"
    file.write_text("error: a.png: truncated\n")
    log({**FAILED, "log": [str(file)]}, show_failed_logs=True)
    printed = lines(capsys.readouterr().err)
    assert "Error in rule encode:" in printed and "error: a.png: truncated" in printed
    assert "    input: order.json" in printed


def test_a_failed_job_on_this_machine_has_said_what_its_log_holds(
    working: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("logs").mkdir()
    Path("logs/a.log").write_text("error: a.png: truncated\n")
    Path("logs/killed.log").touch()
    log({**FAILED, "log": ["logs/a.log"]}, show_failed_logs=True)
    assert lines(capsys.readouterr().err) == []
    log({**FAILED, "log": ["logs/killed.log"]}, show_failed_logs=True)
    assert "Error in rule encode:" in lines(capsys.readouterr().err)
    log(NODES, {**FAILED, "log": ["logs/a.log"]}, show_failed_logs=True)  # on a cluster
    assert "error: a.png: truncated" in lines(capsys.readouterr().err)


def test_quiet_lines_say_which_job_of_ours_begins_and_no_word_of_snakemake(
    capsys: pytest.CaptureFixture[str],
) -> None:
    ours = [
        {**JOB, "jobid": 2, "log": ["logs/latents/cats/2948e8a03598.log"]},
        {**JOB, "jobid": 3, "log": ["logs/train/cats.log"]},
    ]
    log({"msg": "Job stats:"}, JOB, *ours, FINISHED, quiet={Quietness.ALL})
    assert lines(capsys.readouterr().err) == [
        "latents of cats: logs/latents/cats/2948e8a03598.log",
        "training of cats: logs/train/cats.log",
    ]
    log(*ours, quiet={Quietness.ALL}, dryrun=True)
    assert lines(capsys.readouterr().err) == []


def test_a_folder_that_snakemake_has_locked_is_one_line(
    capsys: pytest.CaptureFixture[str], working: Path
) -> None:
    from latentmake.plan import build_locks

    words = "Error: Directory cannot be locked. ... --unlock argument."
    locked = {"msg": words, "event": LogEvent.ERROR, "exception": "LockException"}
    log(locked)
    log(locked, quiet={Quietness.ALL})
    line = f"error: {build_locks.locked()}"
    assert lines(capsys.readouterr().err) == [line, line]
    assert "wait until it ends; if none runs on any machine" in line


def test_no_color_takes_the_colours_of_lines_away(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ColorizingTextHandler, "can_color_tty", lambda self: True)
    for value, coloured in (("", True), ("1", False)):
        monkeypatch.setenv("NO_COLOR", value)
        log(JOB)
        assert ("\x1b[" in capsys.readouterr().err) is coloured
