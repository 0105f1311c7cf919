"""The page of a comparison in a real browser: what it shows, and what keys do."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import compare_world
import pytest
import video_world
from browser import Browser, until
from compare_world import colour_of, make_run, make_trained
from latentmake.commands.pages import write_comparison
from latentmake.pages.pictured import Pictured, index_of
from latentmake.plan.manifest import run_folder
from latentmake.runs.results import Clip, GenerationIndex
from latentmake.trainers.loop.generation import clip_name
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

NASTY = "</script><img src=x onerror='window.hurt=1'><script>window.hurt=1</script> & <b>"
PROMPTS = ["a cat", NASTY]
TIMES = "return [...document.querySelectorAll('dialog video')].map(v => v.currentTime)"
WIDTHS = "return [...document.querySelectorAll('dialog video')].map(v => v.videoWidth)"
SHOWN = "return [...document.querySelectorAll('dialog video')].every(v => v.readyState >= 2)"


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A working folder for the runs of this module."""
    before, here = Path.cwd(), tmp_path_factory.mktemp("runs")
    os.chdir(here)
    yield here
    os.chdir(before)


def page_of(*runs: Pictured) -> Path:
    page = Path(f"reports/{'-'.join(run.name for run in runs)}.html")
    write_comparison(runs, page, lambda line: None)
    return page


@pytest.fixture(scope="module")
def runs(folder: Path) -> Path:
    """A page of two runs: other steps, their prompts in another order."""
    one = make_run("one", PROMPTS, [0, 50, 100], number=0, rank=4)
    two = make_run("two", [*PROMPTS[::-1], "only here"], [0, 100, 200], number=1, rank=8)
    return page_of(one, two)


def expected(row: int, step: int) -> list[tuple[int, int, int]]:
    """The colours of both runs at a row and a step that both have."""
    return [colour_of(0, row, step), colour_of(1, 1 - row, step)]


def test_the_same_prompt_and_step_stand_side_by_side(browser: Browser, runs: Path) -> None:
    browser.open(runs, "#prompt=1&step=100")
    assert browser.text("h1") == "one vs two"
    assert browser.colours() == expected(0, 100)
    assert browser.alts == ["one, step 100: a cat", "two, step 100: a cat"]
    assert browser.text("#viewer-title") == "a cat (step 100)"
    left, right = (frame.rect for frame in browser.all(".frame"))
    assert left["y"] == right["y"] and left["x"] + left["width"] < right["x"]
    browser.press(Keys.ESCAPE)
    until(lambda: browser.hash == "")
    assert [row.text for row in browser.all("#differing tr")] == [
        "setting one two",
        "trainer.rank 4 8",
    ]
    details = browser.driver.find_element(By.ID, "equal")
    assert "trainer.lr_scheduler" not in details.text
    details.find_element(By.TAG_NAME, "summary").click()
    assert "trainer.lr_scheduler constant" in details.text
    assert browser.complaints() == []


def test_keys_step_through_steps_and_prompts(browser: Browser, runs: Path) -> None:
    browser.open(runs, "#prompt=1&step=100")
    browser.press(Keys.HOME)
    assert browser.colours() == expected(0, 0)
    browser.press(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)
    assert browser.colours() == expected(0, 100)
    assert browser.hash == "#prompt=1&step=100"
    browser.press(Keys.END)
    assert browser.notes == ["missing", "step 200"]
    assert browser.text("dialog .missing") == "No picture of this prompt at this step."
    browser.press(Keys.ARROW_LEFT, Keys.ARROW_DOWN)
    assert browser.text("#viewer-title") == f"{NASTY} (step 100)"
    assert browser.colours() == expected(1, 100)
    browser.click("before")
    assert browser.colours()[0] == colour_of(0, 1, 50)
    browser.run("location.hash = '#prompt=2&step=60'")
    until(lambda: browser.hash == "#prompt=2&step=50")  # the last step before it
    for address in ("#prompt=99&step=99999", "#prompt=x&step=-1", "#<b>"):
        browser.open(runs, address)
        assert len(browser.all("#grid .item")) == 3
    assert browser.run("return window.hurt === undefined")
    assert browser.complaints() == []


def test_a_grid_has_a_row_for_each_prompt_and_run_and_a_column_for_each_step(
    browser: Browser, runs: Path
) -> None:
    browser.open(runs)
    assert [each.text for each in browser.all("#grid h2")] == [*PROMPTS, "only here"]
    assert browser.run("return document.querySelector('dialog').open") is False
    strips = [
        [str(image.get_attribute("alt")).partition(":")[0] for image in images]
        for images in (each.find_elements(By.TAG_NAME, "img") for each in browser.all(".strip"))
    ]
    one = [f"one, step {step}" for step in (0, 50, 100)]
    two = [f"two, step {step}" for step in (0, 100, 200)]
    assert strips == [one, two, one, two, [], two]
    places: dict[str, set[float]] = {}
    for figure in browser.all("#grid .item:first-child figure"):
        places.setdefault(figure.text.split("\n")[-1], set()).add(figure.rect["x"])
    assert [*places] == ["step 0", "step 50", "step 100", "step 200"]
    assert all(len(lefts) == 1 for lefts in places.values())
    browser.all("#grid .open")[1].click()
    assert browser.hash == "#prompt=1&step=50" and browser.notes == ["step 50", "missing"]
    browser.press(Keys.ESCAPE)
    assert browser.run("return document.querySelector('dialog').open") is False
    assert "No files are kept." in browser.text("#weights")
    assert browser.complaints() == []


def test_losses_and_loras_stand_below_the_pictures(browser: Browser) -> None:
    run = make_run("trained", ["a cat"], [0, 20])
    make_trained("trained", 20)
    browser.open(page_of(run))
    assert len(browser.all("#losses polyline")) == 1
    assert browser.text("#losses svg text:last-child") == "trained"
    assert browser.text("#weights code") == "runs/trained/kohya.safetensors"
    browser.all("#grid .open")[1].click()
    assert browser.text("dialog code") == "runs/trained/kohya.safetensors"
    button = browser.driver.find_element(By.CSS_SELECTOR, "dialog .path button")
    button.click()
    until(lambda: button.text != "Copy")
    assert browser.run("return getSelection().toString()") == "runs/trained/kohya.safetensors"
    browser.press(Keys.ARROW_LEFT)
    assert "No weights of this step are kept." in browser.text("dialog")
    assert browser.complaints() == []


def test_the_page_asks_the_network_for_nothing(browser: Browser, runs: Path) -> None:
    browser.open(runs)
    loaded = browser.run("return performance.getEntriesByType('resource').map((each) => each.name)")
    assert [name for name in loaded if not name.startswith("data:")] == []
    refused = browser.run(
        "return await fetch('http://127.0.0.1:1/').then(() => 'allowed', (error) => String(error))"
    )
    assert "Failed to fetch" in refused
    until(lambda: any("Content Security Policy" in line for line in browser.complaints()))


def test_five_runs_fit_a_narrow_window(browser: Browser) -> None:
    found = [make_run(f"run{number}", ["a cat"], [0], size=(900, 300)) for number in range(5)]
    browser.open(page_of(*found))
    names = [each.accessible_name for each in browser.all("button") if each.is_displayed()]
    assert len(names) == len({*names}) == 5 and all(names)
    for width in (1200, 600, 390):
        with browser.window(width, 900):
            assert browser.run("return document.documentElement.scrollWidth <= window.innerWidth")


def generated(name: str, wanted: list[tuple[str, int]], width: int) -> Pictured:
    """Write the generated clips of a run without samples: of prompts and seeds, all of one size."""
    clips = []
    for prompt, seed in wanted:
        for adapter in ("", "a" * 64):
            file = clip_name(prompt, seed, adapter=bool(adapter))
            path, size = Path("runs", name, "generated", file), (width if adapter else 96, 48)
            path.parent.mkdir(parents=True, exist_ok=True)
            video_world.write_video(path, "libx264", 17, size=size)
            same = {"file": file, "key": file, "prompt": prompt, "seed": seed, "adapter": adapter}
            clips.append(Clip(**same, asked=False, size=path.stat().st_size))
    index = GenerationIndex(run=name, parts={"fps": 24, "frames": 17}, clips=clips)
    return Pictured(name, run_folder(name), None, index)


def test_generated_clips_play_in_step_by_prompt_and_seed(browser: Browser) -> None:
    one = generated("films", [("a wave", 0), ("a wave", 1)], 32)
    two = generated("others", [("a wave", 1), ("a sea", 0)], 64)
    browser.open(page_of(one, two), "#prompt=2")
    assert browser.text("#viewer-title") == "a wave (seed 1)"
    until(lambda: browser.run(SHOWN) and browser.run(WIDTHS) == [32, 64])
    until(lambda: min(browser.run(TIMES)) > 0.05)
    seen = [browser.run(TIMES) for _ in range(20)]
    late = [times for times in seen if abs(times[0] - times[1]) > 1 / 24]
    assert len(late) <= 2, seen
    browser.press(" ", ".")
    until(lambda: len(set(browser.run(TIMES))) == 1)
    browser.press(Keys.ARROW_UP)
    until(lambda: browser.run(SHOWN) and browser.run(WIDTHS) == [32])
    assert browser.complaints() == []


def test_sample_clips_have_steps(browser: Browser) -> None:
    compare_world.make_run("clips", ["a wave"], [0, 8])
    folder = Path("runs/clips/samples")
    index = json.loads((folder / "index.json").read_bytes())
    index["files"] = [[file.replace(".png", ".mp4") for file in row] for row in index["files"]]
    for step, (file,) in zip([0, 8], index["files"], strict=True):
        video_world.write_video(folder / file, "libx264", 9, size=(32 + 2 * step, 32))
    (folder / "index.json").write_text(json.dumps(index))
    browser.open(
        page_of(Pictured("clips", run_folder("clips"), index_of(run_folder("clips")), None)),
        "#prompt=1&step=8",
    )
    until(lambda: browser.run(SHOWN) and browser.run(WIDTHS) == [48])
    assert browser.notes == ["step 8"]
    browser.press(Keys.HOME)
    until(lambda: browser.notes == ["step 0"])
    until(lambda: browser.run(SHOWN) and browser.run(WIDTHS) == [32])
