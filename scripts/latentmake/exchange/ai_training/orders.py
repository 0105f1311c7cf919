"""What adoption and export are asked to do, as small files that the planner writes."""

from __future__ import annotations

from pathlib import Path
from typing import Self

from pydantic import BaseModel, ConfigDict

from latentmake.models.shapes import Latents, Tokens

__all__ = ["AdoptOrder", "ExportOrder", "Text"]


class _Order(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read an order.

        Raises:
            OSError: it cannot be read.
            ValueError: it is not one.
        """
        return cls.model_validate_json(path.read_bytes())


class Text(BaseModel):
    """The embeddings of one text encoder.

    Attributes:
        ending: of the other program's files.
        tokens: how many there are.
        width: of each.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    ending: str
    tokens: Tokens
    width: int


class AdoptOrder(_Order):
    """What an adoption is asked to do.

    Attributes:
        run: its name.
        naming: whose files are adopted.
        orders: names of the work orders that hold what is stale, of kinds that may be adopted.
        roots: dataset -> its folder.
        ending: of files of latents; None where none are adopted.
        latents: what they are like; None likewise.
        texts: the text encoders, in order; none where no embeddings are adopted.
        sizes: width and height of the run's resolutions, in pixels.
        fresh: how many targets need nothing.
        stale: how many targets those work orders hold.
        passed: how many stale ones are of a kind that is not adopted.
        planned: when, in nanoseconds; names the receipts.
    """

    run: str
    naming: str
    orders: list[str]
    roots: dict[str, str]
    ending: str | None
    latents: Latents | None
    texts: list[Text]
    sizes: list[tuple[int, int]]
    fresh: int
    stale: int
    passed: int
    planned: int


class ExportOrder(_Order):
    """What an export is asked to do.

    Attributes:
        run: its name.
        naming: for whom files are written.
        manifest: one line an item with the paths of its caches.
        folder: gets the files; None: they lie beside the images.
        part: name of the resolution.
        ending: of files of latents; None where none are written.
        dtype: number format of the latents' caches.
        texts: (ending, whether it pads) of each text encoder; none where no text is written.
        text_dtype: number format of the embeddings' caches.
        overwrite: whether files that we did not write are replaced.
    """

    run: str
    naming: str
    manifest: str
    folder: str | None
    part: str
    ending: str | None
    dtype: str
    texts: list[tuple[str, bool]]
    text_dtype: str
    overwrite: bool
