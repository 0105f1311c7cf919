"""Targets (cache files that runs need), orders (batches of targets) and encoding jobs.

A part is a resolution (`64`, `480x832`) or a text (`text`, `text.1`). If a layout stores the texts
once per resolution, such a part is `text@480x832` or `text.1@480x832`. `view_of` defines the keys.

An order is named by the digest of its content, which includes the files that the plan found. So
Snakemake never confuses a new order with an earlier one. The planning process writes orders; jobs
read them.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import InitVar, dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel, TypeAdapter
from pydantic_core import from_json

from latentmake.base import atomic, digest
from latentmake.base.errors import SourceError
from latentmake.base.state_file import read_order, read_state
from latentmake.config.datasets import Dataset
from latentmake.config.machines import ExternalProgram, MusubiTuner
from latentmake.config.models import Model
from latentmake.config.root import Config, Run
from latentmake.data.item import BUCKET, Item
from latentmake.geometry.buckets import Size, refuse_large
from latentmake.geometry.clips import AnyClip
from latentmake.layouts.layout import Layout, layout_of, parsed

PROMPTS = "_prompts"
"""Dataset of the prompts of sample pictures and generated clips; digests name its items."""


class Part(NamedTuple):
    """Name of a part, with its dataset and model."""

    dataset: str
    model: str
    name: str


class Target(NamedTuple):
    """One cache file.

    Attributes:
        size: requested width and height, in pixels; None for captions without control images.
    """

    part: str
    path: str
    found: str | None = None  # key and mtime of the present file (`key@mtime_ns`), if any
    size: Size | None = None
    clip: AnyClip | None = None
    at_hand: tuple[str, ...] = ()  # other files that probably have its key

    @property
    def is_made(self) -> bool:
        """Whether its file appeared or changed since the plan."""
        with contextlib.suppress(OSError):
            moment = str(os.lstat(self.path).st_mtime_ns)
            return self.found is None or self.found.rpartition("@")[2] != moment
        return False


def pixels(targets: Iterable[Target]) -> int:
    """Return the pixels of some targets, counting all frames of a clip; texts count as 0."""
    sized = [(target.size, target.clip) for target in targets if target.size is not None]
    return sum(size.width * size.height * (clip.frames if clip else 1) for size, clip in sized)


# -- parts of runs --------------------------------------------------------------------------------


def parts_of(config: Config, run: Run, *, generated: bool = False) -> list[Part]:
    """Return the parts that a run needs; with `generated`, also the prompts of generated clips."""
    parts = [
        Part(dataset, run.model, name)
        for dataset in run.datasets
        for name in part_names(config, run, dataset)
    ]
    texts = prompts_of(config, run, generated=generated)
    return [*parts, Part(PROMPTS, run.model, "text")] if texts else parts


def part_names(config: Config, run: Run, dataset: str) -> list[str]:
    """Return the names of the parts that a run needs from one of its datasets."""
    layout = layout_of(config.models[run.model].layout_name)
    resolutions = [size.name for size in run.resolutions]
    return layout.parts(resolutions, text_parts(config.datasets[dataset]))


def text_parts(settings: Dataset) -> list[str]:
    """Return the part of each variant of the items' texts: `text`, `text.1`, `text.2`, ..."""
    return ["text", *(f"text.{number}" for number in range(1, settings.text_variants))]


def prompts_of(config: Config, run: Run, *, generated: bool = False) -> list[str]:
    """Return the prompts of a run's samples; with `generated`, also those of generated clips."""
    samples = run.trainer.prompts if run.trainer else []
    return [*samples, *generation_prompts(config, run)] if generated else samples


def generation_prompts(config: Config, run: Run) -> list[str]:
    """Return the prompts of the clips that a run generates, without duplicates."""
    settings = config.generation(run)
    negative = [settings.negative_prompt] if settings.guidance_scale > 1 else []
    return list(dict.fromkeys([*settings.prompts, *negative]))


def prompt_items(texts: Iterable[str]) -> list[Item]:
    """Return an item for each different prompt; its stem is a digest of the text."""
    return sorted(Item(digest.of_bytes(text.encode())[:20], texts=[text]) for text in {*texts})


def prompt_path(config: Config, model: str, text: str) -> str:
    """Return the cache file of a prompt's embedding."""
    layout = layout_of(config.models[model].layout_name)
    ((_, (target,)),) = targets_of(layout, None, Part(PROMPTS, model, "text"), prompt_items([text]))
    return target.path


# -- targets of a part ----------------------------------------------------------------------------


def targets_of(
    layout: Layout, settings: Dataset | None, part: Part, items: Iterable[Item]
) -> Iterator[tuple[Item, list[Target]]]:
    """Yield each item with its targets in a part. `items` may be inputs (`Item.inputs`) as well.

    `settings` is the dataset's section of the configuration; None for prompts.
    """
    name, folder = part.name, layout.folder(*part)
    kind, _, resolution = parsed(name)
    for item in items:
        named = layout.named(folder, name, item.stem, item.media, settings, item.span)
        size = resolution if resolution and (kind == "latents" or item.file(BUCKET)) else None
        yield item, [Target(name, path, None, size, clip) for path, clip in named]


def view_of(
    layout: Layout, settings: Dataset | None, item: Item, target: Target, image: Size
) -> str:
    """Return the view of a target: the part of its key that names size, crop, clip and controls.

    A target's key is the digest of its inputs' content, its recipe and its view
    (`cachefile.target_key`). `image` is the image's size in pixels: upright for the layout `plain`,
    as stored for other layouts.

    Raises:
        SourceError: an image of this size cannot be encoded.
    """
    if target.size is None or settings is None:
        return ""
    is_text = parsed(target.part).kind == "text"
    if not (is_text or settings.video):
        refuse_large(image, settings.max_image_pixels)
    return layout.view(
        image,
        target.size,
        settings,
        is_text=is_text,
        clip=target.clip,
        span=item.span,
        rotation=item.media.rotation if item.media else 0,
        controls=item.control_sizes,
    )


def placing_of(
    layout: Layout, settings: Dataset | None, item: Item, target: Target, image: Size, view: str
) -> str:
    """Return the settings that placed an image, in the form of a header; see `view_of`.

    It is empty if the default settings give the same view.
    """
    placing = settings.placing() if settings else {}
    if settings is None or not placing:
        return ""
    with contextlib.suppress(SourceError):
        if view_of(layout, settings.placed({}), item, target, image) == view:
            return ""
    return digest.canonical(placing)


def settings_digest(settings: Dataset) -> str:
    """Return the digest of a dataset's settings, which decide whether an item is faulty."""
    return digest.of_value(settings.model_dump())


def place_of(item: Item, layout: Layout) -> str:
    """Return the place of an item's pixels as a manifest names it: path, span, row, controls."""
    span, row = item.span, item.row
    # The control of a Wan model has the name of its image, so the image names both.
    beside = [*item.controls, *item.layers] if layout.numbered_controls else []
    if span is None and row is None and not beside:
        return item.image
    place: list[object] = [item.image, span, row]
    if beside:
        place.append(beside)
    return json.dumps(place)


# -- orders ----------------------------------------------------------------------------------------

FOLDER = Path(".latentmake/orders")
RUNS = Path(".latentmake/runs")
KEPT_SECONDS = 7 * 24 * 3600
"""Time for which builds keep orders and receipts."""

_SECTIONS: dict[str, type[BaseModel]] = {
    "dataset_settings": Dataset,
    "model_settings": Model,
    "musubi_tuner": MusubiTuner,
    "sd_scripts": ExternalProgram,
}


class Work(NamedTuple):
    """Targets of one item that are made from the same inputs, with these inputs."""

    item: Item
    targets: tuple[Target, ...]
    content: str | None = (
        None  # digest of the inputs when the order was written, if the plan knew it
    )


_ITEMS: TypeAdapter[tuple[Work, ...]] = TypeAdapter(tuple[Work, ...])
_FAULTS = TypeAdapter(list[dict[str, str]])


@dataclass
class Order:
    """Order of one batch.

    Attributes:
        dataset_settings: the dataset's section of the configuration; the defaults for prompts.
        musubi_tuner: installation whose scripts encode; None if Latentmake's encoders do.
        forced: whether targets are encoded even if they exist or could be linked.
        reuses: whether all targets can probably be linked, so that nothing is encoded.
        work: kind and model. Jobs with the same `work` are about equally fast.
    """

    kind: str  # `latents` or `text`
    dataset: str
    model: str
    dataset_settings: Dataset
    model_settings: Model
    recipe: dict[str, Any]  # the targets' recipe; empty if the model is not on this machine
    items: tuple[Work, ...]
    musubi_tuner: MusubiTuner | None = None
    sd_scripts: ExternalProgram | None = None  # like `musubi_tuner`, for sd-scripts
    forced: bool = False
    file: InitVar[Path | None] = None  # file that it was read from
    name: str = field(init=False, compare=False)  # digest of its content
    path: Path = field(init=False, compare=False)
    receipt: Path = field(init=False, compare=False)
    faults: Path = field(init=False, compare=False)  # faults of a failed job: see `Receipt.faults`
    paths: list[str] = field(init=False, compare=False)  # files of all targets
    reuses: bool = field(init=False, compare=False)
    is_external: bool = field(init=False, compare=False)  # whether another program encodes
    work: str = field(init=False, compare=False)
    layout: Layout = field(init=False, compare=False, repr=False)  # its targets' layout
    cuts_clips: bool = field(init=False, compare=False)  # whether its targets are clips of videos
    _texts: tuple[bytes, bytes] = field(init=False, compare=False, repr=False)

    def __post_init__(self, file: Path | None) -> None:
        """Derive name, paths and layout."""
        targets = [target for item in self.items for target in item.targets]
        self.paths = [target.path for target in targets]
        self.reuses = all(target.at_hand for target in targets)
        self.is_external = self.musubi_tuner is not None or self.sd_scripts is not None
        self.work = f"{self.kind} {self.model}"
        self.layout = layout_of(self.model_settings.layout_name)
        self.cuts_clips = self.kind == "latents" and self.dataset_settings.video
        if file is None:  # the content of an order: a head with the digest of its items, and these
            inits = [entry.name for entry in fields(self) if entry.init]
            values = {name: getattr(self, name) for name in inits}
            for name in _SECTIONS:
                values[name] = values[name] and values[name].model_dump()
            if not self.forced:
                del values["forced"]  # orders keep the names that earlier releases gave them
            items = _ITEMS.dump_json(self.items)
            head = digest.canonical(values | {"items": digest.of_bytes(items)}).encode()
            self._texts = head, items
        self.name = file.stem if file else digest.of_bytes(head)[:20]
        self.path = FOLDER / f"{self.name}.json"
        self.receipt = FOLDER / f"{self.name}.receipt.json"
        self.faults = FOLDER / f"{self.name}.faults.json"

    @property
    def skips(self) -> bool:
        """Whether faulty items are skipped."""
        return self.dataset_settings.on_error == "skip"

    @property
    def log(self) -> str:
        """Path of the log of a job that carries out only this order."""
        return f"logs/{self.kind}/{self.dataset}/{self.name[:12]}.log"

    def write(self) -> None:
        """Write the order, with an mtime later than those of all target files and of its receipt.

        A target file whose mtime lies in the future gets the present time. Otherwise the order
        would need a future mtime as well: it would be newer than its job's output, and Snakemake
        would end with an error.

        An existing order without a receipt is not written again, because a build may be carrying it
        out. Snakemake ends with an error if an input becomes newer than the output made from it.

        Raises:
            StorageError: the disk is full or cannot be written.
        """
        path, (head, items) = self.path.with_suffix(".items.json"), self._texts
        self._texts = head, b""  # frees memory: a plan may have very many items
        with contextlib.suppress(OSError):
            new = self.path.stat().st_mtime > time.time() - KEPT_SECONDS / 2
            items = items or _ITEMS.dump_json(self.items)
            same = self.path.read_bytes() == head and path.read_bytes() == items
            if new and same and not self.receipt.exists():
                return
        # The items are a file of their own, so that Snakemake need not digest them with its input.
        # They are written first: once the order exists, it is complete.
        atomic.write(path, items or _ITEMS.dump_json(self.items))
        atomic.write(self.path, head)
        moment = time.time_ns()
        before = moment - 1_000_000
        for target in (target for item in self.items for target in item.targets):
            if target.found and int(target.found.split("@")[1]) > before:
                with contextlib.suppress(OSError):
                    os.utime(target.path, ns=(before, before))
        os.utime(self.path, ns=(moment, moment))

    @classmethod
    def read(cls, path: Path) -> Order:
        """Read an order; raises StorageError if it is missing or damaged."""

        def parse(head: bytes) -> Order:
            items = path.with_suffix(".items.json").read_bytes()
            values = from_json(head) if digest.of_bytes(head)[:20] == path.stem else {}
            if values.get("items") != digest.of_bytes(items):
                raise ValueError("it is not as it was written")
            for name, section in _SECTIONS.items():
                if values.get(name):
                    values[name] = section.model_validate(values[name])
            return cls(**values | {"items": _ITEMS.validate_json(items), "file": path})

        return read_order(path, parse)


def left_faults(dataset: str) -> Iterator[dict[str, str]]:
    """Yield the faults of a dataset that failed jobs noted in `Order.faults`."""
    for path in sorted(FOLDER.glob("*.faults.json")):
        faults = read_state(path, _FAULTS.validate_json) or []
        yield from (fault for fault in faults if fault.get("dataset") == dataset)


def run_order(run: str, kind: str, planned: int) -> Path:
    """Return the path of a run's order of a kind (`manifest`, ...); `planned` is in ns."""
    return RUNS / f"{run}.{planned}.{kind}.json"


class EncodingJob(NamedTuple):
    """Orders of one kind and model that one process carries out one after the other.

    `rule` is the name of its rule. `reuses` tells whether all its targets can probably be linked.
    """

    rule: str
    log: str
    orders: tuple[Order, ...]
    receipts: list[str]
    reuses: bool


def job_of(orders: Sequence[Order]) -> EncodingJob:
    """Return the job of some orders; datasets and model are in its rule's name."""
    kind, names = orders[0].kind, [order.name for order in orders]
    one = {order.dataset for order in orders} == {orders[0].dataset}
    subject = orders[0].dataset if one else orders[0].model
    name = (names[0] if len(names) == 1 else digest.of_value(names))[:12]
    reuses = all(order.reuses for order in orders)
    # Prompts that are encoded with the texts of a dataset are left out of the name.
    datasets = dict.fromkeys(order.dataset for order in orders if order.dataset != PROMPTS)
    several = "_".join([*datasets][:3]) or PROMPTS
    rule = f"{'reuse' if reuses else 'encode'}_{kind}_{several}_{orders[0].model}_{name}"
    receipts = [str(order.receipt) for order in orders]
    return EncodingJob(rule, f"logs/{kind}/{subject}/{name}.log", tuple(orders), receipts, reuses)
