"""The page of a comparison in a real browser: what it shows, and what keys and buttons do."""

from __future__ import annotations

from pathlib import Path

import pytest
from browser import Browser, until
from compare_world import colour_of, make_folder, make_run
from latentmake.reports.comparison import compare
from latentmake.reports.comparison_order import PageOrder, Source
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.select import Select

NASTY = "</script><img src=x onerror='window.hurt=1'><script>window.hurt=1</script> & <b>"
PROMPTS = ["a cat", NASTY]
ONE, TWO = [0, 50, 100], [0, 100, 200]


def page_of(root: Path, *sources: Source) -> Path:
    order, page = root / "order.json", root / "page.html"
    order.write_text(PageOrder(sources=list(sources), planned=0).model_dump_json())
    compare(order, page, lambda line: None)
    return page


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page of two runs: other steps, their prompts in another order."""
    root = tmp_path_factory.mktemp("runs")
    one = make_run(root, "one", PROMPTS, ONE, number=0, rank=4)
    two = make_run(root, "two", [*PROMPTS[::-1], "only here"], TWO, number=1, rank=8)
    return page_of(root, one, two)


def expected(row: int, step: int) -> list[tuple[int, int, int]]:
    """The colours of both runs at a row and a step that both have."""
    return [colour_of(0, row, step), colour_of(1, 1 - row, step)]


def test_the_same_prompt_and_step_stand_side_by_side(browser: Browser, runs: Path) -> None:
    browser.open(runs, "#prompt=1&step=100")
    assert browser.text("h1") == "one vs two"
    assert browser.colours() == expected(0, 100)
    assert browser.alts == ["one, step 100: a cat", "two, step 100: a cat"]
    assert browser.text("#where") == "Prompt 1 of 3, step 100 (3 of 4)"
    left, right = (frame.rect for frame in browser.all(".frame"))
    assert left["y"] == right["y"]
    assert left["x"] + left["width"] < right["x"]
    assert browser.complaints() == []


def test_keys_step_through_steps_and_prompts(browser: Browser, runs: Path) -> None:
    browser.open(runs, "#prompt=1&step=100")
    browser.press(Keys.HOME)
    assert browser.colours() == expected(0, 0)
    browser.press(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)
    assert browser.colours() == expected(0, 100)
    assert browser.hash == "#prompt=1&step=100"
    browser.press(Keys.ARROW_DOWN)
    assert browser.colours() == expected(1, 100)
    assert browser.hash == "#prompt=2&step=100"
    browser.press(Keys.ARROW_LEFT, Keys.ARROW_LEFT, Keys.ARROW_LEFT, Keys.ARROW_LEFT)
    assert browser.hash == "#prompt=2&step=0"
    assert browser.colours() == expected(1, 0)
    browser.press(Keys.ARROW_UP, Keys.ARROW_UP, Keys.END)
    assert browser.hash == "#prompt=1&step=200"
    assert browser.colours()[1] == colour_of(1, 1, 200)


def test_buttons_do_the_same(browser: Browser, runs: Path) -> None:
    browser.open(runs, "#prompt=1&step=100")
    browser.click("step-first")
    assert browser.colours() == expected(0, 0)
    browser.click("step-on")
    browser.click("step-on")
    browser.click("row-on")
    assert browser.colours() == expected(1, 100)
    browser.click("step-last")
    browser.click("step-back")
    browser.click("row-back")
    assert browser.hash == "#prompt=1&step=100"
    assert browser.colours() == expected(0, 100)


def test_slider_and_list_move_by_keys_and_choice(browser: Browser, runs: Path) -> None:
    browser.open(runs, "#prompt=1&step=0")
    slider = browser.driver.find_element(By.ID, "step")
    browser.run("arguments[0].focus()", slider)
    browser.press(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)  # one step each, not two
    assert browser.hash == "#prompt=1&step=100"
    assert slider.get_attribute("aria-valuetext") == "step 100"
    Select(browser.driver.find_element(By.ID, "row")).select_by_index(1)
    assert browser.colours() == expected(1, 100)
    browser.press(Keys.ARROW_UP)
    assert browser.colours() == expected(0, 100)


def test_a_missing_step_names_the_nearest_earlier_one(browser: Browser, runs: Path) -> None:
    browser.open(runs, "#prompt=1&step=50")
    assert browser.alts == ["one, step 50: a cat", None]
    assert browser.notes == ["step 50", "missing"]
    missing = browser.all("figure .missing")[1]
    assert "No picture at step 50. The nearest earlier one is of step 0." in missing.text
    assert browser.colours()[0] == colour_of(0, 0, 50)
    missing.find_element(By.TAG_NAME, "button").click()
    assert browser.hash == "#prompt=1&step=0"
    assert browser.colours() == expected(0, 0)
    browser.open(runs, "#prompt=3&step=50")
    first, second = (element.text for element in browser.all("figure .missing"))
    assert first == "No picture of this prompt."
    assert "The nearest earlier one is of step 0." in second


def test_gaps_are_filled_with_the_nearest_earlier_step(browser: Browser, runs: Path) -> None:
    browser.open(runs, "#prompt=1&step=200")
    assert browser.notes == ["missing", "step 200"]
    browser.press("f")
    assert browser.notes == ["step 100, the nearest earlier", "step 200"]
    assert browser.alts[0] == "one, step 100: a cat"
    assert browser.colours() == [colour_of(0, 0, 100), colour_of(1, 1, 200)]
    assert browser.hash == "#prompt=1&step=200&fill=1"
    browser.click("fill")
    assert browser.notes == ["missing", "step 200"]


def test_an_address_leads_to_what_it_was_copied_from(browser: Browser, runs: Path) -> None:
    browser.open(runs, "#prompt=2&step=100&zoom=2")
    assert browser.colours() == expected(1, 100)
    assert browser.text("#zoom-reset") == "200 %"
    browser.run("location.hash = '#prompt=1&step=0'")
    until(lambda: browser.colours() == expected(0, 0))  # the event comes after the script
    for address in ("#prompt=99&step=99999&zoom=7", "#prompt=x&step=-1", "#<b>"):
        browser.open(runs, address)
        assert len(browser.all("figure")) == 2
        assert browser.complaints() == []
    browser.open(runs, "#prompt=1&step=60")
    assert browser.hash == "#prompt=1&step=50"


def test_zoom_enlarges_both_sides_about_the_same_place(browser: Browser, runs: Path) -> None:
    def widths() -> list[float]:
        script = "return [...document.images].map((each) => each.getBoundingClientRect().width)"
        return [float(width) for width in browser.run(script)]

    browser.open(runs, "#prompt=1&step=100")
    before = widths()
    assert before[0] == before[1]
    assert before[0] % 16 == 0  # whole pixels of the screen for each of the picture's
    browser.press("+", "+")
    assert widths() == [2 * width for width in before]
    assert browser.hash == "#prompt=1&step=100&zoom=2"
    assert browser.colours() == expected(0, 100)
    shot, box = browser.screenshot(), browser.all(".frame")[0].rect
    corners = [
        (int(box["x"] + x * box["width"]), int(box["y"] + y * box["height"]))
        for x in (0.02, 0.98)
        for y in (0.02, 0.98)
    ]
    assert {shot.getpixel(corner) for corner in corners} == {colour_of(0, 0, 100)}
    browser.press("0")
    assert widths() == before
    browser.click("zoom-in")
    browser.click("zoom-out")
    assert widths() == before
    style = "return getComputedStyle(document.images[0]).imageRendering"
    assert browser.run(style) == "pixelated"


def test_no_text_of_a_prompt_is_markup(browser: Browser, runs: Path) -> None:
    browser.open(runs, "#prompt=2&step=0")
    assert browser.text("#prompt") == NASTY
    assert browser.alts[0] == f"one, step 0: {NASTY}"
    assert browser.run("return window.hurt === undefined")
    assert len(browser.all("img")) == 2
    assert len(browser.all("script")) == 2


def test_the_page_asks_the_network_for_nothing(browser: Browser, runs: Path) -> None:
    browser.open(runs)
    browser.press(Keys.HOME, Keys.ARROW_RIGHT, Keys.ARROW_DOWN)
    loaded = browser.run("return performance.getEntriesByType('resource').map((each) => each.name)")
    assert [name for name in loaded if not name.startswith("data:")] == []
    refused = browser.run(
        "return await fetch('http://127.0.0.1:1/').then(() => 'allowed', (error) => String(error))"
    )
    assert "Failed to fetch" in refused
    until(lambda: any("Content Security Policy" in line for line in browser.complaints()))


def test_settings_that_differ_are_shown_and_the_others_folded(browser: Browser, runs: Path) -> None:
    browser.open(runs)
    rows = [row.text for row in browser.all("#differing tr")]
    assert rows == ["setting one two", "trainer.rank 4 8"]
    details = browser.driver.find_element(By.ID, "equal")
    assert "settings are equal" in details.text
    assert "trainer.lr_scheduler" not in details.text
    details.find_element(By.TAG_NAME, "summary").click()
    assert "trainer.lr_scheduler constant" in details.text


def test_everything_has_a_name_that_can_be_read_aloud(browser: Browser, runs: Path) -> None:
    browser.open(runs, "#prompt=1&step=50")
    controls = [each for each in browser.all("button, select, input") if each.is_displayed()]
    assert len(controls) > 10
    names = [each.accessible_name for each in controls]
    assert all(names), names
    assert len(set(names)) == len(names)


def test_dark_and_light_follow_the_system(browser: Browser, runs: Path) -> None:
    shades = []
    for scheme in ("light", "dark"):
        browser.prefer(scheme)
        browser.open(runs, "#prompt=1&step=100")
        shot = browser.screenshot()
        shades.append(sum(shot.getpixel((5, shot.height - 5))))  # type: ignore[arg-type]
        assert browser.colours() == expected(0, 100)
    browser.prefer("light")
    assert shades[0] > 600 and shades[1] < 150


def test_pictures_of_folders_are_stepped_through_by_all_keys(
    browser: Browser, tmp_path: Path
) -> None:
    red, green, blue, grey = (255, 0, 0), (0, 128, 0), (0, 0, 255), (90, 90, 90)
    one = make_folder(tmp_path, "one", {"a.png": red, "b.png": green})
    two = make_folder(tmp_path, "two", {"a.bmp": blue, "b.bmp": grey, "c.bmp": grey})
    browser.open(page_of(tmp_path, one, two))
    assert browser.colours() == [red, blue]
    browser.press(Keys.ARROW_RIGHT)
    assert browser.colours() == [green, grey]
    assert browser.hash == "#picture=2"
    assert browser.alts == ["one: b", "two: b"]
    browser.press(Keys.ARROW_DOWN)
    assert browser.alts == [None, "two: c"]
    assert browser.text("figure .missing") == "It has no such picture."
    browser.press(Keys.HOME)
    assert browser.colours() == [red, blue]
    assert not browser.driver.find_element(By.ID, "step-controls").is_displayed()
    assert not browser.driver.find_element(By.ID, "settings").is_displayed()
    assert browser.complaints() == []


def test_many_sides_and_large_pictures_fit_a_narrow_window(
    browser: Browser, tmp_path: Path
) -> None:
    sources = [
        make_run(tmp_path, f"run{number}", ["a cat"], [0], number=number % 2, size=(900, 300))
        for number in range(5)
    ]
    browser.open(page_of(tmp_path, *sources))
    boxes = [frame.rect for frame in browser.all(".frame")]
    assert len({box["y"] for box in boxes}) == 2
    assert browser.run("return document.documentElement.scrollWidth <= window.innerWidth")
    for frame, image in zip(browser.all(".frame"), browser.all("img"), strict=True):
        assert image.rect["width"] <= frame.rect["width"]
        assert abs(image.rect["width"] / image.rect["height"] - 3) < 0.05
    size = browser.driver.get_window_size()
    try:
        browser.driver.set_window_size(500, 900)
        until(lambda: len({frame.rect["y"] for frame in browser.all(".frame")}) == 5)
        assert browser.run("return document.documentElement.scrollWidth <= window.innerWidth")
    finally:
        browser.driver.set_window_size(size["width"], size["height"])
