"""A training by musubi-tuner: what it is given, when it has succeeded, and how it goes on."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from latentmake.base import digest
from latentmake.base.errors import StorageError, TrainingError
from latentmake.formats.safetensors import read_head
from latentmake.plan.product import Parts
from latentmake.runs.order import Record, RunFiles
from latentmake.trainers.launched.launch import prepare
from latentmake.trainers.musubi.backend import Musubi
from latentmake.trainers.musubi.order import MusubiOrder
from latentmake.trainers.process import Stopped
from musubi_world import RUN, WAN_DIT, called, make_run, put_weights, stand_in, write_order

LORA = Path(f"runs/{RUN}/{RUN}.safetensors")
WORK = Path(f"runs/{RUN}/output")
RECEIPT = Path(f"runs/{RUN}/trained.json")


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    place = tmp_path / "project"
    place.mkdir()
    monkeypatch.chdir(place)
    monkeypatch.delenv("STAND_IN", raising=False)
    return place


@pytest.fixture
def tuner(tmp_path: Path) -> Path:
    return stand_in(tmp_path / "tuner")


def launch(order: MusubiOrder) -> str:
    """Train, and return the log."""
    log = Path("logs/train.log")
    Musubi().train(write_order(order, Path("order.json")), log=log, receipt=RECEIPT, threads=1)
    return log.read_text()


def refused(order: MusubiOrder, match: str) -> str:
    with pytest.raises(TrainingError, match=match) as caught:
        launch(order)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def wanted_of(order: MusubiOrder) -> Parts:
    return order.with_weights(digest.of_file).wanted()


def is_trained(order: MusubiOrder) -> bool:
    record = Record.read(RunFiles(order).record)
    return record is not None and record.parts == wanted_of(order) and LORA.is_file()


def epochs(path: Path = LORA) -> int:
    """Return how many epochs went into a LoRA."""
    return int(read_head(path).metadata["epochs"])


def flag(tuner: Path, name: str) -> str:
    arguments: list[str] = called(tuner)["argv"]
    return arguments[arguments.index(f"--{name}") + 1]


def test_a_training_ends_with_a_lora_a_record_and_a_receipt(root: Path, tuner: Path) -> None:
    order = make_run(root, tuner=tuner)
    log = launch(order)
    assert epochs() == 4
    assert "images and captions" in log
    assert "学習開始" in log
    assert b"\repoch 4\ncats: trained" in Path("logs/train.log").read_bytes()
    assert is_trained(order)
    receipt = json.loads(RECEIPT.read_text())
    assert (receipt["run"], receipt["weights"]) == (RUN, str(LORA))
    assert receipt["parts"] == wanted_of(order)
    assert receipt["files"] == {LORA.name: digest.of_file(LORA)}


def test_the_trainer_runs_in_its_own_folder_and_environment(
    root: Path, tuner: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SNAKEMAKE_X", "1")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[4] / "scripts"))
    launch(make_run(root, tuner=tuner))
    call = called(tuner)
    assert call["cwd"] == str(tuner)
    assert call["environment"]["VIRTUAL_ENV"] == str(tuner / "venv")
    assert call["environment"]["PYTHONUNBUFFERED"] == "1"
    assert not {"PYTHONPATH", "SNAKEMAKE_X"} & call["environment"].keys()
    for name in ("dataset_config", "dit", "output_dir", "logging_dir"):
        assert os.path.isabs(flag(tuner, name))
    assert "--sdpa" in call["argv"]


def test_a_trainer_with_accelerate_is_launched_by_it(root: Path, tmp_path: Path) -> None:
    tuner = stand_in(tmp_path / "tuner", own_venv=False)
    launch(make_run(root, tuner=tuner))
    assert epochs() == 4
    assert "ACCELERATE_MIXED_PRECISION" in called(tuner)["environment"]


def test_what_is_trained_already_is_not_trained_again(root: Path, tuner: Path) -> None:
    order = make_run(root, tuner=tuner)
    launch(order)
    (tuner / "called.json").unlink()
    RECEIPT.unlink()
    assert "already trained on exactly this" in launch(order)
    assert RECEIPT.is_file()
    assert not (tuner / "called.json").exists()


def test_samples_are_asked_for_and_other_samples_train_nothing(root: Path, tuner: Path) -> None:
    launch(make_run(root, tuner=tuner, samples={"prompts": ["a cat"]}))
    assert flag(tuner, "sample_every_n_epochs") == "1"
    assert "--sample_at_first" in called(tuner)["argv"]
    assert flag(tuner, "vae") == str(root / "models/vae.safetensors")
    prompts = Path(flag(tuner, "sample_prompts"))
    assert prompts.read_text() == "a cat --w 64 --h 64 --f 1 --d 0 --s 30\n"
    (tuner / "called.json").unlink()
    launch(make_run(root, tuner=tuner, samples={"prompts": ["a dog"], "every": 5}))
    assert not (tuner / "called.json").exists()
    order = make_run(root, tuner=tuner, model={"vae": "models"}, samples={"prompts": ["a dog"]})
    line = refused(order, "samples want a file of the original weights, not models")
    assert "correct models.wan.vae" in line


@pytest.mark.parametrize("change", ["data", "settings", "weights", "lora"])
def test_anything_else_is_trained_anew(root: Path, tuner: Path, change: str) -> None:
    launch(make_run(root, tuner=tuner))
    (tuner / "called.json").unlink()
    settings: dict[str, Any] = {"network_dim": 8} if change == "settings" else {}
    lock = "another" if change == "data" else "one"
    order = make_run(root, tuner=tuner, lock=lock, **settings)
    if change == "weights":
        put_weights(root / "models/dit.safetensors", *WAN_DIT, "blocks.1.self_attn.q.weight")
    if change == "lora":
        LORA.write_bytes(b"damaged")
    launch(order)
    assert called(tuner)
    assert is_trained(order)
    assert not (WORK / "previous").exists()


# -- failures ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mood", "fault"),
    [
        ("silent", "is not there"),
        ("empty", "holds no tensor"),
        ("merged", "holds no tensor lora_unet_*"),
        ("short", "is cut short or has grown"),
    ],
)
def test_ending_without_an_error_and_without_a_lora_is_a_failure(
    root: Path, tuner: Path, monkeypatch: pytest.MonkeyPatch, mood: str, fault: str
) -> None:
    monkeypatch.setenv("STAND_IN", mood)
    order = make_run(root, tuner=tuner)
    said = refused(order, "ended without an error, but wrote no weights")
    assert fault in said
    assert ("No training items, leaving." in said) == (mood == "silent")
    assert not LORA.exists()
    assert not RECEIPT.exists()
    assert not is_trained(order)


def test_the_error_of_the_trainer_is_the_last_line(
    root: Path, tuner: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STAND_IN", "broken")
    refused(make_run(root, tuner=tuner), "RuntimeError: the loss has gone its own way")
    assert "Traceback" in Path("logs/train.log").read_text()


@pytest.mark.parametrize("mood", ["silent", "broken", "empty"])
def test_an_old_lora_outlives_a_failure_but_does_not_stand_for_the_new_one(
    root: Path, tuner: Path, monkeypatch: pytest.MonkeyPatch, mood: str
) -> None:
    old = make_run(root, tuner=tuner)
    launch(old)
    before = LORA.read_bytes()
    monkeypatch.setenv("STAND_IN", mood)
    new = make_run(root, tuner=tuner, network_dim=8)
    refused(new, "run cats")
    previous = LORA.parent / "previous"
    assert (previous / LORA.name).read_bytes() == before
    assert not LORA.exists()
    monkeypatch.delenv("STAND_IN")
    assert "takes back the previous result" in launch(old)
    assert LORA.read_bytes() == before
    assert is_trained(old) and not previous.exists()
    launch(new)
    assert is_trained(new)
    assert (previous / LORA.name).read_bytes() == before
    assert (previous / "output" / LORA.name).is_file()


def test_states_of_a_killed_training_outlive_an_undone_change(
    root: Path, tuner: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = make_run(root, tuner=tuner)
    launch(old)
    interrupted(root, tuner, monkeypatch, "killed 3", network_dim=8)
    assert "takes back the previous result" in launch(old)
    assert not WORK.joinpath(f"{RUN}-000003-state").exists()
    launch(make_run(root, tuner=tuner, save_every_n_epochs=1, network_dim=8))
    assert Path(flag(tuner, "resume")).name == f"{RUN}-000003-state"
    assert epochs() == 4


def test_a_flag_found_unknown_only_when_it_runs_is_named(root: Path, tmp_path: Path) -> None:
    tuner = stand_in(tmp_path / "tuner", without=("discrete_flow_shift",))
    script = tuner / "wan_train_network.py"
    # Declared where nobody looks: sources say nothing, the parser refuses.
    text = script.read_text().replace('parser.add_argument("--dataset_config")', "declare(parser)")
    declare = 'def declare(parser):\n    getattr(parser, "add_argument")("--dataset_config")\n\n\n'
    script.write_text(text.replace("def main", f"{declare}def main"))
    refused(make_run(root, tuner=tuner), "unrecognized arguments: --discrete_flow_shift")


def test_the_checklist_comes_first(root: Path, tuner: Path) -> None:
    order = make_run(root, tuner=tuner)
    Path("models/dit.safetensors").unlink()
    refused(order, r"1 failed in the checklist: model: dit: .*does not exist")
    assert not (tuner / "called.json").exists()
    assert "failed" in Path("logs/train.log").read_text()


def test_orders_and_locks_that_cannot_be_read_are_named(root: Path, tuner: Path) -> None:
    order = make_run(root, tuner=tuner)
    with pytest.raises(StorageError, match="cannot be read"):
        Musubi().train(Path("gone.json"), log=Path("log"), receipt=RECEIPT)
    Path(order.lock).write_text("{}")
    refused(order, "lock")


# -- going on ----------------------------------------------------------------------------------


def interrupted(
    root: Path, tuner: Path, monkeypatch: pytest.MonkeyPatch, mood: str, **settings: Any
) -> MusubiOrder:
    monkeypatch.setenv("STAND_IN", mood)
    order = make_run(root, tuner=tuner, save_every_n_epochs=1, **settings)
    refused(order, "run cats")
    monkeypatch.delenv("STAND_IN")
    return order


def test_a_killed_training_goes_on_from_its_last_state(
    root: Path, tuner: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order = interrupted(root, tuner, monkeypatch, "killed 3")
    for path in (WORK / f"{RUN}-000001-state", WORK / f"{RUN}-000001-state/optimizer.bin"):
        os.utime(path, (2**31, 2**31))  # its number decides
    log = launch(order)
    assert Path(flag(tuner, "resume")).name == f"{RUN}-000003-state"
    # This trainer counts from one again, so that it is told what is left.
    assert flag(tuner, "max_train_epochs") == "1"
    assert "3 epochs are done" in log
    assert epochs() == 4
    assert [epochs(path) for path in sorted(WORK.glob(f"{RUN}-*.safetensors"))] == [1, 2, 3]
    assert not (WORK / "resumed").exists()


def test_a_killed_training_leaves_no_partial_state_and_no_partial_lora(
    root: Path, tuner: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tuner / "wan_train_network.py"
    dies = 'if mood in (f"killed {epoch + 1}", f"cut {epoch + 1}"):'
    cut = f'{dies}\n            os.truncate(state.removesuffix("-state") + ".safetensors", 20)'
    script.write_text(script.read_text().replace(dies, cut))
    interrupted(root, tuner, monkeypatch, "cut 2")
    left = {path.name for path in WORK.glob(f"{RUN}-*")}
    assert left == {f"{RUN}-000001-state", f"{RUN}-000001.safetensors"}


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        ({"save_every_n_epochs": 1}, "the same command goes on after epoch 3 of 4"),
        ({}, "the same command begins again, unless `save_every_n_epochs` is set"),
    ],
)
def test_a_training_that_a_signal_stops_says_from_which_state_it_goes_on(
    root: Path, tuner: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, int], kept: str
) -> None:
    script = tuner / "wan_train_network.py"
    dies = 'if mood in (f"killed {epoch + 1}", f"cut {epoch + 1}"):'
    told = "os.kill(os.getppid(), 15); __import__('time').sleep(600)"
    script.write_text(script.read_text().replace(dies, f"{dies}\n            {told}"))
    monkeypatch.setenv("STAND_IN", "killed 3")
    order = make_run(root, tuner=tuner, **settings)
    with pytest.raises(Stopped) as stopped:
        launch(order)
    line = f"run {RUN}: stopped; musubi-tuner saves no state amid an epoch: {kept}"
    assert str(stopped.value) == line


def test_a_resume_that_is_killed_loses_no_epoch_and_counts_none_twice(
    root: Path, tuner: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order = interrupted(root, tuner, monkeypatch, "killed 3")
    layout = RunFiles(order)
    before = layout.progress.read_bytes()
    assert prepare(order, wanted_of(order)).done == 3
    layout.progress.write_bytes(before)  # as if killed before it was written
    assert prepare(order, wanted_of(order)).done == 3
    launch(order)
    assert flag(tuner, "max_train_epochs") == "1"
    assert epochs() == 4


def test_a_training_killed_behind_its_last_state_trains_no_epoch_more(
    root: Path, tuner: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order = interrupted(root, tuner, monkeypatch, "killed at the end")
    assert "4 epochs are done" in launch(order)
    assert epochs() == 4


def test_a_result_that_nobody_could_accept_any_more_is_accepted(
    root: Path, tuner: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order = make_run(root, tuner=tuner)
    launch(order)
    for path in (LORA, RunFiles(order).record, tuner / "called.json"):
        path.unlink()
    assert "all epochs were done before" in launch(order)
    assert is_trained(order) and not (tuner / "called.json").exists()


def test_a_schedule_that_ends_is_not_resumed_by_a_trainer_that_counts_anew(
    root: Path, tuner: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tuner / "wan_train_network.py"
    declared = 'parser.add_argument("--lr_scheduler")\n    parser.add_argument("--task")'
    script.write_text(script.read_text().replace('parser.add_argument("--task")', declared))
    cosine = ["--lr_scheduler", "cosine"]
    order = interrupted(root, tuner, monkeypatch, "killed 3", arguments=cosine)
    log = launch(order)
    assert "--resume" not in called(tuner)["argv"]
    assert "a killed training begins anew" in log
    assert epochs() == 4


def test_a_result_may_be_read_by_whom_the_umask_says(root: Path, tuner: Path) -> None:
    before = os.umask(0o027)
    try:
        launch(make_run(root, tuner=tuner))
    finally:
        os.umask(before)
    assert LORA.stat().st_mode & 0o777 == 0o640


def test_paths_among_further_arguments_are_those_of_the_project(root: Path, tuner: Path) -> None:
    (root / "prompts.txt").write_text("a cat")
    launch(make_run(root, tuner=tuner, arguments=["--sample_prompts", "prompts.txt"]))
    assert flag(tuner, "sample_prompts") == str(root / "prompts.txt")


def test_a_training_killed_over_and_over_is_as_long_as_any(
    root: Path, tuner: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for mood in ("killed 1", "killed 1", "broken", "killed 1"):
        order = interrupted(root, tuner, monkeypatch, mood)
    launch(order)
    assert flag(tuner, "max_train_epochs") == "1"
    assert epochs() == 4
    assert [epochs(path) for path in sorted(WORK.glob(f"{RUN}-*.safetensors"))] == [1, 2, 3]


def test_a_trainer_that_counts_on_is_told_all_epochs(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tuner = stand_in(tmp_path / "tuner", counts=True)
    order = interrupted(root, tuner, monkeypatch, "killed 2")
    launch(order)
    assert flag(tuner, "resume") == str(root / WORK / f"resumed/000000/{RUN}-000002-state")
    assert flag(tuner, "max_train_epochs") == "4"
    assert epochs() == 4
    assert [epochs(path) for path in sorted(WORK.glob(f"{RUN}-*.safetensors"))] == [1, 2, 3]


def test_a_state_that_was_cut_short_is_passed_over(
    root: Path, tuner: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch(interrupted(root, tuner, monkeypatch, "cut 3"))
    assert Path(flag(tuner, "resume")).name == f"{RUN}-000002-state"
    assert epochs() == 4


def test_a_state_of_another_training_is_not_gone_on_from(
    root: Path, tuner: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupted(root, tuner, monkeypatch, "killed 2")
    launch(make_run(root, tuner=tuner, save_every_n_epochs=1, learning_rate=0.5))
    assert "--resume" not in called(tuner)["argv"]
    assert epochs() == 4
    assert not (WORK / "previous").exists()


@pytest.mark.parametrize("lost", ["output/wanted.json", "output/*-state"])
def test_without_states_or_a_note_of_what_they_are_a_training_begins_anew(
    root: Path, tuner: Path, monkeypatch: pytest.MonkeyPatch, lost: str
) -> None:
    order = interrupted(root, tuner, monkeypatch, "killed 2")
    for path in Path(order.output).glob(lost):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    launch(order)
    assert "--resume" not in called(tuner)["argv"]
    assert epochs() == 4
