"""Items of a manifest, and their cache files: headers at once, content batch by batch.

The caches of a small dataset stay in memory. Those of a large one are read when their batch comes:
the system keeps files in memory that fit there, for all processes together, and reading them again
costs little more than a copy.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from pydantic import BaseModel, ConfigDict, Field, JsonValue

from latentmake.errors import CacheError, TrainingError
from latentmake.training.loop.data.batch import Batch, pad
from latentmake.training.loop.data.headers import HINT, Stored, check_bytes, inspect_all
from latentmake.training.loop.data.tensors import PLAIN, CacheTensors

# Bytes of caches that are kept in memory. More would gain nothing, as the system keeps files in
# memory itself, and once for all processes of a machine.
_MEMORY = 256 << 20


class Item(BaseModel):
    """One line of a manifest; a skipped item has a reason (`aside`) instead of caches.

    Attributes:
        latents: resolution -> path, or paths of clips.
        text: path, or resolution -> path.
        variants: paths of all its texts, where there are several, or resolution -> paths.
        dropped: path of the empty caption, or resolution -> path.
        span: part of a video, see `geometry.clips.Span`.
        row: further columns of a list.
        validation: whether it is held out: evaluated, and never trained on.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    dataset: str
    stem: str
    source: str
    repeats: int = Field(1, ge=1)
    latents: dict[str, str | list[str]] = {}
    text: str | dict[str, str] = ""
    variants: list[str] | dict[str, list[str]] = []
    dropped: str | dict[str, str] | None = None
    texts: list[str] | None = None
    caption: str | None = None
    control: str | None = None
    controls: list[str] = []
    layers: list[str] = []
    span: list[JsonValue] | None = None
    row: dict[str, JsonValue] | None = None
    validation: bool = False
    aside: str | None = None

    @property
    def all_texts(self) -> list[str]:
        """The cache files of all variants of its text."""
        texts = [self.text] if isinstance(self.text, str) else list(self.text.values())
        further = [path for text in texts for path in self.variants_of(text)[1:]]
        return [*texts, *further, *filter(None, map(self.dropped_of, texts))]

    def variants_of(self, text: str) -> list[str]:
        """Return the cache files of all variants of its text, of the resolution of one of them."""
        if isinstance(self.variants, dict):
            return next((each for each in self.variants.values() if text in each), [])
        return self.variants

    def dropped_of(self, text: str) -> str | None:
        """Return the cache file of the empty caption, of the resolution of a text's file."""
        if isinstance(self.dropped, dict) and isinstance(self.text, dict):
            return next(path for size, path in self.dropped.items() if self.text.get(size) == text)
        return self.dropped if isinstance(self.dropped, str) else None

    def pairs(self) -> Iterator[tuple[str, str]]:
        """Yield the cache files of its latents, each with that of its text."""
        for resolution, paths in sorted(self.latents.items()):
            text = self.text if isinstance(self.text, str) else self.text[resolution]
            for path in [paths] if isinstance(paths, str) else paths:
                yield path, text


class Example(NamedTuple):
    """An item at one resolution, or one of its clips; an epoch shows it `repeats` times."""

    latents: Stored
    text: Stored
    repeats: int
    more: Mapping[str, Stored] = {}

    @property
    def shape(self) -> tuple[int, ...]:
        """Channels, (frames,) height and width of its latents."""
        return self.latents.shape

    @property
    def stored(self) -> list[Stored]:
        """All its tensors."""
        return [self.latents, self.text, *self.more.values()]


def read_items(manifest: Path, *, held_out: bool = False) -> list[Item]:
    """Read the items to train on, or those held out, without skipped ones.

    Raises:
        TrainingError: the manifest is missing, damaged or has none of these.
    """
    hint = "run the build's command again, which writes it anew"
    try:
        lines = manifest.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        raise TrainingError("the manifest cannot be read", where=manifest, hint=hint) from None
    items: list[Item] = []
    for number, line in enumerate(lines, 1):
        try:
            item = Item.model_validate_json(line)
            if item.aside is None and not (item.latents and item.text):
                raise ValueError("caches are missing")
        except ValueError:  # pydantic's too
            raise TrainingError(
                f"line {number} of the manifest is damaged", where=manifest, hint=hint
            ) from None
        if item.aside is None and item.validation == held_out:
            items.append(item)
    if not items and held_out:
        what = "the manifest names no item held out of training"
        raise TrainingError(what, where=manifest, hint="set `validation: {items: 16}` of the run")
    if not items:
        what = f"all {len(lines)} items were skipped" if lines else "the manifest has no items"
        raise TrainingError(
            f"nothing to train on: {what}", where=manifest, hint="see the run's datasets"
        )
    return items


class Caches:
    """Cache files of a manifest's items: headers at once, content when a batch needs it.

    Args:
        items: of the manifest.
        tensors: what to read of each file.
        memory: caches of at most so many bytes are kept in memory once they were read.

    Attributes:
        examples: each item at each resolution; behind them, the same with further variants of
            their texts.
        count: of the former.
        datasets: names, of each of the former.
        variants: example -> itself and those with other variants, where there are several.
        dropped: example -> the one with the empty caption, where there is one.
        text_width: width of all embeddings.
        channels: channels of all latents.
        in_memory: whether the caches are kept in memory.

    Raises:
        CacheError: a file is missing or damaged, or its width or channels differ from the others'.
    """

    def __init__(
        self, items: Sequence[Item], tensors: CacheTensors = PLAIN, *, memory: int = _MEMORY
    ) -> None:
        named = [(*pair, item) for item in items for pair in item.pairs()]
        texts = inspect_all((text for item in items for text in item.all_texts), tensors.text)
        latents = inspect_all((path for path, _, _ in named), tensors.latents)
        more = {
            name: inspect_all((path for path, _, _ in named), sought)
            for name, sought in tensors.more
        }
        self.channels = self._same(latents, 0, "channels")
        self.text_width = self._same(texts, 1, "values a token")
        self.examples = [
            Example(
                latents[path],
                texts[text],
                item.repeats,
                {name: found[path] for name, found in more.items()},
            )
            for path, text, item in named
        ]
        self.count = len(self.examples)
        self.datasets = [item.dataset for _, _, item in named]
        self.variants: dict[int, list[int]] = {}
        self.dropped: dict[int, int] = {}
        for index, (_, text, item) in enumerate(named):
            if len(several := item.variants_of(text)) > 1:
                others = [self._add(index, texts[path]) for path in several[1:]]
                self.variants[index] = [index, *others]
            if (dropped := item.dropped_of(text)) is not None:
                self.dropped[index] = self._add(index, texts[dropped])
        stored = (each for group in (texts, latents, *more.values()) for each in group.values())
        self.in_memory = sum(each.size for each in stored) <= memory
        self._kept: dict[Stored, torch.Tensor] = {}
        self._checked: set[str] = set()

    def _add(self, index: int, text: Stored) -> int:
        """Add an example with another text; return its index."""
        self.examples.append(self.examples[index]._replace(text=text))
        return len(self.examples) - 1

    @staticmethod
    def _same(found: dict[str, Stored], side: int, what: str) -> int:
        counts = Counter(each.shape[side] for each in found.values())
        usual = max(counts, key=counts.__getitem__)  # of a few and many, the few are damaged
        for each in found.values():
            if each.shape[side] != usual:
                raise CacheError(
                    f"has {each.shape[side]} {what}, but {counts[usual]} others have {usual}",
                    where=each.path,
                    hint=HINT,
                )
        return usual

    def size(self, indices: Sequence[int]) -> int:
        """Return the bytes of a batch in its files."""
        return sum(each.size for index in indices for each in self.examples[index].stored)

    def batch(self, indices: Sequence[int], *, pin: bool = False) -> Batch:
        """Read the examples of these indices, all of one shape, into pinned memory if asked.

        Raises:
            CacheError: a file has become damaged, or the shapes differ.
        """
        examples = [self.examples[index] for index in indices]
        first = examples[0].latents
        for other in (each.latents for each in examples):
            if other.shape != first.shape:
                raise CacheError(
                    f"its latents have the shape {list(other.shape)}, but those of {first.path} in "
                    f"the same batch {list(first.shape)}",
                    where=other.path,
                    hint="make batches of one shape",
                )
        latents = torch.stack([self._read(each.latents).float() for each in examples])
        for row, example in zip(latents, examples, strict=True):
            if example.latents.shift:
                row.sub_(example.latents.shift)
            row.mul_(example.latents.scaling)
        texts = [self._read(each.text) for each in examples]
        if len({each.dtype for each in texts}) > 1:
            texts = [each.float() for each in texts]
        text, mask = pad(texts)
        more = {
            name: torch.stack([self._read(each.more[name]).to(stored.dtype) for each in examples])
            for name, stored in examples[0].more.items()
        }
        batch = Batch(latents, text, mask, indices, more)
        return batch.pinned() if pin else batch

    def _read(self, stored: Stored) -> torch.Tensor:
        """Return a tensor, from memory where it is kept; check its file once."""
        if stored.path not in self._checked:
            check_bytes(stored.path)
            self._checked.add(stored.path)
        kept = self._kept.get(stored)
        if kept is None:
            kept = stored.read()
            if self.in_memory:
                self._kept[stored] = kept
        return kept


def find_not_finite(caches: Caches, indices: Sequence[int]) -> list[str]:
    """Return the paths of the examples' files that hold NaN or infinite values, each once.

    No encoder of the build writes such values, and a search at every batch would take time: a
    training searches only when its loss is NaN or infinite.

    Raises:
        CacheError: a file is missing or damaged.
    """
    examples = [caches.examples[index] for index in indices]
    found = {
        each.path: None
        for each in dict.fromkeys(each for example in examples for each in example.stored)
        if not torch.isfinite(each.read()).all()
    }
    return list(found)
