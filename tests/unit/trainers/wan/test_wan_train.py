"""Whole trainings of tiny Wan networks: what they write, and that a kill changes nothing."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from latentmake.base.errors import CacheError, ModelError, TrainingError
from latentmake.formats.safetensors import read_head
from latentmake.runs.order import RunFiles
from latentmake.trainers.loop import checkpoint
from latentmake.trainers.loop.caches import WAN, Caches, read_items
from latentmake.trainers.loop.train import Training
from latentmake.trainers.wan.dit import PLACES, WanOrder
from latentmake.trainers.wan.recipe import CLIP, FIRST_FRAME, Denoiser
from safetensors.torch import load_file, save_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from wan_trainer_world import TWO, make_manifest, make_order, make_training
from wan_world import tiny_wan_vae

STEPS = 6
SETTINGS: dict[str, Any] = {
    "steps": STEPS,
    "gradient_accumulation_steps": 2,
    "lr_scheduler": "cosine",
    "ema_decay": 0.9,
    "checkpointing_steps": 2,
    "seed": 7,
    "samples": {"frames": 1, "num_inference_steps": 1, "guidance_scale": 2.0, "every": 3},
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> WanOrder:
    """The order of a finished training of two networks."""
    order = make_order(tmp_path_factory.mktemp("wan"), prompts=True, **TWO, **SETTINGS)
    tiny_wan_vae().save_pretrained(order.model.vae.path)
    make_training(order).run()
    return order


def test_each_network_gets_its_files_and_a_training_again_the_same_bytes(
    trained: WanOrder,
) -> None:
    output = Path(trained.output)
    names = {
        f"{prefix}{name}.safetensors"
        for prefix in ("", "high_noise_")
        for name in ("pytorch_lora_weights", "musubi", "comfyui")
    }
    assert {path.name for path in output.glob("*.safetensors")} == names
    again = trained.model_copy(update={"output": f"{trained.output}-again"})
    make_training(again).run()
    for name in names:
        assert (output / name).read_bytes() == Path(again.output, name).read_bytes()
        ups = (load_file(output / name)[key] for key in load_file(output / name) if "_up" in key)
        assert "weights" in name or all(each.any() for each in ups)
    header = read_head(output / "musubi.safetensors").metadata
    assert header["modelspec.architecture"] == "wan2.2/lora"
    record = json.loads(RunFiles(trained).record.read_bytes())
    assert record["loss_end"] < record["loss_start"]
    events = EventAccumulator(str(RunFiles(trained).logs))
    events.Reload()
    assert [event.step for event in events.Scalars("loss")] == list(range(1, STEPS + 1))
    assert "items_per_second" in events.Tags()["scalars"]


def test_two_networks_that_take_turns_on_a_device_train_the_same_weights(
    trained: WanOrder, monkeypatch: pytest.MonkeyPatch
) -> None:
    moves: list[int] = []

    def withdraw(network: Denoiser) -> None:
        moves.append(len(network._on_device))
        original(network)

    original = Denoiser.withdraw
    monkeypatch.setattr(Denoiser, "withdraw", withdraw)
    monkeypatch.setattr(Denoiser, "fits", lambda network, device: False)
    order = trained.model_copy(update={"output": f"{trained.output}-in-turn"})
    training = make_training(order)
    training.run()
    network = training.learner.denoiser
    assert len(network._on_device) == 1
    assert moves.count(1) > 2 and set(moves) == {0, 1}
    for name in trained.results:
        assert Path(trained.output, name).read_bytes() == Path(order.output, name).read_bytes()


def test_images_and_clips_are_mixed_but_not_in_a_batch(tmp_path: Path) -> None:
    order = make_order(tmp_path, train_batch_size=4, epochs=2)
    training = make_training(order)
    batches = list(training.batch_order.batches(0, 1, training.steps))
    shapes = [{training.caches.examples[index].latents.shape for index in each} for each in batches]
    assert all(len(each) == 1 for each in shapes)
    assert {each.pop() for each in shapes} == {(16, 1, 4, 6), (16, 3, 4, 4)}
    assert len(training.caches) == 4  # the held-out clip is not among them
    (held,) = read_items(Path(order.manifest), held_out=True)
    assert held.stem == "item3"
    latents = Caches([held], WAN).batch([0]).latents
    (name,) = load_file(held.latents["48x32"][0])
    assert name == "latents_3x4x4_bfloat16"
    assert torch.equal(latents[0], load_file(held.latents["48x32"][0])[name].float())


def test_steps_end_at_their_bound_and_checkpoints_come_with_epochs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings: dict[str, Any] = {"epochs": 30, "max_steps": 9, "checkpointing_epochs": 1}
    order = make_order(tmp_path, checkpoints_total_limit=9, **settings)
    training = make_training(order)
    assert (training.steps, training.batch_order.batches_per_epoch) == (9, 4)
    with monkeypatch.context() as killed:
        killed.setattr(Training, "_finish", lambda training: None)
        training.run()
    folders = sorted(path.name for path in RunFiles(order).checkpoints.iterdir())
    assert folders == ["step-000004", "step-000008", "step-000009"]
    shutil.rmtree(RunFiles(order).checkpoints / "step-000009")
    make_training(order).run()
    assert json.loads(RunFiles(order).record.read_bytes())["steps"] == 9
    whole = make_order(tmp_path, output="whole", **settings)
    make_training(whole).run()
    assert RunFiles(order).weights.read_bytes() == RunFiles(whole).weights.read_bytes()


def test_image_to_video_reads_its_inputs_from_the_caches(tmp_path: Path) -> None:
    training = make_training(make_order(tmp_path, task="i2v-14B", steps=1))
    batch = training.caches.batch([0])
    stored = load_file(training.caches.examples[0].latents.path)
    assert torch.equal(batch.more[FIRST_FRAME][0], stored["latents_image_1x4x6_bfloat16"])
    assert torch.equal(batch.more[CLIP][0], stored["clip_bfloat16"])
    training.run()
    # A cache of text-to-video has no first frame.
    bad = Path(training.caches.examples[0].latents.path)
    save_file({"latents_1x4x6_bfloat16": stored["latents_1x4x6_bfloat16"]}, bad)
    with pytest.raises(CacheError, match="has no tensor `latents_image`"):
        make_training(make_order(tmp_path, task="i2v-14B", steps=1))


def test_a_network_of_another_text_encoder_is_refused(tmp_path: Path) -> None:
    make_manifest(tmp_path)
    for path in tmp_path.glob("cache/*_te.safetensors"):
        save_file({"varlen_t5_bfloat16": torch.ones(3, 8, dtype=torch.bfloat16)}, path)
    with pytest.raises(ModelError, match=r"takes embeddings of 24 values a token.* have 8"):
        make_training(make_order(tmp_path))


def test_only_the_length_of_a_training_is_no_part_of_its_course(tmp_path: Path) -> None:
    course = make_order(tmp_path, steps=3).course_digest()
    assert make_order(tmp_path, steps=9).course_digest() == course
    assert make_order(tmp_path, steps=3, max_steps=2).course_digest() == course
    for changes in ({"epochs": 3, "steps": None}, {"rank": 2}, {"shift": 5.0}):
        assert make_order(tmp_path, **{"steps": 3, **changes}).course_digest() != course


def test_two_networks_begin_from_the_loras_of_a_folder(trained: WanOrder) -> None:
    settings = {**TWO, **SETTINGS, "steps": 1, "init_lora": trained.output}
    order = make_order(Path(trained.output).parent, output="further", **settings)
    make_training(order).run()
    ended, record = (json.loads(RunFiles(x).record.read_bytes()) for x in (trained, order))
    assert record["loss_start"] == pytest.approx(ended["loss_end"], rel=1e-5)
    one = order.model_copy(
        update={"trainer": order.trainer.model_copy(update={"init_lora": "lora.safetensors"})}
    )
    with pytest.raises(TrainingError, match="two networks need a folder with pytorch_lora_weights"):
        one.begun(Path.read_text, [["to_q"], ["to_q"]], PLACES)


@pytest.mark.parametrize(
    ("longer", "found"), [({"max_steps": 9}, [4]), ({}, [4]), ({"max_steps": 3}, [])]
)
def test_a_training_with_a_higher_bound_of_its_steps_goes_on(
    longer: dict[str, Any], found: list[int], tmp_path: Path
) -> None:
    order = make_order(tmp_path, steps=None, epochs=9, max_steps=4)
    values = {"parts": order.wanted(), "step": 4, "loss_start": 1, "seconds": 1, "limit": 4}
    course, length = order.course_digest(), order.length
    progress = checkpoint.Progress(**values, course=course, length=length)
    progress.write(RunFiles(order).checkpoints / "step-000004/progress.json")
    other = make_order(tmp_path, steps=None, epochs=9, **longer)
    steps = [progress.step for _, progress in checkpoint.resumable(other, other.wanted())]
    assert steps == found
