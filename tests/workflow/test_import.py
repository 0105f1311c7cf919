"""A user of musubi-tuner comes over: dataset file and caches, without encoding a thing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tomli_w
import wan
import world
import yaml
from project import NOTHING, Counts, Project
from safetensors import safe_open
from safetensors.torch import load_file, save_file

SIDES = (64, 96)


def as_theirs(path: Path, place: Path) -> None:
    """Write a cache file as musubi-tuner's scripts do: the same tensors, and nothing of ours."""
    with safe_open(path, framework="pt") as file:
        metadata = {k: v for k, v in file.metadata().items() if not k.startswith("latentmake.")}
    place.parent.mkdir(parents=True, exist_ok=True)
    save_file(load_file(path), place, metadata)


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory, wan_model: Path) -> Project:
    """A project without a configuration: images, weights, musubi-tuner's caches and its file."""
    root = tmp_path_factory.mktemp("import")
    project = wan.make(root / "project", wan_model)
    project.configure(lambda values: values["runs"]["tiny"].update(resolutions=list(SIDES)))
    project.run("caches_tiny")
    for side in SIDES:
        for path in (project / f"cache/shapes/wan/{side}").iterdir():
            as_theirs(path, project / f"theirs/{side}/{path.name}")
    for name in ("cache", "runs", ".latentmake", "config", "logs"):
        (project / name).rename(root / name)
    blocks = [
        {
            "image_directory": "data/shapes",
            "cache_directory": f"theirs/{side}",
            "resolution": side,
            "batch_size": 1,
        }
        for side in SIDES
    ]
    general = {"caption_extension": ".txt", "enable_bucket": True}
    text = tomli_w.dumps({"general": general, "datasets": blocks})
    (project / "dataset.toml").write_text(text)
    return project


def with_weights(values: dict[str, Any]) -> dict[str, Any]:
    """Name the weights in what an import wrote, as a user does."""
    values["models"]["wan"] |= wan.config()["models"]["wan"]
    return values


def test_a_run_of_musubi_tuner_goes_on_without_encoding(theirs: Project, tmp_path: Path) -> None:
    project = theirs.copy(tmp_path / "project")
    folder = {path: path.read_bytes() for path in (project / "theirs").rglob("*") if path.is_file()}
    asked = ("import", "dataset.toml", "--name", "cats", "--task", "t2v-1.3B")
    result = project.ask(*asked)
    made = yaml.safe_load(result.output)
    assert made["datasets"]["shapes"]["adopt_from"] == ["theirs/64", "theirs/96"]
    assert "adopt_from: [theirs/64, theirs/96]" in result.output
    assert not (project / "runs").exists()
    written = project.ask(*asked, "--output", "import.yaml")
    assert "import.yaml: runs cats" in written.output
    assert (project / "import.yaml").read_text() == result.output
    project.ask(*asked, "--output", "import.yaml")  # again: nothing is in its way
    (project / "import.yaml").write_text("mine")
    edited = project.ask(*asked, "--output", "import.yaml", check=False)
    assert edited.returncode == 2
    edited.one_line("error: import.yaml: is there already; rename or remove it")

    (project / "mine.yaml").write_text(yaml.safe_dump(with_weights(made)))
    own = ("--configfile", "mine.yaml")
    stale = project.run("-n", "caches_cats", *own).table()
    assert [row["new"] for row in stale.values()] == [6] * 4
    result = project.ask("adopt", "cats", "-c", "mine.yaml")
    result.one_line("cats: 24 adopted, 0 fresh already, 0 without")
    before = project.snapshot()
    result = project.run("caches_cats", *own)
    assert result.encoded() == Counts()
    assert project.run("caches_cats", *own).idle
    assert project.snapshot() == before
    for path, data in folder.items():
        assert path.read_bytes() == data
        ours = load_file(project / "cache/shapes/wan" / path.parent.name / path.name)
        for name, tensor in load_file(path).items():
            assert ours[name].equal(tensor)
    project.ask("adopt", "cats", "-c", "mine.yaml").one_line("cats: 0 adopted, 24 fresh already")

    (project / "data/shapes/cat.txt").write_text("another circle")
    world.draw(project / "data/shapes/bee.png", 9, wan.SIZES["bee"])
    project.ask("adopt", "cats", "-c", "mine.yaml").one_line(
        "0 adopted, 20 fresh already", "4 out of date"
    )
    result = project.run("caches_cats", *own)
    assert result.encoded() == Counts(encoded=3, linked=1)
    names = ("cat_wan_te", "bee_0064x0064_wan")
    edited = {f"cache/shapes/wan/{side}/{name}.safetensors" for side in SIDES for name in names}
    assert project.changed(before) == NOTHING._replace(content=edited)


def test_a_mistake_in_a_dataset_file_is_one_line(theirs: Project, tmp_path: Path) -> None:
    project = theirs.copy(tmp_path / "project")
    (project / "dataset.toml").write_text("[[datasets]\n")
    result = project.ask("import", "dataset.toml", check=False)
    assert result.returncode == 2 and result.output.count("\n") == 1
    result.one_line("error: dataset.toml: is not TOML", "line 1")
    (project / "dataset.toml").write_text("")
    result = project.ask("import", "dataset.toml", "--name", "../x", check=False)
    result.one_line("error: --name ../x: is no name of a run")
