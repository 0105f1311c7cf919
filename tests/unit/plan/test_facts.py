"""Facts about datasets and models: each file is read once, whatever ends a plan."""

from __future__ import annotations

import copy
import shutil
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import world
from latentmake.base import digest
from latentmake.config.root import parse
from latentmake.data import probe
from latentmake.data.memo import MEMO, Memo
from latentmake.plan.facts import Facts
from latentmake.session import Session
from video_world import write_video

Values = dict[str, Any]
RUNS = {"one": "float32", "two": "bfloat16", "three": "float16"}


@pytest.fixture
def read(micro: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each file is read for its digest; pictures and a model lie in the folder."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(micro, "models/micro")
    for name in RUNS:
        world.make_dataset(Path("data", name))
    count: Counter[str] = Counter()
    of_file = digest.of_file

    def counted(path: Path, **options: bool) -> str:
        count[str(path)] += 1
        return of_file(path, **options)

    monkeypatch.setattr(digest, "of_file", counted)
    return count


def three_runs() -> Values:
    """Return a configuration of three trainings, each of a model and a dataset of its own."""
    values = world.config()
    (model,), (run,) = values["models"].values(), values["runs"].values()
    for section in ("datasets", "models", "runs"):
        values[section] = {}
    for name, dtype in RUNS.items():
        values["datasets"][name] = {"path": f"data/{name}"}
        values["models"][name] = model | {"dtype": dtype}
        values["runs"][name] = run | {
            "trainer": world.training(), "datasets": [name], "model": name
        }  # fmt: skip
    return values


def plan(values: Values) -> None:
    Session(copy.deepcopy(values), targets=[], main=True, read_only=True)


def weights(read: Counter[str]) -> set[str]:
    return {path for path in read if path.endswith(".safetensors")}


def test_what_a_plan_has_read_is_read_once_also_before_a_mistake(read: Counter[str]) -> None:
    values = three_runs()
    values["datasets"]["three"]["path"] = "data/thre"
    with pytest.raises(SystemExit, match="data/thre"):
        plan(values)
    assert weights(read)
    plan(three_runs())
    assert len(weights(read)) == 3  # VAE, text encoder, UNet
    assert {path: count for path, count in read.items() if count > 1} == {}


def test_what_a_killed_plan_has_read_is_not_read_again(
    read: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("latentmake.data.memo._SECONDS", 0.0, raising=False)
    facts = Facts(parse(three_runs()), Memo(MEMO))
    facts.recipe("one", "one", "latents")
    assert weights(read)
    read.clear()
    plan(three_runs())  # of another process: nobody saved or closed the first one's memo
    assert not any("vae" in path for path in read)


def test_videos_are_probed_once_for_all_tasks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    for name in ("a", "b"):
        write_video(tmp_path / f"data/{name}.mp4", "mpeg4", 5)
        (tmp_path / f"data/{name}.txt").write_text("a caption")
    tasks = {
        "t2v": {"task": "t2v-1.3B", "dit": "m/dit"},
        "i2v": {"task": "i2v-14B", "dit": "m/dit", "clip": "m/clip"},
        "moe": {"task": "t2v-A14B", "dit": "m/low", "dit_high_noise": "m/high"},
    }
    values = {
        "datasets": {"clips": {"path": "data", "fit": "bucket", "target_frames": [1]}},
        "models": {name: task | {"vae": "m/vae", "text": "m/text"} for name, task in tasks.items()},
        "runs": {name: {"datasets": "clips", "model": name, "resolutions": [32]} for name in tasks},
    }
    probed: list[str] = []
    probe_videos = probe.probe_videos

    def noted(paths: Sequence[str]) -> Any:
        probed.extend(paths)
        return probe_videos(paths)

    monkeypatch.setattr(probe, "probe_videos", noted)
    facts = Facts(parse(values), Memo(None), encoders=False)
    for name in tasks:
        items, faults = facts.items("clips", name)
        assert not faults and len(items) == 2
    assert sorted(probed) == ["data/a.mp4", "data/b.mp4"]


@pytest.mark.parametrize("models", [("ours", "theirs"), ("theirs", "ours")])
def test_what_one_encoder_cannot_take_is_faulty_for_that_one_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, models: tuple[str, str]
) -> None:
    monkeypatch.chdir(tmp_path)
    np.savez(tmp_path / "a.npz", frames=np.zeros((9, 32, 48, 3), np.uint8))
    (tmp_path / "list.jsonl").write_text('{"video": "a.npz", "prompt": "p"}\n')
    weights = {"task": "t2v-1.3B", "vae": "vae", "text": "text"}
    values = {
        "datasets": {"cats": {"path": "list.jsonl", "target_frames": [9], "fit": "bucket"}},
        "models": {"ours": weights, "theirs": {**weights, "encoder": "musubi"}},
        "musubi_tuner": {"path": "musubi-tuner"},
        "runs": {x: {"datasets": "cats", "model": x, "resolutions": [32]} for x in models},
    }
    facts = Facts(parse(values), Memo(None), encoders=False)
    faulty = {model: len(facts.items("cats", model)[1]) for model in models}
    assert faulty == {"ours": 0, "theirs": 1}
    assert [len(facts.faults["cats", model]) for model in ("ours", "theirs")] == [0, 1]
