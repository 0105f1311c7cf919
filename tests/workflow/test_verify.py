"""`latentmake verify` names what is wrong with a cache; a repair and a build leave a whole one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import verify_world
import world
from project import Project

ITEMS = 60


@pytest.fixture
def written(micro: Path, tmp_path: Path) -> Project:
    project = Project.make(tmp_path / "project", world.config(), micro)
    verify_world.put_items(project / "data/shapes", ITEMS)
    return project


def test_what_is_wrong_is_named_deleted_and_encoded_again_alone(written: Project) -> None:
    files = verify_world.build(written.folder)
    before = written.snapshot()
    spoilt = verify_world.spoil(written.folder, files)
    assert len(spoilt) == 25
    asked = written.ask("verify", check=False)
    assert asked.returncode == 1 and "25 wrong (16 damaged, 9 not what" in asked.output
    for path, (verdict, reason) in spoilt.items():
        assert f"{path}: {verdict}: {reason}" in asked.output
    repaired = written.ask("verify", "tiny", "--repair", "--json", check=False)
    found = json.loads(repaired.output)
    assert {each["path"]: each["verdict"] for each in found["findings"]} == {
        path: verdict for path, (verdict, _) in spoilt.items()
    }
    # A file of another program is left to the next build.
    foreign = {path for path, (_, reason) in spoilt.items() if reason.startswith("was not made")}
    assert {each["path"] for each in found["findings"] if not each["done"]} == foreign
    assert repaired.returncode == 1 and found["repaired"] == 23
    built = written.run("caches_tiny").encoded()
    # Of files under each other's names the store has the bytes.
    swapped = {path for path, (_, reason) in spoilt.items() if reason.startswith("it was not")}
    assert (built.encoded, built.spooled) == (len(spoilt) - len(swapped), len(swapped))
    now = written.snapshot()
    assert {path for path in now if now[path] != before[path]} == spoilt.keys() - swapped
    assert now.keys() == before.keys()
    assert "0 wrong" in written.ask("verify").output
