"""`latentmake report`: the state of a run's caches, its training and its items, on a page."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import world
from browser import Browser
from project import Project

NASTY = "</script><img src=x onerror='window.hurt=1'>"
PAGE = "reports/report_tiny.html"


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory, template: Project) -> Project:
    """A project that was trained after a caption was edited, with its page."""
    project = template.copy(tmp_path_factory.mktemp("report") / "project")
    (project / "data/shapes/ant.txt").write_text(NASTY)
    training = world.training()
    training["samples"] |= {"prompts": ["a circle", NASTY], "every": 1}
    project.configure(lambda config: config["runs"]["tiny"].update(trainer=training))
    project.run("train_tiny")
    assert project.ask("report", "tiny").output == f"{PAGE}\n"
    return project


def test_every_section_is_filled_and_nothing_is_requested(shown: Project, browser: Browser) -> None:
    browser.open(shown / PAGE)
    assert browser.text("h1") == "Report of tiny"
    assert [title.text.split()[0] for title in browser.all(".item h3")] == sorted(world.CAPTIONS)
    assert len(browser.all(".item img")) == 6
    assert len(browser.all(".target")) == 2 * 6  # two resolutions
    assert browser.text(".item .text") == NASTY
    assert browser.text(".encoder h2") == "text_encoder"
    assert "all fresh" in browser.text("#summary")
    sizes = [row.text.split() for row in browser.all("#buckets tbody tr")]
    assert {row[1] for row in sizes} == {"16", "32"} and all(row[-1].isdigit() for row in sizes)
    files = [row.text.rsplit(maxsplit=6)[0] for row in browser.all("#caches tbody tr")]
    assert files[:3] == ["shapes latents 16", "shapes latents 32", "shapes text"]
    assert "loss" in browser.text("#training p")
    assert [each.get_attribute("alt") for each in browser.all("#training img")] == [
        "Curves",
        "Sample pictures",
    ]
    loaded = "return performance.getEntriesByType('resource').map(each => each.name)"
    assert [each for each in browser.run(loaded) if not each.startswith("data:")] == []
    assert browser.run("return window.hurt") is None
    assert browser.complaints() == []


def test_a_crop_is_drawn_where_it_is_cut(shown: Project, browser: Browser) -> None:
    browser.open(shown / PAGE)
    browser.all(".frame img")[0]
    frame, *marks = (each.rect for each in browser.all(".frame:first-child, .frame:first-child i"))
    kept, first, second = marks[:3]
    assert kept["width"] <= frame["width"] + 1 and kept["height"] <= frame["height"] + 1
    for mark in (first, second):
        assert mark["width"] == pytest.approx(kept["width"], rel=0.3)


def test_a_phone_needs_no_scrolling_sideways(shown: Project, browser: Browser) -> None:
    with browser.window(390, 844):
        browser.open(shown / PAGE)
        assert browser.run("return document.documentElement.scrollWidth") <= 390
        # The cells of a row are one above the other, with the names of their columns.
        cells = browser.all("#caches tbody tr:first-child > *")
        heights = [cell.rect["y"] for cell in cells]
        assert heights == sorted({*heights})


def test_a_run_without_caches_has_a_page_that_says_so(
    shown: Project, tmp_path: Path, browser: Browser
) -> None:
    project = shown.copy(tmp_path / "project")
    for name in ("cache", "runs", ".latentmake", "reports"):
        shutil.rmtree(project / name)
    project.ask("report", "tiny")
    assert not (project / "cache").exists() and not (project / "runs").exists()
    browser.open(project / PAGE)
    assert "No latents yet." in browser.text("#buckets")
    assert "Nothing is encoded yet." in browser.text("#caches")
    assert "Not trained yet." in browser.text("#training")
    assert "20 targets stale" in browser.text("#summary")
    assert browser.complaints() == []
