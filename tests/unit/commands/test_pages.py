"""What a comparison shows: what stands beside what, and nothing as markup."""

from __future__ import annotations

import base64
import io
import json
import os
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from compare_world import Colour, colour_of, make_run, make_trained
from latentmake.base import digest
from latentmake.base.errors import ConfigError, TrainingError
from latentmake.commands.pages import gather, page_path, pictured, settings_table, write_comparison
from latentmake.config.root import Config, parse
from latentmake.pages.page import Pictures, page
from latentmake.pages.pictured import Pictured
from latentmake.runs.order import COPIED, write_parts
from PIL import Image


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTEST_TMP", str(tmp_path))


def view_of(*runs: Pictured, said: list[str] | None = None) -> dict[str, Any]:
    return gather(runs, Path("reports/page.html"), (said if said is not None else []).append)


def shown(view: dict[str, Any], side: int, row: str) -> dict[str, Colour | str]:
    """Return step -> the colour of the picture that a side shows in a row."""
    found: dict[str, Colour | str] = {}
    for step, number in view["sides"][side]["cells"][view["rows"].index(row)].items():
        if isinstance(number, str):
            found[step] = number
            continue
        data = base64.b64decode(view["pictures"][number][0].partition(",")[2])
        with Image.open(io.BytesIO(data)) as picture:
            colour = picture.convert("RGB").getpixel((0, 0))
        assert isinstance(colour, tuple)
        found[step] = colour
    return found


def test_runs_meet_by_the_text_of_their_prompts_and_by_steps() -> None:
    one = make_run("one", ["a cat", "a dog"], [0, 50, 100], number=0)
    two = make_run("two", ["an eel", "a cat"], [0, 100, 200], number=1)
    said: list[str] = []
    view = view_of(one, two, said=said)
    assert view["title"] == "one vs two"
    assert view["rows"] == ["a cat", "a dog", "an eel"]
    assert view["steps"] == [0, 50, 100, 200]
    assert shown(view, 0, "a cat") == {str(s): colour_of(0, 0, s) for s in (0, 50, 100)}
    assert shown(view, 1, "a cat") == {str(s): colour_of(1, 1, s) for s in (0, 100, 200)}
    assert shown(view, 1, "a dog") == shown(view, 0, "an eel") == {}
    write_comparison([one, two], page_path(["one", "two"]), said.append)
    assert len(said) == 1
    assert re.fullmatch(r"reports/compare_one_vs_two.html: 12 pictures, \d+\.\d MB", said[0])


def test_a_damaged_picture_is_named_and_stops_no_other() -> None:
    run = make_run("one", ["a cat"], [0, 50, 60])
    Path("runs/one/samples/step-000050_00.png").unlink()
    Path("runs/one/samples/step-000060_00.png").write_bytes(b"no picture")
    said: list[str] = []
    found = shown(view_of(run, said=said), 0, "a cat")
    assert found["50"] == "cannot be read (No such file or directory)"
    assert isinstance(found["60"], str) and found["0"] == colour_of(0, 0, 0)
    assert [line.partition(": ")[0] for line in said] == ["not shown", "not shown"]


def test_many_names_make_no_name_that_is_too_long() -> None:
    path = page_path([f"{number:03d}-{'x' * 60}" for number in range(99)])
    assert len(path.name) < 220 and path.name.endswith(".html")


def config(**run: Any) -> Config:
    wan = run.get("trainer", {}).get("kind") == "wan"
    model = {"dit": "dit", "task": "t2v-1.3B"} if wan else {"unet": "unet"}
    shared = {"datasets": "cats", "model": "m", "resolutions": 64}
    return parse(
        {
            "datasets": {"cats": {"path": "data/cats"}},
            "models": {"m": {"vae": "vae", "text": "text", **model}},
            "runs": {"a": {**shared, **run}},
        }
    )


@pytest.mark.parametrize(
    ("run", "error"),
    [
        ({"trainer": {"kind": "sd"}}, "yet; make them: latentmake build a"),
        ({"trainer": {"kind": "wan"}}, "without prompts; set `samples: {prompts: [...]}` of its"),
        ({"trainer": {"kind": "wan"}, "generate": {}}, "make clips: latentmake build gener"),
        ({}, "draws no sample pictures: only the trainers sd and wan do"),
    ],
)
def test_a_run_without_pictures_is_told_in_one_line(run: dict[str, Any], error: str) -> None:
    with pytest.raises((ConfigError, TrainingError)) as caught:
        pictured(config(**run), "a")
    assert error in str(caught.value) and str(caught.value).startswith("run a: ")


def test_pictures_of_an_earlier_training_are_not_those_of_a_run() -> None:
    make_run("a", ["x"], [0])
    settings = config(trainer={"kind": "sd"})
    assert pictured(settings, "a").samples is not None
    wanted = {"data": "e" * 64, "settings": "s" * 64, "weights": "w" * 64}
    figures = dict.fromkeys(("loss_start", "loss_end", "seconds"), 1.0)
    record = {"wanted": wanted, "steps": 1, **figures, "history": []}
    Path("runs/a/training.json").write_text(json.dumps(record))
    with pytest.raises(TrainingError, match=r"latentmake build a$"):
        pictured(settings, "a")


def test_each_step_has_the_path_of_its_lora_and_each_run_its_losses() -> None:
    run = make_run("one", ["a cat"], [0, 50, 100])
    assert (run.weights(), [*run.losses()]) == ({}, [])
    want = make_trained("one", 100)
    for step, wanted in ((50, want), (75, want | {"dataset": "e" * 64})):
        folder = Path(f"runs/one/saved/step-{step:06d}")
        folder.mkdir(parents=True)
        (folder / "kohya.safetensors").touch()
        write_parts(folder / COPIED, wanted)
    assert run.weights() == {
        "50": "runs/one/saved/step-000050/kohya.safetensors",
        "100": "runs/one/kohya.safetensors",
        "*": "runs/one/kohya.safetensors",
    }
    ((name, points),) = run.losses()
    assert name == "loss" and len(points) == 99  # one was NaN
    assert {loss for _, loss in points} == {1.0} and points[-1][0] == 99
    assert view_of(run)["losses"] == [["one", "loss", points]]


def test_settings_stand_side_by_side_by_their_whole_names() -> None:
    one = make_run("one", ["x"], [0], rank=8, samples={"seed": 1})
    two = make_run("two", ["x"], [0], rank=16, samples={"seed": 1}, weights="v")
    table = dict(view_of(one, two)["settings"])
    assert table["trainer.rank"] == ["8", "16"]
    assert table["trainer.samples.seed"] == ["1", "1"]
    assert table["trainer.lr_scheduler"] == ["constant", "constant"]
    assert table["weights"] == ["w" * 12, "v" * 12]
    assert {key for key, (a, b) in table.items() if a != b} == {"trainer.rank", "weights"}


def test_a_setting_that_one_run_does_not_have_is_a_dash() -> None:
    table = settings_table([{"a.b": 1, "a.c": None}, {"a.b": 1, "d": [1, "x"]}])
    assert table == [("a.b", ["1", "1"]), ("a.c", ["null", "–"]), ("d", ["–", '[1, "x"]'])]


class Reader(HTMLParser):
    """Takes a page apart: elements, attributes, and the texts of scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[int, str] = {}
        self.open = False
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self.open = True

    def handle_endtag(self, tag: str) -> None:
        self.open = False

    def handle_data(self, data: str) -> None:
        if not self.open:
            return
        number = len(self.elements) - 1
        self.texts[number] = self.texts.get(number, "") + data

    def of(self, tag: str) -> list[tuple[dict[str, str | None], str]]:
        return [
            (attributes, self.texts.get(number, ""))
            for number, (name, attributes) in enumerate(self.elements)
            if name == tag
        ]


def page_of(text: str) -> str:
    values = {"sides": [{"name": text, "cells": [{"0": 0, "5": text}]}], "rows": [text]}
    return page("compare", text, values)


PLAIN = Reader(page_of("plain"))
NASTY = [
    "<script>alert(1)</script>",
    "</script><script>alert(1)</script>",
    "<!--<script>",
    '"><img src=x onerror=alert(1)>',
    "&lt;b&gt; &amp; {{ data }} {% raw %} {{ script | safe }} {# #} \\1",
    "\u2028\u2029\x00\ud800",
    "]]>' `${1}`",
]


@pytest.mark.parametrize("text", NASTY)
def test_a_text_is_never_markup(text: str) -> None:
    reader = Reader(page_of(text))
    assert [tag for tag, _ in reader.elements] == [tag for tag, _ in PLAIN.elements]
    ((_, data),) = [each for each in reader.of("script") if each[0].get("type")]
    values = json.loads(data)
    assert values["rows"] == [text]
    if text.isprintable():
        assert reader.of("h1")[0][1] == reader.of("title")[0][1] == text


def test_a_page_needs_nothing_else_and_allows_nothing_else() -> None:
    for tag, attributes in PLAIN.elements:
        assert tag not in ("link", "iframe", "object", "embed", "base", "form"), tag
        assert not {"src", "href", "srcset", "action"} & attributes.keys(), tag
        assert not [name for name in attributes if name.startswith("on")], tag
    script, style = PLAIN.of("script")[-1][1], PLAIN.of("style")[0][1]
    assert not re.search(r"fetch\(|XMLHttp|import\b|innerHTML|eval\(|https?:", script)
    assert not re.search(r"@import|url\(|https?:", style)
    policies = {each.get("http-equiv"): each.get("content") for _, each in PLAIN.elements}
    policy = policies["Content-Security-Policy"]
    assert policy is not None
    assert policy.startswith("default-src 'none'; img-src data:; ")
    assert "unsafe" not in policy
    for kind, text in (("style", style), ("script", script)):
        name = base64.b64encode(bytes.fromhex(digest.of_bytes(text.encode()))).decode()
        assert f"{kind}-src 'sha256-{name}'" in policy


def test_small_pictures_are_kept_pixel_by_pixel() -> None:
    random = np.random.default_rng(0)
    pixels = random.integers(0, 256, (255, 200, 3), np.uint8)
    uri, width, height, pixelated = embedded(Image.fromarray(pixels), 1000)
    assert uri.startswith("data:image/png;base64,")
    assert (width, height, pixelated) == (200, 255, True)
    with Image.open(io.BytesIO(base64.b64decode(uri.partition(",")[2]))) as picture:
        assert (np.asarray(picture) == pixels).all()


def embedded(image: Image.Image, count: int) -> tuple[str, int, int, bool]:
    path = Path(os.environ["PYTEST_TMP"], "picture.png")
    pictures = Pictures(Path("page.html"), [path] * count)
    image.save(path)
    assert pictures.add(path) == pictures.add(path) == 0
    (found,) = pictures.embedded
    return found


def test_large_pictures_are_made_smaller_and_many_of_them_smaller_still() -> None:
    large = Image.new("RGB", (2000, 1000), (10, 200, 30))
    uri, *size = embedded(large, 200)
    assert uri.startswith("data:image/webp;base64,")
    assert size == [1024, 512, False]
    assert embedded(large, 201)[1:] == (512, 256, False)
    assert embedded(Image.new("RGB", (300, 256)), 200)[1:] == (300, 256, False)
