"""The logger plugin `latentmake` prints short lines; other plugins get the same events in full."""

from __future__ import annotations

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
        logger.info(extra.pop("msg", "a line"), extra=extra)
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


def test_a_dry_run_shows_files_on_the_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    log({"msg": "Building DAG of jobs..."}, JOB, dryrun=True, stdout=True)
    printed = capsys.readouterr()
    assert lines(printed.out) == FULL and not printed.err


def test_nothing_is_left_out_of_verbose_lines(capsys: pytest.CaptureFixture[str]) -> None:
    log({"msg": "Building DAG of jobs..."}, JOB, FINISHED, verbose=True)
    assert lines(capsys.readouterr().err)[-8:] == ["Building DAG of jobs...", *FULL, "a line"]


def test_the_log_of_a_failed_job_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "encode.log"
    file.write_text("error: a.png: truncated\n")
    error = {"msg": None, "conda_env": None, "shellcmd": None, "aux": {}, "log": [str(file)]}
    log({**JOB, **error, "event": LogEvent.JOB_ERROR}, show_failed_logs=True)
    printed = lines(capsys.readouterr().err)
    assert "Error in rule encode:" in printed and "error: a.png: truncated" in printed
    assert "    input: order.json" in printed


def test_no_color_takes_the_colours_of_lines_away(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ColorizingTextHandler, "can_color_tty", lambda self: True)
    for value, coloured in (("", True), ("1", False)):
        monkeypatch.setenv("NO_COLOR", value)
        log(JOB)
        assert ("\x1b[" in capsys.readouterr().err) is coloured
