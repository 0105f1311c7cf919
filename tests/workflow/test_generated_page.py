"""The page of generated clips, in a real browser from a disk."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from browser import Browser, until
from latentmake.formats.video import write_mp4
from latentmake.pages.following import PAGE, outdated, write_generated
from latentmake.plan.product import Difference
from latentmake.runs.results import INDEX, Clip, GenerationIndex
from latentmake.trainers.loop.generation import clip_name

NASTY = "</script><img src=x onerror='window.hurt=1'> & <b>\n../.."
FRAMES, FPS, WIDTH, HEIGHT = 12, 8, 64, 32
COLOURS = {"": (200, 20, 20), "lora": (20, 20, 200)}
READY = "return [...document.querySelectorAll('video')].every(v => v.readyState >= 2)"
TIMES = "return [...document.querySelectorAll('video')].map(v => v.currentTime)"
SIZES = "return [...document.querySelectorAll('video')].map(v => [v.videoWidth, v.videoHeight])"


def make(folder: Path, *prompts: str) -> None:
    """Write the clips of some prompts, which grow brighter, and their index."""
    clips = []
    for prompt in prompts:
        for adapter, colour in COLOURS.items():
            name = clip_name(prompt, 3, adapter=bool(adapter))
            tinted = np.full((HEIGHT, WIDTH, 3), colour, np.uint8)
            write_mp4(folder / name, [tinted + 3 * number for number in range(FRAMES)], FPS)
            size = (folder / name).stat().st_size
            clips.append(
                Clip(
                    file=name,
                    key=name,
                    prompt=prompt,
                    seed=3,
                    adapter=adapter,
                    asked=False,
                    size=size,
                )
            )  # fmt: skip
    settings = {"frames": FRAMES, "width": WIDTH, "height": HEIGHT, "fps": FPS, "steps": 2}
    index = GenerationIndex(run="waves", parts=settings, clips=clips)
    index.write(folder / INDEX)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("built") / "a run #1/generated"
    make(place, "a wave", NASTY)
    write_generated(place, place / "receipt.json", lambda line: None)
    return place


def test_clips_play_side_by_side_from_a_disk(browser: Browser, folder: Path) -> None:
    browser.open(folder / PAGE)
    until(lambda: browser.run(READY))
    assert browser.run(SIZES) == [[WIDTH, HEIGHT]] * 4
    assert [each.text for each in browser.all("figcaption")] == ["base", "with the adapter"] * 2
    until(lambda: min(browser.run(TIMES)) > 0.3)
    heads = [each.text for each in browser.all(".item h2")]
    assert heads[0] == "a wave seed 3"
    assert NASTY.replace("\n", " ") in heads[1].replace("\n", " ")
    assert browser.run("return window.hurt") is None
    assert browser.complaints() == []
    assert "num" not in browser.text("#settings") and "steps" in browser.text("#settings")


def test_a_page_is_fresh_until_its_clips_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    place, receipt = Path("runs/waves/generated"), Path("runs/waves/generated.json")
    make(place, "a wave")
    assert outdated("waves", "generate") == [
        Difference(f"{place / PAGE} does not show these results")
    ]
    write_generated(place, receipt, lambda line: None)
    assert not outdated("waves", "generate")
    make(place, "a boat")
    (reason,) = outdated("waves", "generate")
    assert reason.name == "results and template"
    assert reason.old.endswith(f".. ({place / PAGE})")
    assert reason.new.endswith(f".. ({place / INDEX})")
    write_generated(place, receipt, lambda line: None)
    receipt.unlink()
    assert outdated("waves", "generate") == [Difference(f"{receipt} is missing")]
