"""Projects of each layout and kind for `versions.py`: how each is made, and what changes it."""

from __future__ import annotations

import contextlib
import inspect
import json
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import every_key
import fast_tuner
import sdscripts_world
import strategies_world
import test_every_key_musubi
import test_every_key_plain
import test_every_key_scripted
import test_every_key_sdscripts
import test_every_key_videos
import test_video_lists
import wan
import world
from every_key import Change, Key
from latentmake.config.architectures import MUSUBI
from PIL import Image
from project import Project

RUN = "tiny"
SCRIPTED = {"ant": "a red circle", "bee": "a blue square", "cat": "a green star"}


class World(NamedTuple):
    """A kind of project: what makes it, changes of its configuration, and its model's name."""

    make: Callable[[Path], Project]
    changes: Mapping[Key, Change]
    model: str


def _of_test(module: Any, name: str = "key_template") -> World:
    """Return the world of a test's fixture, with the changes that the test makes."""

    def make(folder: Path) -> Project:
        fixture, place = getattr(module, name).__wrapped__, Path(f"{folder}-parts")
        place.mkdir()
        factory = SimpleNamespace(mktemp=lambda _: Path(tempfile.mkdtemp(dir=place)))
        given = {"tmp_path_factory": factory, "micro": folder.parent / "micro", "tmp_path": place}
        wanted = inspect.signature(fixture).parameters
        if "wan_model" in wanted:
            given["wan_model"] = place / "wan"
            wan.make_model(place / "wan")
        made = fixture(*(given[each] for each in wanted))
        made.folder.rename(folder)
        return Project(folder)

    changes = getattr(module, "CHANGES", CHANGES)
    return World(make, changes, getattr(module, "MODEL", "wan"))


def _lists(folder: Path) -> Project:
    """A list of pictures with rows' metadata, and a folder with a metadata file."""
    values = world.config()
    values["datasets"] = {
        "shapes": {"path": "data/list.jsonl", "num_repeats": 2},
        "more": {"path": "data/more", "metadata_file": "data/meta.json"},
    }
    values["datasets"]["more"]["metadata_captions"] = "join"
    values["runs"][RUN] |= {"datasets": ["shapes", "more"], "trainer": world.training()}
    project = Project.make(folder, values, folder.parent / "micro")
    for name in ("shapes", "more"):
        world.make_dataset(project / f"data/{name}")
    rows = [
        {"image": f"shapes/{stem}.png", "prompt": f"listed {text}", "score": number}
        for number, (stem, text) in enumerate(world.CAPTIONS.items())
    ]
    text = "".join(f"{json.dumps(row)}\n" for row in rows)
    (project / "data/list.jsonl").write_text(text, encoding="utf-8")
    listed = {f"{stem}.png": {"caption": f"also {stem}"} for stem in [*world.CAPTIONS][:4]}
    (project / "data/meta.json").write_text(json.dumps(listed), encoding="utf-8")
    return project


def _controls(folder: Path) -> Project:
    """Pictures with two control images each, encoded by musubi-tuner's scripts."""
    project = _of_scripts(folder, "qwen_image_edit", task="edit-2509")
    project.configure(
        lambda values: values["datasets"]["shapes"].update(control_directory="data/control")
    )
    for number, stem in enumerate(SCRIPTED):
        for control in range(2):
            path = project / f"data/control/{stem}_{control}.png"
            world.draw(path, 2 * number + control, (40 + 20 * control, 50))
    return project


def _layers(folder: Path) -> Project:
    """Pictures with two layers each, encoded by musubi-tuner's scripts."""
    project = _of_scripts(folder, "qwen_image_layered")
    project.configure(lambda values: values["datasets"]["shapes"].update(multiple_target=True))
    for number, stem in enumerate(SCRIPTED):
        for layer in range(2):
            path = project / f"data/shapes/{stem}_{layer}.png"
            Image.new("RGBA", (96, 64), (9 * number, 90 * layer, 30, 200)).save(path)
    return project


def _of_scripts(folder: Path, architecture: str, **model: Any) -> Project:
    """Three pictures, and a musubi-tuner of an architecture."""
    weights = folder.parent / architecture / "tiny"
    fast_tuner.write_weights(weights, vae="encoder", text="embedding")
    places = {"vae": "models/tiny/vae.safetensors", "text": "models/tiny/text.safetensors"}
    project = Project.make(folder, fast_tuner.config(architecture, **places, **model), weights)
    fast_tuner.write_pictures(project / "data/shapes", SCRIPTED, (96, 64))
    fast_tuner.install(project / "musubi-tuner", MUSUBI[architecture])
    return project


def _strategies(folder: Path) -> Project:
    """Two texts of each picture, encoded by sd-scripts' own classes."""
    project = Project.make(folder, {}, folder.parent / "micro")
    with contextlib.chdir(folder):
        values = strategies_world.make(text_arguments=["--system_prompt", "draw"])
        sdscripts_world.stand_in(Path("sd-scripts"), own_venv=False)
    making = {"variants": 2, "caption_separator": " ", "shuffle_caption": True}
    values["datasets"]["shapes"]["captions"] = making
    values["runs"][RUN]["trainer"] = {"kind": "sdscripts", "max_train_epochs": 1}
    project.config = values
    return project


CHANGES: dict[Key, Change] = {
    **every_key.DATASETS,
    **every_key.CAPTIONS,
    **every_key.MACHINES,
    ("runs", "resolutions"): Change([32, 64]),
    ("datasets", "no_resize_control"): Change(True),
    ("models", "dtype"): Change("bfloat16"),
    ("runs", "trainer", "seed"): Change(5),
    ("datasets", "target_frames"): Change([1, 5]),
}
WORLDS = {
    "images": _of_test(test_every_key_plain),
    "lists": World(_lists, CHANGES, "micro"),
    "wan": _of_test(test_every_key_musubi),
    "clips": _of_test(test_every_key_videos),
    "spans": _of_test(test_video_lists, "films"),
    "scripts": _of_test(test_every_key_scripted),
    "controls": World(_controls, CHANGES, "tiny"),
    "layers": World(_layers, CHANGES, "tiny"),
    "sdscripts": _of_test(test_every_key_sdscripts),
    "strategies": World(_strategies, CHANGES, "tiny"),
}
