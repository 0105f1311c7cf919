"""Two projects with one cache folder leave each other's caches alone."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from project import NOTHING, Project


def test_a_project_removes_no_caches_of_another(built: Project, tmp_path: Path) -> None:
    before = built.snapshot()
    other = built.copy(tmp_path / "other")
    shutil.rmtree(other / "cache")
    (other / "cache").symlink_to(built / "cache")
    assert other.run("caches_tiny").idle
    for stem in ("ant", "bee"):
        (other / f"data/shapes/{stem}.png").unlink()
        (other / f"data/shapes/{stem}.txt").unlink()
    for refused in (other.run("caches_tiny", check=False), other.ask("prune", check=False)):
        line = refused.one_line("error: cache/shapes: ", f"the project {built.folder} uses this")
        assert refused.returncode and "Traceback" not in refused.output, line
    assert built.changed(before) == NOTHING

    def rename(values: dict[str, Any]) -> None:
        values["datasets"]["figures"] = values["datasets"].pop("shapes")
        values["runs"]["tiny"]["datasets"] = ["figures"]

    other.configure(rename)
    assert other.run("caches_tiny").encoded().encoded == 0
    assert built.run("caches_tiny").idle
    changes = built.changed(before)
    assert {name.split("/")[1] for name in changes.added} == {"figures"}
    assert changes._replace(added=set()) == NOTHING
