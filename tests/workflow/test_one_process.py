"""One process carries out the orders of a model, and loads its weights once."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable

import world
from project import Counts, Project

LOADED = re.compile(r"^encoding on \w+, \d+ at once$", re.MULTILINE)


def loads(project: Project) -> list[int]:
    """Return how often each job for latents loaded an encoder."""
    return [
        len(LOADED.findall(each.read_text()))
        for each in project.folder.glob("logs/latents/**/*.log")
    ]


def test_datasets_and_batches_of_one_model_are_encoded_by_one_process(
    fresh: Callable[[], Project],
) -> None:
    project = fresh()
    data = project / "data"
    (data / "more").mkdir()
    for stem in ("ant", "bee", "cat"):
        for path in data.glob(f"shapes/{stem}.*"):
            shutil.move(path, data / "more" / path.name)

    def two_datasets(values: dict) -> None:
        values["datasets"]["more"] = {"path": "data/more"}
        values["runs"]["tiny"]["datasets"] = ["shapes", "more"]
        values["batch"] = {"items": 2}

    project.configure(two_datasets)
    (data / "shapes/dog.png").write_bytes(b"")
    result = project.run("latents_tiny", check=False)
    assert result.returncode == 1
    result.one_line("error: 1 of 2 items are faulty", "dog.png: is an empty file")
    assert len(set(re.findall(r"rule (encode_latents_\w+_micro_\w+)", result.output))) == 1
    assert len(re.findall(r"^latents of (?:more|shapes): ", result.output, re.MULTILINE)) >= 4
    assert loads(project) == [1]
    assert result.encoded() == Counts(encoded=10, faulty=1)

    world.draw(data / "shapes/dog.png", 7)
    assert project.run("latents_tiny").encoded().encoded == 2
