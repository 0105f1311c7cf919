"""Items with several texts in musubi-tuner's layout: cached once, trained on as several items."""

from __future__ import annotations

import json
import shutil
import tomllib
from pathlib import Path
from typing import Any

import fast_tuner
import pytest
import video_world
import wan
import world
from latentmake.config.architectures import MUSUBI
from project import Project
from safetensors import safe_open

STEMS = ("ant_hill_01", "bee")
TAGS = "one, two, three, four"
CAPTIONS: dict[str, Any] = {
    "variants": 3,
    "shuffle_caption": True,
    "caption_prefix": "photo of",
    "caption_dropout_rate": 0.3,
    "seed": 1,
}
CACHE = "cache/shapes/wan"


@pytest.fixture
def project(tmp_path: Path, wan_model: Path) -> Project:
    values = wan.config()
    values["datasets"]["shapes"]["captions"] = CAPTIONS
    values["datasets"]["films"] = {
        "path": "data/films",
        "target_frames": [1, 5],
        "frame_extraction": "head",
        "captions": {**CAPTIONS, "variants": 2, "seed": 0},
    }
    values["datasets"]["plain"] = {"path": "data/plain"}
    values["runs"]["tiny"] |= {
        "datasets": ["shapes", "films", "plain"],
        "resolutions": [[64, 48], 32],
    }
    project = Project.make(tmp_path / "project", values, wan_model)
    for number, stem in enumerate(STEMS):
        world.draw(project / f"data/shapes/{stem}.png", number, (64, 48))
        (project / f"data/shapes/{stem}.txt").write_text(f"{stem}, {TAGS}", encoding="utf-8")
    world.draw(project / "data/plain/eel.png", 5, (64, 48))
    (project / "data/plain/eel.txt").write_text("an eel", encoding="utf-8")
    (project / "data/films").mkdir()
    video_world.write_video(project / "data/films/ray.mp4", "libx264", 8)
    (project / "data/films/ray.txt").write_text("moving, colours", encoding="utf-8")
    return project


def caption(path: Path) -> str:
    with safe_open(path, framework="pt") as file:
        return str(file.metadata()["caption1"])


def linked(project: Project, folder: str) -> dict[str, str]:
    """Return name -> the cache file that it is a link to."""
    caches = {(project / path).stat().st_ino: path for path in project.cache_files()}
    found = sorted((project / "runs/tiny/caches" / folder).iterdir())
    return {path.name: caches[path.stat().st_ino] for path in found}


def test_each_text_is_an_item_of_links_and_an_edit_encodes_its_texts_alone(
    project: Project,
) -> None:
    wan.with_trainer(project)
    project.run("train_tiny")
    assert project.run("train_tiny").idle
    blocks = tomllib.loads((project / "runs/tiny/dataset.toml").read_text())["datasets"]
    folders = [str(Path(each["cache_directory"]).relative_to(project.folder)) for each in blocks]
    assert folders == [
        *("runs/tiny/caches/shapes_64x48", "runs/tiny/caches/shapes_32"),
        *("runs/tiny/caches/films_64x48", "runs/tiny/caches/films_32"),
        *("cache/plain/wan/64x48", "cache/plain/wan/32"),
    ]
    assert {each["num_repeats"] for each in blocks} == {1}

    texts = linked(project, "shapes_64x48")
    latents = "ant_hill_01{}_0064x0048_wan.safetensors"
    embedding = "ant_hill_01{}_wan_te.safetensors"
    for number, ending in enumerate(("", ".v1", ".v2")):
        assert texts[latents.format(ending)] == f"{CACHE}/64x48/{latents.format('')}"
        assert embedding.format(ending) in texts
        place = f"text.{number}@64x48" if number else "64x48"
        assert (project / f"{CACHE}/{place}/{embedding.format('')}").is_file()
    assert len(texts) == len(STEMS) * 3 * 2
    said = [
        caption(project / "runs/tiny/caches/shapes_64x48" / embedding.format(ending))
        for ending in ("", ".v1", ".v2")
    ]
    assert said == project.manifest()[0]["texts"]
    all_said = [text for row in project.manifest()[:2] for text in row["texts"]]
    assert "" in all_said and len(set(all_said)) > 3  # some dropped, the others shuffled
    assert all(text == "" or "photo of " in text for text in all_said)
    films = linked(project, "films_32")
    assert len(films) == 2 * (2 + 1)  # texts, each with clips of 1 and 5 frames and an embedding
    assert any(name.startswith("ray.v1_00000-005_") for name in films)

    before = project.snapshot()
    (project / "data/shapes/bee.txt").write_text("a bee, other, words", encoding="utf-8")
    done = project.run("train_tiny")
    new = project.manifest()[1]["texts"]
    assert done.encoded("text").encoded == len({text for text in new if text})
    assert done.encoded("latents").encoded == 0
    changes = project.changed(before)
    assert {name.rpartition("/")[2] for name in changes.content} == {"bee_wan_te.safetensors"}
    folder = project / "runs/tiny/caches/shapes_32"
    assert [caption(folder / f"bee{x}_wan_te.safetensors") for x in ("", ".v1", ".v2")] == new

    single = f"{CACHE}/text.1@32/bee_wan_te.safetensors"
    (project / single).unlink()
    project.run(single)
    assert caption(project / single) == new[1]

    stray = folder / "foreign_0064x0048_wan.safetensors"
    shutil.copy(folder / "bee_0064x0048_wan.safetensors", stray)
    assert stray.name in project.ask("check", check=False).output
    stray.unlink()

    # One text of each item again: the folders of the caches are trained on as they are.
    def one(values: dict[str, Any]) -> None:
        for name in ("shapes", "films"):
            values["datasets"][name]["captions"] = {"caption_prefix": "photo of"}

    project.configure(one)
    project.run("train_tiny")
    assert not [*(project / "runs/tiny/caches").rglob("*.safetensors")]


def test_names_that_another_text_is_to_have_are_refused_while_planning(project: Project) -> None:
    shutil.copy(project / "data/shapes/bee.png", project / "data/shapes/bee.v2.png")
    shutil.copy(project / "data/shapes/bee.txt", project / "data/shapes/bee.v2.txt")
    done = project.run("-n", "caches_tiny", check=False)
    assert "bee.v2.png" in done.one_line(
        "shares the name bee.v2 in the cache with data/shapes/bee.png", "rename"
    )
    # `.v3` is the name of no text.
    for ending in ("png", "txt"):
        (project / f"data/shapes/bee.v2.{ending}").rename(project / f"data/shapes/bee.v3.{ending}")
    project.plan("caches_tiny")


def test_texts_of_a_scripted_model_are_listed_cached_and_published(tmp_path: Path) -> None:
    tensors = {"vae": "encoder", "text": "embedding", "dit": "noise_refiner.0.weight"}
    fast_tuner.write_weights(tmp_path / "tiny", **tensors)
    places = {name: f"models/tiny/{name}.safetensors" for name in tensors}
    values = fast_tuner.config("z_image", **places)
    values["datasets"]["shapes"]["captions"] = CAPTIONS
    values["runs"]["tiny"]["trainer"] = {"kind": "musubi", "max_train_epochs": 1}
    values["publish"] = {"path": "published"}
    project = Project.make(tmp_path / "project", values, tmp_path / "tiny")
    fast_tuner.write_pictures(project / "data/shapes", dict.fromkeys(STEMS, TAGS), (96, 64))
    fast_tuner.install(project / "musubi-tuner", MUSUBI["z_image"])
    said = project.ask("captions", "tiny").output
    assert "tokens are not counted" in said
    lines = (project / "reports/captions_tiny.jsonl").read_text().splitlines()
    listed = [json.loads(line)["text"] for line in lines]
    project.run("publish_tiny")
    assert listed == [text for row in project.manifest() for text in row["texts"]]
    published = project / "published/tiny/shapes_96_cache"
    assert {path.name for path in published.iterdir()} == {
        f"{stem}{number}{ending}_zi{te}.safetensors"
        for stem in STEMS
        for number in ("", ".v1", ".v2")
        for ending, te in (("_0096x0064", ""), ("", "_te"))
    }
    assert [
        caption(published / f"bee{number}_zi_te.safetensors") for number in ("", ".v1", ".v2")
    ] == listed[3:]
    # Its scripts on another machine would encode one text of each item.
    project.configure(lambda values: values["publish"].update(caches=False))
    line = project.refusal("publish_tiny")
    for words in ("datasets.shapes.captions.variants", "one text", "publish.caches: true"):
        assert words in line
