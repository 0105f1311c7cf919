"""Caches for sd-scripts, built incrementally: names, orphans, and what it wrote itself."""

from __future__ import annotations

import json
import os
import sysconfig
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sdscripts
import text_world
import wan
import world
from project import NOTHING, Project
from sdscripts_world import latents_fault, text_fault

FOLDERS = ("64", "128")


@pytest.fixture(scope="session")
def npz_template(tmp_path_factory: pytest.TempPathFactory, micro: Path) -> Project:
    """A project whose caches are all built. Not to be changed: copy it."""
    project = sdscripts.make(tmp_path_factory.mktemp("npz") / "project", micro)
    project.run("caches_tiny")
    return project


@pytest.fixture
def built(npz_template: Project, tmp_path: Path) -> Project:
    return npz_template.copy(tmp_path / "project")


@pytest.fixture(scope="session")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of tiny text encoders."""
    folder = tmp_path_factory.mktemp("texts")
    text_world.make_texts(folder)
    return folder


def latents(stem: str, size: tuple[int, int] | None = None) -> set[str]:
    width, height = size or sdscripts.SIZES[stem]
    return {
        f"cache/shapes/tiny/{folder}/{stem}_{width:04d}x{height:04d}_sd.npz" for folder in FOLDERS
    }


def test_every_image_has_latents_that_sd_scripts_takes_and_sd1_has_no_text(
    npz_template: Project,
) -> None:
    wanted = {path for stem in sdscripts.SIZES for path in latents(stem)}
    assert set(npz_template.cache_files()) == wanted
    for stem, size in sdscripts.SIZES.items():
        # All are 64 x 64 at 64; at 128 only the narrow ones go beside the square.
        narrow = {"sub/cat": (64, 192)}.get(stem, (128, 128))
        for path, place in zip(sorted(latents(stem)), (narrow, (64, 64)), strict=True):
            assert latents_fault(npz_template / path, "sd1", place, size) is None
    rows = npz_template.manifest()
    assert [row["text"] for row in rows] == [None] * 6
    assert rows[0]["latents"] == {path.split("/")[3]: path for path in latents("ant")}
    assert rows[0]["caption"] == "data/shapes/ant.txt"


def test_a_caption_that_only_the_trainer_reads_is_a_bad_item_where_it_cannot(
    built: Project,
) -> None:
    caption = built / "data/shapes/ant.txt"
    caption.unlink()
    caption.symlink_to("/proc/self/mem")  # which even root cannot read
    result = built.run("caches_tiny", check=False)
    assert result.returncode
    result.one_line("1 faulty: data/shapes/ant.txt: cannot be read (Input/output error); check")
    built.configure(lambda config: config["datasets"]["shapes"].update(on_error="skip"))
    built.run("caches_tiny")
    assert [row["stem"] for row in built.manifest() if "aside" in row] == ["ant"]
    assert built.run("caches_tiny").idle


def test_each_edit_makes_just_what_it_shapes(built: Project) -> None:
    before, lock = built.snapshot(), built.lock()
    # A caption that no cache holds counts all the same.
    (built / "data/shapes/ant.txt").write_text("a purple circle\n")
    assert built.run("caches_tiny").jobs == ["manifest", "caches_tiny"]
    assert built.changed(before) == NOTHING
    changed = {part for part, keys in built.lock()["parts"].items() if keys != lock["parts"][part]}
    assert changed == {"shapes/texts"} and built.lock()["digest"] != lock["digest"]
    # Another name: links.
    for path in (built / "data/shapes/sub").glob("cat.*"):
        path.rename(path.with_stem("yak"))
    (built / ".latentmake/memo.sqlite").unlink()
    assert built.run("caches_tiny").encoded().encoded == 0
    new = {path.replace("/cat_", "/yak_") for path in latents("sub/cat")}
    assert built.changed(before) == NOTHING._replace(added=new, removed=latents("sub/cat"))
    now = built.snapshot()
    assert all(now[path][0] == before[path.replace("/yak_", "/cat_")][0] for path in new)
    # An image of another size leaves no old name, nor does one that is gone.
    world.draw(built / "data/shapes/sub/yak.png", 77, (100, 160))
    for ending in ("png", "txt"):
        (built / f"data/shapes/sub/fox.{ending}").unlink()
    assert built.run("caches_tiny").encoded().encoded == 2
    drawn = {path.replace("0040x0090", "0100x0160") for path in new}
    assert built.changed(now) == NOTHING._replace(added=drawn, removed=new | latents("sub/fox"))
    # A file that sd-scripts wrote again.
    path = built / min(latents("bee"))
    with np.load(path) as found:
        arrays = {name: found[name] for name in found.files}
    path.unlink()
    np.savez(path, **arrays)
    counts = built.run("caches_tiny").encoded()
    assert counts.encoded + counts.spooled == 1
    with zipfile.ZipFile(path) as archive:
        assert b"latentmake.key" in archive.comment
    # A file asked for by its name.
    (asked,) = [name for name in drawn if "/64/" in name]
    (built / asked).unlink()
    built.run(asked)
    built.scramble_mtimes()
    (built / ".latentmake/memo.sqlite").unlink()
    assert built.run("caches_tiny").idle


# -- training -------------------------------------------------------------------------------------


def called(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "called.json").read_bytes())


def test_training_goes_on_a_folder_of_links_and_again_on_what_was_edited(built: Project) -> None:
    folder = sdscripts.with_trainer(built)
    built.run("train_tiny")
    said = called(folder)
    assert said["cwd"] == str(folder)
    captions = {f"{stem}.png": caption for stem, caption in sdscripts.CAPTIONS.items()}
    assert sorted(map(tuple, said["items"])) == sorted([*captions.items()] * 2)
    place = built / "runs/tiny/sdscripts/shapes_64"
    assert (place / "sub/cat.png").samefile(built / "data/shapes/sub/cat.png")
    cache = "sub/cat_0040x0090_sd.npz"
    assert (place / cache).samefile(built / f"cache/shapes/tiny/64/{cache}")
    assert (built / "runs/tiny/tiny.safetensors").is_file()
    (built / "data/shapes/ant.txt").write_text("a purple\ncircle\n")
    world.draw(built / "data/shapes/sub/cat.png", 77, (100, 160))
    built.run("train_tiny")
    assert ["ant.png", "a purple"] in called(folder)["items"]  # of several lines the first
    assert not list((built / "runs/tiny/sdscripts").rglob("*0040x0090*"))
    assert list((built / "runs/tiny/sdscripts").rglob("*0100x0160*"))
    built.scramble_mtimes()
    assert built.run("train_tiny").idle
    # It is forced, begins from the start, and keeps the result before.
    (folder / "called.json").unlink()
    os.utime(built / "runs/tiny/dataset.lock")  # Snakemake refuses an input from the future
    before = (built / "runs/tiny/tiny.safetensors").stat().st_ino
    result = built.run("train_tiny", "-R", "train")
    result.one_line("training of tiny: forced; the last one took ")
    assert called(folder) and "resumed" not in result.output and "encoded" not in result.output
    assert (built / "runs/tiny/previous/tiny.safetensors").stat().st_ino == before


def test_nothing_but_a_new_and_whole_lora_is_success(
    built: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    sdscripts.with_trainer(built)
    for mood, words in (
        ("broken", ("run tiny: RuntimeError: the loss has gone its own way", "all output: ")),
        ("silent", ("wrote no weights", "is not there", "nothing to do, leaving")),
        ("short", ("wrote no weights",)),
        ("empty", ("wrote no weights", "holds no tensor")),
    ):
        monkeypatch.setenv("STAND_IN", mood)
        result = built.run("train_tiny", check=False)
        assert result.returncode != 0
        result.one_line(*words)
        assert not (built / "runs/tiny/trained.json").exists()
    monkeypatch.delenv("STAND_IN")
    built.run("train_tiny")
    assert (built / "runs/tiny/trained.json").is_file()


def test_sdxl_trains_on_each_variant_of_a_caption_as_an_image_with_its_text(
    micro: Path, tmp_path: Path, texts: Path
) -> None:
    project = sdscripts.make_xl(tmp_path / "project", micro, texts)
    folder = sdscripts.with_trainer(project)
    project.run("train_tiny")
    wanted = {
        f"cache/shapes/tiny/{part}/{stem}_te_outputs.npz"
        for part in ("text", "text.1")
        for stem in sdscripts.SIZES
    }
    assert {name for name in project.cache_files() if "/text" in name} == wanted
    assert {text_fault(project / name, "sdxl") for name in wanted} == {None}
    said = called(folder)
    assert {"--network_train_unet_only", "--cache_text_encoder_outputs"} <= set(said["argv"])
    rows = {row["stem"]: row["texts"] for row in project.manifest()}
    images = [
        (f"{stem}{ending}.png", text)
        for stem, both in rows.items()
        for ending, text in zip(("", ".v1"), both, strict=True)
    ]
    assert sorted(map(tuple, said["items"])) == sorted(images * 2)
    before = project.snapshot()
    (project / "data/shapes/bee.txt").write_text("one, two, three")
    project.run("caches_tiny")
    edited = {name for name in wanted if "bee" in name}
    assert project.changed(before).content == edited


def test_a_published_folder_is_trained_on_by_its_own_script(built: Project) -> None:
    folder = sdscripts.with_trainer(built)
    built.run("publish_tiny")
    built.ask("explain", "publish_tiny").one_line("publish_tiny: fresh")
    place = built / "published/tiny"
    names = {str(path.relative_to(place)) for path in place.rglob("*") if path.is_file()}
    assert {"tiny_linux.toml", "tiny_win.toml", "train_tiny.sh", "train_tiny.bat"} <= names
    assert "shapes_128/sub/cat_0040x0090_sd.npz" in names
    image = "sub/cat.png"
    assert not (place / f"shapes_64/{image}").samefile(built / f"data/shapes/{image}")
    (site,) = (folder / "venv").glob("lib/python*/site-packages")
    (site / "accelerate.pth").write_text(sysconfig.get_path("purelib"))
    done = wan.bash(place / "train_tiny.sh", PATH=os.environ["PATH"])
    assert done.returncode == 0, done.stderr
    assert len(called(folder)["items"]) == 12
    assert (place / "output/tiny.safetensors").is_file()
    built.run("publish_tiny").one_line("0 files written")
