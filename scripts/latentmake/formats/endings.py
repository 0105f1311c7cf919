"""Endings and formats of files: of images and videos that are read, and of those that are not.

Listings only need the endings, so this module imports nothing that opens files.
"""

from __future__ import annotations

IMAGE_EXTENSIONS = frozenset(
    {".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff", ".gif", ".avif"}
)
IMAGE_FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "TIFF", "GIF", "AVIF")
"""Pillow's names of the image formats of datasets.

Pillow tries no other format, whatever the file's ending: it would start Ghostscript for PostScript.
"""

PREVIEWS = (".img_sdvae.webp", ".img_sdxl.webp")
"""Endings of preview pictures of latents, which ai-training's scripts write beside images."""

VIDEO_EXTENSIONS = frozenset(
    {".mp4", ".webm", ".avi", ".mkv", ".mov", ".flv", ".wmv", ".m4v", ".mpg", ".mpeg"}
)

NPZ = ".npz"
"""Ending of a clip that is stored as an array of frames."""

_IMAGES = (
    *(".heic", ".heif", ".hif", ".jxl", ".jp2", ".j2k", ".jpf", ".jpx", ".tga", ".ico", ".icns"),
    *(".psd", ".xcf", ".svg", ".exr", ".hdr", ".dds", ".dib", ".pcx", ".ppm", ".pgm", ".pbm"),
    *(".pnm", ".dng", ".cr2", ".cr3", ".nef", ".arw", ".orf", ".rw2", ".raf"),
)
_VIDEOS = (
    *(".ts", ".mts", ".m2ts", ".m2v", ".3gp", ".3g2", ".ogv", ".vob", ".asf", ".f4v", ".mxf"),
    *(".rm", ".rmvb", ".divx", ".qt"),
)
UNREAD = {
    **dict.fromkeys((".jfif", ".jpe", ".jif", ".mpo"), "rename to .jpg"),
    ".apng": "rename to .png",
    **dict.fromkeys(_IMAGES, "convert to PNG or JPEG"),
    **dict.fromkeys(_VIDEOS, "convert to MP4"),
}
"""Ending of a file that neither Latentmake nor the trainers read -> what to do with the file."""

_NAMES = {".heic": "HEIC", ".heif": "HEIC", ".hif": "HEIC", ".jxl": "JPEG XL"}


def unread_format(kind: str) -> tuple[str, str]:
    """Return the fault of an image in a format that is not read, and the hint."""
    return f"is a {kind} image, which cannot be read", "convert it to PNG or JPEG, or remove it"


def unread_fault(ending: str) -> tuple[str, str] | None:
    """Return the fault of a file with an ending, and the hint; None if there is no fault."""
    if ending in _NAMES:
        return unread_format(_NAMES[ending])
    if ending not in UNREAD:
        return None
    hint = UNREAD[ending].replace(" to ", " it to ")
    if hint.startswith("convert"):
        hint += ", or remove it"
    return f"has the ending {ending}, which is not read", hint
