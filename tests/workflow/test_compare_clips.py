"""Clips of runs and folders on a comparison page: aligned by prompt and seed, playing in step."""

from __future__ import annotations

import json
from pathlib import Path

import compare_world
import video_world
from browser import Browser, until
from latentmake import digest
from latentmake.reports.comparison import compare, gather
from latentmake.reports.comparison_order import PageOrder, Source, generated_folder, state_of
from latentmake.training.generation import Clip, GenerationIndex, clip_name
from selenium.webdriver.common.keys import Keys

TIMES = "return [...document.querySelectorAll('video[src]')].map(v => v.currentTime)"
WIDTHS = "return [...document.querySelectorAll('video[src]')].map(v => v.videoWidth)"
SHOWN = "return [...document.querySelectorAll('video[src]')].every(v => v.readyState >= 2)"


def generated(root: Path, name: str, wanted: list[tuple[str, int]], width: int) -> Source:
    """Write the generated clips of a run without samples: of prompts and seeds, all of one size."""
    source = Source(name=name, kind="run", path=str(root / f"runs/{name}/samples"))
    folder = generated_folder(source)
    folder.mkdir(parents=True)
    clips = []
    for prompt, seed in wanted:
        for adapter in ("", "a" * 64):
            file = clip_name(prompt, seed, adapter=bool(adapter))
            size = (width if adapter else 96, 48)
            path = video_world.write_video(folder / file, "libx264", 17, size=size)
            clips.append(
                Clip(
                    file=file,
                    key=file,
                    prompt=prompt,
                    seed=seed,
                    adapter=adapter,
                    asked=False,
                    size=path.stat().st_size,
                )
            )
    index = GenerationIndex(run=name, weights="w", settings={"fps": 24, "frames": 17}, clips=clips)
    index.write(folder / "index.json")
    return source


def sampled(root: Path, name: str, prompts: list[str], steps: list[int]) -> Source:
    """Turn the sample pictures of a run into clips."""
    source = compare_world.make_run(root, name, prompts, steps)
    folder = Path(source.path)
    index = json.loads((folder / "index.json").read_bytes())
    index["files"] = [[file.replace(".png", ".mp4") for file in row] for row in index["files"]]
    for step, row in zip(steps, index["files"], strict=True):
        for file in row:
            video_world.write_video(folder / file, "libx264", 9, size=(32 + 2 * step, 32))
    (folder / "index.json").write_text(json.dumps(index))
    return source


def page_of(root: Path, *sources: Source) -> Path:
    order, page = root / "order.json", root / "page.html"
    order.write_text(PageOrder(sources=list(sources), planned=0).model_dump_json())
    compare(order, page, lambda line: None)
    return page


def test_generated_clips_stand_side_by_side_by_prompt_and_seed(
    browser: Browser, tmp_path: Path
) -> None:
    one = generated(tmp_path, "one", [("a wave", 0), ("a wave", 1)], 32)
    two = generated(tmp_path, "two", [("a wave", 1), ("a sea", 0)], 64)
    view = gather([one, two], print)
    assert view.rows == ["a wave (seed 0)", "a wave (seed 1)", "a sea (seed 0)"]
    assert view.fps == 24 and view.steps == [] and view.rows_are == "prompt"
    assert ("generate.frames", ["17", "17"]) in view.settings
    browser.open(page_of(tmp_path, one, two), "#prompt=2")
    until(lambda: browser.run(SHOWN) and browser.run(WIDTHS) == [32, 64])
    until(lambda: min(browser.run(TIMES)) > 0.05)
    seen = [browser.run(TIMES) for _ in range(20)]
    late = [times for times in seen if abs(times[0] - times[1]) > 1 / 24]
    assert len(late) <= 2, seen
    browser.click("play")
    browser.press(".")
    until(lambda: len(set(browser.run(TIMES))) == 1)
    browser.press(Keys.ARROW_UP)
    until(lambda: browser.run(SHOWN) and browser.run(WIDTHS) == [32])
    browser.open(tmp_path / "page.html", "#prompt=3")
    until(lambda: browser.run(SHOWN) and browser.run(WIDTHS) == [64])
    assert browser.complaints() == []


def test_sample_clips_and_a_folder_of_videos(browser: Browser, tmp_path: Path) -> None:
    run = sampled(tmp_path, "run", ["a wave"], [0, 8])
    folder = compare_world.make_folder(tmp_path, "films", {"picture.png": (9, 9, 9)})
    video_world.write_video(tmp_path / "films/a wave.mp4", "libx264", 9, size=(80, 48))
    video_world.write_video(tmp_path / "films/picture.mp4", "libx264", 9)
    browser.open(page_of(tmp_path, run, folder), "#prompt=1&step=8")
    until(lambda: browser.run(SHOWN) and browser.run(WIDTHS) == [48, 80])
    assert browser.notes == ["step 8", "at all steps"]
    browser.press(Keys.HOME)
    assert browser.notes[0] == "step 0"
    browser.open(tmp_path / "page.html", "#prompt=2")
    until(lambda: browser.alts[1] == "films: picture")
    assert browser.run(WIDTHS) == []
    assert browser.complaints() == []


def test_a_clip_that_changed_makes_the_page_stale(tmp_path: Path) -> None:
    one = generated(tmp_path, "one", [("a wave", 0)], 32)
    before = state_of([one], digest.of_file)
    index = generated_folder(one) / "index.json"
    found = GenerationIndex.read(index)
    assert found is not None
    GenerationIndex(**{**found.model_dump(), "weights": "x"}).write(index)
    assert state_of([one], digest.of_file) != before


def test_a_damaged_clip_is_named_and_stops_no_other(tmp_path: Path) -> None:
    one = generated(tmp_path, "one", [("a wave", 0), ("a sea", 0)], 32)
    damaged = generated_folder(one) / clip_name("a sea", 0, adapter=True)
    damaged.write_bytes(b"no clip")
    said: list[str] = []
    view = gather([one], said.append)
    assert len(view.clips) == len(view.pictures) == 1
    assert len(said) == 1 and damaged.name in said[0]
