"""`latentmake prune` removes what it lists, and nothing that Latentmake did not write."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

from project import Project

UNNAMED = "cache/shapes/micro/32"


def files_of(project: Project, *folders: str) -> dict[str, bytes | None]:
    """Return path -> content of all files of some folders; None of a link."""
    found: dict[str, bytes | None] = {}
    for top in folders:
        for folder, names, files in os.walk(project / top):
            for name in (*files, *names):
                path = Path(folder, name)
                if path.is_symlink():
                    found[str(path)] = None
                elif path.is_file():
                    found[str(path)] = path.read_bytes()
    return found


def without_32(values: dict[str, Any]) -> None:
    values["runs"]["tiny"]["resolutions"] = [16]


def test_only_what_was_listed_is_removed(built: Project, tmp_path: Path) -> None:
    places = ("cache", "data", "models", ".latentmake/store", "runs")
    outside = tmp_path / "outside"
    ours = sorted((built / UNNAMED).iterdir())
    # Copies of our own files where nothing may be removed: in other folders, behind links.
    outside.mkdir()
    shutil.copy(ours[0], outside / "copy.latents.safetensors")
    (built / "cache/shapes/linked").symlink_to(outside)
    (built / UNNAMED / "deep").symlink_to(outside)
    (built / UNNAMED / "one.latents.safetensors").symlink_to(outside / "copy.latents.safetensors")
    shutil.copy(ours[0], built / "data/shapes/ours.safetensors")
    (built / UNNAMED / "notes.txt").write_text("mine")
    (built / UNNAMED / "foreign.safetensors").write_bytes(b"\2\0\0\0\0\0\0\0{}")
    (built / "cache/shapes/more").mkdir()
    shutil.copy(built / "data/shapes/ant.png", built / "cache/shapes/more/a.png")
    built.configure(without_32)
    before = files_of(built, *places) | files_of(Project(outside), ".")

    listing = built.ask("prune", "shapes").output
    assert listing.count("nothing is removed yet") == 1 and "no run needs 32" in listing
    for left in ("notes.txt", "foreign.safetensors", "deep", "linked", "more/a.png"):
        assert left not in built.ask("prune", "shapes", "--verbose").output
    assert files_of(built, *places) | files_of(Project(outside), ".") == before

    said = built.ask("prune", "shapes", "--yes").output
    assert "removed 6 files" in said
    after = files_of(built, *places) | files_of(Project(outside), ".")
    gone = {str(path) for path in ours}
    assert after == {path: data for path, data in before.items() if path not in gone}
    assert built.run("caches_tiny").encoded().encoded == 0


def test_what_only_other_configurations_name_is_listed_apart_and_only_with_all(
    built: Project,
) -> None:
    def rename(values: dict[str, Any]) -> None:
        values["models"]["other"] = values["models"].pop("micro") | {"dtype": "bfloat16"}
        values["datasets"]["figures"] = values["datasets"].pop("shapes")
        run = {"datasets": ["figures"], "model": "other", "resolutions": [16]}
        values["runs"] = {"second": run}

    built.configure(rename)
    built.run("caches_second")
    mine = files_of(built, "cache/figures")
    theirs = files_of(built, "cache/shapes")
    told = built.ask("prune", "--yes").output
    assert "not named by this configuration: shapes; see --all" in told
    assert files_of(built, "cache/shapes") == theirs
    named, others = built.ask("prune", "--all", "--verbose").output.split("Not named by this")
    assert "figures: nothing" in named and "shapes" not in named
    for words in (
        "no run of shapes has the model micro",
        "cache/shapes/micro/16/ant.latents.safetensors",
    ):
        assert words in others
    built.ask("prune", "--all", "--yes")
    assert not (built / "cache/shapes").exists()
    assert files_of(built, "cache/figures") == mine
    assert built.run("caches_second").idle
