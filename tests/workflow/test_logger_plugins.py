"""Logger plugins of other programs get whole events of a build."""

from __future__ import annotations

import json

from project import Project

PROBE = """
import json
from snakemake_interface_logger_plugins.base import LogHandlerBase

KEPT = ("event", "jobid", "job_id", "rule_name", "input", "output", "resources")

class LogHandler(LogHandlerBase):
    writes_to_stream = writes_to_file = needs_rulegraph = False
    has_filter = has_formatter = True

    def emit(self, record):
        kept = {name: vars(record)[name] for name in KEPT if hasattr(record, name)}
        if "resources" in kept:
            kept["resources"] = dict(kept["resources"].items())
        with open("events.jsonl", "a") as file:
            print(json.dumps(kept), file=file)
"""


def test_a_plugin_gets_the_files_and_the_end_of_each_job_that_is_shown_in_short(
    built: Project,
) -> None:
    built.preloads = False  # the other process has looked for plugins before
    plugin = built / "snakemake_logger_plugin_probe/__init__.py"
    plugin.parent.mkdir()
    plugin.write_text(PROBE)
    (built / "data/shapes/ant.txt").write_text("an edited caption")
    output = built.run("--logger", "latentmake", "probe", "--", "text_tiny").output
    events = [json.loads(line) for line in (built / "events.jsonl").read_text().splitlines()]
    jobs = {each["jobid"]: each for each in events if each.get("event") == "job_info"}
    encoding = next(each for each in jobs.values() if each["rule_name"].startswith("encode_text"))
    assert encoding["input"] and encoding["output"] and encoding["resources"]["mem_mb"]
    ended = [each["job_id"] for each in events if each.get("event") == "job_finished"]
    assert sorted(ended) == sorted(jobs)
    assert f"rule {encoding['rule_name']}:" in output and "1 text encoded" in output
    assert "input:" not in output and "Finished jobid" not in output
