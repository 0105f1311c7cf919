"""The previous result of a run: no kill loses a result or mixes two; an undone change is back."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from latentmake.base.atomic import TEMPORARY_SUFFIX
from latentmake.plan.product import Made, Parts
from latentmake.runs.order import Forced, Record, RunFiles, last_place
from latentmake.trainers import previous
from latentmake.trainers.sd.unet import SdOrder
from trainer_world import make_order

WEIGHTS = ("pytorch_lora_weights.safetensors", "kohya.safetensors")
_EVENTS = {"os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.link"}

Tree = dict[str, str]


def want(name: str) -> Parts:
    return {"dataset": name, "settings": "s", "network": "w"}


@pytest.fixture(scope="module")
def order(tmp_path_factory: pytest.TempPathFactory) -> SdOrder:
    return make_order(tmp_path_factory.mktemp("order"))


def course(name: str) -> Tree:
    """Return the files of a training's course; each says of which training it is."""
    index = json.dumps({"parts": want(name), "steps": [name]})
    files = ("samples/step.png", "samples.png", "curves.png", "logs/events", "logs/samples/events")
    return {"samples/index.json": index, **dict.fromkeys(files, name)}


def result(name: str, *, step: str = "step-1") -> Tree:
    """Return the files of a finished result."""
    record = Record(
        parts=want(name),
        steps=1,
        loss_start=1,
        loss_end=1,
        seconds=1,
        files=dict.fromkeys(WEIGHTS, name),
    )
    made = (*WEIGHTS, "trained_on.json", "generated/clip.png", "generated.json", "evaluation/a.png")
    return {
        "training.json": record.model_dump_json(),
        **dict.fromkeys(made, name),
        **course(name),
        f"saved/{step}/lora": name,
        f"saved/{step}/wanted.json": Made(parts=want(name)).model_dump_json(),
    }


def below(folder: str, files: Tree) -> Tree:
    return {f"{folder}/{name}": text for name, text in files.items()}


BASE = {"manifest.jsonl": "m", "dataset.lock": "l", "checkpoints/step-1/state.pt": "half C"}


def lay(folder: Path, files: Tree) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def tree(folder: Path) -> Tree:
    """Return the files below a folder, but for half-written ones, which the next build removes."""
    files = (path for path in folder.rglob("*") if path.is_file())
    files = (path for path in files if not path.name.endswith(TEMPORARY_SUFFIX))
    return {path.relative_to(folder).as_posix(): path.read_text() for path in files}


def killed_at(number: int, action: Callable[[], object]) -> bool:
    """Carry out an action in a process that gets SIGKILL before its n-th change of a folder."""
    process = os.fork()
    if process == 0:
        count = itertools.count(1)

        def hook(event: str, _: Any) -> None:
            if event in _EVENTS and next(count) == number:
                os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(hook)
        try:
            action()
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == -signal.SIGKILL


def begin(name: str, *continued: str) -> Callable[[RunFiles], object]:
    kept = [want(each) for each in continued]
    return lambda files: previous.make_room(files, want(name), WEIGHTS, kept)


def anew(name: str) -> Callable[[RunFiles], object]:
    return lambda files: previous.anew(files, want(name), 7, [files.checkpoints])


def take_back(name: str) -> Callable[[RunFiles], object]:
    return lambda files: previous.take_back(files, want(name))


def forced(name: str, *before: Tree) -> Tree:
    """Return what a forced training finds: no states, its mark, and the results before."""
    mark = Forced(parts=want(name), planned=7).model_dump_json(indent=2, exclude_defaults=True)
    states = {"forced.json": f"{mark}\n", "checkpoints/step-1/state.pt": ""}
    for number, each in enumerate(before, 1):
        states |= below("/".join(["previous"] * number), each)
    return states


Z, A, B, HALF = result("Z"), result("A"), result("B"), course("C")
MOVES: dict[str, tuple[Tree, Callable[[RunFiles], object], Tree]] = {
    "a first change": (A, begin("B"), below("previous", A)),
    "a second change": (
        B | below("previous", A),
        begin("C"),
        below("previous", B) | below("previous/previous", A),
    ),
    "a resume": (HALF | below("previous", A), begin("C"), HALF | below("previous", A)),
    "another change, half-way": (
        HALF | below("previous", A),
        begin("D"),
        below("unfinished", HALF) | below("previous", A),
    ),
    "an undone change": (B | below("previous", A), take_back("A"), A | below("previous", B)),
    "an undone change, half-way": (
        HALF | below("previous", B) | below("previous/previous", A),
        take_back("B"),
        B | below("previous", A) | below("unfinished", HALF),
    ),
    "the change again": (
        A | below("unfinished", HALF),
        begin("C"),
        HALF | below("previous", A),
    ),
    "weights whose record was deleted": (
        {WEIGHTS[0]: "D", WEIGHTS[1]: "D"} | course("D") | below("previous", A),
        begin("C"),
        below("unfinished", {WEIGHTS[0]: "D", WEIGHTS[1]: "D"} | course("D"))
        | below("previous", A),
    ),
    "one of two changes again": (
        course("D") | below("unfinished", HALF) | below("previous", A),
        begin("C"),
        HALF | below("unfinished", course("D")) | below("previous", A),
    ),
    "two changes undone, half-way": (
        HALF | below("previous", B) | below("previous/previous", A),
        take_back("A"),
        A | below("previous", B) | below("unfinished", HALF),
    ),
    "samples of a new training beside weights of an earlier release": (
        {**A, **HALF},
        begin("C"),
        HALF | below("previous", {name: A[name] for name in A.keys() - HALF.keys()}),
    ),
    "a forced training": (A | below("previous", Z), anew("A"), forced("A", A, Z)),
    "a forced training, half-way": (HALF | below("previous", A), anew("C"), forced("C", A)),
    "a forced training instead of another, half-way": (
        course("D") | below("unfinished", HALF) | below("previous", A),
        anew("C"),
        course("D") | forced("C", A),
    ),
}


@pytest.mark.parametrize("move", MOVES)
def test_a_kill_at_any_moment_of_a_move_loses_and_mixes_nothing(
    order: SdOrder, tmp_path: Path, move: str
) -> None:
    before, action, after = MOVES[move]
    folder = tmp_path / "run"
    files = RunFiles(order, folder)
    for number in itertools.count(1):
        lay(folder, BASE | before)
        was_killed = killed_at(number, lambda: action(files))
        if was_killed:
            action(files)
        left = {name: text for name, text in (BASE | after).items() if text}
        assert tree(folder) == left, number
        if not was_killed:
            break
    names = {path.name for path in folder.iterdir()}
    assert names == {Path(name).parts[0] for name in left}


def test_a_forced_training_is_not_replaced_by_the_result_before_it_until_it_has_ended(
    order: SdOrder, tmp_path: Path
) -> None:
    lay(tmp_path, A)
    files = RunFiles(order, tmp_path)
    anew("A")(files)
    assert not previous.take_back(files, want("A"))
    lay(files.checkpoints, {"step-1": "half A"})
    anew("A")(files)  # its job is tried again
    assert tree(files.checkpoints)
    previous.anew(files, want("A"), 8, [files.checkpoints])  # it is forced again
    assert not tree(files.checkpoints) and tree(files.previous) == A
    files.forced.unlink()
    assert previous.take_back(files, want("A")) and tree(tmp_path) == A


def test_after_a_kill_in_a_move_an_undone_change_has_its_result(
    order: SdOrder, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    files = RunFiles(order, folder)
    for number in itertools.count(1):
        lay(folder, BASE | A)
        was_killed = killed_at(number, lambda: begin("B")(files))
        assert files.finished.record.read_text() == A["training.json"]
        previous.take_back(files, want("A"))
        assert tree(folder) == BASE | A, number
        if not was_killed:
            break


def test_a_longer_training_shows_what_it_continues_and_the_shorter_one_keeps_it(
    order: SdOrder, tmp_path: Path
) -> None:
    lay(tmp_path, BASE | A)
    files = RunFiles(order, tmp_path)
    begin("B", "A")(files)
    shown = {name: text for name, text in course("A").items() if "/" in name}
    assert tree(tmp_path) == BASE | shown | below("previous", A)
    assert files.samples.joinpath("step.png").stat().st_nlink == 2


def test_what_waits_for_a_result_goes_when_it_is_there(order: SdOrder, tmp_path: Path) -> None:
    state = {"previous/output/a-state/x": "A", "previous/output/a.safetensors": "A"}
    lay(tmp_path, B | below("previous", A) | below("previous/previous", Z) | state)
    files = RunFiles(order, tmp_path)
    lay(tmp_path / "unfinished", HALF)
    previous.settle(files)
    state.pop("previous/output/a-state/x")
    assert tree(tmp_path) == B | below("previous", A) | state


def test_copies_of_a_training_that_never_ended_stay(order: SdOrder, tmp_path: Path) -> None:
    copy = {
        "saved/step-9/lora": "D",
        "saved/step-9/wanted.json": Made(parts=want("D")).model_dump_json(),
    }
    lay(tmp_path, A | copy)
    begin("B")(RunFiles(order, tmp_path))
    assert tree(tmp_path) == copy | below("previous", A)


def test_a_lora_named_by_another_run_is_found_where_it_was_moved_to(
    order: SdOrder, tmp_path: Path
) -> None:
    lay(tmp_path, A)
    begin("B")(RunFiles(order, tmp_path))
    for name in (WEIGHTS[0], "saved/step-1"):
        assert last_place(tmp_path / name) == tmp_path / "previous" / name
    (tmp_path / "previous/training.json").unlink()
    missing = tmp_path / WEIGHTS[0]
    assert last_place(missing) == missing
