"""From the bytes of an image to the pixels an encoder sees. Pillow and numpy only, no torch."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import ExifTags, Image, ImageColor

from latentmake.files.media import opened_image
from latentmake.geometry.buckets import Size, placement

__all__ = ["decode", "fit", "upright_size"]


# How a picture of some EXIF orientation becomes upright. Not ImageOps.exif_transpose: it writes the
# EXIF anew as well, and fails over odd entries that no viewer minds.
_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


_PNG_TEXTS = (b"eXIf", b"tEXt", b"zTXt", b"iTXt")


def decode(data: bytes, path: str, settings: Mapping[str, Any]) -> Image.Image:
    """Decode an image to RGB, upright, without transparency.

    Args:
        data: the file's bytes.
        path: names it in errors.
        settings: the dataset's `exif_rotation`, `background` and `max_image_pixels`.

    Raises:
        SourceError: it is empty, no image, cut short, or has too many pixels.
    """
    with opened_image(io.BytesIO(data), path, int(settings["max_image_pixels"])) as image:
        image.load()
        if settings["exif_rotation"] and image.format != "TIFF":  # Pillow turns a TIFF itself
            method = _UPRIGHT.get(image.getexif().get(ExifTags.Base.Orientation, 1))
            image = image if method is None else image.transpose(method)
        return _to_rgb(image, str(settings["background"]))


def upright_size(data: bytes, path: str, settings: Mapping[str, Any]) -> Size:
    """Return the size of what `decode` gives, in pixels, from the image's header alone.

    Args:
        data: the file's bytes.
        path: names it in errors.
        settings: the dataset's `exif_rotation` and `max_image_pixels`.

    Raises:
        SourceError: it is empty, no image, or has too many pixels.
    """
    with opened_image(io.BytesIO(data), path, int(settings["max_image_pixels"])) as image:
        size = Size(*image.size)
        if settings["exif_rotation"] and image.format != "TIFF":
            turned = _exif(image, data).get(ExifTags.Base.Orientation, 1) in (5, 6, 7, 8)
            return Size(size.height, size.width) if turned else size
        return size


def _exif(image: Image.Image, data: bytes) -> Image.Exif:
    """Return the EXIF of an image of which no pixel is decoded yet.

    For that of a PNG, which may stand behind the pixels, Pillow decodes all of them; not here,
    where no chunk that may hold EXIF stands there.
    """
    behind = data.find(b"IDAT")
    if image.format == "PNG" and all(data.find(name, behind) < 0 for name in _PNG_TEXTS):
        return Image.Image.getexif(image)
    return image.getexif()


def _to_rgb(image: Image.Image, background: str) -> Image.Image:
    if image.mode in ("I", "I;16", "I;16B", "I;16L", "F"):
        values = np.asarray(image).astype(np.float32)
        # 16-bit greyscale; Pillow's own conversion would cut all above 255 off. The other two modes
        # do not say their range.
        scale = 257.0 if image.mode.startswith("I;16") or values.max(initial=0) > 255 else 1.0
        image = Image.fromarray(np.clip(values / scale + 0.5, 0, 255).astype(np.uint8))
    if image.mode == "RGB" and "transparency" not in image.info:
        return image
    if image.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in image.info:
        rgba = image.convert("RGBA")
        canvas = Image.new("RGBA", rgba.size, ImageColor.getrgb(background))
        return Image.alpha_composite(canvas, rgba).convert("RGB")
    return image.convert("RGB")


def fit(
    image: Image.Image, resolution: tuple[int, int], settings: Mapping[str, Any], path: str = ""
) -> NDArray[np.uint8]:
    """Bring an image to its target size: scaled with Lanczos to cover it, centre kept.

    Args:
        image: RGB, upright.
        resolution: width and height asked for, in pixels.
        settings: what `placement` needs.
        path: names it in errors.

    Returns:
        Pixels [height, width, 3], 0 to 255.

    Raises:
        SourceError: it is so narrow that it would first have to be scaled up beyond all measure.
    """
    resized, left, top, target = placement(Size(*image.size), resolution, settings, path)
    if image.size != resized:
        image = image.resize(resized, Image.Resampling.LANCZOS)
    if image.size != target:
        image = image.crop((left, top, left + target.width, top + target.height))
    return np.asarray(image)
