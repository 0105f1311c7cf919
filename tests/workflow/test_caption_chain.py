"""The chain from a picture to a training, where the sample's captioner writes the captions."""

from __future__ import annotations

import json
import os
import signal
from typing import Any

import pytest
import world
from project import ROOT, Project, stopped

CAPTIONS = "cache/shapes/captions/tiny"


def with_captioner(values: dict[str, Any]) -> None:
    values["datasets"]["shapes"]["captioner"] = "tiny"
    values["captioners"] = {"tiny": {"model": str(ROOT / "data/tiny-captioner")}}


@pytest.fixture
def captioned(built: Project) -> Project:
    """A built project of six pictures that lost all its captions but one, and has a captioner."""
    for caption in (built / "data/shapes").glob("*.txt"):
        if caption.stem != "ant":
            caption.unlink()
    built.configure(with_captioner)
    return built


def texts(project: Project) -> dict[str, list[str] | None]:
    return {row["stem"]: row.get("texts") for row in project.manifest()}


def test_one_command_makes_captions_then_embeddings_then_a_training(captioned: Project) -> None:
    captioned.configure(lambda values: values["runs"]["tiny"].update(trainer=world.training()))
    built = captioned.run("train_tiny")
    assert "captions of shapes: 5 made" in built.output
    assert built.encoded("latents").encoded == 0
    assert "5 captions made, 5 texts encoded, 0 latents" in built.output
    made = {path.stem: json.loads(path.read_text()) for path in (captioned / CAPTIONS).iterdir()}
    assert made.keys() == {"bee", "cat", "dog", "eel", "fox"}
    assert all(text.startswith(("a ", "an ")) for text in (own["text"] for own in made.values()))
    assert texts(captioned) == {"ant": None, **{stem: [own["text"]] for stem, own in made.items()}}
    assert captioned.run("train_tiny").idle

    def answer_shorter(values: dict[str, Any]) -> None:
        values["captioners"]["tiny"]["max_new_tokens"] = 200  # the same answers

    captioned.configure(answer_shorter)
    plan = captioned.run("-n", "train_tiny").output
    assert "recipe: max_new_tokens 256 -> 200: 5 captions of shapes" in plan
    assert "10 targets to make (5 captions, 0 latents, 5 texts), in 2 jobs" in plan
    embedding = "cache/shapes/micro/text/bee.text.safetensors"
    explained = captioned.ask("explain", embedding).output
    assert "differs     caption by tiny: max_new_tokens 256 -> 200" in explained
    again = captioned.run("train_tiny")
    assert "5 captions made, 0 texts encoded, 0 latents" in again.output
    assert "already trained on exactly this" in again.output
    assert captioned.run("train_tiny").idle

    (captioned / "data/shapes/bee.txt").write_text("my own words")
    written = captioned.run("caches_tiny")
    assert (written.encoded("text").encoded, "captions of" in written.output) == (1, False)
    unused = captioned.ask("explain", f"{CAPTIONS}/bee.json").output
    assert "unused (somebody wrote the caption of its item)" in unused
    (captioned / "data/shapes/bee.txt").unlink()
    assert captioned.run("caches_tiny").encoded("text").encoded == 0
    assert texts(captioned)["bee"] == [made["bee"]["text"]]


def test_a_killed_captioner_keeps_what_it_finished(captioned: Project) -> None:
    captioned.stop_in_script("encode.py", CAPTIONS, 2)
    running = captioned.start("captions_tiny")
    os.kill(stopped(running), signal.SIGKILL)
    assert running.wait(timeout=600) != 0
    finished = len([*(captioned / CAPTIONS).glob("*.json")])
    assert 2 <= finished < 5
    again = captioned.run("captions_tiny").output
    assert f"captions of shapes: {5 - finished} made" in again
    assert captioned.run("captions_tiny").idle
    captioned.ask("verify", "tiny")


def test_a_made_caption_is_a_target_of_its_own(captioned: Project) -> None:
    target = f"{CAPTIONS}/cat.json"
    assert "captions of shapes: 1 made" in captioned.run(target).output
    assert [path.name for path in (captioned / CAPTIONS).iterdir()] == ["cat.json"]
    refused = captioned.refusal(f"{CAPTIONS}/ant.json")
    assert "no item has a cache file of this name" in refused
    chain = captioned.run("--dag", "dot", "text_tiny").output
    assert "captioner: tiny" in chain
