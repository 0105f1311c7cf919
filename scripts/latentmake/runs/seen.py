"""Items that a training saw: their texts and digests of pictures, in a file beside the weights.

Captions, pictures and cache files may change afterwards. Pages, and the reasons to train, compare
today's items with this file.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from pydantic import BaseModel

from latentmake.base import atomic
from latentmake.base.errors import SourceError
from latentmake.base.state_file import read_state
from latentmake.data.contents import read_caption
from latentmake.formats.cachefile import header_of
from latentmake.plan.manifest import SEEN
from latentmake.runs.rows import Row, rows_of


class SeenItem(BaseModel, extra="ignore", frozen=True):
    """One item that a training saw.

    Attributes:
        source: digest of its picture or video, with its controls; "" if no cache file has it.
        texts: texts of the item, as they were encoded.
    """

    dataset: str
    stem: str
    source: str = ""
    texts: list[str] = []


def write_seen(manifest: Path, folder: Path) -> None:
    """Write a file with the items of a manifest into a folder; raises StorageError."""
    lines = (f"{item.model_dump_json()}\n" for item in seen_items(manifest))
    atomic.write(folder / SEEN, "".join(lines).encode())


def read_seen(folder: Path) -> list[SeenItem] | None:
    """Return the items that `write_seen` wrote; None if the file is missing or damaged."""
    return read_state(
        folder / SEEN,
        lambda data: [SeenItem.model_validate_json(line) for line in data.splitlines()],
    )


def seen_items(manifest: Path) -> Iterator[SeenItem]:
    """Yield the items of a manifest, with the texts and digests in today's cache files.

    Raises:
        TrainingError: the manifest is missing or damaged.
    """
    for row in rows_of(manifest):
        latents = next((path for size in row.latents for path in row.latents_at(size)), None)
        header = header_of(Path(latents)) if latents else None
        source = header.source if header else ""
        yield SeenItem(dataset=row.dataset, stem=row.stem, source=source, texts=[*_texts(row)])


def _texts(row: Row) -> Iterator[str]:
    """Yield the texts of a row. If the row has none, they are in the headers of its embeddings."""
    if row.texts is not None:
        yield from row.texts
        return
    embeddings = next((paths for size in (*row.latents, "") if (paths := row.texts_at(size))), [])
    headers = [header_of(Path(path)) for path in embeddings]
    captions = [header.caption for header in headers if header and header.caption is not None]
    if not captions and row.caption:  # a trainer that encodes captions itself reads the file
        with suppress(SourceError):
            captions = [read_caption(row.caption)]
    yield from captions or [""]
