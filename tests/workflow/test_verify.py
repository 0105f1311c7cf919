"""verify_{run} names what is wrong with a cache, and a repair and a build leave a whole one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import verify_world
import world
from project import Project

ITEMS = 334


@pytest.fixture
def written(micro: Path, tmp_path: Path) -> Project:
    project = Project.make(tmp_path / "project", world.config(), micro)
    verify_world.put_items(project / "data/shapes", ITEMS)
    return project


def test_damages_of_eight_kinds_are_named_repaired_and_encoded_again_alone(
    written: Project,
) -> None:
    files = verify_world.build(written.folder)
    assert len(files) > 1000
    before = written.snapshot()
    spoilt = verify_world.spoil(written.folder, files)
    kinds = {path: kind for path, (kind, _) in spoilt.items()}
    assert len(kinds) == 25
    result = written.run("verify_tiny", "--config", "repair=true", check=False)
    report = json.loads((written / "reports/verify_tiny.json").read_bytes())
    assert {each["path"]: each["kind"] for each in report["findings"]} == kinds
    for path, (kind, reason) in spoilt.items():
        assert f"\n{path}: {kind}: {reason}" in result.output
    # A foreign file is left to the next build.
    foreign = {path for path, kind in kinds.items() if kind == "foreign"}
    assert {each["path"] for each in report["findings"] if not each["done"]} == foreign
    assert result.returncode != 0 and "Traceback" not in result.output
    result.one_line("error: verify_tiny: 2 files are wrong")
    built = written.run("caches_tiny").encoded()
    # Of files under each other's names the store has the bytes.
    swapped = {path for path, kind in kinds.items() if kind == "other item"}
    assert (built.encoded, built.linked) == (len(kinds) - len(swapped), len(swapped))
    now = written.snapshot()
    assert {path for path in now if now[path] != before[path]} == kinds.keys() - swapped
    assert now.keys() == before.keys()
    assert "0 wrong" in written.run("verify_tiny").output
