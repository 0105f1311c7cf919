"""Orders of adoption and export, written by the planner."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from latentmake.models.shapes import Latents, Tokens

__all__ = ["AdoptOrder", "ExportOrder", "Text"]


class _Order(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)
    run: str


class Text(BaseModel):
    """Embeddings of one text encoder: ending of ai-training's files, tokens, width of each."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    ending: str
    tokens: Tokens
    width: int


class AdoptOrder(_Order):
    """Order to adopt a run's stale targets.

    Attributes:
        orders: names of the work orders with the stale targets of adopted kinds.
        roots: dataset -> its folder.
        ending: of files of latents; None where none are adopted.
        latents: their shape and scaling; None likewise.
        texts: the text encoders, in order; none where no embeddings are adopted.
        sizes: width and height of the run's resolutions, in pixels.
        fresh: targets up to date.
        stale: targets of those work orders.
        passed: stale targets of a kind that is not adopted.
        planned: time in nanoseconds; names the receipts.
    """

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

    manifest: str
    folder: str | None
    part: str
    ending: str | None
    dtype: str
    texts: list[tuple[str, bool]]
    text_dtype: str
    overwrite: bool
