"""Self-contained HTML pages with images and clips: one file each, no network.

A page's content is data (JSON) that its script shows as text, never as markup. The page's content
security policy allows that script, that style sheet and embedded pictures, nothing else;
cards and galleries also pictures in files beside the page, a page with clips also clips.
"""

from __future__ import annotations

import base64
import io
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from latentmake import digest
from latentmake.config.datasets import Dataset
from latentmake.errors import SourceError
from latentmake.files import atomic
from latentmake.files.media import probe_video

if TYPE_CHECKING:
    from PIL import Image

PLAYED = frozenset({".mp4", ".webm"})
"""Endings of clips that browsers play."""

FPS = 16.0
"""Frames a second of Wan's clips."""

EMBEDDED = 40_000_000
"""Bytes of all clips of a page up to which they are embedded, so that the page can be moved."""

_FOLDER = Path(__file__).parent
_PARTS = {
    "cards": ("page", "viewer", "cards"),
    "compare": ("page", "clips", "chart", "viewer", "compare"),
    "gallery": ("page", "clips", "chart", "gallery"),
}
"""Kind of a page -> its templates, style sheets and scripts, as far as there are such files."""
_HEAD = 4096  # bytes: the state stands within these
_STATE = re.compile(rb'<meta name="latentmake-state" content="([0-9a-f]{64})">')


def _sources(kind: str, ending: str) -> list[str]:
    """Return the texts of a kind of page's files that have an ending."""
    paths = (_FOLDER / f"{name}.{ending}" for name in _PARTS[kind])
    return [path.read_text(encoding="utf-8").strip() for path in paths if path.exists()]


def template_digest(kind: str) -> str:
    """Return the digest of a kind of page: its templates, style sheets and scripts."""
    return digest.of_value([_sources(kind, ending) for ending in ("html", "css", "js")])


def _allowed(text: str) -> str:
    """Name a script or a style sheet in a content security policy (W3C CSP3, section 2.3)."""
    sha256 = bytes.fromhex(digest.of_bytes(text.encode()))
    return f"'sha256-{base64.b64encode(sha256).decode()}'"


def page(kind: str, title: str, data: Any, state: str = "") -> str:
    """Return a page.

    Args:
        kind: `cards`, `compare` or `gallery`.
        title: of the page.
        data: JSON values for its script.
        state: digest of what it was made of, for `state_in`.
    """
    from jinja2 import Environment, FileSystemLoader  # not while planning

    templates = Environment(
        loader=FileSystemLoader(_FOLDER), autoescape=True, keep_trailing_newline=True
    )
    # Written in its own order, and without spaces.
    templates.policies["json.dumps_kwargs"] = {"separators": (",", ":")}
    style, script = ("\n".join(_sources(kind, ending)) for ending in ("css", "js"))
    clips = "media-src data: file: 'self'; " if "clips" in _PARTS[kind] else ""
    beside = "" if kind == "compare" else " file: 'self'"
    policy = (
        f"default-src 'none'; img-src data:{beside}; {clips}style-src {_allowed(style)}; "
        f"script-src {_allowed(script)}; base-uri 'none'; form-action 'none'"
    )
    return templates.get_template(f"{kind}.html").render(
        title=title, data=data, state=state, policy=policy, style=style, script=script
    )


def write_page(path: Path, kind: str, title: str, data: Any, state: str = "") -> str:
    """Write a page as `page` makes it; return its size in words; raises StorageError."""
    text = page(kind, title, data, state).encode()
    atomic.write(path, text)
    return f"{len(text) / 1e6:.1f} MB"


def table(
    name: str, title: str, words: str, heads: Sequence[str], rows: Iterable[Sequence[str | float]]
) -> dict[str, Any]:
    """Return a table of a page; `name` is its section's.

    Heads with a `>` belong to columns of numbers; a cell that is a number is a bar of that share.
    """
    values = [[*row] for row in rows]
    return {"id": name, "title": title, "words": words, "heads": [*heads], "rows": values}


def state_in(path: Path) -> str | None:
    """Return the state of a page; None without a page of ours."""
    try:
        with path.open("rb") as file:
            match = _STATE.search(file.read(_HEAD))
    except OSError:
        return None
    return match[1].decode() if match else None


class ClipSources:
    """Addresses of clips for a page's `video` elements.

    Args:
        page: path of the page.
        paths: all clips of the page.
    """

    def __init__(self, page: Path, paths: list[Path]) -> None:
        self._folder = page.parent
        sizes = (each.stat().st_size for each in {*paths} if each.is_file())
        self.embeds = sum(sizes) <= EMBEDDED

    def address(self, path: Path) -> str:
        """Return a data URI, or the path from the page to the clip; raises OSError."""
        if self.embeds:
            ending = path.suffix.lower().removeprefix(".")
            kind = f"image/{ending}" if ending == "png" else f"video/{ending}"
            return f"data:{kind};base64,{base64.b64encode(path.read_bytes()).decode()}"
        return quote(Path(os.path.relpath(path, self._folder)).as_posix())


_WIDTH, _NARROW = 1024, 512  # pixels; wider pictures are scaled down
_MANY = 200  # pictures; more are narrow
_PIXEL_ART = 256  # pixels; smaller pictures are embedded without loss
Picture = tuple[str, int, int, bool]


def embedded(image: Image.Image, kind: str, **options: Any) -> str:
    """Return an image as a data URI; `kind` is `png` or `webp`, `options` are Pillow's."""
    data = io.BytesIO()
    image.save(data, kind, **options)
    return f"data:image/{kind};base64,{base64.b64encode(data.getvalue()).decode()}"


def picture_of(data: bytes, path: Path) -> Image.Image:
    """Return the picture that a file holds; raises SourceError."""
    from latentmake.caches.pixels.plain import decode

    return decode(data, str(path), Dataset(path="."))


def as_text(name: str) -> str:
    """Return a file name with undecodable bytes replaced."""
    return os.fsencode(name).decode("utf-8", "replace")


class Pictures:
    """Pictures of a page, without duplicates.

    Args:
        page: path of the page.
        paths: all pictures and clips of it; many pictures are shown smaller.

    Attributes:
        embedded: address, width, height, whether to show it pixel by pixel.
        clips: numbers of those that are clips.
        faults: pictures that cannot be read, a line each.
    """

    def __init__(self, page: Path, paths: Sequence[Path]) -> None:
        clips = [each for each in paths if each.suffix.lower() in PLAYED]
        self._sources = ClipSources(page, clips)
        self._width = _WIDTH if len(paths) - len(clips) <= _MANY else _NARROW
        self.clips: list[int] = []
        self._numbers: dict[str, int] = {}
        self.embedded: list[Picture] = []
        self.faults: list[str] = []

    def add(self, path: Path) -> int | str:
        """Return the number of a picture, or why it cannot be shown."""
        try:
            data = path.read_bytes()
            if (name := digest.of_bytes(data)) not in self._numbers:
                number, is_clip = len(self.embedded), path.suffix.lower() in PLAYED
                self.embedded.append(self._clip(path) if is_clip else self._image(data, path))
                self.clips += [number] * is_clip
                self._numbers[name] = number
            return self._numbers[name]
        except SourceError as error:
            fault = error.what
        except OSError as error:
            fault = f"cannot be read ({error.strerror})"
        self.faults.append(f"{path}: {fault}")
        return as_text(fault)

    def _clip(self, path: Path) -> Picture:
        media = probe_video(str(path))
        small = max(media.width, media.height) < _PIXEL_ART
        return self._sources.address(path), media.width, media.height, small

    def _image(self, data: bytes, path: Path) -> Picture:
        from PIL import Image

        image = picture_of(data, path)
        if max(image.size) < _PIXEL_ART:
            return embedded(image, "png", optimize=True), *image.size, True
        image.thumbnail((self._width, 2 * self._width), Image.Resampling.LANCZOS)
        return embedded(image, "webp", quality=80, method=2), *image.size, False
