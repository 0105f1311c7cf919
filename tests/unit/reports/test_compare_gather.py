"""What a comparison shows: which names it means, what stands beside what, and nothing as markup."""

from __future__ import annotations

import base64
import io
import itertools
import json
import os
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from compare_world import Colour, colour_of, make_folder, make_run, png
from hypothesis import given
from hypothesis import strategies as st
from latentmake import digest
from latentmake.config import Config, parse
from latentmake.errors import ConfigError, DatasetError, TrainingError
from latentmake.reports.comparison import Side, View, compare, flat, gather, settings_table
from latentmake.reports.comparison_order import (
    PageOrder,
    Source,
    is_page,
    pictures_in,
    plan_page,
    resolve,
)
from latentmake.reports.images import Pictures
from latentmake.reports.page import state_in
from PIL import Image


def config(*runs: str, **folders: str) -> Config:
    run = {"datasets": "cats", "model": "sd", "resolutions": 64, "trainer": {"kind": "sd"}}
    return parse(
        {
            "datasets": {"cats": {"path": "data/cats"}},
            "models": {"sd": {"vae": "vae", "text": "text", "unet": "unet"}},
            "runs": dict.fromkeys(runs, run),
            "folders": folders,
        }
    )


# -- names ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "names"),
    [
        ("compare_a_vs_b", ["a", "b"]),
        ("compare_b_vs_a", ["b", "a"]),
        ("compare_a", ["a"]),
        ("compare_gold_vs_a_vs_b", ["gold", "a", "b"]),
        ("compare_x_vs_y_vs_a", ["x_vs_y", "a"]),
        ("reports/compare_a_vs_x_vs_y.html", ["a", "x_vs_y"]),
    ],
)
def test_a_target_names_runs_and_folders(target: str, names: list[str]) -> None:
    assert is_page(target)
    assert resolve(target, config("a", "b", "x_vs_y", gold="references")) == names


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("compare_a_vs_cta", "there is no run or folder `cta`; did you mean `compare_a_vs_cat`?"),
        (
            "compare_caat_vs_x_vs_y",
            "no run or folder `caat`; did you mean `compare_cat_vs_x_vs_y`?",
        ),
        ("compare_a_vs_qqqq", "no run or folder `qqqq`; known: a, cat, x_vs_y, gold"),
        ("compare_cta_vs_qqqq", "no run or folder `cta`; did you mean `cat`?"),
        ("compare_a_vs_", "no run or folder ``; known: "),
        ("compare_a_vs_a", "`a` is named twice; name it once"),
    ],
)
def test_a_name_that_there_is_not_is_answered_in_one_line(target: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(target, config("a", "cat", "x_vs_y", gold="references"))
    assert str(caught.value).startswith(f"{target}: ")
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_names_that_can_be_read_in_two_ways_are_refused() -> None:
    with pytest.raises(ConfigError, match="can be read as `a` and `b` or as `a_vs_b`; give"):
        resolve("compare_a_vs_b", config("a", "b", "a_vs_b"))
    with pytest.raises(ConfigError, match="`a_vs_b` and `c` or as `a` and `b_vs_c`; give"):
        resolve("compare_a_vs_b_vs_c", config("a_vs_b", "c", "a", "b_vs_c"))


@given(st.lists(st.sampled_from(["a", "b", "a_vs_b", "vs"]), unique=True), st.data())
def test_a_target_is_read_as_what_it_was_made_of_or_refused(
    some: list[str], data: st.DataObject
) -> None:
    known = ["c", *some]
    names = data.draw(st.lists(st.sampled_from(known), min_size=1, max_size=3, unique=True))
    target = "compare_" + "_vs_".join(names)
    ways = [
        each
        for length in range(1, 6)
        for each in itertools.product(known, repeat=length)
        if "compare_" + "_vs_".join(each) == target
    ]
    if len(ways) == 1:
        assert resolve(target, config(*known)) == names
    else:
        with pytest.raises(ConfigError, match="can be read as"):
            resolve(target, config(*known))


# -- pictures of a folder -------------------------------------------------------------------------


def test_a_folder_is_listed_as_a_reader_counts(tmp_path: Path) -> None:
    files = ["10.png", "9.webp", "sub/1.JPG", ".hidden/1.png", ".2.png", "ümlaut ß.png"]
    source = make_folder(tmp_path, "gold", dict.fromkeys(files, (1, 2, 3)))
    (tmp_path / "gold/notes.txt").write_text("no image")
    assert list(pictures_in(source)) == ["9", "10", "sub/1", "ümlaut ß"]


def test_a_folder_that_cannot_be_shown_is_told_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match=r"^folders.gold: the folder .* does not exist; "):
        pictures_in(Source(name="gold", kind="folder", path=str(tmp_path / "nowhere")))
    source = make_folder(tmp_path, "gold", {"a.png": (1, 2, 3), "a.webp": (1, 2, 3)})
    with pytest.raises(DatasetError, match=r"folders.gold: a.(png|webp) and a.(png|webp) differ"):
        pictures_in(source)


# -- side by side ---------------------------------------------------------------------------------


def shown(view: View, side: int, row: str) -> dict[str, Colour | str]:
    """Return step -> the colour of the picture that a side shows in a row."""
    found: dict[str, Colour | str] = {}
    for step, number in view.sides[side].cells[view.rows.index(row)].items():
        if isinstance(number, str):
            found[step] = number
            continue
        data = base64.b64decode(view.pictures[number][0].partition(",")[2])
        with Image.open(io.BytesIO(data)) as picture:
            colour = picture.convert("RGB").getpixel((0, 0))
        assert isinstance(colour, tuple)
        found[step] = colour
    return found


def test_runs_meet_by_the_text_of_their_prompts_and_by_steps(tmp_path: Path) -> None:
    one = make_run(tmp_path, "one", ["a cat", "a dog"], [0, 50, 100], number=0)
    two = make_run(tmp_path, "two", ["an eel", "a cat"], [0, 100, 200], number=1)
    said: list[str] = []
    view = gather([one, two], said.append)
    assert view.title == "one vs two"
    assert view.rows == ["a cat", "a dog", "an eel"]
    assert (view.rows_are, view.steps) == ("prompt", [0, 50, 100, 200])
    assert shown(view, 0, "a cat") == {str(s): colour_of(0, 0, s) for s in (0, 50, 100)}
    assert shown(view, 1, "a cat") == {str(s): colour_of(1, 1, s) for s in (0, 100, 200)}
    assert shown(view, 1, "a dog") == shown(view, 0, "an eel") == {}
    assert shown(view, 1, "an eel") == {str(s): colour_of(1, 0, s) for s in (0, 100, 200)}
    assert said == []


def test_a_prompt_that_was_drawn_twice_has_two_rows(tmp_path: Path) -> None:
    one = make_run(tmp_path, "one", ["a cat", "a cat", ""], [0], number=0)
    two = make_run(tmp_path, "two", ["", "a cat"], [0], number=1)
    view = gather([one, two], print)
    assert view.rows == ["a cat", "a cat (2)", "(the empty prompt)"]
    assert shown(view, 0, "a cat (2)") == {"0": colour_of(0, 1, 0)}
    assert shown(view, 1, "a cat") == {"0": colour_of(1, 1, 0)}
    assert shown(view, 1, "a cat (2)") == {}


def test_folders_meet_by_path_without_ending(tmp_path: Path) -> None:
    red, blue = (255, 0, 0), (0, 0, 255)
    one = make_folder(tmp_path, "one", {"sub/a.png": red, "b.png": red})
    two = make_folder(tmp_path, "two", {"sub/a.bmp": blue, "a.png": blue})
    view = gather([one, two], print)
    assert (view.rows_are, view.steps) == ("picture", [])
    assert sorted(view.rows) == ["a", "b", "sub/a"]
    assert [shown(view, side, "sub/a") for side in (0, 1)] == [{"*": red}, {"*": blue}]
    assert [shown(view, side, "b") for side in (0, 1)] == [{"*": red}, {}]


def test_a_folder_stands_beside_the_prompts_and_steps_that_its_pictures_are_named_by(
    tmp_path: Path,
) -> None:
    run = make_run(tmp_path, "one", ["a cat", "a dog", "an eel"], [0, 50])
    colours: dict[str, Colour] = {
        "step-000050_00.png": (1, 1, 1),
        "01.png": (2, 2, 2),
        "an eel.png": (3, 3, 3),
        "other.png": (4, 4, 4),
    }
    gold = make_folder(tmp_path, "gold", colours)
    said: list[str] = []
    view = gather([gold, run], said.append)
    assert view.rows == ["a cat", "a dog", "an eel", "other"]
    assert shown(view, 0, "a cat") == {"50": (1, 1, 1)}
    assert shown(view, 0, "a dog") == {"*": (2, 2, 2)}
    assert shown(view, 0, "an eel") == {"*": (3, 3, 3)}
    assert shown(view, 0, "other") == {"*": (4, 4, 4)}
    assert shown(view, 1, "other") == {}
    assert said == []
    alone = make_folder(tmp_path, "alone", {"x.png": (5, 5, 5)})
    gather([alone, run], said.append)
    assert len(said) == 1 and said[0].startswith("alone: none of its pictures is named like")


def test_a_damaged_picture_is_named_and_stops_no_other(tmp_path: Path) -> None:
    run = make_run(tmp_path, "one", ["a cat"], [0, 50])
    gold = make_folder(tmp_path, "gold", {"a.png": (1, 1, 1), "b.png": (2, 2, 2)})
    (tmp_path / "gold/a.png").write_bytes(png((9, 9, 9))[:40])
    (tmp_path / "runs/one/samples/step-000050_00.png").unlink()
    said: list[str] = []
    view = gather([run, gold], said.append)
    assert shown(view, 0, "a cat")["50"] == "cannot be read (No such file or directory)"
    assert isinstance(shown(view, 1, "a")["*"], str)
    assert shown(view, 1, "b") == {"*": (2, 2, 2)}
    faults = [line for line in said if line.startswith("not shown: ")]
    assert len(faults) == 2
    assert "step-000050_00.png" in faults[0] and "a.png" in faults[1]


def test_a_run_without_pictures_is_told_in_one_line(tmp_path: Path) -> None:
    missing = Source(name="b", kind="run", path=str(tmp_path / "runs/b/samples"))
    with pytest.raises(TrainingError, match="the run b has no sample pictures; make them: "):
        gather([make_run(tmp_path, "a", ["x"], [0]), missing], print)


# -- settings -------------------------------------------------------------------------------------


def test_settings_stand_side_by_side_by_their_whole_names(tmp_path: Path) -> None:
    one = make_run(tmp_path, "one", ["x"], [0], rank=8, samples={"seed": 1})
    two = make_run(tmp_path, "two", ["x"], [0], rank=16, samples={"seed": 1}, weights="v")
    view = gather([one, two], print)
    table = dict(view.settings)
    assert view.runs == ["one", "two"]
    assert table["trainer.rank"] == ["8", "16"]
    assert table["trainer.samples.seed"] == ["1", "1"]
    assert table["trainer.lr_scheduler"] == ["constant", "constant"]
    assert table["weights"] == ["w" * 12, "v" * 12]
    assert {key for key, values in table.items() if len(set(values)) > 1} == {
        "trainer.rank",
        "weights",
    }


def test_a_setting_that_one_run_does_not_have_is_a_dash() -> None:
    table = settings_table([{"a": {"b": 1, "c": None}}, {"a": {"b": 1}, "d": [1, "x"]}])
    assert table == [("a.b", ["1", "1"]), ("a.c", ["null", "–"]), ("d", ["–", '[1, "x"]'])]


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.dictionaries(st.text(alphabet="abc", min_size=1), inner, min_size=1),
)


@given(st.dictionaries(st.text(alphabet="abc", min_size=1), values))
def test_settings_made_flat_lose_nothing(nested: dict[str, Any]) -> None:
    def leaves(value: Any) -> int:
        return sum(map(leaves, value.values())) if isinstance(value, dict) else 1

    level = flat(nested)
    assert len(level) == leaves(nested)
    for key, value in level.items():
        found: Any = nested
        for part in key.split("."):
            found = found[part]
        assert found == value


# -- the page -------------------------------------------------------------------------------------


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


def view_of(text: str) -> View:
    side = Side(text, "run", [{"0": 0, "5": text}])
    picture = ("data:image/png;base64,AAAA", 1, 1, True)
    return View(text, [side], [text], "prompt", [0, 5], [picture], [text], [(text, [text])])


PLAIN = Reader(view_of("plain").page("0" * 64))
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
    page = view_of(text).page("0" * 64)
    reader = Reader(page)
    assert [tag for tag, _ in reader.elements] == [tag for tag, _ in PLAIN.elements]
    ((_, data),) = [each for each in reader.of("script") if each[0].get("type")]
    values = json.loads(data)
    assert values["rows"] == [text]
    assert values["sides"][0]["name"] == text
    if text.isprintable():
        assert reader.of("h1")[0][1] == reader.of("title")[0][1] == text


@given(st.text())
def test_data_survives_the_page(text: str) -> None:
    reader = Reader(view_of(text).page("0" * 64))
    assert len(reader.elements) == len(PLAIN.elements)
    ((_, data),) = [each for each in reader.of("script") if each[0].get("type")]
    assert json.loads(data)["sides"][0]["cells"] == [{"0": 0, "5": text}]


def test_a_page_needs_nothing_else_and_allows_nothing_else() -> None:
    for tag, attributes in PLAIN.elements:
        assert tag not in ("link", "iframe", "object", "embed", "base", "form"), tag
        assert not {"src", "href", "srcset", "action"} & attributes.keys(), tag
        assert not [name for name in attributes if name.startswith("on")], tag
    script, style = PLAIN.of("script")[-1][1], PLAIN.of("style")[0][1]
    assert not re.search(r"fetch\(|XMLHttp|import\b|innerHTML|eval\(|https?:", script)
    assert not re.search(r"@import|url\(|https?:", style)
    policy = next(
        attributes["content"]
        for tag, attributes in PLAIN.elements
        if attributes.get("http-equiv") == "Content-Security-Policy"
    )
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
    pictures = Pictures(count)
    path = Path(os.environ["PYTEST_TMP"], "picture.png")
    image.save(path)
    assert pictures.add(path) == pictures.add(path) == 0
    (found,) = pictures.embedded
    return found


@pytest.fixture(autouse=True)
def _place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTEST_TMP", str(tmp_path))


def test_large_pictures_are_made_smaller_and_a_page_of_200_stays_small() -> None:
    random = np.random.default_rng(0)
    noise = Image.fromarray(random.integers(0, 256, (900, 1400, 3), np.uint8))
    uri, width, height, pixelated = embedded(noise, 200)
    assert uri.startswith("data:image/webp;base64,")
    assert width <= 1024 and not pixelated
    assert abs(width / height - 1400 / 900) < 0.01
    assert 200 * len(uri) < 20_000_000
    # What needs no room keeps its size, up to that width.
    plain = Image.new("RGB", (2000, 1000), (10, 200, 30))
    assert embedded(plain, 200)[1:] == (1024, 512, False)
    assert embedded(Image.new("RGB", (300, 256)), 200)[1:] == (300, 256, False)


# -- planning -------------------------------------------------------------------------------------


def plan(target: str, settings: Config, *trained: str) -> Any:
    return plan_page(
        target, settings, digest_of=digest.of_file, trained=trained, planned=len(trained)
    )


def test_a_page_is_fresh_until_a_picture_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    make_run(tmp_path, "a", ["x"], [0])
    make_folder(tmp_path, "gold", {"00.png": (1, 2, 3)})
    settings = config("a", gold="gold")
    page = plan("compare_a_vs_gold", settings)
    assert page.stale and page.path == "reports/compare_a_vs_gold.html"
    order = PageOrder.model_validate_json(Path(page.order).read_bytes())
    assert [source.name for source in order.sources] == ["a", "gold"]
    said: list[str] = []
    compare(Path(page.order), Path(page.path), said.append)
    assert re.fullmatch(r"reports/compare_a_vs_gold.html: 2 pictures, \d+\.\d MB", said[0])
    assert state_in(Path(page.path))
    assert not plan("compare_a_vs_gold", settings).stale
    os.utime("gold/00.png", (1, 1))
    assert not plan("compare_a_vs_gold", settings).stale
    assert plan("compare_gold_vs_a", settings).stale
    Image.new("RGB", (16, 16), (3, 2, 1)).save("gold/00.png")
    assert plan("compare_a_vs_gold", settings).stale
    compare(Path(page.order), Path(page.path), said.append)
    assert not plan("compare_a_vs_gold", settings).stale
    make_run(tmp_path, "a", ["x"], [0], number=1)
    assert plan("compare_a_vs_gold", settings).stale


def test_a_run_that_is_trained_before_needs_no_pictures_yet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    make_run(tmp_path, "a", ["x"], [0])
    with pytest.raises(TrainingError) as caught:
        plan("compare_a_vs_b", config("a", "b"))
    assert str(caught.value) == (
        "compare_a_vs_b: the run b has no sample pictures yet; "
        "make them: snakemake --cores all train_b"
    )
    page = plan("compare_a_vs_b", config("a", "b"), "b", "other")
    assert page.stale and page.trained == ["runs/b/trained.json"]


@pytest.mark.parametrize(
    ("more", "hint"),
    [
        ({}, "set `samples: {prompts: [...]}` of its trainer"),
        ({"generate": {}}, "make clips: snakemake --cores all generate_w"),
    ],
)
def test_a_run_that_draws_nothing_is_told_how_to(
    more: dict[str, Any], hint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = {"datasets": "cats", "model": "m", "resolutions": 64, "trainer": {"kind": "wan"}, **more}
    model = {"vae": "vae", "text": "text", "dit": "dit", "task": "t2v-1.3B"}
    settings = parse(
        {
            "datasets": {"cats": {"path": "data/cats"}},
            "models": {"m": model},
            "runs": {"w": run},
        }
    )
    with pytest.raises(ConfigError) as caught:
        plan("compare_w", settings)
    said = "compare_w: the run w draws no sample clips, for its trainer has no prompts"
    assert str(caught.value) == f"{said}; {hint}"


def test_pictures_of_an_earlier_training_are_not_those_of_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    make_run(tmp_path, "a", ["x"], [0])
    record = {
        "wanted": {"data": "d" * 64, "settings": "s" * 64, "weights": "w" * 64},
        "steps": 1,
        "loss_start": 1.0,
        "loss_end": 1.0,
        "seconds": 1.0,
        "history": [],
    }
    Path("runs/a/training.json").write_text(json.dumps(record))
    assert plan("compare_a", config("a")).stale
    record["wanted"] = {"data": "e" * 64, "settings": "s" * 64, "weights": "w" * 64}
    Path("runs/a/training.json").write_text(json.dumps(record))
    Path("runs/a/trained.json").write_text("{}")
    with pytest.raises(TrainingError, match=r"--cores all train_a$"):
        plan("compare_a", config("a"))
