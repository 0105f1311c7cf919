"""Items of a report: what the VAE saw, what its latents hold, and what is wrong with the others."""

from __future__ import annotations

import base64
import io
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import world
from latentmake import digest, layouts
from latentmake.caches.encoders.vae import encode_images, load_vae
from latentmake.caches.inputs import SourceBytes, samples_of
from latentmake.config import parse
from latentmake.errors import CacheError
from latentmake.files import cachefile, npz
from latentmake.geometry.buckets import Size
from latentmake.index.memo import Memo
from latentmake.plan.facts import Facts
from latentmake.plan.orders import Target, WorkItem, WorkOrder
from latentmake.plan.parts import RunPlan
from latentmake.reports import items_order
from latentmake.reports.contact_sheet import ContactSheets
from latentmake.reports.decoded_latents import psnr, read_latents
from latentmake.reports.items_order import ItemsOrder, plan_items, spread
from latentmake.reports.report_items import items_section
from picture_world import clouds, encoded, noise
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


def planned(dataset: Section | None = None, **model: Any) -> ItemsOrder:
    values = world.config()
    values["datasets"]["shapes"] |= dataset or {}
    if dataset:
        values["runs"]["tiny"]["resolutions"] = [32]
    values["models"]["micro"] |= model
    config = parse(values)
    order = plan_items(Facts(config, Memo(None)), RunPlan("tiny", {}), config.runs["tiny"])
    return ItemsOrder.model_validate_json(order.model_dump_json())


def section(order: ItemsOrder) -> Section:
    found: Section = json.loads(json.dumps(items_section(order, lambda line: None)))
    return found


def by_stem(found: Section) -> dict[str, Section]:
    return {item["stem"]: item for item in found["items"]}


def picture(uri: str) -> Image.Image:
    return Image.open(io.BytesIO(base64.b64decode(uri.partition(",")[2])))


def pixels_of(order: ItemsOrder, stem: str) -> dict[str, np.ndarray]:
    """Return resolution -> the pixels that a job hands to the encoder."""
    (item,) = (each for each in order.items if each.stem == stem)
    work = WorkOrder(
        "latents", item.dataset, "micro", order.datasets[item.dataset], order.model, {}, ()
    )
    targets = {Target(name, path, None, layouts.size_of(name)): name for name, path in item.targets}
    source = WorkItem(stem, item.image, None, tuple(targets), media=item.media)
    data = Path(item.image).read_bytes()
    samples = samples_of(work, SourceBytes(source, data, ""), targets)
    return {sample.key: np.asarray(sample.content) for sample in samples}


def stamp_of(order: ItemsOrder, image: str, name: str) -> dict[str, str]:
    """Return the metadata of fresh latents."""
    content, layout = digest.of_file(Path(image)), layouts.of(order.model.layout_name)
    with Image.open(image) as opened:
        size = Size(*opened.size)
    variant = layout.variant(layouts.size_of(name), size, order.datasets["shapes"], None)
    key = cachefile.target_key(content, order.recipes["shapes"], variant)
    return cachefile.stamp(key=key, source=content, recipe={})


def encode(order: ItemsOrder, *stems: str) -> None:
    """Write the latents of some items with the real VAE."""
    vae = load_vae(order.model.vae, torch.device("cpu"), torch.float32)
    for item in order.items:
        if item.stem not in stems:
            continue
        pixels = pixels_of(order, item.stem)
        for name, path in item.targets:
            (latents,) = encode_images(vae, torch.from_numpy(pixels[name])[None])
            stamp = stamp_of(order, item.image, name)
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            Path(path).write_bytes(cachefile.serialize({"latents": latents}, stamp))


# -- latents --------------------------------------------------------------------------------------


def test_decoded_latents_are_beside_the_pixels_that_the_vae_was_given(project: Path) -> None:
    order = planned()
    encode(order, "ant", "bee")
    Path(order.items[1].targets[0][1]).unlink()
    listed = section(order)
    found = by_stem(listed)
    seen = pixels_of(order, "ant")
    vae = load_vae(order.model.vae, torch.device("cpu"), torch.float32)
    for target in found["ant"]["targets"]:
        pixels = seen[target["resolution"]]
        assert (np.asarray(picture(target["original"])) == pixels).all()
        latents = encode_images(vae, torch.from_numpy(pixels)[None])
        with torch.inference_mode():
            expected = ((vae.decode(latents).sample[0] + 1) * 127.5).clamp(0, 255)
        decoded = np.asarray(picture(target["decoded"]))
        assert np.abs(decoded - expected.permute(1, 2, 0).numpy()).max() <= 0.51
        assert target["psnr"] == pytest.approx(psnr(decoded, pixels), abs=0.05)
        assert "note" not in target
    missing, made = found["bee"]["targets"]
    assert (missing["note"], "decoded" in missing, "decoded" in made) == (
        "is not made yet",
        False,
        True,
    )
    assert listed["notes"] == ["latents of 2 of 6 items are decoded"]


def test_scaled_latents_of_another_layout_are_decoded_to_the_same_picture(project: Path) -> None:
    plain = planned()
    texts = {"text": ["models/micro/text_encoder"] * 2, "unet": None, "layout": "sdscripts"}
    scaled = planned(**texts, architecture="flux")
    assert scaled.model.spec.scale is not None
    encode(plain, "ant")
    first = by_stem(section(plain))["ant"]["targets"][1]
    for name, path in scaled.items[0].targets:
        latents = read_latents(plain.items[0].targets[name == "32"][1]).numpy()
        shift, factor = scaled.model.spec.scale
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        stamp = stamp_of(scaled, scaled.items[0].image, name)
        sides = "x".join(map(str, latents.shape[1:]))
        arrays = {f"latents_{sides}": (latents - shift) * factor}
        Path(path).write_bytes(npz.serialize(arrays, stamp))
    second = by_stem(section(scaled))["ant"]["targets"][1]
    one, other = (np.asarray(picture(each["decoded"])) for each in (first, second))
    assert np.abs(one.astype(int) - other).max() <= 1


def test_latents_of_an_edited_image_or_a_damaged_file_are_not_decoded(project: Path) -> None:
    order = planned()
    encode(order, "ant", "bee", "cat")
    world.draw(Path("data/shapes/ant.png"), 7)
    damaged = Path(order.items[1].targets[0][1])
    damaged.write_bytes(damaged.read_bytes()[:-8])
    found = by_stem(section(order))
    assert {each["note"] for each in found["ant"]["targets"]} == {
        "is stale: it was made of another image"
    }
    assert found["bee"]["targets"][0]["note"] == "is cut short or has grown"
    assert found["bee"]["targets"][1]["decoded"]
    assert all(each["decoded"] for each in found["cat"]["targets"])
    found = by_stem(section(planned(dtype="float16")))
    assert {each["note"] for each in found["cat"]["targets"]} == {
        "is stale: it was made by another recipe"
    }
    pending = order.model_copy(update={"recipes": {"shapes": ""}})  # a rule made the model since
    assert all(each["decoded"] for each in by_stem(section(pending))["cat"]["targets"])
    with pytest.raises(CacheError, match="no latents"):
        Path("other.npz").write_bytes(npz.serialize({"latents_flipped": np.zeros(1)}, {}))
        read_latents("other.npz")


def test_without_a_decoder_the_report_says_why(project: Path) -> None:
    wan = {"task": "t2v-1.3B", "text": "models/micro/text_encoder", "unet": None}
    found = section(planned(**wan))
    assert any("its VAE is no AutoencoderKL" in note for note in found["notes"])
    order = planned()
    (project / "models/micro").unlink()
    found = section(order)
    assert any("latents of models.micro are not decoded: models/micro" in n for n in found["notes"])
    assert any("tokens are not counted: models/micro" in note for note in found["notes"])
    assert all(item["thumbnail"] for item in found["items"])


# -- images ---------------------------------------------------------------------------------------


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
    order = planned(**LAYOUTS[layout])
    item = by_stem(section(order))["ant"]
    assert (item["width"], item["height"]) == ((150, 400) if layout == "plain" else (400, 150))
    shown = image.transpose(Image.Transpose.ROTATE_270) if layout == "plain" else image
    for target, pixels in zip(item["targets"], pixels_of(order, "ant").values(), strict=True):
        pixels = pixels.reshape(pixels.shape[-3:])
        size = Size(*target["size"])
        assert size == pixels.shape[1::-1]
        left, top, right, bottom = target["crop"]
        width, height = shown.size
        box = (left * width, top * height, right * width, bottom * height)
        found = shown.resize(size, Image.Resampling.LANCZOS, box=box)
        assert psnr(np.asarray(found), pixels) > 30


@pytest.mark.parametrize("turned", [False, True])
def test_a_video_is_shown_by_a_frame_as_it_is_encoded(project: Path, turned: bool) -> None:
    for stem in world.CAPTIONS:
        Path(f"data/shapes/{stem}.png").unlink()
    write_video(Path("ant.mp4"), "mpeg4", 5)
    (turn if turned else Path)(Path("ant.mp4")).rename("data/shapes/ant.mp4")
    Path("data/shapes/bee.mp4").write_bytes(b"")
    dataset = {"target_frames": [1, 5], "display_rotation": turned, "on_error": "skip"}
    found = section(planned(dataset=dataset, **LAYOUTS["musubi"]))
    (item,) = found["items"]
    assert (item["width"], item["height"]) == ((48, 64) if turned else (64, 48))
    assert item["thumbnail"][3:] == [item["width"], item["height"]]
    left, top, right, bottom = item["targets"][0]["crop"]
    assert ((left, right) == (0, 1)) == turned
    assert ((top, bottom) == (0, 1)) != turned
    assert "bee" in {each["stem"] for each in found["skipped"]}


def test_a_damaged_image_is_named_and_the_others_are_shown(project: Path) -> None:
    Path("data/shapes/bee.png").write_bytes(b"no image")
    Path("data/shapes/cat.txt").write_bytes(b"caf\xe9")
    found = by_stem(section(planned()))
    assert (
        found["bee"]["fault"]
        == "is not an image that can be read (JPEG, PNG, WebP, BMP, TIFF, GIF or AVIF)"
    )
    assert found["bee"]["thumbnail"] is None
    assert "is not UTF-8" in found["cat"]["fault"]
    assert all(item["thumbnail"] for stem, item in found.items() if stem != "bee")


def test_a_system_that_tells_no_affinity_gets_its_report(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "sched_getaffinity")  # as on macOS
    assert all(item["thumbnail"] for item in section(planned())["items"])


def test_what_is_skipped_is_listed_with_its_reason(project: Path) -> None:
    Path("data/shapes/dog.txt").unlink()
    found = section(planned())
    (row,) = found["skipped"]
    assert (row["dataset"], row["stem"]) == ("shapes", "dog")
    assert "caption" in row["why"]
    assert "dog" not in by_stem(found)


def test_a_thumbnail_lies_where_the_report_says(project: Path) -> None:
    for number, stem in enumerate(world.CAPTIONS):
        Image.new("RGB", (50 + number, 40), (40 * number, 0, 200)).save(f"data/shapes/{stem}.png")
    found = section(planned())
    for number, item in enumerate(found["items"]):
        sheet, left, top, width, height = item["thumbnail"]
        assert (width, height) == (50 + number, 40)
        cut = picture(found["sheets"][sheet]).crop((left, top, left + width, top + height))
        mean = np.asarray(cut.convert("RGB")).mean(axis=(0, 1))
        assert np.abs(mean - (40 * number, 0, 200)).max() < 8


def test_10_000_thumbnails_of_the_worst_pictures_take_4_megabytes() -> None:
    sheets = ContactSheets(10_000)
    image = Image.fromarray(noise((sheets.side, sheets.side)))
    for _ in range(2):
        sheets.add([image] * 100)
    assert sum(map(len, sheets.sheets)) * 50 < 4_000_000


def test_of_many_items_some_are_shown_from_the_first_to_the_last(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert spread(range(10), 4) == [0, 3, 6, 9]
    assert spread(range(3), 4) == [0, 1, 2]
    monkeypatch.setattr(items_order, "_MOST", 3)
    found = section(planned())
    assert [item["stem"] for item in found["items"]] == ["ant", "cat", "fox"]
    assert found["total"] == 6
    assert "3 of 6 items are shown, spread evenly" in found["notes"]


def test_copies_of_a_picture_name_each_other(project: Path) -> None:
    image = Image.fromarray(clouds((90, 120)))
    image.save("data/shapes/ant.png")
    Path("data/shapes/eel.png").unlink()
    Path("data/shapes/eel.jpg").write_bytes(encoded(image.resize((240, 180)), quality=60))
    found = by_stem(section(planned()))
    (like,) = found["ant"]["like"]
    assert like[:2] == ["shapes", "eel"]
    assert found["eel"]["like"][0][:2] == ["shapes", "ant"]


# -- captions -------------------------------------------------------------------------------------


def test_tokens_are_counted_and_what_is_cut_is_shown(project: Path) -> None:
    Path("data/shapes/ant.txt").write_text(f"{'x' * 70} {'y' * 9}")  # the tokenizer knows letters
    found = section(planned())
    ant = by_stem(found)["ant"]
    assert ant["tokens"] == {"text_encoder": [79, 75]}
    assert ant["cut"] == {"text_encoder": "y" * 4}
    assert "cut" not in by_stem(found)["bee"]
    (encoder,) = found["encoders"]
    assert (encoder["texts"], encoder["cut"], encoder["longest"]) == (6, 1, 79)
