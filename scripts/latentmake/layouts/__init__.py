"""Layouts: under which names a trainer looks for caches.

Each layout is a module that offers the functions of `Layout`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

from latentmake.buckets import Size
from latentmake.clips import Clip
from latentmake.config import Dataset
from latentmake.media import Media

__all__ = ["Layout", "Named", "kind_of", "of", "size_of"]


def kind_of(part: str) -> str:
    """Return whether a part is `text` or `latents`."""
    return "text" if part.startswith("text") else "latents"


def size_of(part: str) -> Size | None:
    """Return width and height that a resolution's name stands for; None for text."""
    if kind_of(part) == "text":
        return None
    width, _, height = part.partition("x")
    return Size(int(width), int(height or width))


class Named(NamedTuple):
    """One target of an item.

    Attributes:
        path: its cache file.
        clip: which frames it is made of; None for an image or a caption.
    """

    path: str
    clip: Clip | None = None


class Layout(Protocol):
    """What a layout's module, or an object of it, offers."""

    @property
    def longest_ending(self) -> str:
        """The longest that the name of a cache file may have after the item's own name."""

    def parts(self, resolutions: Iterable[str], texts: Sequence[str] = ("text",)) -> list[str]:
        """Return the parts of one dataset and model, for some resolutions' names.

        Args:
            resolutions: their names.
            texts: `text`, and a name for each further variant of an item's text.
        """

    def folder(self, dataset: str, model: str, part: str) -> str:
        """Return the folder of a part's cache files."""

    def named(
        self, folder: str, part: str, stem: str, media: Media | None, settings: Dataset | None
    ) -> Sequence[Named]:
        """Return the targets of one item in one part's folder."""

    def variant(
        self, resolution: Size | None, image: Size, settings: Dataset | None, clip: Clip | None
    ) -> str:
        """Return the part of a target's key that says what is done to its source.

        Args:
            resolution: the size asked for, in pixels; None for text.
            image: size of the source, in pixels: upright for `plain`, as stored for the others.
            settings: the dataset's section of the configuration.
            clip: which frames of a video it is made of.

        Raises:
            SourceError: no target can be made of a source of this size.
        """

    def base(self, stem: str) -> str:
        """Return what of an item's stem is in the names of its cache files."""

    def owners(self, name: str) -> Sequence[str]:
        """Return to which bases a file below a part's folder may belong; none: no cache file."""

    def identity(self, stem: str, path: str) -> str:
        """Return the name under which a target's key enters the digest of its part."""

    def row(self, targets: Mapping[str, Sequence[str]]) -> dict[str, object]:
        """Return what a manifest's line says of an item's cache files, given part -> paths."""


def of(name: str) -> Layout:
    """Return the layout of a name: `plain`, `musubi`, `sdscripts-sdxl` and so on."""
    from latentmake.layouts import musubi, plain, sdscripts

    if name.startswith(sdscripts.PREFIX):
        return sdscripts.of(name.removeprefix(sdscripts.PREFIX))
    return {"plain": plain, "musubi": musubi}[name]
