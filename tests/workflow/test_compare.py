"""Comparisons as targets: of trained runs and of folders, without training or planning anything."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import world
from browser import started
from latentmake.reports.page import state_in
from PIL import Image
from project import Project, Result
from selenium.webdriver.common.keys import Keys

PAGE = "reports/compare_one_vs_two.html"
RED, BLUE = (255, 0, 0), (0, 0, 255)


def two_runs(config: dict[str, Any]) -> None:
    run = {**config["runs"].pop("tiny"), "trainer": world.training()}
    two = copy.deepcopy(run)
    two["trainer"].update(learning_rate=1e-2, steps=4)
    config["runs"] = {"one": run, "two": two, "caches": {**run, "trainer": None}}
    config["folders"] = {"gold": "references/br{a}ce"}


def refused(project: Project, *arguments: str) -> str:
    """Return the line by which a command is refused."""
    result = project.run(*arguments, check=False)
    assert result.returncode != 0
    assert "Traceback" not in result.output
    assert not result.jobs
    return result.one_line("error: ")


@pytest.fixture(scope="module")
def finished(
    tmp_path_factory: pytest.TempPathFactory, template: Project
) -> tuple[Project, str, Result]:
    """A project after the first command: what was said before it, and by it."""
    project = template.copy(tmp_path_factory.mktemp("compared") / "project")
    project.configure(two_runs)
    (project / "references/br{a}ce").mkdir(parents=True)
    Image.new("RGB", (400, 300), RED).save(project / "references/br{a}ce/00.png")
    before = refused(project, "compare_one_vs_two")
    return project, before, project.run("train_one", "train_two", "compare_one_vs_two")


@pytest.fixture
def trained(finished: tuple[Project, str, Result], tmp_path: Path) -> Project:
    return finished[0].copy(tmp_path / "project")


def test_runs_are_compared_once_they_are_trained(finished: tuple[Project, str, Result]) -> None:
    project, before, result = finished
    assert before == (
        "error: compare_one_vs_two: the run one has no sample pictures yet; "
        "make them: snakemake --cores all train_one"
    )
    assert "compare_one_vs_two" in result.jobs
    result.one_line(PAGE, "pictures", "MB")
    assert state_in(project / PAGE)
    for run, last in (("one", 2), ("two", 4)):
        folder = project / f"runs/{run}/samples"
        index = json.loads((folder / "index.json").read_bytes())
        assert (index["run"], index["steps"][0], index["steps"][-1]) == (run, 0, last)
        assert index["prompts"] == [world.CAPTIONS[stem] for stem in ("ant", "bee", "cat", "dog")]
        assert {path.name for path in folder.glob("*.png")} == {
            name for row in index["files"] for name in row
        }
        with Image.open(project / f"runs/{run}/curves.png") as curves:
            assert curves.width == 1200


def test_a_page_is_written_again_when_a_picture_changes_and_only_then(trained: Project) -> None:
    trained.scramble_mtimes()
    assert trained.run("compare_one_vs_two").idle
    picture = trained / "references/br{a}ce/00.png"
    first = trained.run("compare_one_vs_gold", "compare_gold")
    assert sorted(first.jobs) == ["compare_gold", "compare_one_vs_gold"]
    assert first.tables == 0  # no run was planned
    assert trained.run("reports/compare_one_vs_gold.html").idle
    assert trained.run("compare_one_vs_two").idle
    page = (trained / "reports/compare_one_vs_gold.html").read_bytes()
    Image.new("RGB", (400, 300), BLUE).save(picture)
    assert trained.run("-n", "compare_one_vs_gold").jobs == ["compare_one_vs_gold"]
    assert (trained / "reports/compare_one_vs_gold.html").read_bytes() == page
    assert trained.run("compare_one_vs_gold").jobs == ["compare_one_vs_gold"]
    assert (trained / "reports/compare_one_vs_gold.html").read_bytes() != page
    assert trained.run("compare_one_vs_gold").idle


def test_names_and_folders_that_cannot_be_compared_are_told_in_one_line(trained: Project) -> None:
    assert "did you mean `compare_one_vs_two`?" in refused(trained, "compare_one_vs_tow")
    assert "only our own trainers do" in refused(trained, "compare_one_vs_caches")
    trained.configure(lambda config: config["folders"].update(gold="nowhere"))
    assert "folders.gold: the folder nowhere does not exist" in refused(trained, "compare_gold")
    trained.configure(lambda config: config["folders"].update(one="references"))
    assert "folders.one: the folder one bears the name of a run" in refused(trained, "compare_one")


def test_pictures_that_were_lost_are_drawn_again_without_training(trained: Project) -> None:
    weights = trained / "runs/one/pytorch_lora_weights.safetensors"
    before, picture = weights.stat().st_mtime_ns, trained / "runs/one/samples/step-000002_00.png"
    content = picture.read_bytes()
    picture.unlink()
    (trained / "runs/one/samples/index.json").unlink()
    line = refused(trained, "compare_one_vs_two")
    command = line.partition("make them: snakemake ")[2].split()
    assert command == ["--cores", "all", "train_one"]
    trained.run(*command)
    assert picture.read_bytes() == content
    assert weights.stat().st_mtime_ns == before
    assert trained.run("compare_one_vs_two").idle


def test_the_page_of_two_trained_runs_opens_in_a_browser(
    finished: tuple[Project, str, Result],
) -> None:
    project, _, _ = finished
    with started() as browser:
        browser.open(project / PAGE, "#prompt=2&step=2")
        assert browser.text("h1") == "one vs two"
        assert browser.text("#prompt") == world.CAPTIONS["bee"]
        assert browser.notes == ["step 2", "step 2"]
        sizes = "return [...document.images].map((each) => [each.naturalWidth, each.complete])"
        assert browser.run(sizes) == [[16, True], [16, True]]
        shown = []
        for run, colour in zip(("one", "two"), browser.colours(), strict=True):
            with Image.open(project / f"runs/{run}/samples/step-000002_01.png") as picture:
                shown.append(colour in set(picture.convert("RGB").get_flattened_data()))
        assert shown == [True, True]
        browser.press(Keys.END)
        assert browser.notes == ["missing", "step 4"]
        assert [row.text for row in browser.all("#differing tr")] == [
            "setting one two",
            "trainer.steps 2 4",
            "trainer.learning_rate 0.0001 0.01",
        ]
        assert browser.complaints() == []
