"""Order of an export, written by the planner."""

from __future__ import annotations

from pydantic import BaseModel

from latentmake.exchange.shapes import Tokens


class Text(BaseModel, extra="forbid", frozen=True):
    """Embeddings of one text encoder: ending of ai-training's files, tokens, width of each."""

    ending: str
    tokens: Tokens
    width: int


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
