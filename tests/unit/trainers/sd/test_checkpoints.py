"""Checkpoints: what a longer training goes on from, what is never removed, and damage."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from latentmake.base import digest
from latentmake.base.errors import TrainingError
from latentmake.commands.forecast import steps_of, training_time
from latentmake.data.memo import Memo
from latentmake.pages.plan_report import report
from latentmake.plan.run_plan import Plan, RunPlan
from latentmake.runs.order import Record, RunFiles, taken_back
from latentmake.runs.results import INDEX, PictureIndex
from latentmake.trainers.loop.order import sample_steps
from latentmake.trainers.loop.train import Training
from latentmake.trainers.sd.plan import Sd
from latentmake.trainers.sd.unet import SdOrder
from trainer_world import make_order, make_training, record, trained, weights

pytestmark = pytest.mark.usefixtures("own_folder")


def folders(order: SdOrder) -> list[str]:
    return sorted(each.name for each in RunFiles(order).checkpoints.iterdir())


def test_the_state_of_the_last_step_is_kept(tmp_path: Path) -> None:
    order = trained(tmp_path, steps=4, checkpointing_steps=3)
    assert folders(order) == ["step-000004"]
    names = ("pytorch_lora_weights.safetensors", "kohya.safetensors")
    files = {name: digest.of_file(Path(order.output, name)) for name in names}
    assert record(order)["files"] == files
    # Weights that were lost are written from it again.
    before = weights(order)
    RunFiles(order).weights.unlink()
    make_training(order).run()
    assert (weights(order), folders(order)) == (before, ["step-000004"])


@pytest.mark.parametrize(
    ("short", "long"), [({"steps": 4}, {"steps": 6}), ({"epochs": 1}, {"epochs": 2})]
)
def test_a_longer_training_goes_on_from_the_last_state_of_the_shorter_one(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], short: dict[str, Any], long: dict[str, Any]
) -> None:
    settings: dict[str, Any] = {"learning_rate": 1e-2, "samples": {"num_inference_steps": 1}}
    settings["lora_dropout"] = 0.3
    first = trained(tmp_path, prompts=True, **short, **settings)
    steps = record(first)["steps"]
    capfd.readouterr()
    further = trained(tmp_path, prompts=True, **long, **settings)
    said = capfd.readouterr().err
    assert f"resumed from step {steps} of a shorter training" in said
    assert folders(further) == [f"step-{record(further)['steps']:06d}"]
    # It is the training of that length.
    at_once = trained(tmp_path, prompts=True, output="at_once", **long, **settings)
    assert weights(further) == weights(at_once)
    assert record(further)["loss_end"] == record(at_once)["loss_end"]
    # The pictures of the shorter one are shown with its own.
    index, total = PictureIndex.read(RunFiles(further).samples / INDEX), record(further)["steps"]
    assert index is not None
    assert set(index.steps) == sample_steps(first, steps) | sample_steps(further, total)


def planned(order: SdOrder, lock: str = "d" * 64) -> RunPlan:
    """Return the plan of a run whose caches are there."""
    config = SimpleNamespace(runs={order.run: SimpleNamespace(trainer=order.trainer)})
    facts: Any = SimpleNamespace(runs_jobs=True, read_only=False, forced=(), config=config)
    plan = RunPlan(order.run, {}, lock=lock)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Sd, "order", lambda *_: order)
        Sd().plan(facts, plan, train=False)
    return plan


def test_the_plan_says_from_which_step_a_training_goes_on(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert planned(make_order(tmp_path, steps=2)).note == ""
    trained(tmp_path, steps=2)
    longer = planned(make_order(tmp_path, steps=4))
    assert longer.note == "training of tiny: goes on from step 2"
    facts: Any = SimpleNamespace(memo=Memo(None))
    report(facts, Plan({"cats": longer}), ["cats"], [], kinds={"cats": ()}, dry=True)
    assert longer.note in capfd.readouterr().err.splitlines()
    for changes in ({"steps": 4, "rank": 2}, {"steps": 4, "learning_rate": 1e-3}, {"steps": 1}):
        assert planned(make_order(tmp_path, **changes)).note == ""
    assert planned(make_order(tmp_path, epochs=2)).note == ""
    assert planned(make_order(tmp_path, steps=4), lock="e" * 64).note == ""


def test_the_cost_of_a_training_is_that_of_the_steps_which_are_left(tmp_path: Path) -> None:
    trained(tmp_path, steps=2)

    def left(plan: RunPlan) -> int:
        assert isinstance(plan.trainer, SdOrder)
        runs = {plan.name: SimpleNamespace(trainer=plan.trainer.trainer)}
        facts: Any = SimpleNamespace(config=SimpleNamespace(runs=runs))
        return steps_of(facts, plan, plan.trainer)

    assert left(planned(make_order(tmp_path, steps=6))) == 4
    assert left(planned(make_order(tmp_path, steps=6, rank=2))) == 6
    assert left(planned(make_order(tmp_path, steps=6), lock="")) == 6
    facts: Any = None
    back = planned(make_order(tmp_path, steps=6))
    back.note = taken_back(back.name)
    assert training_time(facts, back, {}) == (0.0, 0.0, 0.0, "its previous result", 0.0)


def test_an_edited_training_goes_on_from_its_last_weights_where_it_is_asked_to(
    tmp_path: Path,
) -> None:
    settings: dict[str, Any] = {"steps": 6, "learning_rate": 1e-2, "on_change": "continue"}
    trained(tmp_path, **settings)
    edited = make_order(tmp_path, **settings | {"seed": 1})
    note = "training of tiny: goes on from the last weights"
    assert planned(edited).note == planned(edited, lock="").note == note
    assert planned(make_order(tmp_path, steps=6, seed=1)).note == ""
    before = record(edited)
    training = make_training(edited)
    network = training.learner.denoiser
    assert any(each.any() for name, each in network.named_parameters() if "lora_B" in name)
    training.run()
    assert RunFiles(edited).trained(edited.wanted())
    anew = trained(tmp_path, steps=6, seed=1, learning_rate=1e-2, output="anew")
    assert record(anew)["loss_start"] > record(edited)["loss_start"]
    assert before["parts"] != record(edited)["parts"] == record(anew)["parts"]
    with pytest.raises(TrainingError, match=r"another rank.*trains them anew"):
        make_training(make_order(tmp_path, **settings | {"rank": 2}))


def test_a_setting_that_the_record_of_an_earlier_release_lacks_is_named(tmp_path: Path) -> None:
    order = trained(tmp_path, steps=2)
    file = RunFiles(order).record
    made = Record.read(file)
    assert made is not None
    made.values["settings"].pop("snr_gamma")
    made.write(file)
    other = make_order(tmp_path, steps=2, snr_gamma=5, rank=4)
    assert [*map(str, planned(other).reasons)] == ["rank 8 -> 4", "snr_gamma none -> 5.0"]
    made.model_copy(update={"values": {}}).write(file)
    (settings_alone,) = planned(other).reasons
    assert settings_alone.name == "settings"
    assert settings_alone.old != settings_alone.new


# -- damage ---------------------------------------------------------------------------------------


def flip(path: Path) -> None:
    """Change one bit in the middle of a file, which is still read without an error."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("name", ["weights.safetensors", "state.pt"])
def test_a_flipped_bit_in_a_checkpoint_resumes_from_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], name: str
) -> None:
    settings: dict[str, Any] = {"steps": 3, "checkpointing_steps": 1, "learning_rate": 1e-2}
    whole = trained(tmp_path, output="whole", **settings)
    order = make_order(tmp_path, **settings)
    with monkeypatch.context() as killed:
        killed.setattr(Training, "_finish", lambda training: None)
        make_training(order).run()
    second, third = sorted(RunFiles(order).checkpoints.iterdir())
    flip(third / name)
    capfd.readouterr()
    make_training(order).run()
    said = capfd.readouterr().err.splitlines()
    assert [line for line in said if "damaged" in line] == [f"{third} is damaged and skipped"]
    assert f"resumed from step 2 ({second})" in said
    assert weights(order) == weights(whole)


@pytest.mark.parametrize("name", ["weights.safetensors", "progress.json"])
def test_without_a_sound_checkpoint_a_training_begins_anew_and_says_so(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], name: str
) -> None:
    order = trained(tmp_path, steps=2)
    expected = weights(order)
    RunFiles(order).record.unlink()
    (folder,) = RunFiles(order).checkpoints.iterdir()
    (folder / name).write_bytes((folder / name).read_bytes()[:-9])
    capfd.readouterr()
    make_training(order).run()
    said = capfd.readouterr().err
    assert f"{folder} is damaged and skipped" in said.splitlines()
    assert weights(order) == expected
