"""Orders of adoption and export, written by the planner."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel

from latentmake.models.shapes import Latents, Tokens

__all__ = ["AdoptOrder", "ExportOrder", "Text"]


class Text(BaseModel, extra="forbid", frozen=True):
    """Embeddings of one text encoder: ending of ai-training's files, tokens, width of each."""

    ending: str
    tokens: Tokens
    width: int


class AdoptOrder(BaseModel, extra="forbid", frozen=True):
    """Order to adopt a run's stale targets.

    Attributes:
        orders: names of the work orders with the stale targets of adopted kinds.
        roots: dataset -> its folder.
        ending: of files of latents; None where none are adopted.
        latents: their channels, factor, scaling and shift; None likewise.
        texts: the text encoders, in order; none where no embeddings are adopted.
        sizes: width and height of the run's resolutions, in pixels.
        fresh: targets up to date.
        stale: targets of those work orders.
        passed: stale targets of a kind that is not adopted.
        planned: time in nanoseconds; names the receipts.
    """

    kind: Literal["ai_training"] = "ai_training"
    run: str
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


class ExportOrder(BaseModel, extra="forbid", frozen=True):
    """Order to export a run's caches.

    Attributes:
        manifest: one line an item with the paths of its caches.
        folder: of the files; None: beside the images.
        part: name of the resolution.
        ending: of files of latents; None where none are written.
        dtype: of the latents' caches.
        texts: (ending, whether it pads) of each text encoder; none where no text is written.
        text_dtype: of the embeddings' caches.
        overwrite: whether to replace files that we did not write.
    """

    run: str
    manifest: str
    folder: str | None
    part: str
    ending: str | None
    dtype: str
    texts: list[tuple[str, bool]]
    text_dtype: str
    overwrite: bool
