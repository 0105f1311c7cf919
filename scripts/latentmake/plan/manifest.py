"""Lock of a run (one digest of all keys) and order of its manifest (the items that it trains on).

The manifest order holds every item with the keys that the plan knows. `training.rows` then writes
the manifest (`manifest.jsonl`, one line per item) and `dataset.lock`. The plan computes the lock's
digest from the keys only, to tell whether the lock still fits.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from pydantic import BaseModel, Field, JsonValue

from latentmake.base import digest
from latentmake.base.errors import ConfigError
from latentmake.base.state_file import JsonFile, is_damaged, read_order
from latentmake.config.datasets import Dataset
from latentmake.data.contents import encoded
from latentmake.data.item import Item
from latentmake.plan.product import Parts
from latentmake.plan.receipts import NotedFault

TEXTS = "texts"
"""Name of the part of the items' texts, if a trainer encodes them itself."""

CAPTIONS = "captions"
"""Name of that part in locks of releases before 0.3, which have digests of caption files."""
REGULARISATION = "datasets with is_reg"
"""Name of the difference if two locks have other datasets of regularisation images."""

SALT = "latentmake validation 1"
"""Salt of the held-out choice. Changing it holds out other sources."""


def run_folder(run: str) -> Path:
    """Return the folder of a run's manifest, lock and results."""
    return Path("runs") / run


PREVIOUS = "previous"
"""Folder of a run's previous result, below the folder of its present one."""
LEAVING = ".previous.latentmake-partial"
"""Name of that folder while the result is being moved there."""


def result_folder(run: str) -> Path:
    """Return the folder of a run's last finished result.

    It is the run's own folder, or `previous` while a new training is not finished.
    """
    folder = run_folder(run)
    places = (folder, folder / LEAVING, folder / PREVIOUS)
    return next((place for place in places if (place / "training.json").is_file()), folder)


class Lock(JsonFile, extra="ignore"):  # other releases may write more
    """Content of `dataset.lock`.

    Attributes:
        aside: dataset -> skipped items, each with stem, path, digest of the faulty file and line.
        images: dataset -> digest of the places of its images (`place_of`), in the order of stems.
    """

    digest: str = ""  # `lock_digest` of the parts and repeats
    counts: dict[str, int] = Field({})  # `{dataset}/{part}` -> number of targets
    parts: dict[str, str] = Field({})  # `{dataset}/{part}` -> digest of its keys
    repeats: dict[str, int] = Field({})  # dataset -> `num_repeats`
    aside: dict[str, list[NotedFault]] = Field({})
    images: dict[str, str] = Field({})
    manifest: str = ""  # digest of the manifest's bytes
    held_out: list[str] = Field([])  # digests of the sources held out of training
    trained: str = ""  # `lock_digest` of the other items, where some are held out
    is_reg: list[str] = Field([])  # datasets of regularisation images, sorted

    @property
    def changed(self) -> bool:
        """Whether another program changed the lock, so that its digest does not fit its values."""
        fitting = lock_digest(self.parts, self.repeats, len(self.held_out), self.is_reg)
        return self.digest != fitting

    @property
    def data(self) -> str:
        """Digest of the training data, without held-out items."""
        return self.trained or self.digest

    def data_values(self, parts: Mapping[str, JsonValue] | None = None) -> Parts:
        """Return the values that its digest covers, by name; `parts` replaces its own."""
        parts = self.parts if parts is None else parts
        return {
            **{f"caches of {part}": keys for part, keys in parts.items()},
            **{f"num_repeats of {name}": number for name, number in self.repeats.items()},
            "validation.items": len(self.held_out),
            **({REGULARISATION: [*self.is_reg]} if self.is_reg else {}),
        }

    def values(self, parts: Mapping[str, JsonValue]) -> Parts:
        """Return the values that the manifest is made from, by name."""
        stems = {name: {row["stem"] for row in rows} for name, rows in self.aside.items() if rows}
        return {
            **self.data_values(parts),
            **{f"skipped {name}": [*sorted(skipped)] for name, skipped in stems.items()},
        }


def read_lock(run: str) -> Lock:
    """Read a run's lock; an empty one if it is missing or damaged."""
    return Lock.read(run_folder(run) / "dataset.lock") or Lock()


def lock_fault(run: str) -> str:
    """Return why a run's lock could not be read: damaged, or missing."""
    damaged = is_damaged(run_folder(run) / "dataset.lock")
    return "the dataset's lock is damaged" if damaged else "there is no lock of the dataset yet"


def keys_digest(keys: Iterable[tuple[str, str]]) -> str:
    """Return the digest of (stem, key) pairs in the order of their stems."""
    return digest.of_lines(f"{stem}\t{key}" for stem, key in keys)


def digest_of_texts(texts: Sequence[str]) -> str:
    """Return the digest of the texts of an item, for a trainer that encodes them itself."""
    return digest.of_value([*map(encoded, texts)])


def lock_digest(
    parts: Mapping[str, str],
    repeats: Mapping[str, int],
    validation: int = 0,
    is_reg: Sequence[str] = (),
) -> str:
    """Return the digest of `{dataset}/{part}` -> `keys_digest` and dataset -> `num_repeats`.

    `validation` is the number of held-out sources. It is enough to identify these sources, because
    they are chosen by digests of sources, which the keys contain. `is_reg` lists the datasets of
    regularisation images.
    """
    held = [[SALT, validation]] if validation else []
    regular = [{"is_reg": [*is_reg]}] if is_reg else []
    return digest.of_value([dict(parts), dict(repeats), *held, *regular])


def refuse_too_many(run: str, count: int, sources: Collection[str]) -> None:
    """Raise ConfigError if more than half of a run's sources would be held out.

    Sources are paths, or digests of content. Equal ones count once. A run without sources has
    another fault, which is reported when its items are read.
    """
    total = len(set(sources))
    if total and count > total // 2:
        hint = f"set it to {total // 2} or less" if total > 1 else "leave out `validation`"
        what = f"{count} of {total} different sources would be held out, more than half of them"
        raise ConfigError(what, where=f"runs.{run}.validation.items", hint=hint)


class Member(NamedTuple):
    """One item of a run.

    Attributes:
        targets: part -> path and key of each target; a key is None until its job has run.
    """

    dataset: str
    item: Item
    targets: dict[str, list[tuple[str, str | None]]]
    text: tuple[str, str] | None = None  # part and digest of its texts, if these are not cached


class ManifestOrder(BaseModel, frozen=True):
    """Order of the manifest job."""

    run: str
    model: str
    repeats: dict[str, int]  # dataset -> `num_repeats`
    skip: list[str]  # datasets with `on_error: skip`
    items: list[Member]
    faults: dict[str, list[dict[str, str]]]  # dataset -> faulty items: stem, path, digest and line
    orphans: list[str]  # cache files whose items are gone
    planned: int  # time of the plan (ns), so that no two orders are equal for Snakemake
    layout: str = "plain"
    validation: int = 0  # number of sources to hold out of training
    vanished: list[str] = []  # orphans to keep apart
    is_reg: list[str] = []  # datasets of regularisation images, sorted
    captioned: dict[str, Dataset] = {}  # datasets of which items await made captions

    @classmethod
    def read(cls, path: Path) -> ManifestOrder:
        """Read an order; raises StorageError if it is missing or damaged."""
        return read_order(path, cls.model_validate_json)
