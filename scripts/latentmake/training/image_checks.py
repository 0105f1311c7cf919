"""Checks of images that musubi-tuner and sd-scripts read otherwise than a viewer does."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from PIL import ExifTags, Image

from latentmake.files.media import IMAGE_FORMATS
from latentmake.training.checks import Finding

_NAMED = 3
_SIXTEEN_BITS = (".png", ".tif", ".tiff")


def image_findings(paths: Iterable[str]) -> Iterator[Finding]:
    """Read the headers of images, and warn of those that are not turned, or become white.

    Pillow's conversion to RGB, which both programs call, cuts 16-bit greyscale off at 255.
    """
    turned, white = 0, []
    for path in paths:
        lower = path.lower()
        if lower.endswith(_SIXTEEN_BITS):
            white += [path] * _header(path, lambda image: image.mode.startswith("I"))
        elif lower.endswith((".jpg", ".jpeg", ".webp")):  # a PNG's EXIF may follow its pixels
            turned += _header(path, _is_turned)
    if turned:
        note = f"{turned} images are stored turned (EXIF), and are trained on as they are stored"
        yield Finding("EXIF orientation", "warning", note)
    if white:
        many = "1 image is" if len(white) == 1 else f"{len(white)} images are"
        names = ", ".join(white[:_NAMED]) + ", ..." * (len(white) > _NAMED)
        note = f"{many} 16-bit greyscale, of which nearly every pixel becomes white: {names}"
        yield Finding("16-bit images", "warning", f"{note}; save with 8 bits")


def _header(path: str, tells: Callable[[Image.Image], bool]) -> bool:
    try:
        with Image.open(path, formats=IMAGE_FORMATS) as image:
            return tells(image)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
        return False  # said elsewhere


def _is_turned(image: Image.Image) -> bool:
    return image.getexif().get(ExifTags.Base.Orientation, 1) in range(2, 9)
