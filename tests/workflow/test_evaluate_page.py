"""The page of an evaluation in a real browser: clips play in step, losses are told in words."""

from __future__ import annotations

from pathlib import Path

import pytest
from browser import Browser, until
from evaluation_world import FPS, make_metrics
from latentmake.pages import page as pages
from latentmake.pages.following import write_evaluation
from selenium.webdriver.common.keys import Keys

NASTY = "</script><img src=x onerror='window.hurt=1'><script>window.hurt=1</script> & <b>"
TIMES = "return [...document.querySelectorAll('video')].map(v => v.currentTime)"
STILL = "return [...document.querySelectorAll('video')].every(v => v.paused && !v.seeking)"
READY = """return [...document.querySelectorAll('video')].every(v => v.readyState >= 2)
    && !document.getElementById('clip-controls').hidden"""


@pytest.fixture(scope="module")
def metrics(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("built") / "runs/a wave/evaluation"
    return make_metrics(folder, ["a wave", NASTY])


@pytest.fixture(scope="module")
def page(metrics: Path) -> Path:
    """The page, with its clips embedded."""
    path = metrics.parents[3] / "reports/embedded.html"
    write_evaluation(metrics.parent, path, lambda line: None)
    return path


@pytest.fixture(scope="module")
def page_beside(metrics: Path) -> Path:
    """The page beside its clips."""
    path = metrics.parents[3] / "reports/beside.html"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pages, "EMBEDDED", 0)
        write_evaluation(metrics.parent, path, lambda line: None)
    return path


def opened(browser: Browser, page: Path) -> None:
    browser.open(page)
    until(lambda: browser.run(READY))


def spread(browser: Browser) -> float:
    found = browser.run(TIMES)
    assert len(found) == 6
    return float(max(found) - min(found))


def are_in_step(seen: list[list[float]]) -> bool:
    """Tell whether the times seen last are equal to a frame, but for moments of a correction."""
    moving = [times for times in seen if min(times) > 2 / FPS][-30:]
    late = [times for times in moving if max(times) - min(times) > 1 / FPS]
    return len(moving) == 30 and len(late) <= 3


@pytest.mark.parametrize("name", ["page", "page_beside"])
def test_clips_play_in_step_and_begin_anew_together(
    browser: Browser, name: str, request: pytest.FixtureRequest
) -> None:
    opened(browser, request.getfixturevalue(name))
    browser.run("window.seen = []; setInterval(() => seen.push((() => {" + TIMES + "})()), 40)")
    until(lambda: browser.run("return seen.some((t, i) => i && t[0] < seen[i - 1][0])"))  # looped
    until(lambda: are_in_step(browser.run("return seen")))
    assert browser.complaints() == []


def test_one_control_drives_all(browser: Browser, page: Path) -> None:
    opened(browser, page)
    browser.click("play")
    until(lambda: browser.run(STILL))
    assert browser.run("return document.getElementById('play').ariaLabel") == "Play"
    browser.run("const t = document.getElementById('time'); t.value = 0.51;"
        "t.dispatchEvent(new Event('input'))")  # fmt: skip
    until(lambda: browser.run(STILL) and abs(browser.run(TIMES)[0] - 0.51) < 0.01)
    until(lambda: browser.text("#frame") == "frame 13 of 25")
    assert spread(browser) < 1e-3
    browser.press(Keys.ARROW_RIGHT)
    until(lambda: browser.text("#frame") == "frame 14 of 25")
    assert spread(browser) < 1e-3
    browser.press(Keys.ARROW_LEFT, Keys.ARROW_LEFT)
    until(lambda: browser.text("#frame") == "frame 12 of 25")
    before = browser.run(TIMES)[0]
    browser.press(" ")
    until(lambda: browser.run(TIMES)[0] > before)
    assert browser.complaints() == []


def test_losses_are_told_in_words(browser: Browser, page: Path) -> None:
    opened(browser, page)
    assert browser.text("#summary") == (
        "On 2 held-out items the adapter lowers the loss by 20.0 %, from 0.5 to 0.4."
    )
    assert len(browser.all(".chart circle")) == 6
    rows = [row.text for row in browser.all("#loss tbody tr")]
    assert rows[0] == "mean of all 0.5000 0.4000 -20.00 %"
    assert rows[1] == "950 0.2500 0.2000 -20.00 %"
    captions = [caption.text for caption in browser.all("figcaption")]
    assert captions == ["real", "base", "with the adapter"] * 2
    boxes = [video.rect for video in browser.all(".item:first-child video")]
    assert len({box["y"] for box in boxes}) == 1 and min(box["width"] for box in boxes) > 60


def test_a_caption_is_text(browser: Browser, page: Path) -> None:
    opened(browser, page)
    assert [quote.text for quote in browser.all(".item q")] == ["a wave", NASTY]
    assert browser.run("return window.hurt") is None
    assert browser.complaints() == []
