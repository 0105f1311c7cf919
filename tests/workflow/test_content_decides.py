"""What is rebuilt is decided by content; after one edit, exactly what it shapes changes."""

from __future__ import annotations

import os
import shutil
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path

import world
from project import NOTHING, Counts, Project


def test_the_same_command_does_nothing_whatever_the_mtimes_and_without_metadata(
    template: Project, tmp_path: Path
) -> None:
    shutil.copytree(template.folder, tmp_path / "project", copy_function=shutil.copyfile)
    copy = Project(tmp_path / "project")  # as `cp -r` and git do: neither mtimes nor links
    for left_out in ((), (".snakemake",), (".latentmake",), (".snakemake", ".latentmake")):
        for name in left_out:
            shutil.rmtree(copy / name)
        copy.scramble_mtimes()
        before, lock = copy.snapshot(), (copy / "runs/tiny/dataset.lock").stat().st_mtime_ns
        result = copy.run("caches_tiny")
        assert result.idle, (left_out, result.output)
        assert copy.changed(before) == NOTHING
        assert (copy / "runs/tiny/dataset.lock").stat().st_mtime_ns == lock


def test_files_with_times_in_the_future_are_built_as_others(
    fresh: Callable[[], Project],
) -> None:
    project, future = fresh(), time.time() + 36_000  # a camera's clock, a time zone of an archive

    def postpone(folder: str) -> None:
        for path in (project / folder).rglob("*"):
            os.utime(path, (future, future))

    postpone("data")
    assert project.run("caches_tiny").encoded().encoded == 17
    postpone("cache")
    (project / "data/shapes/ant.txt").write_text("a purple circle")
    assert project.run("caches_tiny").encoded() == Counts(encoded=1)
    project.configure(lambda values: values["runs"]["tiny"].update(trainer=world.training()))
    postpone("cache")
    postpone("runs")
    project.run("train_tiny")
    assert project.run("train_tiny").idle


def test_moving_the_model_and_the_dataset_rebuilds_nothing(built: Project) -> None:
    (built / "models/micro").rename(built / "elsewhere")
    (built / "data/shapes").rename(built / "pictures")
    before, lock = built.snapshot(), built.lock()["digest"]

    def move(config: dict) -> None:
        config["datasets"]["shapes"]["path"] = "pictures"
        config["models"]["micro"] = {
            "vae": "elsewhere/vae",
            "text": "elsewhere/text_encoder",
            "unet": "elsewhere/unet",
        }

    built.configure(move)
    assert built.run("caches_tiny").encoded() == Counts()
    assert built.changed(before) == NOTHING
    assert built.lock()["digest"] == lock
    assert all((built / row["source"]).is_file() for row in built.manifest())


def test_editing_one_caption_changes_exactly_one_text_cache(built: Project) -> None:
    """The caption of bee equals that of fox."""
    before, lock = built.snapshot(), built.lock()["digest"]
    (built / "data/shapes/fox.txt").write_text("a blue square with a shadow\n")
    result = built.run("caches_tiny")
    assert result.encoded("text") == Counts(encoded=1)
    assert result.encoded("latents") == Counts()
    assert built.changed(before) == NOTHING._replace(content=built.texts("fox"))
    assert built.lock()["digest"] != lock
    assert built.run("caches_tiny").idle


def test_an_image_replaced_under_an_older_mtime_changes_exactly_its_latents(
    built: Project,
) -> None:
    image = built / "data/shapes/cat.png"
    before = built.snapshot()
    world.draw(image, 77)
    os.utime(image, (1_000_000_000, 1_000_000_000))
    result = built.run("caches_tiny")
    assert result.encoded() == Counts(encoded=2)
    assert built.changed(before) == NOTHING._replace(content=built.latents("cat"))
    assert built.run("caches_tiny").idle


def test_an_edit_of_the_same_size_with_its_mtime_restored_is_noticed(built: Project) -> None:
    old = (built / "data/shapes/ant.txt").read_bytes()
    built.write_keeping_mtime("data/shapes/ant.txt", old.replace(b"red", b"tan"))
    table = built.run("-n", "caches_tiny").table()
    assert table["shapes", "text"]["edited"] == 1
    assert table["shapes", "text"]["fresh"] == 5
    assert table["shapes", "latents 16"]["fresh"] == 6


def test_leaving_a_resolution_out_and_taking_it_back_encodes_nothing(built: Project) -> None:
    before, lock = built.snapshot(), built.lock()
    for resolutions in ([32], [16, 32]):
        built.configure(lambda c, r=resolutions: c["runs"]["tiny"].update(resolutions=r))
        result = built.run("caches_tiny")
        assert result.jobs == ["manifest", "caches_tiny"]
        names = {name for row in built.manifest() for name in row["latents"]}
        assert names == {str(size) for size in resolutions}
    assert built.changed(before) == NOTHING
    assert built.lock() == lock


def test_the_memo_is_never_needed(built: Project) -> None:
    memo, before = built / ".latentmake/memo.sqlite", built.snapshot()
    for state in ("locked", "damaged", "cannot be opened"):
        database = sqlite3.connect(memo)
        if state == "locked":
            database.execute("BEGIN EXCLUSIVE")
        else:
            memo.unlink(missing_ok=True)
        if state == "damaged":
            memo.write_bytes(b"this is no database" * 500)
        elif state == "cannot be opened":
            memo.mkdir()
        try:
            result = built.run("caches_tiny")
        finally:
            database.close()
        assert result.idle, (state, result.output)
        assert built.changed(before) == NOTHING


def test_equal_captions_are_encoded_once_and_hard_linked(template: Project) -> None:
    (log,) = (template / "logs/text/shapes").glob("*.log")
    assert "5 encoded, 1 linked" in log.read_text()
    (bee,), (fox,), (cat,) = (template.texts(stem) for stem in ("bee", "fox", "cat"))
    assert (template / bee).samefile(template / fox)
    assert not (template / bee).samefile(template / cat)
    assert template.store() == []
    assert template.temporaries() == []
