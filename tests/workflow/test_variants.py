"""A training reads each variant of a caption; captions of a metadata file."""

from __future__ import annotations

import json
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
