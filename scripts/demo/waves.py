"""The sample dataset of videos: short clips of drawn waves, and a few still pictures.

All share a style (bands of water one behind the other, each with a crest of white foam, under a
shaded sky with a sun) for an adapter to learn.
"""

from __future__ import annotations

import argparse
import random
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np
from latentmake.files.mp4 import write_mp4
from numpy.typing import NDArray
from PIL import Image

from demo.motion import Clip, shaded
from demo.shapes import COLOURS, Colour

__all__ = ["DEFAULT_SEED", "FRAMES", "SIZE", "STILLS", "VIDEOS", "Waves", "draw_waves", "main"]

DEFAULT_SEED = 0
SIZE = (128, 80)
"""Width and height in pixels."""
FRAMES = 17
FPS = 16
"""Frames a second: those of Wan's own training."""
_FOAM = (250, 250, 245)
_OVERSAMPLING = 2
_BANDS = 2
_CREST = 0.085  # height of the foam, as a share of the picture's
_SUN = (255, 240, 170)
_SUN_RADIUS = 0.13  # as a share of the picture's height
_Grid: TypeAlias = NDArray[np.float64]


@dataclass(frozen=True)
class Kind:
    """One kind of waves.

    Attributes:
        height: of a wave, from the middle to the crest, as a share of the picture's height.
        length: from crest to crest, as a share of the picture's width.
        sharpness: 0 for a sine; above, crests are narrower than troughs.
        speed: lengths a second.
    """

    height: float
    length: float
    sharpness: float
    speed: float


KINDS: dict[str, Kind] = {
    "calm": Kind(0.035, 0.9, 0.0, 0.5),
    "rolling": Kind(0.07, 0.75, 0.2, 0.8),
    "high": Kind(0.13, 0.8, 0.6, 1.0),
    "choppy": Kind(0.06, 0.4, 0.8, 1.2),
}

WATERS: dict[str, tuple[Colour, Colour]] = {
    "blue": ((70, 140, 230), (15, 50, 140)),
    "teal": ((70, 190, 190), (5, 85, 100)),
    "green": ((90, 190, 130), (15, 85, 60)),
    "purple": ((150, 110, 210), (60, 25, 110)),
}
"""Colours of the farthest and of the nearest band."""


@dataclass(frozen=True)
class Waves:
    """One clip or picture of the sample dataset.

    Attributes:
        kind: one of `KINDS`.
        water: one of `WATERS`.
        sky: a colour.
        way: `left` or `right`.
    """

    kind: str
    water: str
    sky: str
    way: str

    @property
    def stem(self) -> str:
        """The file name without its suffix."""
        return f"{self.kind}_{self.water}_{self.sky}"

    @property
    def caption(self) -> str:
        """Caption with the trigger word of the style."""
        return f"{self.kind} {self.water} waves moving {self.way} under a {self.sky} sky, papersea"


VIDEOS: tuple[Waves, ...] = (
    Waves("calm", "blue", "orange", "right"),
    Waves("calm", "teal", "pink", "left"),
    Waves("calm", "green", "yellow", "right"),
    Waves("calm", "purple", "white", "left"),
    Waves("calm", "blue", "grey", "left"),
    Waves("rolling", "blue", "yellow", "right"),
    Waves("rolling", "teal", "orange", "left"),
    Waves("rolling", "green", "white", "left"),
    Waves("rolling", "purple", "pink", "right"),
    Waves("rolling", "teal", "grey", "right"),
    Waves("high", "blue", "pink", "left"),
    Waves("high", "teal", "yellow", "right"),
    Waves("high", "green", "grey", "left"),
    Waves("high", "purple", "orange", "right"),
    Waves("high", "blue", "white", "right"),
    Waves("choppy", "blue", "orange", "left"),
    Waves("choppy", "teal", "white", "right"),
    Waves("choppy", "green", "pink", "right"),
    Waves("choppy", "purple", "yellow", "left"),
    Waves("choppy", "green", "orange", "left"),
)
"""The clips."""

STILLS: tuple[Waves, ...] = (
    Waves("calm", "teal", "yellow", "right"),
    Waves("rolling", "blue", "white", "left"),
    Waves("high", "purple", "grey", "left"),
    Waves("choppy", "blue", "pink", "right"),
)
"""The pictures."""


def draw_clip(waves: Waves, frames: int = FRAMES, *, seed: int = DEFAULT_SEED) -> Clip:
    """Return frames of waves; the seed decides the places of crests and sun."""
    dice = random.Random(f"{seed}/{waves.stem}")  # noqa: S311 - drawing, not cryptography
    kind = KINDS[waves.kind]
    width, height = (side * _OVERSAMPLING for side in SIZE)
    ys, xs = np.mgrid[0:height, 0:width].astype(np.float64) / height
    sky = _sky(waves, xs, ys, (dice.uniform(0.15, 0.85) * width / height, dice.uniform(0.17, 0.24)))
    phases = [dice.random() for _ in range(_BANDS)]
    far, near = (np.array(colour) for colour in WATERS[waves.water])
    sign = 1 if waves.way == "right" else -1
    clip = []
    for number in range(frames):
        picture = sky.copy()
        for band, phase in enumerate(phases):
            share = band / (_BANDS - 1)
            scale = 0.7 + 0.6 * share  # what is nearer is larger and faster
            moved = sign * kind.speed * number / FPS * (0.7 + 0.3 * share)
            turns = xs * height / width / (kind.length * scale) - moved + phase
            crest = np.cos(2 * np.pi * turns) + kind.sharpness / 2 * np.cos(4 * np.pi * turns)
            level = 0.48 + 0.26 * band - kind.height * scale * crest / (1 + kind.sharpness / 2)
            picture[ys > level] = (far + share * (near - far)).astype(np.uint8)
            picture[(ys > level) & (ys < level + _CREST)] = _FOAM
        clip.append(np.asarray(Image.fromarray(picture).reduce(_OVERSAMPLING)))
    return np.stack(clip)


def _sky(waves: Waves, xs: _Grid, ys: _Grid, sun: tuple[float, float]) -> Clip:
    """Return a picture [height, width, 3] of sky alone; `sun` is its place in heights."""
    height, width = xs.shape
    red, green, blue = ((value + 255) // 2 for value in COLOURS[waves.sky])
    top = shaded((width, height * 2 // 3), COLOURS[waves.sky], (red, green, blue))
    picture = np.concatenate([top, top[-1:].repeat(height - len(top), axis=0)])
    picture[np.hypot(xs - sun[0], ys - sun[1]) < _SUN_RADIUS] = _SUN
    return picture


def draw_waves(folder: Path, *, seed: int = DEFAULT_SEED) -> list[Path]:
    """Write all clips, pictures and captions into a folder; return the paths of clips and pictures.

    Equal seeds give equal bytes under one version of PyAV and Pillow. Other files are kept.
    """
    for part in ("clips", "pictures"):
        (folder / part).mkdir(parents=True, exist_ok=True)
    paths = []
    for waves in VIDEOS:
        path = folder / "clips" / f"{waves.stem}.mp4"
        write_mp4(path, draw_clip(waves, seed=seed), FPS)
        paths.append(path)
    for waves in STILLS:
        path = folder / "pictures" / f"{waves.stem}.png"
        Image.fromarray(draw_clip(waves, 1, seed=seed)[0]).save(path, optimize=True)
        paths.append(path)
    for path, waves in zip(paths, (*VIDEOS, *STILLS), strict=True):
        path.with_suffix(".txt").write_text(waves.caption + "\n", encoding="utf-8")
    return paths


def main() -> None:
    """Draw the dataset into the folder named on the command line."""
    parser = argparse.ArgumentParser(description="Draw the sample dataset of videos.")
    parser.add_argument("folder", type=Path, help="where clips, pictures and captions go")
    parser.add_argument("--seed", type=int, default=DEFAULT_SEED, help="decides the places")
    arguments = parser.parse_args()
    draw_waves(arguments.folder, seed=arguments.seed)


if __name__ == "__main__":
    main()
