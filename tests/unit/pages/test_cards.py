"""Cards of a run's items: what the VAE sees of each, its texts, and what is wrong with it."""

from __future__ import annotations

import base64
import gzip
import io
import json
from pathlib import Path
from typing import Any

import made_caption_world
import numpy as np
import pytest
import world
from latentmake.base import digest
from latentmake.config.root import parse
from latentmake.data.memo import Memo
from latentmake.encode.reading import Reading, identify, samples_of
from latentmake.geometry.buckets import Size
from latentmake.layouts.layout import resolution_of
from latentmake.pages import cards
from latentmake.pages.captions import read_cards
from latentmake.pages.cards import page_data
from latentmake.plan.facts import Facts
from latentmake.plan.orders import Order, Target, Work
from latentmake.runs.history import ROSTER, RosterItem
from picture_world import clouds
from PIL import Image
from video_world import turn, write_video

Section = dict[str, Any]


@pytest.fixture
def project(tmp_path: Path, micro: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("models").mkdir()
    Path("models/micro").symlink_to(micro)
    world.make_dataset(Path("data/shapes"))
    return tmp_path


def facts_of(dataset: Section | None = None, **model: Any) -> Facts:
    values = world.config()
    values["datasets"]["shapes"] |= dataset or {}
    if dataset:
        values["runs"]["tiny"]["resolutions"] = [32]
    values["models"]["micro"] |= model
    return Facts(parse(values), Memo(None))


def section(facts: Facts) -> Section:
    values = page_data(facts, "tiny", read_cards(facts, "tiny"), Path("reports/page.html"))
    found: Section = json.loads(json.dumps(values))
    return found


def by_stem(found: Section) -> dict[str, Section]:
    return {item["stem"]: item for item in found["items"]}


def picture(uri: str) -> Image.Image:
    return Image.open(io.BytesIO(base64.b64decode(uri.partition(",")[2])))


def pixels_of(facts: Facts, stem: str) -> list[np.ndarray]:
    """Return the pixels that a job hands to the encoder, of each resolution."""
    (item,) = (each for each in facts.items("shapes", "micro")[0] if each.stem == stem)
    settings, model = facts.config.datasets["shapes"], facts.config.models["micro"]
    order = Order("latents", "shapes", "micro", settings, model, {}, ())
    sizes = facts.config.runs["tiny"].resolutions
    targets = tuple(Target(x.name, x.name, None, resolution_of(x.name)) for x in sizes)
    reading = Reading(Work(item.inputs("latents", facts.layout("micro")), targets))
    identify(order, "recipe", reading)
    reading.missing = reading.keys
    samples = samples_of(order, reading)
    return [np.asarray(sample.content) for sample in samples]


TEXT = {"text": "models/micro/text_encoder", "unet": None}
LAYOUTS = {
    "plain": {},
    "sdscripts": {"layout": "sdscripts", "architecture": "sd1", **TEXT},
    "musubi": {"task": "t2v-1.3B", **TEXT},
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_crop_is_the_part_of_the_image_that_the_vae_sees(project: Path, layout: str) -> None:
    image = Image.fromarray(clouds((150, 400)))
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by 90 degrees, which `plain` alone does
    image.save("data/shapes/ant.png", exif=exif)
    facts = facts_of(**LAYOUTS[layout])
    item = by_stem(section(facts))["ant"]
    assert item["size"] == ([150, 400] if layout == "plain" else [400, 150])
    shown = image.transpose(Image.Transpose.ROTATE_270) if layout == "plain" else image
    for target, pixels in zip(item["targets"], pixels_of(facts, "ant"), strict=True):
        pixels = pixels.reshape(pixels.shape[-3:])
        size = Size(*pixels.shape[1::-1])
        assert target["words"].endswith(f" → {size.width} × {size.height}")
        left, top, right, bottom = target["crop"]
        width, height = shown.size
        box = (left * width, top * height, right * width, bottom * height)
        found = shown.resize(size, Image.Resampling.LANCZOS, box=box)
        assert np.mean((np.asarray(found, np.float32) - pixels) ** 2) < 65  # a PSNR of 30 dB


@pytest.mark.parametrize("turned", [False, True])
def test_a_video_is_shown_by_a_frame_as_it_is_encoded(project: Path, turned: bool) -> None:
    for stem in world.CAPTIONS:
        Path(f"data/shapes/{stem}.png").unlink()
    write_video(Path("ant.mp4"), "mpeg4", 5)
    (turn if turned else Path)(Path("ant.mp4")).rename("data/shapes/ant.mp4")
    Path("data/shapes/bee.mp4").write_bytes(b"")
    dataset = {"target_frames": [1, 5], "display_rotation": turned, "on_error": "skip"}
    found = section(facts_of(dataset, **LAYOUTS["musubi"]))
    (item,) = found["items"]
    assert item["size"] == ([48, 64] if turned else [64, 48])
    assert picture(item["picture"]).size == ((48, 64) if turned else (64, 48))
    left, top, right, bottom = item["targets"][0]["crop"]
    assert ((left, right) == (0, 1)) == turned
    assert ((top, bottom) == (0, 1)) != turned
    assert any("bee.mp4" in line for line in found["faults"])


def test_a_damaged_image_is_named_and_the_others_are_shown(project: Path) -> None:
    Path("data/shapes/bee.png").write_bytes(b"no image")
    Path("data/shapes/cat.txt").write_bytes(b"caf\xe9")
    Path("data/shapes/dog.txt").unlink()
    listed = section(facts_of())
    found = by_stem(listed)
    readable = "is not an image that can be read (JPEG, PNG, WebP, BMP, TIFF, GIF or AVIF)"
    assert found["bee"]["fault"] == readable
    assert "is not UTF-8" in found["cat"]["fault"]
    assert [stem for stem, item in found.items() if item["picture"]] == ["ant", "cat", "eel", "fox"]
    without, undecoded = listed["faults"]
    assert "dog.png" in without and "cat.txt: is not UTF-8" in undecoded


def test_without_a_model_the_items_are_shown_and_it_is_said_why_no_tokens_are(
    project: Path,
) -> None:
    facts = facts_of()
    (project / "models/micro").unlink()
    found = section(facts)
    assert found["notes"][0].startswith("tokens are not counted: models/micro")
    assert all(item["picture"] for item in found["items"])


def test_of_many_items_the_later_pictures_stay_in_their_files(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (60, 40)).save("data/shapes/fox.png", exif=exif)
    Path("data/shapes/eel.png").write_bytes(b"no image")
    whole = section(facts_of())
    monkeypatch.setattr(cards, "PICTURES", 3)
    found = section(facts_of())
    assert [bool(item["picture"]) for item in found["items"]] == [True] * 3 + [False] * 3
    assert found["items"][-1]["size"] == [40, 60]
    for item in (*whole["items"], *found["items"]):
        item.pop("picture")
    assert found == whole and found["root"] == "../"


def test_a_source_smaller_than_its_target_is_enlarged(project: Path) -> None:
    Image.new("RGB", (20, 60)).save("data/shapes/ant.png")
    found = by_stem(section(facts_of()))
    assert [each["enlarged"] for each in found["ant"]["targets"]] == [False, True]
    assert [each["enlarged"] for each in found["bee"]["targets"]] == [False, False]


SUFFIX = {"captions": {"caption_suffix": ", ginger style"}}


@pytest.mark.parametrize(
    ("dataset", "word"),
    [
        ({"class_tokens": "sks man"}, "sks man"),
        ({"class_tokens": "{folder}", **SUFFIX}, "ginger style"),
        ({"captions": {"shuffle_caption": True}}, ""),
    ],
)
def test_the_word_to_look_for_is_that_of_the_configuration(
    project: Path, dataset: Section, word: str
) -> None:
    assert section(facts_of(dataset))["word"] == word


def test_items_are_compared_with_those_that_the_training_saw(project: Path) -> None:
    assert section(facts_of())["trained"] is False
    Path("runs/tiny").mkdir(parents=True)
    Path("runs/tiny/training.json").write_text(json.dumps({"parts": {}, "seconds": 1}))
    lines = ""
    for stem, caption in (world.CAPTIONS | {"gnu": "gone"}).items():
        picture = Path(f"data/shapes/{stem}.png")
        source = digest.of_file(picture) if picture.exists() else ""
        item = RosterItem(dataset="shapes", stem=stem, source=source, texts=[caption])
        lines += f"{item.model_dump_json()}\n" if stem != "fox" else ""
    Path("runs/tiny", ROSTER).write_bytes(gzip.compress(lines.encode()))
    Path("data/shapes/ant.txt").write_text("a red ring")
    world.draw(Path("data/shapes/bee.png"), 77)
    found = section(facts_of())
    edits = {
        stem: {key: item[key] for key in ("new", "before", "repainted") if key in item}
        for stem, item in by_stem(found).items()
    }
    assert {stem: edit for stem, edit in edits.items() if edit} == {
        "ant": {"before": ["a red circle"]},
        "bee": {"repainted": True},
        "fox": {"new": True},
    }
    assert found["notes"] == ["The training also saw gnu, which the dataset has no more."]


def test_tokens_are_counted_and_what_is_cut_is_shown(project: Path) -> None:
    Path("data/shapes/ant.txt").write_text(f"{'x' * 70} {'y' * 9}")  # the tokenizer knows letters
    found = section(facts_of())
    ((parts, seen),) = by_stem(found)["ant"]["texts"]
    assert parts == [f"{'x' * 70} {'y' * 5}", "", "y" * 4]
    assert seen == [[79, 75]]
    (encoder,) = found["encoders"]
    assert (encoder["texts"], encoder["cut"], encoder["longest"]) == (6, 1, 79)


def test_a_card_names_who_made_its_caption_or_that_it_is_not_made_yet(
    tmp_path: Path, micro: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made_caption_world.lay(micro, monkeypatch, tmp_path)
    values = made_caption_world.config()
    made_caption_world.write_made(made_caption_world.facts_of(values), {"ant": "a made caption"})
    page = section(made_caption_world.facts_of(values))
    items = by_stem(page)
    assert {stem: item["by"] for stem, item in items.items() if item["by"]} == dict.fromkeys(
        ("ant", "bee", "cat", "dog"), "florence"
    )
    assert items["ant"]["texts"][0][0] == ["a made caption", "", ""]
    assert items["bee"]["texts"] == []
    assert items["bee"]["fault"] == "its caption is not made yet"
    assert any("3 captions are not made yet" in note for note in page["notes"])
