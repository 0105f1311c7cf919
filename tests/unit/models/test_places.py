"""A pipeline's folder and a repository on the hub stand for their parts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import world
from latentmake.base.errors import ConfigError, ModelError
from latentmake.config import weights
from latentmake.config.models import Model
from latentmake.config.root import Config, parse
from latentmake.models.cache_recipe import make
from latentmake.models.files import refuse_missing, resolved

COMMIT = "0123456789abcdef0123456789abcdef01234567"
HUB = {"hub": "some/model", "revision": COMMIT}
SD = ("vae", "text_encoder", "unet", "scheduler")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The local hub cache."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def pipeline(*parts: str, place: str = "pipe") -> str:
    for part in parts:
        folder = Path(place, part)
        folder.mkdir(parents=True)
        name = "scheduler_config.json" if part == "scheduler" else "config.json"
        (folder / name).write_text("{}")
    Path(place, "model_index.json").write_text("{}")
    return place


def config(**model: Any) -> Config:
    values = world.config()
    values["models"]["micro"] = model
    values["runs"]["tiny"].pop("trainer", None)
    if "task" in model or "architecture" in model:
        dataset = values["datasets"]["shapes"]
        dataset.pop("fit", None)
        values["runs"]["tiny"]["resolutions"] = [256]
    return parse({**values, "musubi_tuner": {"path": "tuner"}, "sd_scripts": {"path": "scripts"}})


def model_of(**model: Any) -> Model:
    return resolved(config(**model)).models["micro"]


def paths(model: Model) -> list[str | None]:
    return [each.path for each in model.text]


def test_each_part_is_a_folder_of_its_pipeline_or_what_is_named_itself() -> None:
    pipe = pipeline(*SD)
    Path("pipe/vae/vae").mkdir()
    parts = {"vae": f"{pipe}/vae", "unet": f"{pipe}/unet", "scheduler": f"{pipe}/scheduler"}
    for named in (dict.fromkeys(parts, pipe), parts):
        model = model_of(text=pipe, **named)
        assert model.vae.path == "pipe/vae" and paths(model) == ["pipe/text_encoder"]
        assert model.unet is not None and model.unet.path == "pipe/unet"
        assert model.scheduler == "pipe/scheduler"
    assert paths(model_of(vae=pipe, text="gone")) == ["gone"]


def test_one_pipeline_holds_all_text_encoders_or_brings_the_second_alone() -> None:
    pipe = pipeline("vae", "text_encoder", "text_encoder_2")
    both = ["pipe/text_encoder", "pipe/text_encoder_2"]
    for text in (pipe, [pipe, pipe]):
        model = model_of(architecture="sdxl", layout="sdscripts", vae=pipe, text=text)
        assert paths(model) == both
    assert paths(model_of(vae=pipe, text=[pipe, pipe])) == both
    Path("clip_l").mkdir()
    Path("clip_l/config.json").write_text("{}")
    model = model_of(architecture="sdxl", vae=pipe, text=["clip_l", pipe])
    assert paths(model) == ["clip_l", "pipe/text_encoder_2"]


def test_one_place_that_is_no_pipeline_is_too_few_text_encoders() -> None:
    Path("clip_l").mkdir()
    with pytest.raises(ConfigError, match=r"^models.micro.text: clip_l is no pipeline.*CLIP-L, C"):
        model_of(architecture="sdxl", vae="vae", text="clip_l")


def test_the_networks_of_wan_are_those_of_their_noise() -> None:
    pipe = pipeline("vae", "text_encoder", "transformer", "transformer_2")
    model = model_of(task="t2v-A14B", vae=pipe, text=pipe, dit=pipe, dit_high_noise=pipe)
    assert model.dit == "pipe/transformer_2" and model.dit_high_noise == "pipe/transformer"
    one = pipeline("transformer", "image_encoder", place="one")
    model = model_of(task="i2v-14B", vae=pipe, text=pipe, dit=one, clip=one)
    assert model.dit == "one/transformer"
    assert model.clip is not None and model.clip.path == "one/image_encoder"


def test_a_recipe_does_not_depend_on_the_words_for_a_place(micro: Path) -> None:
    os.symlink(micro, "micro")
    dataset = config(vae="v", text="t").datasets["shapes"]
    short = model_of(vae="micro", text="micro", unet="micro")
    long = model_of(vae="micro/vae", text=["micro/text_encoder"], unet="micro/unet")
    for kind in ("latents", "text"):
        assert make(kind, dataset, short) == make(kind, dataset, long)


def snapshot(cache: Path) -> Path:
    return cache / "models--some--model" / "snapshots" / COMMIT


def test_a_file_of_the_hub_is_read_from_its_local_cache(cache: Path) -> None:
    model = model_of(
        task="t2v-A14B",
        vae={**HUB, "subfolder": "split", "file": "vae.safetensors"},
        text={**HUB, "file": "umt5.pth", "tokenizer": "tokenizer"},
        dit={**HUB, "file": "low.safetensors"},
        dit_high_noise={**HUB, "subfolder": "high"},
    )
    assert model.vae.path == str(snapshot(cache) / "split/vae.safetensors")
    assert model.vae.hub is None and model.vae.revision is None
    assert paths(model) == [str(snapshot(cache) / "umt5.pth")]
    assert model.dit == str(snapshot(cache) / "low.safetensors")
    assert model.dit_high_noise == str(snapshot(cache) / "high")


def test_a_pipeline_of_the_hub_stands_for_its_parts_too(cache: Path) -> None:
    pipeline("vae", "transformer", "text_encoder", place=str(snapshot(cache)))
    model = model_of(architecture="qwen_image", vae=HUB, text=HUB, dit=HUB)
    assert model.dit == str(snapshot(cache) / "transformer")
    assert model.vae.path == str(snapshot(cache) / "vae")
    assert paths(model) == [str(snapshot(cache) / "text_encoder")]


def test_weights_that_our_encoders_load_from_the_hub_keep_their_commit() -> None:
    model = model_of(vae=HUB, text=HUB, unet={**HUB, "subfolder": "unet"})
    assert model == config(vae=HUB, text=HUB, unet={**HUB, "subfolder": "unet"}).models["micro"]


def test_what_is_not_in_the_cache_comes_with_the_command_that_fetches_it() -> None:
    for place, words in (
        ({"file": "a.safetensors"}, "a.safetensors"),
        ({"subfolder": "x", "file": "a.safetensors"}, "x/a.safetensors"),
        ({"subfolder": "x"}, '--include "x/*"'),
        ({}, ""),
    ):
        model = model_of(architecture="qwen_image", vae={**HUB, **place}, text="text")
        with pytest.raises(ModelError) as error:
            refuse_missing(Path(model.vae.path or ""))
        command = " ".join(f"hf download some/model {words} --revision {COMMIT}".split())
        assert str(error.value).endswith(f"not in the local hub cache; run `{command}`")


def test_a_missing_commit_is_the_one_of_the_local_cache(cache: Path) -> None:
    lost = {"hub": "some/model", "file": "dit.safetensors"}
    with pytest.raises(ConfigError, match=r"huggingface\.co/some/model/commits/main lists them"):
        config(task="t2v-1.3B", vae="vae", text="text", dit=lost)
    snapshot(cache).mkdir(parents=True)
    (cache / "models--some--model/refs").mkdir()
    (cache / "models--some--model/refs/main").write_text(COMMIT)
    for key, rest in (("dit", {"vae": "vae"}), ("vae", {})):
        with pytest.raises(ConfigError) as error:
            config(**{"task": "t2v-1.3B", "text": "text", **rest, key: lost})
        assert str(error.value).startswith(f"models.micro.{key}: a `hub` model needs a commit")
        assert f"write `revision: {COMMIT}`, which is in the local hub cache" in str(error.value)


def test_a_file_of_no_repository_is_refused() -> None:
    with pytest.raises(ConfigError, match="has a `file` of no `hub`; set `path` to the file"):
        config(vae={"path": "here", "file": "vae.safetensors"}, text="text")


@pytest.mark.parametrize("variable", ["HF_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"])
def test_the_cache_is_that_of_huggingface_hub(
    variable: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("HF_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, str(tmp_path / "elsewhere"))
    code = "from huggingface_hub import constants; print(constants.HF_HUB_CACHE)"
    theirs = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert theirs.stdout.strip() == str(weights.cache())
