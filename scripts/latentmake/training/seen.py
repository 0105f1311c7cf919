"""Items that a training saw, in a file beside its weights: their texts, and digests of pictures.

Captions, pictures and cache files may change afterwards. Pages compare today's items with this
file, which nothing else depends on.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from pydantic import BaseModel

from latentmake.data.contents import read_caption
from latentmake.errors import SourceError
from latentmake.files import atomic
from latentmake.files.cachefile import header_of
from latentmake.files.state_file import read_state
from latentmake.training.rows import Row, rows_of

SEEN = "trained_items.jsonl"


class SeenItem(BaseModel, extra="ignore", frozen=True):
    """One item that a training saw.

    Attributes:
        source: digest of its picture or video, with its controls; "" where no cache file has it.
        texts: as they were encoded.
    """

    dataset: str
    stem: str
    source: str = ""
    texts: list[str] = []


def write_seen(manifest: Path, folder: Path) -> None:
    """Write the items of a manifest that was trained on into a folder; raises StorageError."""
    lines = (f"{item.model_dump_json()}\n" for item in seen_items(manifest))
    atomic.write(folder / SEEN, "".join(lines).encode())


def read_seen(folder: Path) -> list[SeenItem] | None:
    """Return the items that `write_seen` wrote into a folder; None where they are not known."""
    return read_state(
        folder / SEEN, lambda data: [SeenItem.model_validate_json(x) for x in data.splitlines()]
    )


def seen_items(manifest: Path) -> Iterator[SeenItem]:
    """Yield the items of a manifest, by its cache files as they are now; raises TrainingError."""
    for row in rows_of(manifest):
        latents = next((path for size in row.latents for path in row.latents_at(size)), None)
        header = header_of(Path(latents)) if latents else None
        source = header.source if header else ""
        yield SeenItem(dataset=row.dataset, stem=row.stem, source=source, texts=[*_texts(row)])


def _texts(row: Row) -> Iterator[str]:
    """Yield the texts of a row, by the headers of its embeddings where the row has none."""
    if row.texts is not None:
        yield from row.texts
        return
    embeddings = next((found for size in (*row.latents, "") if (found := row.texts_at(size))), [])
    headers = [header_of(Path(path)) for path in embeddings]
    captions = [header.caption for header in headers if header and header.caption is not None]
    if not captions and row.caption:  # a trainer that encodes captions itself reads the file
        with suppress(SourceError):
            captions = [read_caption(row.caption)]
    yield from captions or [""]
