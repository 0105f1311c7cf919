"""A model that is one file is built and trained as the folder of its pipeline is."""

from __future__ import annotations

from pathlib import Path

import checkpoint_world
import world
from project import Project
from safetensors.torch import load_file

RUNS = ("folder", "file")


def test_one_file_gives_the_caches_and_the_lora_of_its_folder(tmp_path: Path, micro: Path) -> None:
    values = world.config()
    values["models"] = {
        "folder": {"vae": "models/pipe", "text": "models/pipe", "unet": "models/pipe"},
        "file": {"checkpoint": "models/sd.safetensors", "text": {"tokenizer": "models/clip"}},
    }
    trainer = world.training() | {"steps": 1}
    values["runs"] = {
        name: {"datasets": ["shapes"], "model": name, "resolutions": [32], "trainer": trainer}
        for name in RUNS
    }
    project = Project.make(tmp_path / "project", values, micro)
    world.make_dataset(project / "data/shapes")
    tokens = micro / "tokenizer"
    (project / "models/clip").symlink_to(tokens)
    checkpoint_world.write(project / "models/pipe", project / "models/sd.safetensors", tokens)
    project.run("train_folder", "train_file")
    folder, file = (project / f"cache/shapes/{name}" for name in RUNS)
    caches = sorted(each.relative_to(folder) for each in folder.rglob("*.safetensors"))
    assert caches == sorted(each.relative_to(file) for each in file.rglob("*.safetensors"))
    loras = [f"runs/{name}/pytorch_lora_weights.safetensors" for name in RUNS]
    pairs = [(folder / each, file / each) for each in caches]
    for first, second in [*pairs, tuple(project / each for each in loras)]:
        theirs, ours = load_file(first), load_file(second)
        assert theirs.keys() == ours.keys()
        assert all(theirs[name].equal(ours[name]) for name in theirs), first
    assert project.run("train_file").idle
