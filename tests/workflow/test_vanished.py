"""Items that vanish in bulk cost no cache, whatever hides them, and train nothing meanwhile."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import wan
import world
from project import Counts, Project

DRIVE = "data/shapes/drive"


class Source(NamedTuple):
    """Where the pictures are that vanish: how they go, and how they come back."""

    path: str
    hide: Callable[[Project], object]
    show: Callable[[Project], object]


def _hide_target(project: Project) -> None:
    (project / "unplugged").rename(project / "gone")


def _show_target(project: Project) -> None:
    (project / "gone").rename(project / "unplugged")


def _link(project: Project) -> None:
    (project / DRIVE).rename(project / "unplugged")
    (project / DRIVE).symlink_to(project / "unplugged")


def _empty(project: Project) -> None:
    (project / DRIVE).rename(project / "unplugged")
    (project / DRIVE).mkdir()


def _fill(project: Project) -> None:
    (project / DRIVE).rmdir()
    (project / "unplugged").rename(project / DRIVE)


def _write_list(project: Project, number: int) -> None:
    found = (project / "data").rglob("*.png")
    names = sorted((str(path.relative_to(project / "data")) for path in found), key=len)
    rows = (json.dumps({"image_path": name}) for name in names[:number])
    (project / "data/list.jsonl").write_text("".join(f"{row}\n" for row in rows))


SOURCES = {
    "link that leads nowhere": Source("data/shapes", _hide_target, _show_target),
    "empty mount point": Source("data/shapes", _empty, _fill),
    "list that lost rows": Source(
        "data/list.jsonl", lambda x: _write_list(x, 12), lambda x: _write_list(x, 18)
    ),
}


def _project(folder: Path, model: Path, source: str) -> Project:
    """Make a project with 18 pictures, six of them in a folder of their own."""
    values = wan.config() if model.name == "wan" else world.config()
    values["runs"]["tiny"]["resolutions"] = [64]
    values["store"] = {"keep": 0}
    path = SOURCES[source].path
    values["datasets"]["shapes"].update(path=path, on_error="skip")
    project = Project.make(folder, values, model)
    for number in range(18):
        place = project / ("data/shapes" if number < 12 else DRIVE)
        world.draw(place / f"p{number:02}.png", number)
        (place / f"p{number:02}.txt").write_text(f"number {number}\n")
    if "link" in source:
        _link(project)
    if "list" in path:
        _write_list(project, 18)
    return project


@pytest.mark.parametrize(
    ("layout", "source"),
    [*(("plain", source) for source in SOURCES), ("musubi", "empty mount point")],
)
def test_caches_of_items_that_vanish_in_bulk_are_kept_apart_and_linked_back(
    tmp_path: Path, micro: Path, request: pytest.FixtureRequest, layout: str, source: str
) -> None:
    model = micro if layout == "plain" else request.getfixturevalue("wan_model")
    project = _project(tmp_path / "project", model, source)
    project.run("caches_tiny")
    before = project.snapshot()
    assert len(before) == 36  # latents and a text of each

    SOURCES[source].hide(project)
    result = project.run("caches_tiny")
    line = result.one_line("warning: shapes: 12 cache files have no item any more; they are kept")
    assert line.endswith("`latentmake prune shapes` removes them")
    assert sum("aside" not in row for row in project.manifest()) == 12
    kept = project.changed(before)
    assert all(name.startswith("cache/shapes/.kept/") for name in kept.added)
    assert {name.replace(".kept/", "") for name in kept.added} == kept.removed
    assert len(kept.removed) == 12

    again = project.run("caches_tiny")
    assert again.idle and "warning: shapes: 12 cache files have no item" in again.output
    assert project.ask("prune").output.count("their items are gone") == 1

    SOURCES[source].show(project)
    assert "shapes: nothing" in project.ask("prune").output
    back = project.run("caches_tiny")
    assert back.encoded() == Counts(linked=12)
    assert "no item any more" not in back.output
    assert {name: x for name, (x, _) in project.snapshot().items()} == {
        name: x for name, (x, _) in before.items()
    }
