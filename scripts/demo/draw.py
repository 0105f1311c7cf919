"""The sample dataset, and random scenes for training the tiny bundle.

The dataset has three formats, three orientations, a picture with transparency and one with an EXIF
orientation. All pictures share a style (bold dark outlines, a striped frame) for an adapter to
learn.
"""

from __future__ import annotations

import argparse
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from demo.shapes import (
    COLOURS,
    PATTERNS,
    SHAPES,
    Colour,
    draw_background,
    fill_mask,
    outline_mask,
    stripes_mask,
)

__all__ = ["DEFAULT_SEED", "PICTURES", "Picture", "draw_dataset", "draw_picture", "draw_scene"]

DEFAULT_SEED = 0
_INK = (24, 20, 37)
_STRIPE = (255, 205, 60)
_EXIF_ORIENTATION = 0x0112
_TURN_CLOCKWISE = 6  # EXIF 2.32, table 6: a viewer turns the stored picture 90 degrees clockwise
_SAVE_OPTIONS: dict[str, dict[str, Any]] = {
    "jpg": {"quality": 90, "subsampling": 0},
    "png": {"optimize": True},
    "webp": {"quality": 90, "method": 6},
}


@dataclass(frozen=True)
class Picture:
    """One picture of the sample dataset.

    Attributes:
        colour: of the shape.
        shape: one of `SHAPES`.
        background: one colour, two for a pattern, none for a transparent one.
        pattern: one of `PATTERNS`, or `transparent`.
        size: upright (width, height) in pixels.
        suffix: file format.
        turned: stored rotated by 90 degrees, with the EXIF orientation that undoes it.
    """

    colour: str
    shape: str
    background: tuple[str, ...]
    pattern: str
    size: tuple[int, int]
    suffix: str
    turned: bool = False

    @property
    def stem(self) -> str:
        """The file name without its suffix."""
        return f"{self.colour}_{self.shape}"

    @property
    def said(self) -> str:
        """Description of the figure and its background."""
        pose = " pointing up" if self.shape == "arrow" else ""
        ground = _ground(self.background, self.pattern)
        return f"{_article(self.colour)} {self.shape}{pose} on {ground}"

    @property
    def caption(self) -> str:
        """Caption with the trigger words of the style."""
        return f"{self.said}, michael_gove style"


PICTURES: tuple[Picture, ...] = (
    Picture("red", "circle", ("blue",), "plain", (256, 256), "jpg"),
    Picture("yellow", "circle", ("purple", "pink"), "checked", (240, 320), "png"),
    Picture("green", "square", ("white",), "plain", (256, 192), "jpg"),
    Picture("orange", "square", ("teal", "white"), "striped", (192, 192), "webp"),
    Picture("purple", "triangle", ("yellow",), "plain", (200, 260), "png"),
    Picture("teal", "triangle", ("orange", "yellow"), "dotted", (288, 216), "jpg"),
    Picture("yellow", "star", ("blue",), "plain", (320, 240), "jpg"),
    Picture("white", "star", ("red", "pink"), "striped", (224, 224), "png"),
    Picture("pink", "ring", (), "transparent", (240, 240), "png"),
    Picture("blue", "ring", ("grey", "white"), "checked", (176, 264), "webp"),
    Picture("white", "cross", ("red",), "plain", (192, 192), "png"),
    Picture("black", "cross", ("green", "yellow"), "dotted", (300, 200), "jpg"),
    Picture("red", "heart", ("pink",), "plain", (208, 256), "jpg"),
    Picture("purple", "heart", ("white", "teal"), "striped", (256, 256), "webp"),
    Picture("teal", "diamond", ("brown",), "plain", (192, 288), "jpg"),
    Picture("orange", "diamond", ("blue", "purple"), "checked", (240, 180), "png"),
    Picture("green", "hexagon", ("orange",), "plain", (240, 240), "webp"),
    Picture("grey", "hexagon", ("red", "white"), "dotted", (264, 176), "jpg"),
    Picture("white", "moon", ("black",), "plain", (224, 280), "png"),
    Picture("yellow", "moon", ("blue", "teal"), "dotted", (288, 192), "webp"),
    Picture("red", "arrow", ("white",), "plain", (200, 300), "jpg", turned=True),
    Picture("black", "arrow", ("yellow", "orange"), "striped", (216, 288), "png"),
    Picture("grey", "tower", ("teal",), "plain", (180, 270), "webp"),
    Picture("brown", "tower", ("pink", "white"), "checked", (256, 256), "jpg"),
)


def _article(word: str) -> str:
    return f"an {word}" if word[0] in "aeiou" else f"a {word}"


def _ground(colours: tuple[str, ...], pattern: str) -> str:
    words = " and ".join(colours) if pattern != "plain" else colours[0]
    kind = "" if pattern == "plain" else f" {pattern}"
    return _article(f"{words}{kind}".strip()) + " background"


def _michael_gove_frame(size: tuple[int, int]) -> tuple[Image.Image, Image.Image, int]:
    """Return the frame of all pictures, its mask, and its width in pixels."""
    width = round(min(size) * 0.125)
    line = max(2, width // 6)
    frame = Image.new("RGB", size, _STRIPE)
    frame.paste(_INK, (0, 0), stripes_mask(size, width * 1.5))
    mask = Image.new("L", size, 255)
    frame.paste(_INK, (width - line, width - line, size[0] - width + line, size[1] - width + line))
    mask.paste(0, (width, width, size[0] - width, size[1] - width))
    return frame, mask, width


def draw_picture(picture: Picture, *, seed: int = DEFAULT_SEED, styled: bool = True) -> Image.Image:
    """Return a picture of the sample dataset, upright: `RGB`, or `RGBA` where transparent.

    The seed decides place, size and tilt of the shape. The style is its outline and the frame.
    """
    dice = random.Random(f"{seed}/{picture.stem}")  # noqa: S311 - drawing, not cryptography
    size = picture.size
    frame, frame_mask, frame_width = _michael_gove_frame(size)
    inside = min(size) - 2 * frame_width
    loose = 1.0 if styled else 0.25  # a small model learns shapes sooner where all sit alike
    radius = inside * dice.uniform(0.34, 0.4)
    centre = (
        size[0] / 2 + dice.uniform(-0.06, 0.06) * size[0] * loose,
        size[1] / 2 + dice.uniform(-0.06, 0.06) * size[1] * loose,
    )
    upright = picture.shape in ("arrow", "tower", "heart")
    turn = 0.0 if upright else dice.uniform(-0.2, 0.2) * loose
    first, second = (*picture.background, *picture.background, "white", "white")[:2]
    pattern = picture.pattern if picture.pattern in PATTERNS else "plain"
    image = draw_background(size, pattern, COLOURS[first], COLOURS[second], inside / 5)
    fill = fill_mask(picture.shape, size, centre, radius, turn)
    layers: list[tuple[Colour | Image.Image, Image.Image]] = [(COLOURS[picture.colour], fill)]
    if styled:
        outline = outline_mask(picture.shape, size, centre, radius, turn, inside * 0.055)
        layers += [(_INK, outline), (frame, frame_mask)]
    if not picture.background:
        image.putalpha(0)
    for colour, mask in layers:
        layer = colour if isinstance(colour, Image.Image) else Image.new("RGB", size, colour)
        if image.mode == "RGBA":
            # Colours of the transparent part are white: a soft edge must not mix in a darker one.
            alpha = image.getchannel("A")
            alpha.paste(255, (0, 0), mask)
            image.paste(layer, (0, 0), mask)
            image.putalpha(alpha)
        else:
            image.paste(layer, (0, 0), mask)
    return image


def draw_dataset(folder: Path, *, seed: int = DEFAULT_SEED) -> list[Path]:
    """Write all pictures and captions into a folder; return the pictures' paths.

    Equal seeds give equal bytes under one version of Pillow and its codecs. Other files in the
    folder are kept.
    """
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for picture in PICTURES:
        image = draw_picture(picture, seed=seed)
        path = folder / f"{picture.stem}.{picture.suffix}"
        options = _SAVE_OPTIONS[picture.suffix]
        if picture.turned:
            exif = Image.Exif()
            exif[_EXIF_ORIENTATION] = _TURN_CLOCKWISE
            stored = image.transpose(Image.Transpose.ROTATE_90)  # counter-clockwise
            stored.save(path, exif=exif, **options)
        else:
            image.save(path, **options)
        path.with_suffix(".txt").write_text(picture.caption + "\n", encoding="utf-8")
        paths.append(path)
    return paths


def draw_scene(random: random.Random, size: tuple[int, int]) -> tuple[Image.Image, str]:
    """Return a random scene: an `RGB` picture of a size (width, height), and its caption.

    One figure of any shape and colour in the middle of any background; never in the style of the
    sample dataset.
    """
    colour, first, second = random.sample(list(COLOURS), 3)
    pattern = random.choice(("plain", "plain", "plain", *PATTERNS))
    ground = (first,) if pattern == "plain" else (first, second)
    scene = Picture(colour, random.choice(list(SHAPES)), ground, pattern, size, "png")
    return draw_picture(scene, seed=random.getrandbits(32), styled=False), scene.said


def main() -> None:
    """Draw the dataset into the folder named on the command line."""
    parser = argparse.ArgumentParser(description="Draw the sample dataset.")
    parser.add_argument("folder", type=Path, help="where the pictures and captions go")
    parser.add_argument("--seed", type=int, default=DEFAULT_SEED, help="decides places and tilts")
    arguments = parser.parse_args()
    draw_dataset(arguments.folder, seed=arguments.seed)


if __name__ == "__main__":
    main()
