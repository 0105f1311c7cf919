"""`latentmake report`: the state of a run's caches, its training and its items, on a page."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import world
from browser import Browser, until
from latentmake.pages.page import page
from project import Project
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.select import Select

NASTY = "</script><img src=x onerror='window.hurt=1'>"
PAGE = "reports/report_tiny.html"


def stems(browser: Browser) -> list[str]:
    return [title.text.split()[0] for title in browser.all(".item h3")]


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
    assert stems(browser) == sorted(world.CAPTIONS)
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
        "Sample pictures",
        "Curves",
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
        # The cells of a row are two in a line, with the names of their columns.
        cells = browser.all("#caches tbody tr:first-child > *")
        heights = [cell.rect["y"] for cell in cells]
        assert heights == sorted(heights) and len({*heights}) > 2


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


@pytest.fixture(scope="module")
def edited(shown: Project, tmp_path_factory: pytest.TempPathFactory) -> Project:
    """The project after edits; all but the last are encoded, and none has trained."""
    project = shown.copy(tmp_path_factory.mktemp("edited") / "project")
    (project / "data/shapes/bee.txt").write_text("a blue square at night")
    world.draw(project / "data/shapes/cat.png", 77)
    project.run("caches_tiny")
    (project / "data/shapes/dog.txt").write_text("a dog")
    project.ask("report", "tiny")
    return project


def test_what_was_edited_since_the_training_is_marked_with_what_it_saw(
    edited: Project, browser: Browser
) -> None:
    browser.open(edited / PAGE)
    assert browser.text("#summary .warn") == "1 target stale"
    browser.click("edited")
    assert stems(browser) == ["bee", "cat", "dog"]
    marks = [row.text for row in browser.all(".item .badges")]
    assert marks == ["caption edited", "picture edited", "caption edited stale text: edited"]
    gone, came = browser.text(".item .edit del"), browser.text(".item .edit ins")
    assert (gone, came) == ("square", "square at night")
    assert browser.text("#status strong") == "3 of 6 items."
    browser.click("edited")
    browser.run("scrollTo(0, 0)")
    browser.driver.find_element("css selector", "#summary .warn a").click()
    assert stems(browser) == ["dog"]
    assert browser.complaints() == []


def test_a_click_enlarges_an_item_and_keys_go_on(shown: Project, browser: Browser) -> None:
    browser.open(shown / PAGE)
    browser.all(".item .open")[0].click()
    assert browser.text("#viewer-title") == "ant (1 of 6)"
    assert browser.text("dialog .text") == NASTY
    browser.press(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT, Keys.ARROW_LEFT)
    assert browser.text("#viewer-title") == "bee (2 of 6)"
    links = [link.get_attribute("href") for link in browser.all("dialog a")]
    assert links == [(shown / f"data/shapes/bee{end}").as_uri() for end in (".png", ".txt")]
    file = "return document.querySelector('dialog img').src"
    until(lambda: browser.run(file) == (shown / "data/shapes/bee.png").as_uri())
    browser.press(Keys.ESCAPE)
    assert browser.run("return document.querySelector('dialog').open") is False
    assert browser.run("return document.activeElement.ariaLabel") == "Enlarge ant"
    browser.run("scrollTo(0, 0)")
    browser.all("#training .open")[0].click()
    assert browser.text("#viewer-title") == "Sample pictures"
    assert browser.run("return window.hurt") is None
    assert browser.complaints() == []


def item(number: int, text: str, *, enlarged: bool = False, right: float = 1.0) -> dict[str, Any]:
    target = {"words": "64 → 64 × 64", "crop": [0, 0, right, 1], "enlarged": enlarged}
    return {
        **{"dataset": "many", "stem": f"item-{number}", "path": f"many/{number}.png"},
        **{"caption": f"many/{number}.txt", "remote": False, "size": [64, 64 + number]},
        **{"picture": "data:image/gif;base64,R0lGODlhAQABAAAAACw=", "fault": "", "stale": []},
        **{"texts": [[[text, "", ""], []]], "targets": [target]},
    }


def page_of(items: list[dict[str, Any]], folder: Path, word: str = "") -> Path:
    values: dict[str, Any] = {
        **{"facts": [], "encoders": [], "faults": [], "notes": [], "tables": [], "training": None},
        **{"items": items, "root": "../", "trained": False, "plans": False, "word": word},
    }
    path = folder / "page.html"
    path.write_text(page("cards", "Items", values))
    return path


def test_ten_thousand_items_are_filtered_and_sorted_and_made_as_they_are_scrolled_to(
    tmp_path: Path, browser: Browser
) -> None:
    items = [item(number, f"sks cat {number}") for number in range(10_000)]
    items[3] = item(3, "a concatsks thing", enlarged=True)
    items[4] = item(4, "", right=0.6)
    path = page_of(items, tmp_path, "SKS")
    browser.open(path)
    assert len(browser.all(".item")) < 500
    assert browser.text("#status strong") == "10000 of 10000 items."
    before = len(browser.all(".item"))
    browser.run("scrollTo(0, document.documentElement.scrollHeight)")
    until(lambda: len(browser.all(".item")) > before)
    browser.run("scrollTo(0, 0)")
    for name, wanted in (
        ("enlarged", ["item-3"]),
        ("cropped", ["item-4"]),
        ("empty", ["item-4"]),
        ("without", ["item-3", "item-4"]),
    ):
        browser.click(name)
        assert stems(browser) == wanted
        browser.click(name)
    faulty = browser.driver.find_element("id", "faulty")
    assert faulty.text == "Faulty 0" and not faulty.is_enabled()
    word = browser.driver.find_element("id", "word")
    word.clear()
    word.send_keys("cat")
    assert stems(browser) == ["item-3", "item-4"]
    word.send_keys(Keys.BACKSPACE, Keys.BACKSPACE, Keys.BACKSPACE)
    order = Select(browser.driver.find_element("id", "sort"))
    for name, first in (
        ("Smallest picture first", "item-0"),
        ("Largest picture first", "item-9999"),
        ("Shortest caption first", "item-4"),
        ("Longest caption first", "item-3"),
        ("Most cropped first", "item-4"),
    ):
        order.select_by_visible_text(name)
        assert stems(browser)[0] == first
    browser.driver.find_element("id", "words").send_keys("CAT 9999")
    assert stems(browser) == ["item-9999"]
    assert browser.complaints() == []


def test_on_a_phone_filters_are_folded_and_the_cards_are_seen(
    tmp_path: Path, browser: Browser
) -> None:
    path = page_of([item(number, f"cat {number}") for number in range(4)], tmp_path, "dog")
    summary = "#fold summary"
    with browser.window(390, 844):
        browser.open(path)
        (first, *_), (section,) = browser.all(".item"), browser.all("#items")
        assert first.rect["y"] - section.rect["y"] < 844 / 4
        browser.all(summary)[0].click()
        browser.click("without")
        assert browser.all(summary)[0].text == "Filters (1 on)"
    browser.open(path)
    assert not browser.all(summary)[0].is_displayed()
    assert browser.all("#filters")[0].is_displayed()


def test_a_grid_is_a_third_as_high_as_a_card_a_row(tmp_path: Path, browser: Browser) -> None:
    items = [item(number, f"a cat on a red chair beside a window {number}") for number in range(30)]
    path = page_of(items, tmp_path)
    height = "return document.documentElement.scrollHeight"
    with browser.window(1280, 800):
        browser.open(path)
        assert browser.run(height) < 8900 / 3
    with browser.window(390, 844):
        browser.open(path)
        assert browser.run("return document.documentElement.scrollWidth") <= 390
