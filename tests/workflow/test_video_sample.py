"""The sample of videos by its own example: trained, generated, evaluated, and edited."""

from __future__ import annotations

import json
import shutil
from typing import Any

import av
import pytest
import yaml
from browser import Browser, until
from project import ROOT, Project, Result
from safetensors import safe_open

TARGETS = ("train_waves", "generate_waves", "evaluate_waves")
PROMPTS = 2
SIZE, FRAMES = (128, 80), 17
PLAYING = """return [...document.querySelectorAll('video')]
    .filter(v => v.duration > 1 && !v.paused).map(v => v.currentTime)"""
READY = """const all = [...document.querySelectorAll('video')];
    return all.length && all.every(v => v.readyState >= 2)"""


def example() -> dict[str, Any]:
    """The example, with fewer steps."""
    text = (ROOT / "config/examples/video-sample.yaml").read_text(encoding="utf-8")
    values: dict[str, Any] = yaml.safe_load(text)
    run = values["runs"]["waves"]
    run["trainer"]["steps"] = 60
    run["generate"]["num_inference_steps"] = 3
    run["generate"]["prompts"] = run["generate"]["prompts"][:PROMPTS]
    return values


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory, preloading: None) -> Project:
    """What the example's command leaves. Tests change it one after another."""
    project = Project.make(tmp_path_factory.mktemp("sample") / "project", example())
    shutil.copytree(ROOT / "data/waves", project / "data/waves")
    shutil.copytree(ROOT / "data/tiny-wan", project / "data/tiny-wan")
    assert {"train", "generate", "evaluate"} <= set(run(project).jobs)
    return project


def run(project: Project) -> Result:
    return project.run("--cores", "2", *TARGETS)


def test_the_loss_falls_and_the_lora_has_three_namings(built: Project) -> None:
    trained = json.loads((built / "runs/waves/training.json").read_bytes())
    assert trained["loss_end"] < 0.9 * trained["loss_start"]
    prefixes = {
        "pytorch_lora_weights": "transformer.blocks.0.attn1.to_q.lora_A.weight",
        "musubi": "lora_unet_blocks_0_self_attn_q.lora_down.weight",
        "comfyui": "diffusion_model.blocks.0.self_attn.q.lora_down.weight",
    }
    counts = set()
    for name, key in prefixes.items():
        with safe_open(built / f"runs/waves/{name}.safetensors", "pt") as file:
            keys = set(file.keys())
        assert key in keys, (name, sorted(keys)[:3])
        counts.add(sum(not each.endswith(".alpha") for each in keys))
    assert counts == {3 * 2 * (2 * 4 + 2)}  # blocks, two matrices, layers of two attentions and ffn


def test_clips_and_pictures_are_mixed_and_some_held_out(built: Project) -> None:
    rows = built.manifest("waves")
    held = [row for row in rows if row.get("validation")]
    assert len(rows) == 20 + 4
    assert len(held) == example()["runs"]["waves"]["validation"]["items"]


def test_clips_are_of_a_kind_that_browsers_play(built: Project) -> None:
    paths = sorted((built / "runs/waves/generated").glob("*.mp4"))
    assert len(paths) == 2 * PROMPTS  # with and without the adapter
    for path in paths:
        with av.open(str(path)) as file:
            stream = file.streams.video[0]
            assert (stream.codec_context.name, stream.pix_fmt) == ("h264", "yuv420p")
            assert (stream.width, stream.height) == SIZE
            frames = [frame.to_ndarray(format="rgb24") for frame in file.decode(video=0)]
        assert len(frames) == FRAMES


@pytest.mark.parametrize("page", ["runs/waves/generated/index.html", "reports/evaluate_waves.html"])
def test_pages_play_in_step(built: Project, browser: Browser, page: str) -> None:
    browser.open(built / page)
    until(lambda: browser.run(READY))

    def some_play_in_step() -> bool:  # those in sight
        times = browser.run(PLAYING)
        return len(times) > 1 and min(times) > 0.2 and max(times) - min(times) < 2 / 16

    until(some_play_in_step)
    assert browser.complaints() == []


def test_the_same_command_again_does_nothing(built: Project) -> None:
    assert run(built).idle
