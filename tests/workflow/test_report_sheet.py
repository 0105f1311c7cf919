"""The contact sheet of a report in a real browser: pages, filters, crops and near-duplicates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from browser import Browser, until
from latentmake.reports.images import embedded
from latentmake.reports.page import page
from PIL import Image
from selenium.webdriver.common.keys import Keys

NASTY = "</script><img src=x onerror='window.hurt=1'>"
SIDE = 40  # pixels of a thumbnail
ACROSS = 10  # thumbnails of a row
ITEMS = 120
DRAWN = "return [...document.querySelectorAll('canvas')].every(each => each.dataset.drawn)"


def make_item(number: int, sheet: int = 0) -> dict[str, Any]:
    place = [number % ACROSS * SIDE, number // ACROSS * SIDE, SIDE, SIDE]
    target = {"size": [64, 64], "psnr": None, "decoded": None}
    return {
        "stem": f"item{number:03d}",
        "dataset": "cats",
        "path": f"cats/item{number:03d}.png",
        "width": 80 + number,
        "height": 80,
        "caption": f"cat {number}",
        "thumbnail": [sheet, *place],
        "targets": [
            {"resolution": "64", "crop": [0.1, 0, 0.9, 1], **target},
            {"resolution": "96", "crop": None, **target, "note": "not encoded yet"},
        ],
        "tokens": {"text_encoder": [number, 75]},
        "like": [],
    }


@pytest.fixture(scope="module")
def sheet(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page of items, of which thumbnail n is of the red n; some have more to tell."""
    picture = Image.new("RGB", (ACROSS * SIDE, ITEMS // ACROSS * SIDE))
    items = [make_item(number) for number in range(ITEMS)]
    for number in range(ITEMS):
        tile = Image.new("RGB", (SIDE, SIDE), (2 * number, 0, 80))
        picture.paste(tile, tuple(items[number]["thumbnail"][1:3]))
    decoded = embedded(Image.new("RGB", (64, 64), "blue"), "png")
    items[7]["targets"][0] |= {"decoded": decoded, "original": decoded, "psnr": 21.26}
    items[90]["targets"][0] |= {"decoded": decoded, "original": decoded, "psnr": 12.0}
    items[100] |= {"caption": NASTY, "cut": {"text_encoder": "the end of it"}}
    items[3]["like"] = [["cats", "item110", 2]]
    items[110]["like"] = [["cats", "item003", 2]]
    items[5] |= {"thumbnail": None, "fault": "cats/item005.png: is cut short", "caption": ""}
    encoder = {"name": "text_encoder", "limit": 75, "texts": ITEMS, "cut": 1, "median": 60}
    contact = {
        "items": items,
        "sheets": [embedded(picture, "png")],
        "skipped": [{"dataset": "cats", "stem": "x", "path": "cats/x.png", "why": "is a pipe"}],
        "encoders": [encoder | {"longest": 119, "width": 40, "bars": [40, 40, 40]}],
        "notes": ["latents of 2 of 120 items are decoded"],
        "total": ITEMS,
    }
    data = {
        "run": "cats", "planned": 0, "caches": [], "contact": contact, "buckets": [],
        "training": None, "speeds": [], "history": [],
        "provenance": {
            "model": "m", "trainer": None, "datasets": {}, "recipes": [], "versions": {},
        },
    }  # fmt: skip
    path = tmp_path_factory.mktemp("sheet") / "report.html"
    path.write_text(page("report", "Report of cats", data), encoding="utf-8")
    return path


@pytest.fixture
def opened(sheet: Path, browser: Browser) -> Browser:
    browser.open(sheet)
    until(lambda: browser.run(DRAWN))
    return browser


def stems(browser: Browser) -> list[str]:
    return [title.text.split()[0] for title in browser.all(".item h3")]


def choose(browser: Browser, name: str, text: str) -> None:
    script = "const s = document.getElementById(arguments[0]); s.value = arguments[1];"
    browser.run(f"{script} s.dispatchEvent(new Event('change'))", name, text)


def test_a_page_has_some_of_the_items_with_their_thumbnails(opened: Browser) -> None:
    assert stems(opened) == [f"item{number:03d}" for number in range(24)]
    middle = "return [...arguments[0].getContext('2d').getImageData(40, 40, 1, 1).data]"
    canvases = opened.all(".item canvas")
    assert len(canvases) == 23  # one picture cannot be read
    assert opened.run(middle, canvases[-1]) == [46, 0, 80, 255]
    for _ in range(4):
        opened.click("on")
    assert stems(opened)[-1] == "item119" and len(stems(opened)) == 24
    assert opened.text("#place") == "5 of 5"
    opened.driver.find_element("tag name", "body").send_keys(Keys.ARROW_RIGHT, Keys.ARROW_LEFT)
    assert opened.text("#place") == "4 of 5" and stems(opened)[0] == "item072"
    assert opened.complaints() == []


def test_a_crop_is_drawn_where_it_is_cut(opened: Browser) -> None:
    row = "return [...arguments[0].getContext('2d').getImageData(0, 40, 80, 1).data]"
    greens = opened.run(row, opened.all(".item canvas")[0])[1::4]
    bright = [x for x, green in enumerate(greens) if green > 150]
    assert bright and min(bright) in range(7, 12) and max(bright) in range(69, 74)


def test_items_are_chosen_by_words_by_kind_and_sorted(opened: Browser) -> None:
    opened.driver.find_element("id", "words").send_keys("CAT 11")
    assert stems(opened) == ["item011", *(f"item{number}" for number in range(110, 120))]
    opened.driver.find_element("id", "words").send_keys(6 * Keys.BACKSPACE)
    choose(opened, "only", "With decoded latents")
    choose(opened, "order", "Lowest PSNR first")
    assert stems(opened) == ["item090", "item007"]
    assert "64 → 64 × 64, 12.0 dB" in opened.text(".target")
    assert len(opened.all(".target img")) == 4
    choose(opened, "only", "With a caption that is cut")
    assert opened.text(".item .text") == NASTY
    assert opened.text(".item del") == "the end of it"
    choose(opened, "only", "Faulty")
    assert opened.text(".item .fault") == "cats/item005.png: is cut short"
    assert opened.run("return window.hurt") is None
    assert opened.complaints() == []


def test_a_near_duplicate_leads_to_the_other(opened: Browser) -> None:
    choose(opened, "only", "Near-duplicates")
    assert stems(opened) == ["item003", "item110"]
    opened.all("button.like")[0].click()
    assert stems(opened) == ["item110"]


def test_lengths_notes_and_skipped_items_are_told(opened: Browser) -> None:
    assert opened.text(".encoder p.warn") == "1 of 120 texts are cut."
    assert opened.text(".notes li") == "latents of 2 of 120 items are decoded"
    assert opened.text("#skipped summary") == "Skipped: 1"
