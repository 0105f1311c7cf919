"""Captions, tags and variants: each text is encoded once, and an edit touches its item alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import world
from project import Project
from safetensors import safe_open

TEXT = "cache/shapes/micro"


def captions_of(project: Project, stem: str, variants: int) -> list[str]:
    parts = ["text", *(f"text.{number}" for number in range(1, variants))]
    found = []
    for part in parts:
        with safe_open(project / f"{TEXT}/{part}/{stem}.text.safetensors", framework="np") as file:
            found.append(file.metadata()["caption"])
    return found


def with_captions(**settings: Any) -> Callable[[dict[str, Any]], None]:
    def change(values: dict[str, Any]) -> None:
        values["datasets"]["shapes"]["captions"] = settings

    return change


def test_an_edit_of_one_caption_encodes_its_variants_alone(built: Project) -> None:
    for stem in ("ant", "bee"):
        (built / f"data/shapes/{stem}.txt").write_text("one, two, three, four, five\n")
    built.configure(with_captions(variants=4, shuffle_caption=True, keep_tokens=1))
    built.run("caches_tiny")
    before = built.snapshot()
    texts = captions_of(built, "ant", 4)
    assert len(set(texts)) == 4
    assert all(
        sorted(text.split(", ")) == sorted(["one", "two", "three", "four", "five"])
        for text in texts
    )
    assert all(text.startswith("one, ") for text in texts)
    assert captions_of(built, "bee", 4) != texts
    (built / "data/shapes/ant.txt").write_text("one, two, three, four, six\n")
    done = built.run("caches_tiny")
    assert done.encoded("text").encoded == 4
    assert done.encoded("latents").encoded == 0
    changes = built.changed(before)
    assert {name.rpartition("/")[2] for name in changes.content} == {"ant.text.safetensors"}
    assert not (changes.added or changes.removed or changes.rewritten)
    assert built.run("caches_tiny").idle
    single = "cache/shapes/micro/text.2/ant.text.safetensors"
    (built / single).unlink()
    assert built.run(single).encoded("text").encoded == 1
    assert built.changed(before).content == changes.content


def test_a_training_reads_variants(built: Project) -> None:
    def change(values: dict[str, Any]) -> None:
        values["datasets"]["shapes"] |= {
            "metadata_file": "data/captions.jsonl",
            "metadata_captions": "join",
            "captions": {"variants": 2, "enable_wildcard": True},
        }
        values["runs"]["tiny"] |= {"trainer": world.training(), "resolutions": [16]}

    (built / "data/captions.jsonl").write_text(
        json.dumps({"file_name": "ant.png", "caption": "{up|down}, left", "tags": "x, y"}) + "\n"
    )
    built.configure(change)
    built.run("train_tiny")
    row = built.manifest()[0]
    assert row["texts"] == captions_of(built, "ant", 2)
    assert row["variants"] == [f"{TEXT}/{part}/ant.text.safetensors" for part in ("text", "text.1")]
    counts = built.lock()["counts"]
    assert counts == {f"shapes/{part}": 6 for part in ("16", "text", "text.1")}
    # A row that ends in the middle: one line, and nothing is lost.
    before = built.snapshot()
    with (built / "data/captions.jsonl").open("a") as file:
        file.write('{"file_name": "bee')
    done = built.run("train_tiny", check=False)
    assert done.returncode != 0
    line = done.one_line("data/captions.jsonl, line 2: ends in the middle", "correct the row")
    assert line.startswith("faulty: ")
    assert not any(built.changed(before))
