"""Work orders: the list of one batch, which a job carries out with others of its model.

An order is named by the digest of its content, found targets included, so that Snakemake never
takes a new order for one that it has seen. The planning process writes it; jobs read it.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel
from pydantic_core import to_json

from latentmake import digest, layouts
from latentmake.config.datasets import Dataset
from latentmake.config.machines import ExternalProgram, MusubiTuner
from latentmake.config.models import Model
from latentmake.files import atomic
from latentmake.files.media import Media
from latentmake.geometry.buckets import Size
from latentmake.geometry.clips import AnyClip, Clip, Section, Span
from latentmake.layouts import Layout

FOLDER = Path(".latentmake/orders")
RUNS = Path(".latentmake/runs")
KEPT_SECONDS = 7 * 24 * 3600
"""How long orders and receipts are kept."""

_CONTROLS = 4  # in an item
_SECTIONS: dict[str, type[BaseModel]] = {
    "dataset_settings": Dataset,
    "model_settings": Model,
    "musubi_tuner": MusubiTuner,
    "sd_scripts": ExternalProgram,
}


class Target(NamedTuple):
    """One cache file to be made.

    Attributes:
        found: key and mtime of the file there now (`key@mtime_ns`), if any.
        size: width and height asked for, in pixels; None for text.
        at_hand: files that seem to have the same content.
    """

    part: str
    path: str
    found: str | None
    size: Size | None = None
    clip: AnyClip | None = None
    at_hand: tuple[str, ...] = ()


class WorkItem(NamedTuple):
    """One source and the targets to be made from it.

    Attributes:
        source: path of the image or caption; None where `text` replaces it.
        controls: paths of the control images, or of the control video.
        media: size and length of the image or video, where the names of targets contain them.
        content: digest of the source when the order was written, if it was known.
        span: the part of a video that its clips are counted in; None stands for all of it.
        layers: paths of further target images.
        control_sizes: of the control images, where what is done to them depends on these.
        image: path of the image of a text that depends on controls; they are brought to its bucket.
    """

    stem: str
    source: str | None
    text: str | None
    targets: tuple[Target, ...]
    controls: tuple[str, ...] = ()
    media: Media | None = None
    content: str | None = None
    span: Span | None = None
    layers: tuple[str, ...] = ()
    control_sizes: tuple[Size, ...] = ()
    image: str | None = None

    @property
    def place(self) -> str:
        """Name of its source in messages: the file, or the beginning of the text."""
        if self.source is not None:
            return self.source
        text = self.text or ""
        return f"the text {text[:60]!r}{'...' * (len(text) > 60)}" if text else "the empty caption"


@dataclass(frozen=True)
class WorkOrder:
    """Order of one batch.

    Attributes:
        kind: `latents` or `text`.
        dataset_settings: the dataset's section of the configuration; the defaults for prompts.
        recipe: of the targets; empty where the model is not here.
        musubi_tuner: the installation whose scripts encode, if our encoders do not.
        sd_scripts: the same of sd-scripts.
    """

    kind: str
    dataset: str
    model: str
    dataset_settings: Dataset
    model_settings: Model
    recipe: dict[str, Any]
    items: tuple[WorkItem, ...]
    musubi_tuner: MusubiTuner | None = None
    sd_scripts: ExternalProgram | None = None

    @property
    def layout(self) -> Layout:
        """Layout of its targets."""
        return layouts.of(self.model_settings.layout_name)

    @property
    def skips(self) -> bool:
        """Whether faulty items are skipped."""
        return self.dataset_settings.on_error == "skip"

    @property
    def work(self) -> str:
        """Kind and model: jobs with the same are about equally fast."""
        return f"{self.kind} {self.model}"

    @cached_property
    def reuses(self) -> bool:
        """Whether all targets seem to be at hand, so that nothing has to be encoded."""
        return all(target.at_hand for item in self.items for target in item.targets)

    @property
    def is_external(self) -> bool:
        """Whether another program encodes."""
        return self.musubi_tuner is not None or self.sd_scripts is not None

    @property
    def shared_encoder(self) -> tuple[object, ...]:
        """All that a loaded encoder depends on: orders with the same can share one."""
        flipped = self.kind == "latents" and self.dataset_settings.flip_aug
        return self.kind, self.model, flipped

    @property
    def largest(self) -> int:
        """Pixels of its largest target, as asked for; of a clip those of all frames."""
        targets = (target for item in self.items for target in item.targets if target.size)
        return max((_pixels(target) for target in targets), default=0)

    @property
    def paths(self) -> list[str]:
        """Paths of all targets."""
        return [target.path for item in self.items for target in item.targets]

    @cached_property
    def name(self) -> str:
        """Digest of its content."""
        return digest.of_bytes(self._head.encode())[:20]

    @property
    def path(self) -> Path:
        """Path of its file."""
        return FOLDER / f"{self.name}.json"

    @property
    def receipt(self) -> Path:
        """Path of the job's receipt."""
        return FOLDER / f"{self.name}.receipt.json"

    @property
    def log(self) -> str:
        """Path of the log of a job that carries out nothing else."""
        return f"logs/{self.kind}/{self.dataset}/{self.name[:12]}.log"

    @cached_property
    def _head(self) -> str:
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        for name in _SECTIONS:
            values[name] = values[name] and values[name].model_dump()
        if self.sd_scripts is None:  # as in orders of before
            del values["sd_scripts"]
        return digest.canonical(values | {"items": digest.of_bytes(self._items.encode())})

    @cached_property
    def _items(self) -> str:
        return json.dumps([*map(_values, self.items)], separators=(",", ":"))

    @property
    def _items_path(self) -> Path:
        return self.path.with_suffix(".items.json")

    def write(self) -> None:
        """Write it, with an mtime later than that of anything found and of its receipt.

        An order that lies there without a receipt is left as it is: a build may be carrying it out,
        which Snakemake ends with an error where an input is newer than what was made of it.

        Raises:
            StorageError: the disk is full or cannot be written.
        """
        if self._is_waiting():
            return
        # The items lie beside the order: Snakemake digests its input, and need not digest those.
        atomic.write(self._items_path, self._items.encode())
        atomic.write(self.path, self._head.encode())
        found = (target.found for item in self.items for target in item.targets)
        newest = max((int(each.split("@")[1]) for each in found if each), default=0)
        moment = max(time.time_ns(), newest + 1_000_000)
        os.utime(self.path, ns=(moment, moment))

    def _is_waiting(self) -> bool:
        """Whether it lies there, complete and not about to be deleted, and is not done."""
        try:
            return (
                self.path.stat().st_mtime > time.time() - KEPT_SECONDS / 2
                and self.path.read_bytes() == self._head.encode()
                and self._items_path.read_bytes() == self._items.encode()
                and not self.receipt.exists()
            )
        except OSError:
            return False

    @classmethod
    def read(cls, path: Path) -> WorkOrder:
        """Read an order; an OSError or ValueError tells that there is none."""
        values = json.loads(path.read_bytes())
        for name, section in _SECTIONS.items():
            if values.get(name):
                values[name] = section.model_validate(values[name])
        items = json.loads(path.with_suffix(".items.json").read_bytes())
        return cls(**values | {"items": tuple(map(_item, items))})


def _pixels(target: Target) -> int:
    assert target.size is not None
    return target.size.width * target.size.height * (target.clip.frames if target.clip else 1)


def _values(item: WorkItem) -> list[Any]:
    """Return an item as an order has it: what most items lack is written where it is there."""
    usual: list[Any]
    *usual, layers, sizes, image = item
    usual[_CONTROLS] = one_or_all(item.controls)
    return usual if not (layers or sizes or image) else [*usual, layers, sizes, image]


def _item(values: list[Any]) -> WorkItem:
    stem, source, text, targets, control, media, content, *others = values
    made, size = tuple(map(_target, targets)), Media(*media) if media else None
    span, layers, sizes, image = (*others, None, None, None, None)[:4]  # as far as they are there
    return WorkItem(
        stem,
        source,
        text,
        made,
        all_of(control),
        size,
        content,
        Span(*span) if span else None,
        tuple(layers or ()),
        tuple(Size(*each) for each in sizes or ()),
        image,
    )


def one_or_all(paths: Sequence[str]) -> str | list[str] | None:
    """Return controls as files of JSON have them: None, the only one, or several."""
    return [*paths] if len(paths) > 1 else next(iter(paths), None)


def all_of(value: str | Sequence[str] | None) -> tuple[str, ...]:
    """Return the controls that `one_or_all` wrote."""
    return (value,) if isinstance(value, str) else tuple(value or ())


def _target(values: list[Any]) -> Target:
    part, path, found, size, clip, at_hand = values
    frames: AnyClip | None = None
    if clip:
        frames = Section(*clip) if len(clip) == len(Section._fields) else Clip(*clip)
    return Target(part, path, found, Size(*size) if size else None, frames, tuple(at_hand))


def run_order(run: str, kind: str, planned: int) -> Path:
    """Return the path of a run's order of a kind (`manifest`, ...), of a plan of some time (ns)."""
    return RUNS / f"{run}.{planned}.{kind}.json"


def write_order(run: str, kind: str, order: object) -> str:
    """Write a run's order of a kind, planned now; return its path."""
    path = run_order(run, kind, time.time_ns())
    atomic.write(path, to_json(order))
    return str(path)
