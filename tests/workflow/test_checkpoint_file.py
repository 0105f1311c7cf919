"""A model that is one file is built and trained as the folder of its pipeline is."""

from __future__ import annotations

from pathlib import Path

import checkpoint_world
import pytest
import torch
import world
from project import Counts, Project
from safetensors.torch import load_file

RUNS = ("folder", "file")


@pytest.mark.parametrize("kind", ["sd1", "sdxl"])
def test_one_file_gives_the_caches_and_the_lora_of_its_folder(
    tmp_path: Path, micro: Path, kind: checkpoint_world.Kind
) -> None:
    values = world.config()
    values["models"] = {
        "folder": {"vae": "models/pipe", "text": "models/pipe", "unet": "models/pipe"},
        "file": {"checkpoint": "models/sd.safetensors", "text": {"tokenizer": "models/clip"}},
    }
    for model in values["models"].values():
        model |= {"architecture": kind} if kind == "sdxl" else {}
    trainer = world.training() | {"steps": 1}
    values["runs"] = {
        name: {"datasets": ["shapes"], "model": name, "resolutions": [32], "trainer": trainer}
        for name in RUNS
    }
    project = Project.make(tmp_path / "project", values, micro)
    world.make_dataset(project / "data/shapes")
    tokens = micro / "tokenizer"
    (project / "models/clip").symlink_to(tokens)
    checkpoint_world.write(project / "models/pipe", project / "models/sd.safetensors", tokens, kind)
    project.run("train_folder", "train_file")
    folder, file = (project / f"cache/shapes/{name}" for name in RUNS)
    caches = sorted(each.relative_to(folder) for each in folder.rglob("*.safetensors"))
    assert caches == sorted(each.relative_to(file) for each in file.rglob("*.safetensors"))
    loras = [f"runs/{name}/pytorch_lora_weights.safetensors" for name in RUNS]
    pairs = [(folder / each, file / each) for each in caches]
    for first, second in [*pairs, tuple(project / each for each in loras)]:
        theirs, ours = load_file(first), load_file(second)
        # OpenCLIP's projection lies in memory the other way round, which changes last bits.
        torch.testing.assert_close(theirs, ours, rtol=0, atol=1e-5 if kind == "sdxl" else 0)
    assert project.run("train_file").idle
    (project / "data/shapes/cat.txt").write_text("a green disc on grey")
    edited = project.run("caches_file")
    assert edited.encoded() == edited.encoded("text") == Counts(encoded=1)
