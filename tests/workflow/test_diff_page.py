"""The pages of `latentmake diff` and `latentmake runs`, in a real browser from a disk."""

from __future__ import annotations

from pathlib import Path

import pytest
from browser import Browser
from latentmake.pages.trainings import write_diff, write_ledger
from latentmake.runs.differences import compare
from latentmake.runs.history import SAMPLES, RosterItem
from PIL import Image

NASTY = "</script><img src=x onerror='window.hurt=1'>"
COLOURS = [(200, 20, 20), (20, 20, 200)]


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Two trainings with pictures of their samples."""
    monkeypatch.chdir(tmp_path)
    made = [Path("runs/cats/history") / name for name in ("old", "new")]
    for folder, colour in zip(made, COLOURS, strict=True):
        folder.mkdir(parents=True)
        Image.new("RGB", (300, 200), colour).save(folder / SAMPLES, lossless=True)
    return made


def item(stem: str, text: str, source: str = "") -> RosterItem:
    return RosterItem(dataset="cats", stem=stem, texts=[text], source=source or stem)


def test_the_page_of_differences_shows_words_settings_and_samples(
    browser: Browser, folders: list[Path]
) -> None:
    old = [item("a", "a red cat"), item("b", NASTY), item("gone", "x"), item("d", "d", "1")]
    new = [item("a", "a blue cat"), item("b", "b"), item("came", "x"), item("d", "d", "2")]
    content = {
        "settings": [{"name": "rank", "old": "4", "new": "8"}],
        "figures": {"loss at the end": [0.5, None]},
        "new": {"folder": str(folders[1])},
    }
    page = write_diff(["cats@1", "cats"], content, compare(old, new), folders[0])
    assert page == Path("reports/diff_cats@1_to_cats.html")
    browser.open(page)
    summary = "1 added, 1 removed, 1 replaced, 2 with another caption"
    assert browser.text("#summary") == f"Items: {summary}."
    assert [each.text for each in browser.all("figcaption")] == ["cats@1", "cats"]
    rows = [each.text for each in browser.all("#items tbody tr")]
    assert rows[:3] == ["cats/came added", "cats/gone removed", "cats/d replaced"]
    assert rows[3] == "cats/a caption a redblue cat" and NASTY in rows[4]
    assert browser.text("#items del") == "red" and browser.text("#items ins") == "blue"
    assert browser.text("#settings tbody") == "rank 4 8"
    assert browser.text("#figures tbody") == "loss at the end 0.5 –"
    shot = browser.screenshot()
    for picture, colour in zip(browser.all("figure img"), COLOURS, strict=True):
        box = picture.rect
        place = int(box["x"] + box["width"] / 2), int(box["y"] + box["height"] / 2)
        assert shot.getpixel(place) == colour
    assert browser.run("return window.hurt") is None and browser.complaints() == []
    with browser.window(390, 800):  # the words of a caption stay in one line on a phone
        removed, added = browser.all("#items del")[0], browser.all("#items ins")[0]
        assert removed.rect["y"] == added.rect["y"]
        assert (
            not browser.all("#items tbody tr")[0]
            .find_elements("css selector", "td")[-1]
            .is_displayed()
        )
        assert removed.rect["x"] + removed.rect["width"] == pytest.approx(added.rect["x"], abs=1)


def test_a_page_without_items_and_samples_says_so(browser: Browser, folders: list[Path]) -> None:
    content = {"settings": [], "figures": {}, "new": {"name": "today"}}
    browser.open(write_diff(["cats", "today"], content, None, Path("nowhere")))
    assert browser.text("#summary") == "Items: unknown."
    assert not browser.all("figure, table") and browser.complaints() == []


def test_the_page_of_all_trainings_is_a_table_with_samples(
    browser: Browser, folders: list[Path]
) -> None:
    heads, rows = ["when", "run"], [["2026-11-29", "cats"], ["2026-11-28", NASTY]]
    named = [("2026-11-29 10:00:30", str(folders[0])), ("2026-11-28", "runs/dogs/history/x")]
    browser.open(write_ledger(heads, rows, named))
    assert browser.text("#summary") == "2 trainings."
    assert [each.text for each in browser.all("#trainings td")] == ["cats", NASTY]
    assert [each.text for each in browser.all(".item h2")] == ["cats, 2026-11-29 10:00"]
    assert browser.run("return window.hurt") is None and browser.complaints() == []
