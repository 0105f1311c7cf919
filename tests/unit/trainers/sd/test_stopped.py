"""A signal stops a training after the step in hand, or amid samples; nothing of it is lost."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from latentmake.pages.curves import read_curves
from latentmake.runs.order import RunFiles
from latentmake.runs.results import INDEX, PictureIndex
from latentmake.trainers.loop.checkpoint import find
from latentmake.trainers.loop.train import Training
from latentmake.trainers.sd.recipe import SdRecipe
from latentmake.trainers.sd.unet import SdOrder
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.summary.writer import event_file_writer
from trainer_world import make_order, make_training, write_order

SCRIPTS = Path(__file__).parents[4] / "scripts"
STEPS = 5
SETTINGS: dict[str, Any] = {
    "steps": STEPS,
    "learning_rate": 1e-2,
    "ema_decay": 0.9,
    "lora_dropout": 0.3,
    "gradient_accumulation_steps": 2,
    "samples": {"every": 2, "num_inference_steps": 2},
}


class Signalled(Training):
    """A training that gets signals, as Ctrl-C in a terminal brings two of them, in a step."""

    at, amid_samples = 0, False

    def _told(self, step: int) -> None:
        if step == self.at:
            signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGINT)

    def _one_step(self, step: int, batches: Any) -> Any:
        if not self.amid_samples:
            self._told(step)
        return super()._one_step(step, batches)

    def _sampled(self) -> Any:
        if self.amid_samples:
            self._told(self.step)
        return super()._sampled()


def _stop(order: SdOrder, step: int, *, amid_samples: bool = False) -> str:
    """Train until a signal in a step; return what the training says of its end."""
    training = Signalled(SdRecipe(order))
    training.at, training.amid_samples = step, amid_samples
    with pytest.raises(KeyboardInterrupt) as stopped:
        training.run()
    return str(stopped.value)


@pytest.mark.parametrize("amid_samples", [False, True], ids=["in a step", "amid samples"])
def test_a_training_stopped_at_any_step_ends_with_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, amid_samples: bool
) -> None:
    # Files of one second and one process, which trainings do not share, are read by this number's
    # digits.
    monkeypatch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(10_000))
    undisturbed = make_order(tmp_path, prompts=True, **SETTINGS)
    make_training(undisturbed).run()
    order = make_order(tmp_path, output="stopped", prompts=True, **SETTINGS)
    files, first = RunFiles(order), RunFiles(undisturbed)
    steps = [2, 4, 5] if amid_samples else range(1, STEPS + 1)
    for step in steps:
        said = _stop(order, step, amid_samples=amid_samples)
        told = (
            f"stopped at step {step} of {STEPS}, state saved; the same command goes on from there"
        )
        assert said == told
        assert find(files.checkpoints, order.wanted())[0][1].step == step
    make_training(order).run()
    assert files.weights.read_bytes() == first.weights.read_bytes()
    mine, theirs = (PictureIndex.read(each.samples / INDEX) for each in (files, first))
    assert mine is not None
    assert theirs is not None
    assert mine.steps == theirs.steps == [0, 2, 4, 5]
    for name in (name for row in mine.files for name in row):
        assert (files.samples / str(name)).read_bytes() == (first.samples / str(name)).read_bytes()
    losses = [read_curves(each.logs)["loss"] for each in (files, first)]
    assert [each.tolist() for each in losses[0]] == [each.tolist() for each in losses[1]]


# The second process alone is told to stop, where a step is named.
SIGNALLED = """
import os, signal, sys
from latentmake.trainers import run
from latentmake.trainers.loop.train import Training

class Signalled(Training):
    def _one_step(self, step, batches):
        if str(step) == os.environ.get("STOPPED_IN") and os.environ["RANK"] == "1":
            signal.raise_signal(signal.SIGTERM)
        return super()._one_step(step, batches)

run.Training = Signalled
sys.exit(run.main([sys.argv[1], "train"]))
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="two processes share a CPU, not a GPU")
def test_two_processes_stop_in_step_save_once_and_resume_to_the_same_bytes(tmp_path: Path) -> None:
    (tmp_path / "signalled.py").write_text(SIGNALLED)
    said = tmp_path / "said"

    def train(order: SdOrder, **variables: str) -> str:
        path = write_order(order, tmp_path / "order.json")
        two = ["torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
        variables |= {"PYTHONPATH": str(SCRIPTS), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        variables |= {"ACCELERATE_USE_CPU": "true", "LATENTMAKE_ERROR": str(said)}
        ended = subprocess.run(
            [sys.executable, "-m", *two, str(tmp_path / "signalled.py"), str(path)],
            env={**os.environ, **variables},
            stderr=subprocess.PIPE,
            check=False,
            timeout=600,
        )
        return ended.stderr.decode()

    orders = [make_order(tmp_path, output=x, **{**SETTINGS, "samples": {}}) for x in ("a", "b")]
    stopped, whole = map(RunFiles, orders)
    error = train(orders[0], STOPPED_IN="2")
    ((_, progress),) = find(stopped.checkpoints, orders[0].wanted())
    assert progress.step in (2, 3), error
    assert said.read_text().startswith(f"stopped at step {progress.step} of {STEPS}, state saved")
    for order in orders:
        error = train(order)
        assert RunFiles(order).record.exists(), error
    assert stopped.weights.read_bytes() == whole.weights.read_bytes()
    events = EventAccumulator(str(stopped.logs)).Reload()
    assert [event.step for event in events.Scalars("loss")] == [*range(1, STEPS + 1)]
    # Each process takes a batch of each step.
    alone = make_training(orders[0]).batch_order.epoch(STEPS)
    assert events.Scalars("epoch")[-1].value == pytest.approx(2 * alone)
