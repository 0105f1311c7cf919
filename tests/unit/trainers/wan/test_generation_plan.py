"""Orders of clips: defaults, and the effect of each key of `generate`."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from latentmake.base import digest
from latentmake.base.errors import ConfigError, TrainingError
from latentmake.config.root import parse
from latentmake.config.trainers import Generation
from latentmake.data.memo import Memo
from latentmake.plan.facts import Facts
from latentmake.runs.order import run_values
from latentmake.trainers.loop.generation import (
    GenerationOrder,
    adapter_digest,
    clip_reasons,
    following,
    requested_clips,
)
from latentmake.trainers.loop.order import TrainingOrder
from latentmake.trainers.wan.dit import WanOrder, boundary_of
from latentmake.trainers.wan.plan import Wan
from PIL import Image
from refusals import refused
from safetensors.numpy import save_file

CONFIG: dict[str, Any] = {
    "datasets": {"cats": {"path": "data", "fit": "bucket"}},
    "models": {
        "wan": {"task": "t2v-1.3B", "vae": "m/vae", "text": "m/text", "dit": "m/dit"},
        "moe": {
            "task": "t2v-A14B", "vae": "m/vae", "text": "m/text", "dit": "m/low",
            "dit_high_noise": "m/high",
        },
        "i2v": {
            "task": "i2v-14B", "vae": "m/vae", "text": "m/text", "dit": "m/dit", "clip": "m/clip"
        },
    },
    "runs": {
        "first": {
            "datasets": "cats", "model": "wan", "resolutions": [[64, 32], 96],
            "trainer": {"kind": "wan"},
        }
    },
}  # fmt: skip


@pytest.fixture(autouse=True)
def cats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    # The digest of models that are not here.
    monkeypatch.setattr("latentmake.trainers.wan.plan.made_of", lambda *_: "digest")
    (tmp_path / "data").mkdir()
    Image.new("RGB", (64, 64)).save(tmp_path / "data/a.png")
    (tmp_path / "data/a.txt").write_text("a caption")


def training_of(
    run: dict[str, Any] | None = None, dataset: dict[str, Any] | None = None, **changes: Any
) -> tuple[Facts, WanOrder]:
    """Return the facts and the order of a training; see `order_of`."""
    values = copy.deepcopy(CONFIG)
    values["datasets"]["cats"] = dataset or values["datasets"]["cats"]
    values["runs"]["first"] |= {**(run or {}), **({"generate": changes} if changes else {})}
    facts = Facts(parse(values), Memo(None), encoders=False)
    config = facts.config
    run = config.runs["first"]
    trainer: Any = run.trainer
    model = config.models[run.model]
    training = WanOrder(
        **run_values("first"),
        model=model,
        flow_shift=trainer.shift(run.resolutions),
        boundary=boundary_of(trainer, model),
        weights="digest",
        prompts=[],
        negative=None,
        sample_size=(64, 64),
        trainer=trainer,
    )
    return facts, training


def order_of(*sections: dict[str, Any] | None, **changes: Any) -> GenerationOrder:
    """Return the order of a run with some of its keys changed, and with another dataset.

    `changes` are of `generate`.
    """
    facts, training = training_of(*sections, **changes)
    return following(facts, training, "generate", *Wan().clip_settings(facts, training, "generate"))


def test_defaults_come_from_the_run() -> None:
    order = order_of()
    clips = order.settings
    assert (clips.width, clips.height, clips.frames, clips.fps) == (64, 32, 81, 16)
    assert order.captions == 4 and not order.prompts
    assert clips.flow_shift == 3.0
    assert order_of({"resolutions": [1024]}).settings.flow_shift == 5.0
    shifted = order_of({"trainer": {"kind": "wan", "flow_shift": 7.0}})
    assert shifted.settings.flow_shift == 7.0
    assert order.seeds == [0] and order.base and not order.asked
    assert order.adapters == ["runs/first/pytorch_lora_weights.safetensors"]


@pytest.mark.parametrize(
    ("video", "frames"),
    [
        ({"target_frames": [1, 25, 17]}, 25),
        ({"target_frames": [1]}, 81),
        ({"frame_extraction": "full", "max_frames": 60, "target_frames": [1]}, 57),
    ],
)
def test_clips_are_as_long_as_those_that_a_run_trains_on(
    video: dict[str, Any], frames: int
) -> None:
    dataset = {**CONFIG["datasets"]["cats"], **video}
    assert order_of(None, dataset).settings.frames == frames


def test_both_networks_have_an_adapter_and_a_boundary() -> None:
    order = order_of({"model": "moe"})
    assert len(order.adapters) == 2 and order.settings.timestep_boundary == 0.875
    other = order_of({"model": "moe", "trainer": {"kind": "wan", "timestep_boundary": 900}})
    assert other.settings.timestep_boundary == 0.9
    assert other.key("a", 0, "") != order.key("a", 0, "")


def test_keys_of_clips_are_those_of_earlier_releases() -> None:
    """What they drew is not drawn again."""
    order = order_of({"model": "moe"}, prompts=["a wave"], negative_prompt="dark")
    key = "2dcb75f4434572be5706ee65bcda97b091dfeae059bb221f1461513791ded50b"
    assert order.key("a wave", 3, "lora") == key
    order = order_of({"model": "i2v"}, image="data/a.png", guidance_scale=1)
    settings = order.settings.model_copy(update={"image": "of the picture"})
    key = "da2e16851cfd0f5eca05daa9451b3ca73929183ca2c8ced6d1dbe883e255dac5"
    assert order.model_copy(update={"settings": settings}).key("a wave", 3, "") == key


CHANGES: dict[str, Any] = {
    "prompts": ["another"], "negative_prompt": "dark", "videos": 2,
    "frames": 5, "resolution": 48, "num_inference_steps": 3, "guidance_scale": 1.0,
    "flow_shift": 4.0, "scheduler": "euler", "seed": 9, "fps": 8, "base": False,
    "image": "data/a.png", "lora": "lora", "lora_strength": 0.5,
}  # fmt: skip


def test_each_key_changes_the_clips() -> None:
    assert CHANGES.keys() == Generation.model_fields.keys() - {"images"}  # of pictures

    def keys(order: GenerationOrder) -> set[str]:
        return {clip.key for clip in requested_clips(order, adapter_digest(order))}

    for number, folder in enumerate(("runs/first", "lora")):
        Path(folder).mkdir(parents=True, exist_ok=True)
        head = {"lora_adapter_metadata": "{}", "number": str(number)}
        save_file({"a": np.zeros(1)}, Path(folder) / "pytorch_lora_weights.safetensors", head)
    usual = keys(order_of(prompts=["a wave"]))
    assert len(usual) == 2
    for key, value in CHANGES.items():
        given = {"prompts": ["a wave"], key: value}
        run = {"model": "i2v"} if key == "image" else None
        assert keys(order_of(run, **given)) != usual, key
    bases = [
        next(requested_clips(order_of(prompts=["a wave"], **more), "")).key
        for more in ({}, {"lora": "lora", "lora_strength": 0.5})
    ]
    assert bases[0] == bases[1]


def test_a_lora_that_cannot_be_drawn_with_is_one_line() -> None:
    with pytest.raises(TrainingError, match=r"gone/.*: the trained LoRA cannot be read .*correct"):
        clip_reasons(order_of(prompts=["a"], lora="gone"))
    with pytest.raises(TrainingError, match="one file; name a folder with pytorch_lora"):
        order_of({"model": "moe"}, lora="one.safetensors")


def test_a_strength_is_refused_where_no_lora_is_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TrainingOrder, "trains_lora", False)
    with pytest.raises(TrainingError, match=r"generate\.lora_strength: .* trains no LoRA; leave"):
        order_of(prompts=["a"], lora_strength=0.5)


def test_without_guidance_there_is_no_negative_prompt() -> None:
    order = order_of(prompts=["a"], guidance_scale=1, negative_prompt="dark")
    assert order.negative is None and order.settings.negative_prompt == ""
    assert order_of(prompts=["a"]).negative is not None


def test_image_to_video_needs_a_picture_and_others_take_none() -> None:
    with pytest.raises(ConfigError, match=r"first\.generate\.image: i2v-14B draws from a"):
        order_of({"model": "i2v"})
    with pytest.raises(ConfigError, match=r"generate\.image: gone\.png cannot be read"):
        order_of({"model": "i2v"}, image="gone.png")
    order = order_of({"model": "i2v"}, image="data/a.png")
    assert order.image == "data/a.png"
    assert order.settings.image == digest.of_file(Path("data/a.png"))
    with pytest.raises(ConfigError, match=r"runs\.first\.generate\.image: .*text only"):
        order_of(image="data/a.png")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"prompts": ["a", "a"]}, "names a prompt twice"),
        ({"prompts": ["\n"]}, "empty prompt"),
        ({"frames": 4}, "use 1 or 5"),
        ({"resolution": [40, 32]}, "use 32 or 48"),
        ({"guidance_scale": 0.5}, "use 1"),
        ({"steps": 3}, "steps: unknown key; did you mean `num_inference_steps`?"),
    ],
)
def test_a_mistake_names_its_key_and_the_hint(given: dict[str, Any], words: str) -> None:
    values = copy.deepcopy(CONFIG)
    values["runs"]["first"]["generate"] = given
    line = refused(lambda: parse(values), kind=ConfigError)
    assert "runs.first.generate" in line and words in line


def test_a_prompt_of_the_command_line_takes_the_place_of_others() -> None:
    config = parse({**CONFIG, "prompt": "2001"})
    assert config.generation(config.runs["first"]).prompts == ["2001"]
    with pytest.raises(ConfigError, match=r"prompt: .*empty prompt"):
        parse({**CONFIG, "prompt": ""})
