"""The page that edits captions, in a browser, by keyboard."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.request import urlopen

import made_caption_world
import pytest
import world
import yaml
from browser import Browser, until
from made_caption_world import DATA, config, facts_of, served, write_made
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.keys import Keys

MADE = {"ant": "a red circle, made", "bee": "a blue square, made"}
NASTY = "<img src=x onerror='window.hurt=1'>"


SCROLL = """
const [list, done, frames] = [document.getElementById("list"), arguments[0], []];
let last = performance.now();
const step = (now) => {
  frames.push(now - last);
  last = now;
  list.scrollTop += 1500;
  if (frames.length < 200) requestAnimationFrame(step); else done(frames);
};
requestAnimationFrame((now) => { last = now; requestAnimationFrame(step); });
"""


@pytest.fixture
def page(
    tmp_path: Path, micro: Path, monkeypatch: pytest.MonkeyPatch, browser: Browser
) -> Iterator[Browser]:
    made_caption_world.lay(micro, monkeypatch, tmp_path)
    (DATA / "fox.txt").write_text(f"a fox {NASTY}\n")
    write_made(facts_of(config()), MADE)
    with served(facts_of(config())) as address:
        browser.visit(address)
        until(lambda: name(browser) == "ant")
        yield browser
        assert browser.run("return window.hurt") is None
        browser.run(
            "window.addEventListener('beforeunload', (e) => e.stopImmediatePropagation(), true)"
        )
        browser.driver.get("about:blank")


def name(page: Browser) -> str:
    return page.text("#name")


def text(page: Browser) -> str:
    return str(page.run("return document.getElementById('text').value"))


def stems(page: Browser) -> list[str]:
    return [row.text.split()[0] for row in page.all(".row b")]


def hold(page: Browser, key: str) -> None:
    """Press a key with Ctrl."""
    ActionChains(page.driver).key_down(Keys.CONTROL).send_keys(key).key_up(Keys.CONTROL).perform()


def said(page: Browser, words: str) -> None:
    until(lambda: words in page.text("#said"))


def written(stem: str) -> str | None:
    path = DATA / f"{stem}.txt"
    return path.read_text().removesuffix("\n") if path.exists() else None


def test_captions_are_edited_by_keyboard(page: Browser) -> None:
    assert stems(page) == ["ant", "bee", "cat", "dog", "eel", "fox"]
    assert page.text("#made") == MADE["ant"]
    assert page.text("#by") == "by florence"
    page.press(Keys.ENTER, Keys.END, " and more")
    until(lambda: "29 tokens" not in page.text("#tokens") and page.text("#tokens"))
    hold(page, Keys.ENTER)  # save, next
    until(lambda: name(page) == "bee")
    assert written("ant") == f"{MADE['ant']} and more"
    page.press(Keys.PAGE_DOWN, Keys.PAGE_DOWN, Keys.PAGE_DOWN)
    assert name(page) == "eel"
    hold(page, "a")
    page.press("an eel")
    hold(page, "s")
    said(page, "saved: caption of eel")
    assert written("eel") == "an eel"
    page.press(Keys.ESCAPE, "u")
    said(page, "undone: caption of eel")
    until(lambda: text(page) == "a white circle")
    assert written("eel") == "a white circle"
    page.press("u")
    said(page, "undone: caption of ant")
    assert written("ant") is None
    assert page.complaints() == []


def test_a_text_that_is_not_saved_stays_with_its_item(page: Browser) -> None:
    page.press(Keys.ENTER, Keys.END, " draft", Keys.PAGE_DOWN, Keys.PAGE_UP)
    assert text(page) == f"{MADE['ant']} draft"
    assert "not saved" in page.text(".row[aria-selected=true]")
    assert written("ant") is None


def test_an_accepted_caption_goes_back_to_the_made_one_by_keyboard(page: Browser) -> None:
    page.press(Keys.ENTER, Keys.END, "!")
    hold(page, "s")
    said(page, "saved")
    page.press(Keys.ESCAPE, "b")
    said(page, "saved: return of ant to the made caption")
    assert written("ant") is None
    assert text(page) == MADE["ant"]


def test_a_replacement_is_previewed_applied_and_undone_by_keyboard(page: Browser) -> None:
    page.press("r", "a ", Keys.TAB, "the ", Keys.ENTER)
    until(lambda: page.text("#replace-said") == "2 captions change")
    assert [row.text for row in page.all("#changes p")] == [
        "eel a the white circle",
        f"fox a the fox {NASTY}",
    ]
    assert written("eel") == "a white circle"
    until(lambda: page.driver.switch_to.active_element.text == "Apply to 2")
    page.press(Keys.ENTER)
    said(page, "saved: replacement in 2 captions")
    assert written("eel") == "the white circle"
    page.press("u")
    said(page, "undone: replacement in 2 captions")
    assert (written("eel"), written("fox")) == ("a white circle", f"a fox {NASTY}")


def test_items_are_filtered_by_keyboard(page: Browser) -> None:
    for keys, expected in (("N", ["cat", "dog"]), ("M", ["ant", "bee"]), ("W", ["eel", "fox"])):
        page.press("f", keys, Keys.ESCAPE)
        until(lambda expected=expected: stems(page) == expected)  # type: ignore[misc]
    page.press("f", "All", Keys.ESCAPE, "/", "CIRCLE", Keys.ENTER)
    until(lambda: stems(page) == ["ant", "eel"])
    until(lambda: name(page) in ("ant", "eel"))
    assert page.text("#count") == "2 of 6 items"


def test_two_windows_show_both_texts_and_ask(page: Browser) -> None:
    page.press(Keys.ENTER)
    hold(page, "a")
    page.press("of this window")
    (DATA / "ant.txt").write_text("of the other window\n")
    hold(page, "s")
    until(lambda: page.text("#theirs") == "of the other window")
    assert text(page) == "of this window"
    assert written("ant") == "of the other window"
    page.press(Keys.ENTER)  # keep mine
    said(page, "saved: caption of ant")
    assert written("ant") == "of this window"


def test_a_line_says_what_the_next_build_does(page: Browser) -> None:
    until(lambda: page.text("#work").startswith("The next build makes 2 captions"))
    page.press(Keys.END, Keys.UP, Keys.UP, Keys.ENTER, "a dog")
    hold(page, "s")
    until(lambda: page.text("#work").startswith("The next build makes 1 caption,"))


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_the_page_fits_and_can_be_read(page: Browser, width: int, scheme: str) -> None:
    media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    page.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
    try:
        with page.window(width, 844):
            page.run("dispatchEvent(new Event('resize'))")
            page.press(Keys.ENTER, Keys.END, " and more")
            until(lambda: page.text("#tokens"))
            assert page.run("return document.documentElement.scrollWidth") <= width
            shot = page.screenshot()
            if folder := os.environ.get("LATENTMAKE_SHOTS"):
                shot.save(Path(folder, f"edit_{width}_{scheme}.png"))
                page.press(Keys.ESCAPE, "r", "circle", Keys.TAB, "disc", Keys.ENTER)
                until(lambda: page.text("#replace-said"))
                page.screenshot().save(Path(folder, f"replace_{width}_{scheme}.png"))
                page.press(Keys.ESCAPE, "?")
                page.screenshot().save(Path(folder, f"keys_{width}_{scheme}.png"))
    finally:
        page.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


def test_five_thousand_pictures_scroll_without_a_pause(
    tmp_path: Path, micro: Path, monkeypatch: pytest.MonkeyPatch, browser: Browser
) -> None:
    made_caption_world.lay(micro, monkeypatch, tmp_path)
    for number in range(5000):
        path = DATA / f"item_{number:04}.png"
        if number < 50:
            world.draw(path, number)
        else:
            os.link(DATA / f"item_{number % 50:04}.png", path)
        path.with_suffix(".txt").write_text(f"a drawn figure, number {number}")
    with served(facts_of(config())) as address:
        began = time.monotonic()
        browser.visit(address)
        until(lambda: browser.text("#count") == "5006 of 5006 items")
        print(f"\n5,006 items are shown after {time.monotonic() - began:.1f} s")
        until(lambda: browser.text("#work").startswith("The next build"))
        print(f"the next build is planned after {time.monotonic() - began:.1f} s")
        frames = sorted(browser.driver.execute_async_script(SCROLL))
        print(f"frames: {frames[150]:.0f} ms (3 of 4), {frames[-1]:.0f} ms (longest of 200)")
        assert len(browser.all(".row")) < 100
        assert frames[150] < 100
        browser.press("/", "4999", Keys.ENTER)
        until(lambda: name(browser) == "item_4999")
        browser.driver.get("about:blank")


def test_ctrl_c_ends_the_server_without_a_word(
    tmp_path: Path, micro: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made_caption_world.lay(micro, monkeypatch, tmp_path)
    Path("tiny.yaml").write_text(yaml.safe_dump(world.config()))
    command = [sys.executable, "-m", "latentmake", "captions", "tiny", "-c", "tiny.yaml", "--edit"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    (DATA / "ant.txt").write_text("an ant")
    running = subprocess.Popen(command, **pipes)  # type: ignore[call-overload]
    line = running.stdout.readline()
    assert line.startswith("edit the captions of tiny at http://127.0.0.1:")
    address = line.split()[6]
    with urlopen(f"{address}load") as answer:
        assert b"an ant" in answer.read()
    running.send_signal(signal.SIGINT)
    said, faults = running.communicate(timeout=60)
    assert (running.returncode, said, faults) == (0, "", "")
