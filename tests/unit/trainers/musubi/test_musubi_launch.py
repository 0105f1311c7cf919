"""A training by musubi-tuner: what it is given, when it has succeeded, and how it goes on."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from latentmake.base import digest
from latentmake.base.errors import TrainingError
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
def tuner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A musubi-tuner, beside the project that is the working directory."""
    (tmp_path / "project").mkdir()
    monkeypatch.chdir(tmp_path / "project")
    monkeypatch.delenv("STAND_IN", raising=False)
    return stand_in(tmp_path / "tuner")


@pytest.fixture
def mood(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Say what goes wrong with trainings from now on; "" for nothing."""
    return lambda mood: monkeypatch.setenv("STAND_IN", mood)


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


def run(tuner: Path, **settings: Any) -> MusubiOrder:
    return make_run(Path.cwd(), tuner=tuner, **settings)


def test_a_training_ends_with_a_lora_a_record_and_a_receipt(tuner: Path) -> None:
    order, before = run(tuner), os.umask(0o027)
    try:
        log = launch(order)
    finally:
        os.umask(before)
    assert epochs() == 4 and LORA.stat().st_mode & 0o777 == 0o640
    assert "images and captions" in log and "学習開始" in log
    assert b"\repoch 4\ncats: trained" in Path("logs/train.log").read_bytes()
    assert is_trained(order)
    receipt = json.loads(RECEIPT.read_text())
    assert (receipt["run"], receipt["weights"]) == (RUN, str(LORA))
    assert receipt["parts"] == wanted_of(order)
    weights = (LORA, LORA.with_suffix(".described.safetensors"))
    assert receipt["files"] == {path.name: digest.of_file(path) for path in weights}
    (tuner / "called.json").unlink()
    RECEIPT.unlink()
    assert "already trained on exactly this" in launch(order)
    assert RECEIPT.is_file() and not (tuner / "called.json").exists()


def test_the_trainer_runs_in_its_own_folder_and_environment_on_paths_of_the_project(
    tuner: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SNAKEMAKE_X", "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[4] / "scripts"))
    Path("prompts.txt").write_text("a cat")
    launch(run(tuner, arguments=["--sample_prompts", "prompts.txt"]))
    call = called(tuner)
    assert call["cwd"] == str(tuner)
    assert call["environment"]["VIRTUAL_ENV"] == str(tuner / "venv")
    assert call["environment"]["PYTHONUNBUFFERED"] == "1"
    assert call["environment"]["OMP_NUM_THREADS"] == "7"  # the user's, as in encoding
    assert not {"PYTHONPATH", "SNAKEMAKE_X"} & call["environment"].keys()
    for name in ("dataset_config", "dit", "output_dir", "logging_dir"):
        assert os.path.isabs(flag(tuner, name))
    assert flag(tuner, "sample_prompts") == os.path.abspath("prompts.txt")
    assert "--sdpa" in call["argv"]


def test_a_trainer_with_accelerate_is_launched_by_it(tuner: Path, tmp_path: Path) -> None:
    other = stand_in(tmp_path / "other", own_venv=False)
    launch(run(other))
    assert epochs() == 4
    assert "ACCELERATE_MIXED_PRECISION" in called(other)["environment"]


def test_samples_are_asked_for_and_other_samples_train_nothing(tuner: Path) -> None:
    launch(run(tuner, samples={"prompts": ["a cat"]}))
    assert flag(tuner, "sample_every_n_epochs") == "1"
    assert "--sample_at_first" in called(tuner)["argv"]
    assert flag(tuner, "vae") == os.path.abspath("models/vae.safetensors")
    prompts = Path(flag(tuner, "sample_prompts"))
    assert prompts.read_text() == "a cat --w 64 --h 64 --f 1 --d 0 --s 30\n"
    (tuner / "called.json").unlink()
    launch(run(tuner, samples={"prompts": ["a dog"], "every": 5}))
    assert not (tuner / "called.json").exists()
    order = run(tuner, model={"vae": "models"}, samples={"prompts": ["a dog"]})
    line = refused(order, "samples want a file of the original weights, not models")
    assert "correct models.wan.vae" in line


@pytest.mark.parametrize("change", ["data", "settings", "weights", "lora"])
def test_anything_else_is_trained_anew(tuner: Path, change: str) -> None:
    launch(run(tuner))
    (tuner / "called.json").unlink()
    settings: dict[str, Any] = {"network_dim": 8} if change == "settings" else {}
    order = run(tuner, lock="another" if change == "data" else "one", **settings)
    if change == "weights":
        put_weights(Path("models/dit.safetensors"), *WAN_DIT, "blocks.1.self_attn.q.weight")
    if change == "lora":
        LORA.write_bytes(b"damaged")
    launch(order)
    assert called(tuner)
    assert is_trained(order)
    assert not (WORK / "previous").exists()


# -- failures ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "fault"),
    [
        ("silent", "is not there"),
        ("empty", "holds no tensor"),
        ("merged", "holds no tensor lora_unet_*"),
        ("short", "is cut short or has grown"),
    ],
)
def test_ending_without_an_error_and_without_a_lora_is_a_failure(
    tuner: Path, mood: Callable[[str], None], wrong: str, fault: str
) -> None:
    mood(wrong)
    order = run(tuner)
    said = refused(order, "ended without an error, but wrote no weights")
    assert fault in said
    assert ("No training items, leaving." in said) == (wrong == "silent")
    assert not LORA.exists() and not RECEIPT.exists() and not is_trained(order)


@pytest.mark.parametrize("wrong", ["broken", "empty"])
def test_an_old_lora_outlives_a_failure_but_does_not_stand_for_the_new_one(
    tuner: Path, mood: Callable[[str], None], wrong: str
) -> None:
    old, previous = run(tuner), LORA.parent / "previous"
    launch(old)
    before = LORA.read_bytes()
    mood(wrong)
    new = run(tuner, network_dim=8)
    words = {"broken": "RuntimeError: the loss has gone its own way", "empty": "wrote no weights"}
    refused(new, words[wrong])  # the trainer's own error is the last line
    assert (previous / LORA.name).read_bytes() == before
    assert not LORA.exists()
    mood("")
    assert "takes back the previous result" in launch(old)
    assert LORA.read_bytes() == before
    assert is_trained(old) and not previous.exists()
    launch(new)
    assert is_trained(new)
    assert (previous / LORA.name).read_bytes() == before
    assert (previous / "output" / LORA.name).is_file()


def test_the_checklist_comes_first(tuner: Path) -> None:
    order = run(tuner)
    Path("models/dit.safetensors").unlink()
    refused(order, r"1 failed in the checklist: model: dit: .*does not exist")
    assert not (tuner / "called.json").exists()
    assert "failed" in Path("logs/train.log").read_text()


# -- going on ----------------------------------------------------------------------------------


@pytest.fixture
def interrupted(tuner: Path, mood: Callable[[str], None]) -> Callable[..., MusubiOrder]:
    """Let trainings end too early, one after the other; return their order."""

    def end(*moods: str, **settings: Any) -> MusubiOrder:
        for each in moods:
            mood(each)
            order = run(tuner, save_every_n_epochs=1, **settings)
            refused(order, "run cats")
        mood("")
        return order

    return end


Interrupted = Callable[..., MusubiOrder]


@pytest.mark.parametrize(
    ("moods", "counts", "state", "done", "told"),
    [
        (["killed 3"], False, 3, 3, "1"),  # it counts from one again: it is told what is left
        (["killed 1", "killed 1", "broken", "killed 1"], False, 1, 3, "1"),
        (["cut 3"], False, 2, 2, "2"),  # a state that was cut short is passed over
        (["killed 2"], True, 2, 2, "4"),  # it counts on: it is told all epochs
    ],
    ids=["once", "over and over", "while it saves", "where it counts on"],
)
def test_a_killed_training_goes_on_from_its_last_whole_state_and_is_as_long_as_any(
    tuner: Path,
    interrupted: Interrupted,
    moods: list[str],
    counts: bool,
    state: int,
    done: int,
    told: str,
) -> None:
    stand_in(tuner, counts=counts)
    order = interrupted(*moods)
    for path in WORK.glob(f"{RUN}-000001-state"):
        os.utime(path, (2**31, 2**31))  # its number decides
    log = launch(order)
    assert flag(tuner, "resume").endswith(f"{RUN}-00000{state}-state")
    assert flag(tuner, "max_train_epochs") == told
    assert f"{done} epochs are done" in log
    assert epochs() == 4
    assert [epochs(path) for path in sorted(WORK.glob(f"{RUN}-*.safetensors"))] == [1, 2, 3]
    assert not (WORK / "resumed").exists()


def test_states_of_a_killed_training_outlive_an_undone_change(
    tuner: Path, interrupted: Interrupted
) -> None:
    old = run(tuner)
    launch(old)
    changed = interrupted("killed 3", network_dim=8)
    assert "takes back the previous result" in launch(old)
    assert not WORK.joinpath(f"{RUN}-000003-state").exists()
    launch(changed)
    assert Path(flag(tuner, "resume")).name == f"{RUN}-000003-state"
    assert epochs() == 4


DIES = 'if mood in (f"killed {epoch + 1}", f"cut {epoch + 1}"):'


def dying(tuner: Path, code: str) -> None:
    """Let the trainer do something before it dies."""
    script = tuner / "wan_train_network.py"
    script.write_text(script.read_text().replace(DIES, f"{DIES}\n            {code}"))


def test_a_killed_training_leaves_no_partial_state_and_no_partial_lora(
    tuner: Path, interrupted: Interrupted
) -> None:
    dying(tuner, 'os.truncate(state.removesuffix("-state") + ".safetensors", 20)')
    interrupted("cut 2")
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
    tuner: Path, mood: Callable[[str], None], settings: dict[str, int], kept: str
) -> None:
    dying(tuner, "os.kill(os.getppid(), 15); __import__('time').sleep(600)")
    mood("killed 3")
    with pytest.raises(Stopped) as stopped:
        launch(run(tuner, **settings))
    line = f"run {RUN}: stopped; musubi-tuner saves no state amid an epoch: {kept}"
    assert str(stopped.value) == line


def test_a_resume_that_is_killed_loses_no_epoch_and_counts_none_twice(
    tuner: Path, interrupted: Interrupted
) -> None:
    order = interrupted("killed 3")
    layout = RunFiles(order)
    before = layout.progress.read_bytes()
    assert prepare(order, wanted_of(order)).done == 3
    layout.progress.write_bytes(before)  # as if killed before it was written
    assert prepare(order, wanted_of(order)).done == 3
    launch(order)
    assert flag(tuner, "max_train_epochs") == "1"
    assert epochs() == 4


def test_a_training_killed_behind_its_last_state_trains_no_epoch_more(
    interrupted: Interrupted,
) -> None:
    assert "4 epochs are done" in launch(interrupted("killed at the end"))
    assert epochs() == 4


def test_a_result_that_nobody_could_accept_any_more_is_accepted(tuner: Path) -> None:
    order = run(tuner)
    launch(order)
    for path in (LORA, RunFiles(order).record, tuner / "called.json"):
        path.unlink()
    assert "all epochs were done before" in launch(order)
    assert is_trained(order) and not (tuner / "called.json").exists()


def test_a_schedule_that_ends_is_not_resumed_by_a_trainer_that_counts_anew(
    tuner: Path, interrupted: Interrupted
) -> None:
    log = launch(interrupted("killed 3", arguments=["--lr_scheduler", "cosine"]))
    assert "--resume" not in called(tuner)["argv"]
    assert "a killed training begins anew" in log
    assert epochs() == 4


@pytest.mark.parametrize("lost", ["output/wanted.json", "output/*-state", "settings"])
def test_without_its_states_or_a_note_of_what_they_are_a_training_begins_anew(
    tuner: Path, interrupted: Interrupted, lost: str
) -> None:
    order = interrupted("killed 2")
    for path in Path(order.output).glob(lost):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    if lost == "settings":  # they are of another training
        order = run(tuner, save_every_n_epochs=1, learning_rate=0.5)
    launch(order)
    assert "--resume" not in called(tuner)["argv"]
    assert epochs() == 4
    assert not (WORK / "previous").exists()
