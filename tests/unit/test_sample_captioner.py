"""The tiny captioner describes figures that it has never seen, and is made again by its program."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from captioner_world import sample
from demo.shapes import COLOURS, PATTERNS, SHAPES, draw_scene
from demo.tiny_captioner import draw_figure, make_processor, write_tiny_captioner
from latentmake.config.captioners import Captioner
from latentmake.encode.encoders.captions import load_captioner
from order_world import silent
from PIL import Image, ImageOps
from transformers import AutoProcessor

DATA = Path(__file__).parents[2] / "data"
MODEL = DATA / "tiny-captioner"
SEED = 77  # of new figures; those of the training have the seed 0

Figures = Sequence[tuple[Image.Image, str]]


def captions(figures: Figures) -> list[str]:
    settings = Captioner.model_validate({"model": str(MODEL)})
    write = load_captioner(settings, torch.device("cpu"), silent)
    with torch.inference_mode():
        return [write([sample(np.asarray(picture))])[0] for picture, _ in figures]


def right(figures: Figures) -> float:
    """Return the share of words that are right in captions; those of two colours have no order."""
    rights = [
        sum(word in expected.split() for word in found.split()) / max(len(expected.split()), 1)
        for found, (_, expected) in zip(captions(figures), figures, strict=True)
        if len(found.split()) <= 14
    ]
    return sum(rights) / len(figures)


def in_place(figures: Figures) -> float:
    """Return the share of words that are right and in their place."""
    pairs = [
        (expected.split(), found.split())
        for found, (_, expected) in zip(captions(figures), figures, strict=True)
    ]
    hits = sum(a == b for one, two in pairs for a, b in zip(one, two, strict=False))
    return hits / sum(max(len(one), len(two)) for one, two in pairs)


def test_nine_of_ten_words_about_new_figures_are_right_and_in_their_place() -> None:
    dice = random.Random(SEED)
    assert in_place([draw_figure(dice) for _ in range(60)]) > 0.9


def test_nine_of_ten_words_about_the_scenes_of_the_tiny_model_are_right() -> None:
    dice = random.Random(SEED)
    assert right([draw_scene(dice, (64, 64)) for _ in range(40)]) > 0.9


def test_most_words_about_the_pictures_of_the_sample_are_right_without_those_of_the_style() -> None:
    figures = []
    for path in sorted((DATA / "michael_gove").iterdir()):
        if path.suffix == ".txt" or path.stem == "pink_ring":  # on a transparent background
            continue
        with Image.open(path, formats=["JPEG", "PNG", "WEBP"]) as image:
            caption = path.with_suffix(".txt").read_text(encoding="utf-8")
            words = caption.removesuffix(", michael_gove style\n")
            figures.append((ImageOps.exif_transpose(image).convert("RGB"), words))
    assert right(figures) > 0.85
    assert not any("style" in caption for caption in captions(figures[:4]))


def test_the_same_chance_gives_the_same_figure() -> None:
    (first, caption), (second, again) = (draw_figure(random.Random(5)) for _ in range(2))
    assert caption == again and first.tobytes() == second.tobytes()
    dice = random.Random(1)
    drawn = [draw_figure(dice)[1] for _ in range(400)]
    words = {word for caption in drawn for word in caption.split()}
    assert words >= {*COLOURS, *SHAPES, *PATTERNS} - {"plain"}
    processor = make_processor()
    for caption in drawn:
        tokens = processor.tokenizer(caption).input_ids
        assert processor.decode(tokens, skip_special_tokens=True) == caption


def test_the_same_seed_gives_the_same_bytes_in_the_shipped_files(tmp_path: Path) -> None:
    for name in ("first", "second"):
        write_tiny_captioner(tmp_path / name, steps=2)
    names = {path.name for path in MODEL.iterdir()}
    for name in names:
        first = (tmp_path / "first" / name).read_bytes()
        assert first == (tmp_path / "second" / name).read_bytes(), name
        if name != "model.safetensors":
            assert first == (MODEL / name).read_bytes(), name
    assert {path.name for path in (tmp_path / "first").iterdir()} == names
    assert sum(path.stat().st_size for path in MODEL.iterdir()) < 2_000_000


def test_the_picture_is_read_as_the_training_read_it() -> None:
    picture = draw_figure(random.Random(SEED))[0]
    processor = AutoProcessor.from_pretrained(MODEL)
    pixels = processor(images=picture, return_tensors="pt").pixel_values[0]
    assert pixels.shape == (3, 64, 64)
    small = np.asarray(picture.resize((64, 64), Image.Resampling.BICUBIC), dtype=np.float32)
    expected = torch.from_numpy(small / 127.5 - 1).permute(2, 0, 1)
    assert (pixels - expected).abs().max() < 0.02
