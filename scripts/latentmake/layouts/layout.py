"""A layout: names of the cache files that a trainer reads, and their other peculiarities."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import ClassVar, NamedTuple

from latentmake.config.datasets import Dataset
from latentmake.geometry.buckets import Placement, Size
from latentmake.geometry.clips import WAN_FPS, AnyClip, Clip, Media, Span

SIZED = re.compile(r"(.+)_(\d{4,})x(\d{4,})", re.DOTALL)
"""The name of a latents cache without its ending, where it contains the size of the image."""

DROPPED = "text.dropped"
"""Part of the empty captions that replace the others in some epochs."""


def kind_of(part: str) -> str:
    """Return whether a part is `text` or `latents`."""
    return "text" if part.startswith("text") else "latents"


def beside(part: str) -> Size | None:
    """Return the resolution beside whose latents a text lies (`text@512x768`); None elsewhere."""
    return size_of(part.partition("@")[2]) if "@" in part else None


def size_of(part: str) -> Size | None:
    """Return width and height of a part of latents (`64`, `512x768`); None for text."""
    if kind_of(part) == "text":
        return None
    width, _, height = part.partition("x")
    return Size(int(width), int(height or width))


def text_of(part: str) -> str:
    """Return which text a part of text holds: `text`, `text.1`, `text.dropped`.

    A layout may have it beside each resolution: `text.1@512`.
    """
    return part.partition("@")[0]


class Named(NamedTuple):
    """One target of an item.

    Attributes:
        path: its cache file.
        clip: frames that it is made of; None for an image or a caption.
    """

    path: str
    clip: AnyClip | None = None


class Layout(ABC):
    """A layout with everything that may differ between layouts; the defaults are the usual answers.

    A part of a dataset and model is a resolution (`64`, `512x768`) or a text (`text`, `text.1`,
    `text@512`).

    Attributes:
        name: as `of` takes it.
        encoding: name of the modules of `caches.pixels` and `caches.encoders` that make its caches.
        text_ending: end of the name of a text cache; None where text is not cached.
        latents_ending: end of the name of a latents cache.
        longest_ending: the longest text that follows an item's own name in that of a cache file.
        names_media: whether names contain the size or clips of images and videos, so that planning
            must probe these.
        any_size: whether resolutions must fit the VAE alone; else `config.checks` knows the rule.
        drops_skipped: whether its trainer trains on all files of a folder, so that caches of
            skipped items must go.
        lists_sources: whether a manifest's row names caption and control file.
        adopts: whether its files are those of another program, which a dataset's `adopt_from` may
            name; else `ai_training` of the model says what is adopted.
        npz: whether cache files are .npz and not .safetensors.
        numbers_variants: whether an item with several texts is several items to its trainer, of
            which those of further texts are named `{stem}.v1` and so on, flat in one folder.
        names_architecture: whether the recipe of latents contains the model's architecture.
        numbered_controls: whether an item has several control images, by numbers in their names;
            else the one of its own name.
        controlled_text: whether text depends on control images.
        rate: frames a second that `source_fps` converts videos to.
        pads_t5: whether T5's captions are padded, and the padding is visible to it.
        first_line: whether its trainer reads only the first line of a caption.
    """

    name: str
    encoding: ClassVar[str]
    text_ending: str | None
    latents_ending: str
    longest_ending: str
    names_media: ClassVar[bool] = True
    any_size: ClassVar[bool] = False
    drops_skipped: ClassVar[bool] = False
    lists_sources: ClassVar[bool] = True
    adopts: ClassVar[bool] = False
    npz: ClassVar[bool] = False
    rate: float = WAN_FPS
    pads_t5: ClassVar[bool] = False
    first_line: ClassVar[bool] = False
    names_architecture: ClassVar[bool] = False
    numbers_variants: ClassVar[bool] = False
    numbered_controls: bool = False
    controlled_text: bool = False

    def parts(self, resolutions: Iterable[str], texts: Sequence[str] = ("text",)) -> list[str]:
        """Return the parts of one dataset and model.

        Args:
            resolutions: their names.
            texts: `text`, and a name for each further variant of an item's text.
        """
        return [*resolutions, *(texts if self.text_ending else ())]

    def folder(self, dataset: str, model: str, part: str) -> str:
        """Return the folder of a part's cache files.

        The first text of a resolution lies beside its latents, where musubi-tuner looks for it.
        """
        return f"cache/{dataset}/{model}/{part.removeprefix('text@')}"

    def named(
        self,
        folder: str,
        part: str,
        stem: str,
        media: Media | None,
        settings: Dataset | None,
        span: Span | None = None,
    ) -> Sequence[Named]:
        """Return the targets of one item in one part's folder; `span` is its part of a video."""
        if kind_of(part) == "text":
            return (Named(f"{folder}/{stem}{self.text_ending}"),)
        size = ""
        if self.names_media:
            assert media is not None
            size = f"_{media.width:04d}x{media.height:04d}"
        return (Named(f"{folder}/{stem}{size}{self.latents_ending}"),)

    def clips(self, media: Media, settings: Dataset, span: Span | None = None) -> list[Clip]:
        """Return the clips that are made of a video, or of a span of it."""
        return []

    def variant(
        self,
        resolution: Size | None,
        image: Size,
        settings: Dataset | None,
        clip: AnyClip | None,
        span: Span | None = None,
        rotation: int = 0,
        controls: Sequence[Size] = (),
    ) -> str:
        """Return the part of a target's key for resizing and clips; "" for text.

        Args:
            resolution: the size asked for, in pixels; None for text.
            image: size of the source, in pixels: upright for `plain`, as stored for the others.
            settings: the dataset's section of the configuration.
            clip: frames of a video that it is made of.
            span: part of the video that the clip's frames are counted in.
            rotation: degrees clockwise by which frames are turned before anything else.
            controls: sizes of its control images, in pixels, where these count.

        Raises:
            SourceError: no target can be made of a source of this size.
        """
        if resolution is None or settings is None:
            return ""
        turned = f":r{rotation}" if rotation else ""
        return self._resizing(resolution, image, settings, clip, span or Span()) + turned

    def text_variant(
        self,
        resolution: Size | None,
        image: Size,
        settings: Dataset | None,
        controls: Sequence[Size] = (),
    ) -> str:
        """Return the part of a text's key for what is done to its control images; see `variant`.

        `resolution` is None where it has none, and `image` the size of the image that it describes.
        """
        return ""

    @abstractmethod
    def placement(self, resolution: Size, image: Size, settings: Dataset) -> Placement:
        """Return how an image or a frame is brought to its size; arguments as of `variant`.

        Raises:
            SourceError: no target can be made of an image of this size.
        """

    def _resizing(
        self, resolution: Size, image: Size, settings: Dataset, clip: AnyClip | None, span: Span
    ) -> str:
        """Return the part of a latent's key; see `variant`."""
        return self.placement(resolution, image, settings).name

    def base(self, stem: str) -> str:
        """Return the beginning of the names of an item's cache files."""
        return stem

    def owners(self, name: str) -> Sequence[str]:
        """Return the bases that a file below a part's folder may belong to; none: no cache file."""
        if self.text_ending and name.endswith(self.text_ending):
            return (name.removesuffix(self.text_ending),)
        if not name.endswith(self.latents_ending):
            return ()
        rest = name.removesuffix(self.latents_ending)
        if not self.names_media:
            return (rest,)
        sized = SIZED.fullmatch(rest)
        return (sized[1],) if sized else ()

    def identity(self, stem: str, path: str) -> str:
        """Return the name under which a target's key enters the digest of its part."""
        return stem

    def row(self, targets: Mapping[str, Sequence[str]]) -> dict[str, object]:
        """Return the entries of a manifest's row for an item's cache files.

        Args:
            targets: part -> paths.

        Returns:
            `latents` (resolution -> path), `text` (path, or None), `dropped` (path of the empty
            caption) and, where there are several texts, `variants`: the paths of all of them.
        """
        texts = {part: paths[0] for part, paths in targets.items() if kind_of(part) == "text"}
        row: dict[str, object] = {
            "latents": {part: paths[0] for part, paths in targets.items() if part not in texts},
            "text": texts.get("text"),
        }
        if DROPPED in texts:
            row["dropped"] = texts.pop(DROPPED)
        if len(texts) > 1:
            row["variants"] = list(texts.values())
        return row

    def caption(self, text: str) -> str:
        """Return a caption as its trainer would read it."""
        return text
