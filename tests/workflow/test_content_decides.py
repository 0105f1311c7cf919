"""What is rebuilt is decided by content; after one edit, exactly what it shapes changes."""

from __future__ import annotations

import os
import shutil
import sqlite3
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


def test_adding_a_resolution_encodes_only_that(built: Project) -> None:
    before = built.snapshot()
    built.configure(lambda config: config["runs"]["tiny"].update(resolutions=[16, 32, [24, 40]]))
    result = built.run("caches_tiny")
    assert result.encoded("latents") == Counts(encoded=6)
    assert result.encoded("text") == Counts()
    added = {f"cache/shapes/micro/24x40/{stem}.latents.safetensors" for stem in world.CAPTIONS}
    assert built.changed(before) == NOTHING._replace(added=added)
    assert all(row["latents"].keys() == {"16", "32", "24x40"} for row in built.manifest())


def test_another_vae_encodes_all_latents_and_no_text(built: Project) -> None:
    before = built.snapshot()
    weights = built / "models/micro/vae/diffusion_pytorch_model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-2] ^= 1  # one bit of one weight's exponent or fraction
    built.write_keeping_mtime(str(weights.relative_to(built.folder)), bytes(data))
    result = built.run("caches_tiny")
    assert result.encoded("latents") == Counts(encoded=12)
    assert result.encoded("text") == Counts()
    changes = built.changed(before)
    assert changes.content == built.latents(*world.CAPTIONS)
    assert changes == NOTHING._replace(content=changes.content)


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


def test_removing_an_image_removes_its_caches_and_encodes_nothing(built: Project) -> None:
    before, lock = built.snapshot(), built.lock()["digest"]
    (built / "data/shapes/dog.png").unlink()
    (built / "data/shapes/dog.txt").unlink()
    result = built.run("caches_tiny")
    assert result.jobs == ["manifest", "caches_tiny"]
    removed = built.latents("dog") | built.texts("dog")
    assert built.changed(before) == NOTHING._replace(removed=removed)
    assert built.lock()["digest"] != lock
    assert "dog" not in {row["stem"] for row in built.manifest()}
    assert built.run("caches_tiny").idle


def test_a_strange_file_in_the_cache_folder_is_left_alone(built: Project) -> None:
    strange = built / "cache/shapes/micro/16/notes.latents.safetensors"
    strange.write_bytes(b"someone's own file")
    (built / "cache/shapes/micro/README").write_text("read me")
    result = built.run("caches_tiny")
    assert result.encoded() == Counts()
    assert strange.read_bytes() == b"someone's own file"
    assert (built / "cache/shapes/micro/README").is_file()


def test_deleting_a_cache_file_makes_just_that(built: Project) -> None:
    before, (name,) = built.snapshot(), built.texts("eel")
    old, lock = (built / name).read_bytes(), built.lock()
    (built / name).unlink()
    result = built.run("caches_tiny")
    assert result.encoded() == Counts(encoded=1)
    assert built.changed(before) == NOTHING._replace(rewritten={name})
    assert (built / name).read_bytes() == old
    assert built.lock() == lock


def test_a_truncated_cache_file_is_damaged_and_made_again(built: Project) -> None:
    before = built.snapshot()
    (name,) = built.latents("bee", resolutions=(32,))
    data = (built / name).read_bytes()
    built.write_keeping_mtime(name, data[:-5])
    result = built.run("caches_tiny")
    assert result.table()["shapes", "latents 32"]["damaged"] == 1
    assert result.encoded() == Counts(encoded=1)
    assert built.changed(before) == NOTHING._replace(rewritten={name})
    assert (built / name).read_bytes() == data


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


def test_a_damaged_manifest_or_lock_is_written_again(built: Project) -> None:
    caches = built.snapshot()
    for name in ("manifest.jsonl", "dataset.lock"):
        path = built / "runs/tiny" / name
        data = path.read_bytes()
        for left in (None, data[: len(data) // 2]):
            path.unlink()
            if left is not None:
                path.write_bytes(left)
            assert built.run("caches_tiny").encoded() == Counts()
            assert path.read_bytes() == data
    assert built.changed(caches) == NOTHING


def test_equal_captions_are_encoded_once_and_hard_linked(template: Project) -> None:
    (log,) = (template / "logs/text/shapes").glob("*.log")
    assert "5 encoded, 1 linked" in log.read_text()
    (bee,), (fox,), (cat,) = (template.texts(stem) for stem in ("bee", "fox", "cat"))
    assert (template / bee).samefile(template / fox)
    assert not (template / bee).samefile(template / cat)
    assert template.store() == []
    assert template.temporaries() == []
