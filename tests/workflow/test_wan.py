"""Caches of Wan for musubi-tuner, built incrementally."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import video_world
import wan
import world
from project import NOTHING, Project
from safetensors import safe_open
from safetensors.torch import load_file, save_file

FOLDERS = ("64", "96", "128x64")


@pytest.fixture(scope="session")
def wan_template(tmp_path_factory: pytest.TempPathFactory, wan_model: Path) -> Project:
    """A project whose caches are all built, with a trainer. Not to be changed: copy it."""
    project = wan.make(tmp_path_factory.mktemp("wan") / "project", wan_model)
    project.run("caches_tiny")
    return project


@pytest.fixture
def built(wan_template: Project, tmp_path: Path) -> Project:
    return wan_template.copy(tmp_path / "project")


@pytest.fixture
def fresh(wan_model: Path, tmp_path: Path) -> Callable[..., Project]:
    return lambda **model: wan.make(tmp_path / "project", wan_model, **model)


def texts(stem: str, folders: tuple[str, ...] = FOLDERS) -> set[str]:
    return {f"cache/shapes/wan/{folder}/{stem}_wan_te.safetensors" for folder in folders}


def latents(stem: str, folders: tuple[str, ...] = FOLDERS) -> set[str]:
    width, height = wan.SIZES[stem]
    return {
        f"cache/shapes/wan/{folder}/{stem}_{width:04d}x{height:04d}_wan.safetensors"
        for folder in folders
    }


def metadata(path: Path) -> dict[str, str]:
    with safe_open(path, framework="pt") as file:
        return dict(file.metadata())


# -- caches ---------------------------------------------------------------------------------------


def test_each_resolution_is_a_cache_directory_of_its_own_with_latents_and_text(
    wan_template: Project,
) -> None:
    wanted = {path for stem in world.CAPTIONS for path in latents(stem) | texts(stem)}
    assert set(wan_template.cache_files()) == wanted
    for stem, caption in world.CAPTIONS.items():
        for path in sorted(latents(stem)):
            (key,) = load_file(wan_template / path)
            tensor = load_file(wan_template / path)[key]
            frames, height, width = map(int, key.split("_")[1].split("x"))
            assert tensor.shape == (16, frames, height, width) and frames == 1
            assert key.endswith("_bfloat16") and tensor.dtype == torch.bfloat16
            said = metadata(wan_template / path)
            size = (int(said["width"]), int(said["height"]))
            assert said["architecture"] == "wan" and size == wan.SIZES[stem]
        for path in sorted(texts(stem)):
            assert metadata(wan_template / path)["caption1"] == caption


def test_each_edit_makes_just_what_it_shapes(built: Project) -> None:
    # A caption: one text, which three folders share.
    before = built.snapshot()
    (built / "data/shapes/ant.txt").write_text("a purple circle\n")
    result = built.run("caches_tiny")
    assert (result.encoded("text")[:3], result.encoded("latents").encoded) == ((1, 0, 2), 0)
    assert built.changed(before) == NOTHING._replace(content=texts("ant"))
    assert len({wan.inode(built / path) for path in texts("ant")}) == 1
    # An image of another size: other names, and the old ones go.
    before = built.snapshot()
    world.draw(built / "data/shapes/ant.png", 77, (100, 160))
    assert built.run("caches_tiny").encoded() == (3, 0, 0, 0, 0)
    drawn = {path.replace("0200x0120", "0100x0160") for path in latents("ant")}
    assert built.changed(before) == NOTHING._replace(added=drawn, removed=latents("ant"))
    # Another name: links.
    before = built.snapshot()
    for ending in ("png", "txt"):
        (built / f"data/shapes/cat.{ending}").rename(built / f"data/shapes/yak.{ending}")
    (built / "data/shapes").rename(built / "data/forms")
    built.configure(lambda values: values["datasets"]["shapes"].update(path="data/forms"))
    assert built.run("caches_tiny").encoded() == (0, 0, 6, 0, 0)
    old = latents("cat") | texts("cat")
    new = {path.replace("/cat_", "/yak_") for path in old}
    assert built.changed(before) == NOTHING._replace(added=new, removed=old)
    now = built.snapshot()
    assert all(before[path][0] == now[path.replace("/cat_", "/yak_")][0] for path in old)
    # An item less: nothing of it is left to be trained on.
    before = built.snapshot()
    (built / "data/forms/dog.png").unlink()
    (built / "data/forms/dog.txt").unlink()
    built.run("caches_tiny")
    gone = latents("dog") | texts("dog")
    assert built.changed(before) == NOTHING._replace(removed=gone)
    # A text that musubi-tuner wrote again: it is linked to another name that still holds it.
    path = built / sorted(texts("bee"))[0]
    said, tensors = metadata(path), load_file(path)
    path.unlink()
    save_file(tensors, path, {**said, "caption1": "what somebody else encoded"})
    assert built.run("caches_tiny").encoded("text").linked == 1
    assert metadata(path)["caption1"] == world.CAPTIONS["bee"]
    # Files asked for by their names.
    asked = [sorted(latents("eel"))[0], sorted(texts("eel"))[1]]
    for name in asked:
        (built / name).unlink()
    built.run(*asked)
    built.scramble_mtimes()
    assert built.run("caches_tiny").idle


def test_image_to_video_caches_the_first_frame_and_clip_too(fresh: Callable[..., Project]) -> None:
    project = fresh(task="i2v-14B", clip="models/wan/models_clip_open-clip.pth")
    (path,) = sorted(latents("eel", ("64",)))
    project.run(path)
    found = {key: tuple(value.shape) for key, value in load_file(project / path).items()}
    clip = found.pop("clip_bfloat16")
    assert len(clip) == 2
    assert found == {
        "latents_1x8x8_bfloat16": (16, 1, 8, 8),
        "latents_image_1x8x8_bfloat16": (20, 1, 8, 8),
    }
    assert load_file(project / path)["clip_bfloat16"].dtype == torch.float16


def test_a_model_that_turns_out_to_be_broken_costs_nothing_when_it_is_put_right(
    built: Project,
) -> None:
    before = built.snapshot()
    good = built / "models/wan/Wan2.1_VAE.pth"
    state = torch.load(good, weights_only=True)
    state["conv1.weight"].fill_(float("nan"))
    torch.save(state, built / "models/wan/broken.pth")
    built.configure(lambda values: values["models"]["wan"].update(vae="models/wan/broken.pth"))
    result = built.run("caches_tiny", check=False)
    assert result.returncode != 0
    result.one_line("eel.png", "NaN or infinity")
    built.configure(lambda values: values["models"]["wan"].update(vae="models/wan/Wan2.1_VAE.pth"))
    result = built.run("caches_tiny")
    assert result.encoded("latents").encoded == 0
    assert {name: content for name, (content, _) in built.snapshot().items()} == {
        name: content for name, (content, _) in before.items()
    }
    assert all(path.stat().st_nlink > 1 for path in built.store())  # they take no room


# -- videos ---------------------------------------------------------------------------------------


def test_a_video_is_cut_into_clips_that_share_a_text(fresh: Callable[..., Project]) -> None:
    project = fresh()
    folder = project.folder / "data/clips"
    folder.mkdir()
    video_world.write_video(folder / "walk.mp4", "mpeg4", 14, size=(64, 48))
    (folder / "walk.txt").write_text("somebody walks")

    def change(values: dict[str, Any]) -> None:
        clips = {"path": "data/clips", "target_frames": [1, 5], "frame_extraction": "chunk"}
        values["datasets"] = {"clips": clips}
        values["runs"]["tiny"].update(datasets=["clips"], resolutions=[[64, 48]])

    project.configure(change)
    project.run("caches_tiny")
    names = [Path(name).name for name in project.cache_files()]
    one = [f"walk_{start:05d}-001_0064x0048_wan.safetensors" for start in range(14)]
    five = [f"walk_{start:05d}-005_0064x0048_wan.safetensors" for start in (0, 5)]
    assert sorted(names) == sorted([*one, *five, "walk_wan_te.safetensors"])
    path = project / f"cache/clips/wan/64x48/{five[1]}"
    assert {key: tuple(x.shape) for key, x in load_file(path).items()} == {
        "latents_2x6x8_bfloat16": (16, 2, 6, 8)
    }
    assert metadata(path)["frame_count"] == "5"
    before = project.snapshot()
    (folder / "walk.txt").write_text("somebody runs")
    project.run("caches_tiny")
    assert {Path(each).name for each in project.changed(before).content} == {
        "walk_wan_te.safetensors"
    }
