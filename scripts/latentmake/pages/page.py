"""Self-contained HTML pages with images and clips: one file each, no network.

The content of a page is JSON data. The page's script shows it as text, never as markup. The content
security policy allows only the page's own script and style sheet, and embedded pictures. Cards and
galleries may also load picture files beside the page, and pages with clips may load clips. A page
that edits captions may ask its server.
"""

from __future__ import annotations

import base64
import io
import os
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from latentmake.base import atomic, digest
from latentmake.base.errors import SourceError
from latentmake.config.datasets import Dataset
from latentmake.formats.media import probe_video

if TYPE_CHECKING:
    from PIL import Image

PLAYED = frozenset({".mp4", ".webm"})
"""Endings of clips that browsers play."""

FPS = 16.0
"""Frames per second of Wan's clips."""

EMBEDDED = 40_000_000
"""Largest total size of clips in bytes that a page embeds. A page with embedded clips can be moved
without its files."""

_FOLDER = Path(__file__).parent
_PARTS = {
    "cards": ("page", "texts", "viewer", "cards"),
    "compare": ("page", "clips", "chart", "viewer", "compare"),
    "edit": ("page", "texts", "edit"),
    "gallery": ("page", "clips", "chart", "gallery"),
}
"""Kind of page -> names of its templates, style sheets and scripts; not every file exists."""
_HEAD = 4096  # bytes at the start of a page that contain the state
_STATE = re.compile(rb'<meta name="latentmake-state" content="([0-9a-f]{64})">')


def _sources(kind: str, ending: str) -> list[str]:
    """Return the texts of the files of one kind of page with one ending."""
    paths = (_FOLDER / f"{name}.{ending}" for name in _PARTS[kind])
    return [path.read_text(encoding="utf-8").strip() for path in paths if path.exists()]


def template_digest(kind: str) -> str:
    """Return the digest of the templates, style sheets and scripts of one kind of page."""
    return digest.of_value([_sources(kind, ending) for ending in ("html", "css", "js")])


def _allowed(text: str) -> str:
    """Return the hash of a script or style sheet for a content security policy.

    Source: W3C CSP3, section 2.3.
    """
    sha256 = bytes.fromhex(digest.of_bytes(text.encode()))
    return f"'sha256-{base64.b64encode(sha256).decode()}'"


def page(kind: str, title: str, data: Any, state: str = "") -> str:
    """Return a page.

    Args:
        kind: `cards`, `compare`, `gallery`, or `edit`, which a server sends.
        title: title of the page.
        data: JSON values for the page's script.
        state: digest of the inputs that the page was made from; `state_in` reads it.
    """
    from jinja2 import Environment, FileSystemLoader  # here: a plan does not need it

    loader = FileSystemLoader(_FOLDER)
    templates = Environment(loader=loader, autoescape=True, keep_trailing_newline=True)
    # jinja2 sorts the keys by default; these options keep their order and write no spaces.
    templates.policies["json.dumps_kwargs"] = {"separators": (",", ":")}
    style, script = ("\n".join(_sources(kind, ending)) for ending in ("css", "js"))
    clips = "media-src data: file: 'self'; " if "clips" in _PARTS[kind] else ""
    beside = "" if kind == "compare" else " file: 'self'"
    server = "connect-src 'self'; " if kind == "edit" else ""
    policy = (
        f"default-src 'none'; img-src data:{beside}; {clips}{server}style-src {_allowed(style)}; "
        f"script-src {_allowed(script)}; base-uri 'none'; form-action 'none'"
    )
    return templates.get_template(f"{kind}.html").render(
        title=title, data=data, state=state, policy=policy, style=style, script=script
    )


def write_page(path: Path, kind: str, title: str, data: Any, state: str = "") -> str:
    """Write the page that `page` returns; return its size as text; raises StorageError."""
    text = page(kind, title, data, state).encode()
    atomic.write(path, text)
    return f"{len(text) / 1e6:.1f} MB"


def table(
    name: str, title: str, words: str, heads: Sequence[str], rows: Iterable[Sequence[str | float]]
) -> dict[str, Any]:
    """Return a table of a page; `name` is the ID of its section.

    Heads that begin with `>` belong to columns of numbers. If a cell is a number and no text, the
    page shows a bar whose length is that share.
    """
    values = [[*row] for row in rows]
    return {"id": name, "title": title, "words": words, "heads": [*heads], "rows": values}


def state_in(path: Path) -> str | None:
    """Return the state of a page; None if there is no page or it is not one of Latentmake's."""
    try:
        with path.open("rb") as file:
            match = _STATE.search(file.read(_HEAD))
    except OSError:
        return None
    return match[1].decode() if match else None


def clip_addresses(page: Path, paths: Iterable[Path]) -> Callable[[Path], str]:
    """Return a function that returns the address of a clip for a page's `video` elements.

    The address is a data URI, or the path from the page to the clip; it raises OSError.

    Args:
        page: path of the page.
        paths: all clips of the page.
    """
    embeds = sum(path.stat().st_size for path in {*paths} if path.is_file()) <= EMBEDDED

    def address(path: Path) -> str:
        if embeds:
            ending = path.suffix.lower().removeprefix(".")
            kind = f"image/{ending}" if ending == "png" else f"video/{ending}"
            return f"data:{kind};base64,{base64.b64encode(path.read_bytes()).decode()}"
        return quote(Path(os.path.relpath(path, page.parent)).as_posix())

    return address


_WIDTH, _NARROW = 1024, 512  # largest width of a picture in pixels
_MANY = 200  # pictures; pages with more scale them to `_NARROW`
_PIXEL_ART = 256  # pixels; smaller pictures are embedded losslessly
Picture = tuple[str, int, int, bool]


def embedded(image: Image.Image, kind: str, **options: Any) -> str:
    """Return an image as a data URI; `kind` is `png` or `webp`, `options` go to Pillow."""
    data = io.BytesIO()
    image.save(data, kind, **options)
    return f"data:image/{kind};base64,{base64.b64encode(data.getvalue()).decode()}"


def picture_of(data: bytes, path: Path) -> Image.Image:
    """Decode the picture in a file's content; raises SourceError."""
    from latentmake.encode.pixels.plain import decode

    return decode(data, str(path), Dataset(path="."))


def as_text(name: str) -> str:
    """Return a file name with undecodable bytes replaced."""
    return os.fsencode(name).decode("utf-8", "replace")


class Pictures:
    """Pictures of a page, without duplicates.

    Args:
        page: path of the page.
        paths: all pictures and clips of the page; if there are many pictures, they are smaller.

    Attributes:
        embedded: address, width and height of each picture, and whether browsers must not smooth
            its pixels.
        clips: numbers of the pictures that are clips.
        faults: one line for each picture that cannot be read.
    """

    def __init__(self, page: Path, paths: Sequence[Path]) -> None:
        clips = [path for path in paths if path.suffix.lower() in PLAYED]
        self._address = clip_addresses(page, clips)
        self._width = _WIDTH if len(paths) - len(clips) <= _MANY else _NARROW
        self.clips: list[int] = []
        self._numbers: dict[str, int] = {}
        self.embedded: list[Picture] = []
        self.faults: list[str] = []

    def add(self, path: Path) -> int | str:
        """Return the number of a picture, or the reason why it cannot be shown."""
        try:
            data = path.read_bytes()
            if (name := digest.of_bytes(data)) not in self._numbers:
                number, is_clip = len(self.embedded), path.suffix.lower() in PLAYED
                self.embedded.append(self._clip(path) if is_clip else self._image(data, path))
                if is_clip:
                    self.clips.append(number)
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
        return self._address(path), media.width, media.height, small

    def _image(self, data: bytes, path: Path) -> Picture:
        from PIL import Image

        image = picture_of(data, path)
        if max(image.size) < _PIXEL_ART:
            return embedded(image, "png", optimize=True), *image.size, True
        image.thumbnail((self._width, 2 * self._width), Image.Resampling.LANCZOS)
        return embedded(image, "webp", quality=80, method=2), *image.size, False
