"""`latentmake uses` finds a picture or caption by its content in all that was made of it."""

from __future__ import annotations

import json
import shutil
from typing import Any

import pytest
import world
from latentmake.base import digest
from project import Project

WEIGHTS = ["runs/tiny/kohya.safetensors", "runs/tiny/pytorch_lora_weights.safetensors"]

LATENTS = "cache/shapes/micro/*/cat.latents.safetensors"


def found(project: Project, *asked: str, status: int = 1) -> dict[str, Any]:
    said = project.ask("uses", *asked, "--json", check=False)
    assert said.returncode == status
    values: dict[str, Any] = json.loads(said.output)
    return values


def test_a_picture_is_found_in_caches_and_weights_after_it_was_renamed_and_deleted(
    trained: Project,
) -> None:
    picture = trained / "data/shapes/cat.png"
    content = digest.of_file(picture)
    values = found(trained, "data/shapes/cat.png")
    assert values["files"]["files"] == ["data/shapes/cat.png", "data/shapes/cat.txt"]
    caches = [path.relative_to(trained.folder) for path in trained.folder.glob(LATENTS)]
    assert values["files"]["cache"] == sorted(map(str, caches)) and len(caches) == 2
    (training,) = values["trainings"]
    assert (training["items"], training["weights"]) == (["shapes/cat"], WEIGHTS)

    other = trained / "elsewhere.png"
    shutil.move(picture, other)
    assert found(trained, "elsewhere.png")["trainings"] == [training]
    other.unlink()
    for asked in (["data/shapes/cat.png"], ["--digest", content]):
        values = found(trained, *asked)
        assert values["files"]["files"] == [] and values["trainings"] == [training]
    said = trained.ask("uses", "data/shapes/cat.png", check=False).output
    assert "to train without it, run `latentmake build tiny`\n" in said


def test_a_caption_and_a_folder_are_found_and_other_files_are_not(trained: Project) -> None:
    values = found(trained, "data/shapes/cat.txt")
    assert values["texts"] == [world.CAPTIONS["cat"]] and not values["sources"]
    assert values["files"]["cache"] == ["cache/shapes/micro/text/cat.text.safetensors"]
    assert [training["items"] for training in values["trainings"]] == [["shapes/cat"]]
    (training,) = found(trained, "data/shapes")["trainings"]
    assert training["items"] == [f"shapes/{stem}" for stem in sorted(world.CAPTIONS)]
    world.draw(trained / "new.png", 99)
    assert found(trained, "new.png", status=0)["trainings"] == []
    assert "no weights here contain it" in trained.ask("uses", "new.png").output


def test_weights_whose_roster_is_damaged_or_missing_are_never_said_to_lack_a_picture(
    trained: Project,
) -> None:
    (roster,) = trained.folder.glob("runs/tiny/history/*/roster.jsonl.gz")
    record = roster.with_name("training.json")
    data = roster.read_bytes()
    record.write_bytes(b"{")
    said = trained.ask("uses", "data/shapes/cat.png", check=False)
    assert said.returncode == 1 and "as shapes/cat\n" in said.output
    for damaged in (b"", data[:-9]):
        roster.write_bytes(damaged)
        said = trained.ask("uses", "data/shapes/cat.png", check=False)
        assert said.returncode == 1 and "of unknown items" in said.output
        assert f"it is unknown whether {WEIGHTS[0]}, {WEIGHTS[1]}" in said.output
    shutil.rmtree(roster.parents[1])
    (training,) = found(trained, "data/shapes/cat.png")["trainings"]
    assert (training["items"], training["weights"]) == ([], WEIGHTS)


@pytest.mark.parametrize(
    "asked, line",
    [
        ([], "nothing is named; name a picture, a caption or a folder, or use --digest SHA-256"),
        (["--digest", "c003827b"], "c003827b: is no SHA-256; give all its 64 digits"),
        (["data/shapes/emu.png"], "is in no dataset, and no training saw it under this name"),
    ],
)
def test_a_mistake_is_one_line(trained: Project, asked: list[str], line: str) -> None:
    said = trained.ask("uses", *asked, check=False)
    assert said.returncode == 2 and line in said.output and said.output.count("\n") == 1
