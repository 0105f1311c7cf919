"""report_{run}: what a run's caches are made of and how it went, in a browser."""

from __future__ import annotations

import json
import shutil
import zipfile
from pathlib import Path

import pytest
import world
from browser import Browser, until
from project import Project

NASTY = "</script><img src=x onerror='window.hurt=1'>"
PAGE = "reports/report_tiny.html"
DRAWN = "return [...document.querySelectorAll('canvas')].every(each => each.dataset.drawn)"
SECTIONS = ["items", "buckets", "caches", "training", "speed", "history", "provenance"]


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory, template: Project) -> Project:
    """A project that was trained after a caption was edited, with its page."""
    project = template.copy(tmp_path_factory.mktemp("report") / "project")
    (project / "data/shapes/ant.txt").write_text(NASTY)
    training = world.training()
    training["samples"] |= {"prompts": ["a circle", NASTY], "every": 1}
    project.configure(lambda config: config["runs"]["tiny"].update(trainer=training))
    done = project.run("train_tiny", "report_tiny")
    assert done.jobs.index("report_tiny") > done.jobs.index("train")
    return project


def test_a_line_of_the_history_is_written_by_each_build_that_makes_something(
    shown: Project,
) -> None:
    lines = (shown / ".latentmake/history.jsonl").read_text().splitlines()
    first, second = map(json.loads, lines)
    assert first["targets"] == ["caches_tiny"]
    assert first["made"] == {f"shapes/micro/{part}": 6 for part in (16, 32, "text")}
    assert second["targets"] == ["train_tiny", "report_tiny"]
    assert second["made"] == {"shapes/micro/text": 1, "_prompts/micro/text": 2}
    assert sum(second["ways"].values()) == 3
    assert "runs/tiny/trained.json" in second["results"]


def test_every_section_is_filled_and_nothing_is_requested(shown: Project, browser: Browser) -> None:
    browser.open(shown / PAGE)
    assert browser.text("h1") == "Report of tiny"
    assert [element.get_attribute("id") for element in browser.all("main > section")] == SECTIONS
    until(lambda: browser.run(DRAWN))
    assert [title.text.split()[0] for title in browser.all(".item h3")] == sorted(world.CAPTIONS)
    assert len(browser.all(".item canvas")) == 6
    assert len(browser.all(".target img")) == 2 * 6 * 2  # two resolutions, before and after
    assert browser.text(".item .text") == NASTY
    assert browser.text(".encoder h2") == "text_encoder"
    assert "all fresh" in browser.text("#summary")
    assert [row.text.split()[0] for row in browser.all(".bucket span + span") if row.text]
    rows = [row.text.split()[:4] for row in browser.all("#caches tbody tr")]
    assert rows[1:] == [["shapes", part, "6", "–"] for part in ("16", "32", "text")]
    assert "loss" in [title.text for title in browser.all("#training h3")]
    assert len(browser.all("#training svg polyline")) >= 5
    assert len(browser.all("#training img")) == 2 * 3
    assert [row.text for row in browser.all("#speed tbody th")][:2] == [
        "training",
        "latents of micro",
    ]
    (build,) = browser.all("#history tbody tr")  # the present one has not ended
    assert "caches_tiny" in build.text and "shapes/micro/16: 6" in build.text
    assert browser.text("#provenance summary").startswith("Recipe: latents of shapes")
    loaded = "return performance.getEntriesByType('resource').map(each => each.name)"
    assert [each for each in browser.run(loaded) if not each.startswith("data:")] == []
    assert browser.run("return window.hurt") is None
    assert browser.complaints() == []


def test_a_phone_needs_no_scrolling_sideways(shown: Project, browser: Browser) -> None:
    size = {"width": 390, "height": 844, "deviceScaleFactor": 1, "mobile": True}
    browser.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    try:
        browser.open(shown / PAGE)
        assert browser.run("return document.documentElement.scrollWidth") <= 390
        # Rows of tables are one above the other, with the names of their columns.
        tables = "return [...document.querySelectorAll('.stack')].map(e => e.scrollWidth)"
        assert max(browser.run(tables)) <= 390
        (build,) = browser.all("#history tbody tr")
        heights = [cell.rect["y"] for cell in build.find_elements("css selector", "th, td")]
        assert heights == sorted({*heights})
    finally:
        browser.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_snakemakes_own_report_shows_the_page(
    shown: Project, tmp_path: Path, browser: Browser
) -> None:
    project = shown.copy(tmp_path / "project")
    project.run("report_tiny", "--report", "all.zip")
    with zipfile.ZipFile(project / "all.zip") as archive:
        archive.extractall(tmp_path)
    browser.open(tmp_path / "all/report.html")
    until(lambda: browser.run("return window.app !== undefined"))
    browser.run("app.showCategory('Runs')")
    until(lambda: browser.all("a[iconname=eye]"))
    browser.all("a[iconname=eye]")[0].click()
    until(lambda: browser.all("iframe"))
    browser.driver.switch_to.frame(0)
    try:
        until(lambda: browser.all("h1"))
        assert browser.text("h1") == "Report of tiny"
        assert len(browser.all("main > section")) == len(SECTIONS)
    finally:
        browser.driver.switch_to.default_content()
    browser.complaints()  # those of Snakemake's own page


def test_a_run_without_caches_has_a_page_that_says_so(
    shown: Project, tmp_path: Path, browser: Browser
) -> None:
    project = shown.copy(tmp_path / "project")
    for name in ("cache", "runs", ".latentmake", "reports"):
        shutil.rmtree(project / name)
    project.run("report_tiny")
    assert not (project / "cache").exists()
    browser.open(project / PAGE)
    said = {each.get_attribute("id"): each.text for each in browser.all("main > section")}
    assert "No latents yet." in said["buckets"]
    assert "Nothing is encoded yet." in said["caches"]
    assert "Not trained yet." in said["training"]
    assert "No job has encoded anything yet." in said["speed"]
    assert "No build is noted yet." in said["history"]
    assert "20 targets stale" in browser.text("#summary")
    assert browser.complaints() == []
