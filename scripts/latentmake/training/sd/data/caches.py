"""What a trainer reads: the items its manifest names, and nothing else.

The caches of a small dataset stay in memory. Those of a large one are read when their batch comes:
the system keeps files in memory that fit there, for all processes together, and reading them again
costs little more than a copy.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from latentmake.errors import CacheError, TrainingError
from latentmake.training.sd.data import reader
from latentmake.training.sd.data.batch import Batch, Plan, pad, plan, unfold
from latentmake.training.sd.data.headers import (
    HIDDEN_STATE,
    LATENTS,
    MEND,
    Scale,
    Stored,
    inspect,
    inspect_all,
    read_scale,
    read_tensor,
    read_text,
)
from latentmake.training.sd.data.loader import prefetched

__all__ = [
    "HIDDEN_STATE",
    "Batch",
    "Caches",
    "Example",
    "Item",
    "Scale",
    "find_not_finite",
    "pad",
    "prefetched",
    "read_items",
    "read_scale",
    "read_text",
]

# Bytes of caches that are kept in memory. More would gain nothing, as the system keeps files in
# memory itself, and once for all processes of a machine.
_MEMORY = 256 << 20


class Item(BaseModel):
    """One line of a manifest; an item set aside has a reason instead of caches."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    dataset: str
    stem: str
    source: str
    repeats: int = Field(1, ge=1)
    latents: dict[str, str] = {}
    text: str = ""
    variants: list[str] = []
    dropped: str | None = None
    texts: list[str] | None = None
    aside: str | None = None

    @property
    def all_texts(self) -> list[str]:
        """The cache files of all variants of its text."""
        dropped = [] if self.dropped is None else [self.dropped]
        return [self.text, *self.variants[1:], *dropped]


class Example(NamedTuple):
    """An item at one resolution: what a batch is made of.

    Attributes:
        latents_at: where its latents lie.
        text_at: where its embedding lies.
        repeats: how often an epoch shows it.
    """

    latents_at: Stored
    text_at: Stored
    repeats: int

    @property
    def latents(self) -> Path:
        """The file of its latents."""
        return Path(self.latents_at.path)

    @property
    def text(self) -> Path:
        """The file of its embedding."""
        return Path(self.text_at.path)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width of its latents."""
        channels, height, width = self.latents_at.shape
        return channels, height, width


def read_items(manifest: Path) -> list[Item]:
    """Read the items to train on, without those set aside.

    Raises:
        TrainingError: the manifest is missing, damaged or empty.
    """
    mend = "give the build's command again, which writes it anew"
    try:
        lines = manifest.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        raise TrainingError("the manifest cannot be read", where=manifest, mend=mend) from None
    items: list[Item] = []
    aside = 0
    for number, line in enumerate(lines, 1):
        try:
            item = Item.model_validate_json(line)
            if item.aside is None and not (item.latents and item.text):
                raise ValueError("caches are missing")
        except (ValidationError, ValueError):
            raise TrainingError(
                f"line {number} of the manifest is damaged", where=manifest, mend=mend
            ) from None
        if item.aside is None:
            items.append(item)
        else:
            aside += 1
    if not items:
        what = f"all {aside} items were set aside" if aside else "the manifest has no items"
        raise TrainingError(
            f"nothing to train on: {what}", where=manifest, mend="see the run's datasets"
        )
    return items


class Caches:
    """The cache files of a manifest: their headers at once, their content when a batch needs it.

    Args:
        items: of the manifest.
        memory: caches that have no more bytes than this are kept in memory once they were read.

    Attributes:
        examples: an entry for each item at each resolution; behind them, the same with further
            variants of their texts.
        count: how many of them are no such variants.
        datasets: of each of those.
        variants: example -> itself and those with other variants, where there are several.
        dropped: example -> the one with the empty caption, where there is one.
        text_width: width of all embeddings.
        channels: channels of all latents.
        in_memory: whether the caches are kept in memory.

    Raises:
        CacheError: a file is missing or damaged, or its width or channels differ from the others'.
    """

    def __init__(self, items: Sequence[Item], memory: int = _MEMORY) -> None:
        named = [(path, item) for item in items for _, path in sorted(item.latents.items())]
        texts = inspect_all((text for item in items for text in item.all_texts), HIDDEN_STATE)
        latents = inspect_all((path for path, _ in named), LATENTS)
        self.channels = self._same(latents, 0, "channels")
        self.text_width = self._same(texts, 1, "values a token")
        self.examples = [
            Example(latents[path], texts[item.text], item.repeats) for path, item in named
        ]
        self.count = len(self.examples)
        self.datasets = [item.dataset for _, item in named]
        self.variants: dict[int, list[int]] = {}
        self.dropped: dict[int, int] = {}
        for index, (_, item) in enumerate(named):
            if len(item.variants) > 1:
                others = [self._add(index, texts[path]) for path in item.variants[1:]]
                self.variants[index] = [index, *others]
            if item.dropped is not None:
                self.dropped[index] = self._add(index, texts[item.dropped])
        stored = (each for group in (texts, latents) for each in group.values())
        self.in_memory = sum(each.size for each in stored) <= memory
        self._kept: dict[str, npt.NDArray[np.uint8]] = {}

    def _add(self, index: int, text: Stored) -> int:
        """Add an example with another text; return its index."""
        self.examples.append(self.examples[index]._replace(text_at=text))
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
                    mend=MEND,
                )
        return usual

    def plan(self, indices: Sequence[int]) -> Plan:
        """Lay out the examples of these indices as a batch.

        Raises:
            CacheError: they are not of one shape.
        """
        examples = [self.examples[index] for index in indices]
        return plan(
            indices, [each.latents_at for each in examples], [each.text_at for each in examples]
        )

    def read(self, made: Plan, memory: torch.Tensor) -> None:
        """Read the files of a batch to where they shall lie, or take them from memory.

        Args:
            made: the layout of the batch.
            memory: bytes.

        Raises:
            CacheError: a file has become damaged.
        """
        array: npt.NDArray[np.uint8] = memory.numpy()
        if not self.in_memory:
            self.mend(made, memory, reader.fill(made.parts, array.data))
            return
        missing = [part for part in made.parts if part[0] not in self._kept]
        wrong = reader.fill(missing, array.data)
        self.mend(made, memory, [made.parts.index(missing[number]) for number in wrong])
        new = {part[0] for part in missing}
        for path, _, _, _, size, place, zeros in made.parts:
            if path in new:
                self._kept[path] = array[place : place + size].copy()
            else:
                array[place : place + size] = self._kept[path]
                array[place + size : place + size + zeros] = 0

    def mend(self, made: Plan, memory: torch.Tensor, wrong: Sequence[int]) -> None:
        """Read those files again that are not what they were when the training began.

        A file that was written anew may have another header; its tensor has to be as before.

        Args:
            made: the layout of the batch.
            memory: bytes.
            wrong: positions in `made.parts`.

        Raises:
            CacheError: a file is missing or damaged, or has another shape or scale now.
        """
        for number in wrong:
            is_text, place_in_batch = divmod(number, len(made.latents))
            index = made.indices[place_in_batch]
            before = (made.texts if is_text else made.latents)[place_in_batch]
            now = inspect(before.path, HIDDEN_STATE if is_text else LATENTS)
            if not now.is_like(before):
                raise CacheError(
                    "has another shape or scale than when the training began",
                    where=now.path,
                    mend="give the build's command again",
                )
            example = self.examples[index]
            self.examples[index] = (
                example._replace(text_at=now) if is_text else example._replace(latents_at=now)
            )
            *_, place, zeros = made.parts[number]
            part = (now.path, now.header, now.check, now.start, now.size, place, zeros)
            if reader.fill([part], memory.numpy().data):
                raise CacheError("this cache file cannot be read", where=now.path, mend=MEND)

    def batch(self, indices: Sequence[int]) -> Batch:
        """Read the examples of these indices, all of one shape.

        Raises:
            CacheError: a file has become damaged, or the shapes differ.
        """
        made = self.plan(indices)
        memory = torch.empty(made.size, dtype=torch.uint8)
        self.read(made, memory)
        return unfold(memory, made)


def find_not_finite(caches: Caches, indices: Sequence[int]) -> list[Path]:
    """Name the files of examples that hold NaN or infinite values, each once.

    No encoder of the build writes such values, and looking for them takes time at every batch. So a
    training does that only when its loss is NaN or infinite.

    Raises:
        CacheError: a file is missing or damaged.
    """
    names: dict[Path, str] = {}
    for index in indices:
        names[caches.examples[index].latents] = LATENTS
        names[caches.examples[index].text] = HIDDEN_STATE
    return [
        path for path, name in names.items() if not torch.isfinite(read_tensor(path, name)).all()
    ]
