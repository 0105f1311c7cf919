"""Whole trainings: what they write, that they learn, and that a kill changes nothing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from diffusers import DDIMScheduler, StableDiffusionPipeline, UNet2DConditionModel
from latentmake.base.errors import (
    CacheError,
    ModelError,
    StorageError,
    TrainingError,
    storage_error,
)
from latentmake.config.weights import Weights
from latentmake.pages.curves import read_curves
from latentmake.plan.product import Parts
from latentmake.runs.order import RunFiles, read_order
from latentmake.trainers.loop import checkpoint, state
from latentmake.trainers.loop.recipe import generator
from latentmake.trainers.sd.unet import SdOrder
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from trainer_world import (
    make_manifest,
    make_order,
    make_training,
    make_unet,
    of_model,
    train,
    unet_inputs,
    write_order,
)

STEPS = 40
TRAIN = "latentmake.trainers.run"
SCRIPTS = Path(__file__).parents[4] / "scripts"
SETTINGS: dict[str, Any] = {
    "steps": STEPS,
    "rank": 4,
    "alpha": 2.0,
    "target_modules": ["to_q", "to_k", "to_v", "to_out.0", "conv1"],
    "learning_rate": 1e-2,
    "lr_scheduler": "cosine",
    "lr_warmup_steps": 2,
    "gradient_accumulation_steps": 2,
    "checkpointing_steps": 6,
    "seed": 7,
    "samples": {"num_inference_steps": 2},
}


class Launched(NamedTuple):
    root: Path
    order: SdOrder
    path: Path
    receipt: dict[str, Any]

    def again(self) -> str:
        """Train once more, and return the log."""
        log = self.root / "again.log"
        train(self.path, log=log, receipt=self.root / "again.json", threads=1)
        return log.read_text()


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> Launched:
    root = tmp_path_factory.mktemp("launched")
    order = make_order(root, prompts=True, **SETTINGS)
    path = write_order(order, root / "order.json")
    train(path, log=root / "train.log", receipt=root / "receipt.json", threads=1)
    return Launched(root, order, path, json.loads((root / "receipt.json").read_text()))


def test_receipt_and_log_tell_what_was_trained(launched: Launched) -> None:
    receipt, layout = launched.receipt, RunFiles(launched.order)
    assert receipt["parts"] == launched.order.wanted()
    assert receipt["weights"] == str(layout.weights)
    assert receipt["samples"] == str(layout.grid)
    assert receipt["steps"] == STEPS
    assert receipt["loss_end"] < receipt["loss_start"]

    log = (launched.root / "train.log").read_text()
    assert f"loss at the end: {receipt['loss_end']:.4f}" in log
    assert f"loss at the start: {receipt['loss_start']:.4f}" in log
    events = EventAccumulator(str(layout.logs)).Reload()
    assert set(events.Tags()["scalars"]) == {
        *("loss", "raw_loss", "learning_rate", "gradient_norm", "qk_grads_av"),
        *("epoch", "images_per_second"),
    }
    for name in events.Tags()["scalars"]:
        assert [event.step for event in events.Scalars(name)] == list(range(1, STEPS + 1))


@pytest.mark.parametrize("targets", [["to_q", "conv1"], ["to_q", "to_out.0", "conv_in"]])
def test_a_pipeline_with_the_lora_predicts_what_the_trained_network_does(
    tmp_path: Path, targets: list[str]
) -> None:
    # The first layer of the file is no attention.
    downs, ups = ("DownBlock2D", "CrossAttnDownBlock2D"), ("CrossAttnUpBlock2D", "UpBlock2D")
    make_unet(tmp_path / "unet", down_block_types=downs, up_block_types=ups)
    order = make_order(tmp_path, **{**SETTINGS, "steps": 6, "target_modules": targets})
    training = make_training(order)
    training.run()
    trained = training.learner.denoiser.unet.eval()
    parts = ("vae", "text_encoder", "tokenizer", "safety_checker", "feature_extractor")
    pipeline: Any = StableDiffusionPipeline(
        **dict.fromkeys(parts),
        unet=UNet2DConditionModel.from_pretrained(order.unet.path),
        scheduler=DDIMScheduler(),
        requires_safety_checker=False,
    )
    with torch.no_grad():
        plain = pipeline.unet(*unet_inputs(2)).sample
        pipeline.load_lora_weights(order.output)
        loaded = pipeline.unet(*unet_inputs(2)).sample
        expected = trained(*unet_inputs(2)).sample
    assert _filled(pipeline.unet) == _filled(trained)
    assert torch.equal(loaded, expected)
    assert not torch.allclose(plain, expected, atol=1e-3)
    (adapter,) = pipeline.unet.peft_config.values()
    assert (adapter.r, adapter.lora_alpha) == (4, 2.0)


def _filled(unet: Any) -> set[str]:
    """Return the modules whose LoRA changes what they compute."""
    return {
        name.partition(".lora_B")[0]
        for name, value in unet.named_parameters()
        if ".lora_B." in name and value.any()
    }


def test_the_loss_of_held_out_items_is_logged_and_changes_no_weight(tmp_path: Path) -> None:
    make_manifest(tmp_path)
    rows = [json.loads(row) for row in (tmp_path / "manifest.jsonl").read_text().splitlines()]
    rows[1] |= {"validation": True, "stem": "cats/item1"}
    (tmp_path / "manifest.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings: dict[str, Any] = {"steps": 5, "lora_dropout": 0.3, "ema_decay": 0.9}
    plain = make_order(tmp_path, output="plain", learning_rate=1e-2, **settings)
    order = make_order(tmp_path, learning_rate=1e-2, **settings)
    order = order.model_copy(update={"validates": 2})
    for each in (plain, order):
        make_training(each).run()
    assert order.wanted() == plain.wanted()
    assert RunFiles(order).weights.read_bytes() == RunFiles(plain).weights.read_bytes()
    found = read_curves(RunFiles(order).logs)
    assert found.keys() - read_curves(RunFiles(plain).logs).keys() == {
        "validation_loss",
        "validation_loss/cats",
    }
    steps, losses = found["validation_loss"]
    assert steps.tolist() == [0, 2, 4, 5]
    assert len(set(losses.tolist())) == 4 and (losses > 0).all()


# Ends as by `kill -9` where its second checkpoint is begun: five steps past its first.
KILLED = """
import os, signal, sys
from latentmake.trainers.run import main

def kill(event, arguments):
    if event == "os.mkdir" and ".step-000012" in os.fspath(arguments[0]):
        os.kill(os.getpid(), signal.SIGKILL)

sys.addaudithook(kill)
main([sys.argv[1], "train"])
"""


# No file grows any more once the training runs, as on a disk that another program has filled.
FULL = """
import resource, sys
from latentmake.trainers import run
from latentmake.trainers.loop.train import Training

class Filled(Training):
    def _probe(self):
        resource.setrlimit(resource.RLIMIT_FSIZE, (64, 64))
        return super()._probe()

run.Training = Filled
sys.exit(run.main([sys.argv[1], "train"]))
"""


def _run(*command: str, **changes: str) -> subprocess.CompletedProcess[bytes]:
    environment = {**os.environ, "PYTHONPATH": str(SCRIPTS), "OMP_NUM_THREADS": "1", **changes}
    return subprocess.run(
        [sys.executable, *command],
        env={**environment, "HF_HUB_OFFLINE": "1"},
        stderr=subprocess.PIPE,
        check=False,
        timeout=600,
    )


def test_a_killed_training_ends_with_the_same_bytes(launched: Launched) -> None:
    order = launched.order.model_copy(update={"output": str(launched.root / "killed")})
    path = write_order(order, launched.root / "killed.json")
    layout = RunFiles(order)
    killed = _run("-c", KILLED, str(path))
    assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()
    ((_, kept),) = checkpoint.find(layout.checkpoints, order.wanted())
    assert kept.step == 6
    assert not layout.weights.exists()
    assert not layout.record.exists()

    second = _run("-m", TRAIN, str(path), "train")
    assert second.returncode == 0, second.stderr.decode()
    assert b"resumed from step 6" in second.stderr
    first = RunFiles(launched.order)
    assert layout.weights.read_bytes() == first.weights.read_bytes()
    for mine, theirs in zip(
        sorted(layout.samples.glob("*.png")), sorted(first.samples.glob("*.png")), strict=True
    ):
        assert mine.read_bytes() == theirs.read_bytes()
    record = json.loads(layout.record.read_text())
    expected = json.loads(first.record.read_text())
    for values in (record, expected):
        assert values.pop("seconds") > 0 and values.pop("began") > 0
    assert record == expected
    events = EventAccumulator(str(layout.logs)).Reload()
    assert [event.step for event in events.Scalars("loss")] == list(range(1, STEPS + 1))


def test_a_disk_that_fills_up_under_a_training_is_told_in_a_line(tmp_path: Path) -> None:
    order = make_order(tmp_path, steps=2)
    path = write_order(order, tmp_path / "order.json")
    done = _run("-B", "-c", FULL, str(path))
    assert done.returncode == 1 and b"Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1].startswith(f"error: runs/{order.run}/history".encode())
    assert b"; raise the limit, then run the same command" in done.stderr


@pytest.mark.parametrize("kind", ["16", "text"])
def test_a_cache_file_with_nan_is_named_before_the_first_step(tmp_path: Path, kind: str) -> None:
    order = make_order(tmp_path)
    bad = tmp_path / f"cache/{kind}/1.safetensors"
    with safe_open(bad, framework="pt") as file:
        metadata = file.metadata()
    tensors = load_file(bad)
    for each in tensors.values():
        each.view(-1)[3] = float("nan")
    save_file(tensors, bad, metadata)
    with pytest.raises(CacheError, match="NaN or infinite values; delete it and run") as error:
        make_training(order).run()
    assert error.value.where == str(bad)
    assert not RunFiles(order).checkpoints.exists()


def test_a_mistake_of_the_user_ends_a_training_in_one_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    order = make_order(tmp_path, target_modules=["to_q", "to_kk"])
    path, log = write_order(order, tmp_path / "order.json"), tmp_path / "log"
    receipt = tmp_path / "receipt.json"
    with pytest.raises(
        TrainingError, match=r"run tiny: .*no layer of the UNet is named `to_kk`"
    ) as error:
        train(path, log=log, receipt=receipt, threads=1)
    assert str(log) in str(error.value) and not receipt.exists()
    assert capfd.readouterr().err == ""
    assert log.read_bytes() == b""
    assert not [each for each in Path(order.output).iterdir() if each.name.startswith(".")]


def test_a_new_lock_trains_anew(tmp_path: Path) -> None:
    order = make_order(tmp_path, steps=2, checkpointing_steps=1)
    make_training(order).run()
    layout = RunFiles(order)
    (tmp_path / "dataset.lock").write_text(json.dumps({"digest": "e" * 64}))
    changed = order.wanted()
    make_training(order).run()
    assert json.loads(layout.record.read_text())["parts"] == changed
    # Those of the trainings before are gone.
    assert [each.name for each in layout.checkpoints.iterdir()] == ["step-000002"]
    assert checkpoint.find(layout.checkpoints, changed)


def test_a_loss_that_is_no_number_stops_and_keeps_the_last_checkpoint(tmp_path: Path) -> None:
    order = make_order(tmp_path, steps=30, checkpointing_steps=1, learning_rate=1000)
    with pytest.raises(TrainingError, match="is NaN or infinite at step") as error:
        make_training(order).run()
    ((folder, newest), *_) = checkpoint.find(RunFiles(order).checkpoints, order.wanted())
    assert f"at step {newest.step + 1}, for " in str(error.value)
    assert f"the checkpoint of step {newest.step} is kept" in str(error.value)
    loaded = state.load(folder, newest)
    assert loaded is not None
    assert all(torch.isfinite(value).all() for value in loaded[0].values())
    assert not RunFiles(order).weights.exists()


def test_few_checkpoints_are_kept(tmp_path: Path) -> None:
    ours: Parts = {"dataset": "1", "network": "3"}
    theirs: Parts = {"dataset": "1", "network": "4"}
    tensors = {"a": torch.ones(2)}
    for step, want in ((5, theirs), (10, ours), (15, ours), (20, ours), (30, theirs)):
        progress = checkpoint.Progress(parts=want, step=step, loss_start=1.0, seconds=2.0)
        state.save(tmp_path, progress, (tensors, {"optimizer": {}}))

    def names() -> list[str]:
        return sorted(each.name for each in tmp_path.iterdir())

    state.prune(tmp_path, ours, 2, others=False)
    assert names() == ["step-000005", "step-000015", "step-000020", "step-000030"]
    assert [progress.step for _, progress in checkpoint.find(tmp_path, ours)] == [20, 15]
    (tmp_path / ".step-000025.latentmake-partial").mkdir()
    state.prune(tmp_path, ours, 1, others=True)
    assert names() == ["step-000020"]


def test_a_whole_unet_is_written_as_diffusers_reads_it(tmp_path: Path) -> None:
    order = make_order(
        tmp_path, adapter="full", steps=60, learning_rate=3e-3, train_batch_size=3, seed=1
    )
    training = make_training(order)
    training.run()
    layout = RunFiles(order)
    loaded = UNet2DConditionModel.from_pretrained(layout.output / "unet")
    with torch.no_grad():
        assert torch.equal(
            loaded(*unet_inputs(2)).sample,
            training.learner.denoiser.unet.eval()(*unet_inputs(2)).sample,
        )
    record = json.loads(layout.record.read_text())
    assert record["loss_end"] < 0.6 * record["loss_start"]
    assert {*record["files"]} == {"unet/config.json", "unet/diffusion_pytorch_model.safetensors"}
    # A LoRA afterwards takes its place.
    lora = make_order(tmp_path, steps=1)
    make_training(lora).run()
    assert not (layout.output / "unet").exists()
    assert load_file(RunFiles(lora).weights)


def test_each_item_of_a_step_counts_the_same_in_full_and_short_batches(tmp_path: Path) -> None:
    """Three items of one shape, two of them in the first batch, with and without padding."""
    make_manifest(tmp_path, tokens=(7, 4, 7))
    items = [json.loads(row) for row in (tmp_path / "manifest.jsonl").read_text().splitlines()[:3]]
    for item in items:
        item["repeats"] = 1
        item["latents"].pop("16x8")
    (tmp_path / "manifest.jsonl").write_text("\n".join(json.dumps(item) for item in items))
    order = make_order(
        tmp_path, train_batch_size=2, gradient_accumulation_steps=2, max_grad_norm=1e9
    )
    training = make_training(order)
    cut = list(training.batch_order.batches(0, 1, 1))
    assert sorted(map(len, cut)) == [1, 2]
    random = generator(0, "noise", 1, 0)
    losses = []
    for part in cut:
        batch = training.caches.batch(part)
        noise, timesteps = training.objective.draw(batch.latents.shape, random)
        losses.append(training.painter.losses(training.learner.network, batch, noise, timesteps)[0])
    expected = torch.cat(losses).mean()
    named = training.learner.denoiser.named_parameters()
    trained = {name: each for name, each in named if each.requires_grad}
    gradients = torch.autograd.grad(expected, [*trained.values()])
    attention = [  # as ai-training's train_core.py has it
        float(gradient.abs().mean())
        for name, gradient in zip(trained, gradients, strict=True)
        if ".to_q" in name or ".to_k" in name
    ]
    step = training._one_step(1, map(training.caches.batch, cut))()
    assert step["loss"] == step["raw_loss"] == pytest.approx(float(expected.detach()), rel=1e-5)
    assert step["gradient_norm"] == pytest.approx(
        float(torch.cat([each.flatten() for each in gradients]).norm()), rel=1e-4
    )
    assert 0 < step["qk_grads_av"] == pytest.approx(sum(attention), rel=1e-4)
    assert step["learning_rate"] == order.trainer.learning_rate


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"cross_attention_dim": 24}, "24 wide, but the captions' are 16 wide"),
        ({"in_channels": 9}, "takes 9 channels and gives 4, but the latents have 4"),
    ],
)
def test_a_network_that_does_not_fit_the_caches_is_named(
    tmp_path: Path, changes: dict[str, int], match: str
) -> None:
    order = make_order(tmp_path)
    unet = make_unet(tmp_path / "other", **changes)
    with pytest.raises(ModelError, match=match) as error:
        make_training(of_model(order, unet=Weights(path=str(unet))))
    assert str(unet) in str(error.value)


def test_faults_of_order_and_lock_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="cannot be read"):
        read_order(tmp_path / "none.json", SdOrder)
    (tmp_path / "bad.json").write_text('{"run": 3}')
    with pytest.raises(StorageError, match="cannot be read") as error:
        read_order(tmp_path / "bad.json", SdOrder)
    assert "\n" not in str(error.value)
    order = make_order(tmp_path)
    (tmp_path / "dataset.lock").write_text("{}")
    with pytest.raises(TrainingError, match="lock"):
        order.wanted()


def test_a_full_disk_is_named_as_such() -> None:
    """torch's archive writer itself does not say what failed."""
    with pytest.raises((OSError, RuntimeError)) as error:
        torch.save({"a": torch.ones(100_000)}, "/dev/full")
    fault = storage_error(error.value, "here")
    assert isinstance(fault, StorageError)
    assert "no space left" in str(fault)
    assert storage_error(RuntimeError("anything else"), "here") is None
    assert isinstance(storage_error(SafetensorError("I/O: os error 28"), "here"), StorageError)
