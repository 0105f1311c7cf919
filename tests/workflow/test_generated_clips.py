"""Real builds: clips of a trained run, and what an edit draws again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from dit_world import tiny_dit
from project import Project
from video_world import write_video
from wan_world import write_umt5, write_wan_vae

CAPTIONS = {"first": "a red circle", "second": "two blue squares on a brown table"}
NASTY = "a {cat}: 'runs' & \"jumps\"/../$(x) [1]"


def config() -> dict[str, Any]:
    return {
        "datasets": {"waves": {"path": "data/waves", "target_frames": [5]}},
        "models": {
            "wan": {
                "task": "t2v-1.3B",
                "vae": "models/wan/vae",
                "text": "models/wan/text_encoder",
                "dit": "models/wan/transformer",
            }
        },
        "runs": {
            "waves": {
                "datasets": "waves",
                "model": "wan",
                "resolutions": [32],
                "trainer": {
                    "kind": "wan",
                    "rank": 2,
                    "steps": 2,
                    "learning_rate": 0.1,
                    "mixed_precision": "no",
                },
                "generate": {
                    "prompts": ["a red circle", "two squares"],
                    "num_inference_steps": 1,
                    "guidance_scale": 2.0,
                },
            }
        },
    }


def make(folder: Path) -> None:
    project = Project.make(folder, config())
    write_wan_vae(project / "models/wan", 4)
    write_umt5(project / "models/wan")
    tiny_dit().save_pretrained(project / "models/wan/transformer")
    for stem, caption in CAPTIONS.items():
        path = project / f"data/waves/{stem}.mp4"
        path.parent.mkdir(parents=True, exist_ok=True)
        write_video(path, "libx264", 6, size=(32, 32), bf="0")
        path.with_suffix(".txt").write_text(caption, encoding="utf-8")


@pytest.fixture(scope="module")
def waves(tmp_path_factory: pytest.TempPathFactory, preloading: None) -> Project:
    """A trained run with its clips. Not to be changed: copy it."""

    project = Project(tmp_path_factory.mktemp("generate") / "waves")
    make(project.folder)
    result = project.run("train_waves", "generate_waves")
    assert result.jobs.count("train") == 1 and result.jobs.count("generate") == 1
    return project


@pytest.fixture
def built(waves: Project, tmp_path: Path) -> Project:
    return waves.copy(tmp_path / "project")


def clips(project: Project) -> dict[str, tuple[bytes, int]]:
    return {
        path.name: (path.read_bytes(), path.stat().st_mtime_ns)
        for path in (project / "runs/waves/generated").glob("*.mp4")
    }


def index(project: Project) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((project / "runs/waves/generated/index.json").read_bytes())
    return found


def lora(project: Project) -> tuple[bytes, int]:
    path = project / "runs/waves/pytorch_lora_weights.safetensors"
    return path.read_bytes(), path.stat().st_mtime_ns


def edit(project: Project, **changes: Any) -> None:
    project.configure(lambda values: values["runs"]["waves"]["generate"].update(changes))


def test_a_command_trains_and_draws_and_the_next_does_nothing(built: Project) -> None:
    folder = built / "runs/waves/generated"
    names = {path.name for path in folder.iterdir()}
    drawn = clips(built).keys()
    assert len(drawn) == 4
    assert names == {*drawn, "index.html", "index.json"}
    assert [clip["prompt"] for clip in index(built)["clips"]] == [
        *["a red circle"] * 2, *["two squares"] * 2
    ]  # fmt: skip
    before = clips(built)
    result = built.run("train_waves", "generate_waves")
    assert result.idle, result.output
    assert clips(built) == before


def test_an_edited_prompt_encodes_one_text_and_draws_its_clips_alone(built: Project) -> None:
    before, weights = clips(built), lora(built)
    edit(built, prompts=["a red circle", "three squares"])
    built.ask("explain", "generate_waves").one_line("because     prompts are to be encoded")
    result = built.run("generate_waves")
    assert result.encoded("text").encoded == 1 and result.encoded("latents").encoded == 0
    assert "train" not in result.jobs and lora(built) == weights
    after = clips(built)
    assert len(after) == 4
    assert {name for name in after if after[name] == before.get(name)} == {
        name for name in before if name.startswith("a-red-circle")
    }
    built.ask("explain", "runs/waves/generated/index.html").one_line("index.html: fresh")
    edit(built, num_inference_steps=2)
    built.ask("explain", "generate_waves").one_line("differs     num_inference_steps 1 -> 2")


def test_a_prompt_of_the_command_line_is_drawn_as_it_is_written(built: Project) -> None:
    before, weights = clips(built), lora(built)
    command = ("generate_waves", "--config", f"prompt={NASTY}")
    result = built.run(*command)
    assert result.encoded("text").encoded == 1
    after = clips(built)
    assert len(after) == 6 and all(after[name] == before[name] for name in before)
    assert index(built)["clips"][0]["prompt"] == NASTY
    assert built.run(*command).idle
    assert lora(built) == weights
    result = built.run("generate_waves", "--config", "prompt=", check=False)
    result.one_line("error: --config, prompt: ", "empty prompt")


def test_a_run_without_a_trainer_generates_nothing(built: Project) -> None:
    before = clips(built)
    run = {"datasets": "waves", "model": "wan", "resolutions": [32]}
    built.configure(lambda values: values["runs"].update(waves=run))
    result = built.run("generate_waves", check=False)
    assert result.returncode != 0 and "Traceback" not in result.output, result.output
    result.one_line("error", "generate_waves", "has no trainer")
    assert clips(built) == before
