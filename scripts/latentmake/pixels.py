"""From the bytes of an image to the pixels an encoder sees. Pillow and numpy only, no torch."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import ExifTags, Image, ImageColor

from latentmake.buckets import Placement, Size, place, target_size
from latentmake.config.datasets import BUCKET_STEPS
from latentmake.errors import SourceError
from latentmake.media import opened_image

__all__ = ["decode", "fit", "placement", "refuse_narrow", "upright_size"]


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
            turned = image.getexif().get(ExifTags.Base.Orientation, 1) in (5, 6, 7, 8)
            return Size(size.height, size.width) if turned else size
        return size


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


def placement(
    image: Size, resolution: tuple[int, int], settings: Mapping[str, Any], path: str = ""
) -> Placement:
    """Return how an image is brought to its target size.

    Args:
        image: its own size, upright, in pixels.
        resolution: width and height asked for, in pixels.
        settings: the dataset's `fit`, `bucket_reso_steps`, `bucket_no_upscale` and
            `max_image_pixels`.
        path: names it in errors.

    Raises:
        SourceError: it is so narrow that it would first have to be scaled up beyond all measure.
    """
    target = target_size(
        image,
        Size(*resolution),
        fit=settings["fit"],
        step=settings["bucket_reso_steps"] or BUCKET_STEPS,
        no_upscale=settings["bucket_no_upscale"],
    )
    found = place(image, target)
    refuse_narrow(image, found, int(settings["max_image_pixels"]), path)
    return found


def refuse_narrow(image: Size, placement: Placement, limit: int, path: str) -> None:
    """Refuse an image that would first be scaled up to more pixels than a limit and than it has.

    Args:
        image: its own size, in pixels.
        placement: how it gets its target size.
        limit: most pixels.
        path: names it in errors.

    Raises:
        SourceError: it would.
    """
    resized = placement.resized.width * placement.resized.height
    if resized > max(limit, image.width * image.height):
        target = placement.target
        raise SourceError(
            f"is too narrow ({image.width} x {image.height}): covering {target.width} x "
            f"{target.height} takes {resized} pixels",
            where=path,
            mend="cut it to a shape nearer to the resolution's, or remove it",
        )
