"""Planning takes every form of a Wan DiT for the trainer `wan`, and refuses all else."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from dit_world import (
    forms,
    image_dit,
    original_config,
    original_dit,
    tiny_dit,
    write_file,
)
from latentmake.config.models import Model
from latentmake.errors import ModelError, TrainingError
from latentmake.training.backend import model_finding
from latentmake.training.external.musubi.checks import networks
from latentmake.training.wan.dit import check_networks, dit_digest, read_dit, trained_networks

TARGETS = ["to_q", "to_k", "to_v", "to_out.0"]
IMAGE = {"task": "i2v-14B", "clip": "clip.pth"}


def model(dit: Path | str | None, **changes: Any) -> Model:
    section = {"task": "t2v-1.3B", "vae": "vae.pth", "text": "t5.pth", **changes}
    if dit is not None:
        section["dit"] = str(dit)
    return Model.model_validate(section)


def check(given: Model, targets: list[str] = TARGETS) -> None:
    check_networks(given, "wan", targets, "runs.a.trainer.target_modules")


def refusal(given: Model) -> str:
    """Return the one line in which a model is refused; its checklist says the same."""
    with pytest.raises(ModelError) as caught:
        check(given)
    line = str(caught.value)
    assert "\n" not in line and line.startswith("models.wan.dit") and "; " in line
    findings = [model_finding(file) for file in trained_networks(given)]
    (failed,) = [each for each in findings if each.verdict == "failed"]
    assert failed.note in line
    return line


@pytest.mark.parametrize("kind", ["text", "image"])
def test_every_form_is_accepted_and_musubi_tuner_still_gets_the_original_names_alone(
    tmp_path: Path, kind: str
) -> None:
    dit = tiny_dit() if kind == "text" else image_dit()
    for name, path in forms(dit, tmp_path).items():
        given = model(path, **({} if kind == "text" else IMAGE))
        check(given)
        (file,) = trained_networks(given)
        assert model_finding(file).verdict == "ok"
        assert read_dit(str(path)).config["num_layers"] == 2
        if ("folder" in name and "original" not in name) or name == "diffusers file":
            (musubi,) = networks(given)
            assert "is in diffusers' names, which musubi-tuner cannot read" in musubi.fault


def test_another_task_is_refused(tmp_path: Path) -> None:
    paths = {
        name: forms(dit, tmp_path / name)["original folder"]
        for name, dit in {
            "text": tiny_dit(),
            "image": image_dit(),
            "image without CLIP": tiny_dit(in_channels=36),
        }.items()
    }
    for name, changes, fault in (
        ("image", {}, "is a Wan DiT of 36 input channels; t2v-1.3B has 16"),
        ("text", IMAGE, "is a Wan DiT of 16 input channels; i2v-14B has 36"),
        ("image", {"task": "i2v-A14B"}, "takes a CLIP image encoder's output; i2v-A14B needs none"),
        ("image without CLIP", IMAGE, "does not take a CLIP image encoder's output; i2v-14B needs"),
    ):
        assert fault in refusal(model(paths[name], **changes))
    check(model(paths["image without CLIP"], task="i2v-A14B"))


def test_the_network_for_high_noise_is_checked_too(tmp_path: Path) -> None:
    good = forms(tiny_dit(), tmp_path / "a")["folder"]
    bad = forms(image_dit(), tmp_path / "b")["folder"]
    both = {"task": "t2v-A14B", "dit_high_noise": str(bad)}
    for given in (model(good, **both), model(None, **both)):
        assert refusal(given).startswith(f"models.wan.dit_high_noise: {bad}: ")
    check(model(None, **{**both, "dit_high_noise": str(good)}))
    assert "is not set: there is no network to train" in refusal(model(None))


def test_a_target_that_fits_nothing_is_refused_while_planning(tmp_path: Path) -> None:
    for path in forms(tiny_dit(), tmp_path).values():
        with pytest.raises(TrainingError) as caught:
            check(model(path), ["to_q", "to_x"])
        where = "runs.a.trainer.target_modules"
        assert str(caught.value).startswith(f"{where}: no layer of the DiT is named `to_x`; ")
    with pytest.raises(TrainingError, match="which is no linear layer of a block"):
        check(model(path), ["to_q", "time_proj"])
    check(model(path), ["ffn.net.0.proj", "ffn.net.2", "attn1.to_q"])


def test_the_digest_is_that_of_content_alone(tmp_path: Path) -> None:
    paths = forms(tiny_dit(), tmp_path)
    found = {name: dit_digest(model(path)) for name, path in paths.items()}
    assert found["folder"] == found["pipeline"]  # the same files
    assert len(set(found.values())) == len(found) - 1
    moved = tmp_path / "moved"
    paths["original folder"].rename(moved)
    assert dit_digest(model(moved)) == found["original folder"]
    for file in moved.iterdir():
        os.utime(file)
    assert dit_digest(model(moved)) == found["original folder"]
    config = moved / "config.json"
    config.write_text(config.read_text().replace('"eps": 1e-06', '"eps": 1e-05'))
    assert dit_digest(model(moved)) != found["original folder"]
    asked: list[str] = []

    def remembered(path: Path) -> str:
        asked.append(path.name)
        return path.name

    dit_digest(model(paths["sharded folder"]), remembered)
    assert asked[0] == "config.json" and len(asked) > 3


def test_a_configuration_of_another_model_beside_a_file_does_not_count(tmp_path: Path) -> None:
    wide = tiny_dit(heads=2, head=128, num_layers=1)
    file = write_file(original_dit(wide.state_dict()), tmp_path / "dit.safetensors")
    alone = dit_digest(model(file))
    (tmp_path / "config.json").write_text(json.dumps(original_config(tiny_dit())))
    assert dit_digest(model(file)) == alone
    (tmp_path / "config.json").write_text(json.dumps(original_config(wide)))
    assert dit_digest(model(file)) != alone
