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
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import BaseModel, PlainSerializer, TypeAdapter
from pydantic_core import from_json

from latentmake.base import atomic, digest
from latentmake.base.errors import SourceError
from latentmake.base.state_file import read_order, read_state
from latentmake.config.datasets import Dataset
from latentmake.config.machines import ExternalProgram, MusubiTuner
from latentmake.config.models import Model
from latentmake.config.root import Config, Run
from latentmake.data.item import BUCKET, Item
from latentmake.geometry.buckets import Placement, Size, refuse_large
from latentmake.geometry.clips import Clip
from latentmake.layouts.layout import CAPTIONS, Layout, kind_of, layout_of, resolution_of

PROMPTS = "_prompts"
"""Dataset of the prompts of sample pictures and generated clips; digests name its items."""


class Part(NamedTuple):
    """Name of a part, with its dataset and model; made captions have `CAPTIONS` as their model."""

    dataset: str
    model: str
    name: str

    @property
    def maker(self) -> str:
        """Name of the model or captioner that makes its targets."""
        return self.name if self.model == CAPTIONS else self.model

    @property
    def work(self) -> str:
        """Kind and model of its targets, as `Order.work` of the jobs that make them."""
        return f"{kind_of(self.name)} {self.maker}"


class Target(NamedTuple):
    """One cache file.

    Attributes:
        size: requested width and height, in pixels; None for captions without control images.
        reason: why it is stale, one of `state.REASONS`; means nothing in a fresh target.
        recipe: digest of the present file's recipe, if its header was read.
    """

    part: str
    path: str
    found: str | None = None  # key and mtime of the present file (`key@mtime_ns`), if any
    size: Size | None = None
    clip: Annotated[Clip, PlainSerializer(Clip.numbers)] | None = None
    at_hand: tuple[str, ...] = ()  # other files that probably have its key
    reason: str = "new"
    recipe: str = ""

    @property
    def found_key(self) -> str:
        """Key of the file that the plan found, or "" if it was missing or damaged."""
        return (self.found or "").partition("@")[0].removesuffix("damaged")

    @property
    def found_mtime(self) -> int | None:
        """Time (ns) of the file that the plan found, if any."""
        return int(self.found.partition("@")[2]) if self.found else None

    @property
    def pixels(self) -> int:
        """Its pixels, counting all frames of a clip; 0 for a text."""
        width, height = self.size or (0, 0)
        return width * height * (self.clip.frames if self.clip else 1)

    @property
    def is_made(self) -> bool:
        """Whether its file appeared or changed since the plan."""
        with contextlib.suppress(OSError):
            return os.lstat(self.path).st_mtime_ns != self.found_mtime
        return False


class Work(NamedTuple):
    """Targets of one item that are made from the same inputs, with these inputs."""

    item: Item
    targets: tuple[Target, ...]
    content: str | None = None  # digest of the inputs, if the plan knows it

    def only(self, paths: Container[str]) -> Work:
        """Return this work without the targets whose paths are not among `paths`."""
        return self._replace(targets=tuple(t for t in self.targets if t.path in paths))


# -- parts of runs --------------------------------------------------------------------------------


def parts_of(config: Config, run: Run, *, generated: bool = False) -> list[Part]:
    """Return the parts that a run needs; with `generated`, also the prompts of generated clips."""
    parts = [part for dataset in run.datasets for part in caption_parts(config, dataset)]
    parts += (
        Part(dataset, run.model, name)
        for dataset in run.datasets
        for name in part_names(config, run, dataset)
    )
    texts = prompts_of(config, run, generated=generated)
    return [*parts, Part(PROMPTS, run.model, "text")] if texts else parts


def caption_parts(config: Config, dataset: str) -> list[Part]:
    """Return the parts of a dataset's made captions, one for each of its captioners."""
    return [Part(dataset, CAPTIONS, name) for name in config.datasets[dataset].captioner]


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
    if not generated:
        return samples
    settings = config.generation(run)
    negative = [settings.negative_prompt] if settings.guidance_scale > 1 else []
    return [*samples, *dict.fromkeys([*settings.prompts, *negative])]


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
    kind, resolution = kind_of(name), resolution_of(name)
    for item in items:
        named = layout.named(folder, name, item.stem, item.media, settings, item.span)
        size = resolution if resolution and (kind == "latents" or item.file(BUCKET)) else None
        yield item, [Target(name, path, None, size, clip) for path, clip in named]


def view_of(
    layout: Layout, settings: Dataset | None, item: Item, target: Target, image: Size | None
) -> tuple[str, Placement | None]:
    """Return the view of a target, and the placement of its image (None for a text).

    The view is the part of the target's key that names size, crop, clip and controls. The key is
    the digest of the inputs' content, the recipe and the view (`cachefile.target_key`). `image` is
    the image's size in pixels: upright for the layout `plain`, as stored for other layouts. It is
    not needed for a caption, nor for a text without controls.

    Raises:
        SourceError: an image of this size cannot be encoded.
    """
    if target.size is None or settings is None or image is None:
        return "" if item.window is None else f"seconds {item.window}", None
    is_text = kind_of(target.part) == "text"
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
    layout: Layout, settings: Dataset, item: Item, target: Target, image: Size, view: str
) -> str:
    """Return the settings that placed an image, in the form of a header; see `view_of`.

    It is empty if the default settings give the same view.
    """
    placing = settings.placing()
    with contextlib.suppress(SourceError):
        if not placing or view == view_of(layout, settings.placed({}), item, target, image)[0]:
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


NO_MODEL = Model.model_construct()
"""Section `models` of an order of captions, whose captioner has a section of its own."""

_ITEMS: TypeAdapter[tuple[Work, ...]] = TypeAdapter(tuple[Work, ...])
_FAULTS = TypeAdapter(list[dict[str, str]])


@dataclass
class Order:
    """Order of one batch.

    It is named by the digest of its content. Commands that only ask never serialise it.

    Attributes:
        dataset_settings: the dataset's section of the configuration; the defaults for prompts.
        awaits: receipts of the captioners' jobs, which come first.
        musubi_tuner: installation whose scripts encode; None if Latentmake's encoders do.
        forced: whether targets are encoded even if they exist or could be linked.
        reuses: whether all targets can probably be linked, so that nothing is encoded.
        work: kind and model. Jobs with the same `work` are about equally fast.
    """

    kind: str  # `latents`, `text` or `captions`
    dataset: str
    model: str  # for captions, the captioner
    dataset_settings: Dataset
    model_settings: Model
    recipe: dict[str, Any]  # the targets' recipe; empty if the model is not on this machine
    items: tuple[Work, ...]
    musubi_tuner: MusubiTuner | None = None
    sd_scripts: ExternalProgram | None = None  # like `musubi_tuner`, for sd-scripts
    forced: bool = False
    awaits: tuple[str, ...] = ()
    paths: list[str] = field(init=False, compare=False)  # files of all targets
    reuses: bool = field(init=False, compare=False)
    is_external: bool = field(init=False, compare=False)  # whether another program encodes
    work: str = field(init=False, compare=False)
    layout: Layout = field(init=False, compare=False, repr=False)  # its targets' layout
    cuts_clips: bool = field(init=False, compare=False)  # whether its targets are clips of videos
    makes_captions: bool = field(init=False, compare=False)  # whether its targets are captions

    def __post_init__(self) -> None:
        """Derive paths and layout."""
        targets = self.targets
        self.paths = [target.path for target in targets]
        self.reuses = all(target.at_hand for target in targets)
        self.is_external = self.musubi_tuner is not None or self.sd_scripts is not None
        self.work = f"{self.kind} {self.model}"
        self.makes_captions = self.kind == CAPTIONS
        name = CAPTIONS if self.makes_captions else self.model_settings.layout_name
        self.layout = layout_of(name)
        self.cuts_clips = self.kind == "latents" and self.dataset_settings.video

    @cached_property
    def _texts(self) -> tuple[bytes, bytes]:
        """Content: a head with the digest of the items, and the items."""
        values = {entry.name: getattr(self, entry.name) for entry in fields(self) if entry.init}
        for name in _SECTIONS:
            values[name] = values[name] and values[name].model_dump()
        if self.makes_captions:
            values["model_settings"] = None
        for name in ("forced", "awaits"):
            if not values[name]:
                del values[name]  # most heads stay as earlier releases wrote them
        items = _ITEMS.dump_json(self.items)
        return digest.canonical(values | {"items": digest.of_bytes(items)}).encode(), items

    @cached_property
    def name(self) -> str:
        """Digest of its content."""
        return digest.of_bytes(self._texts[0])[:20]

    @property
    def path(self) -> Path:
        """Path of its file."""
        return FOLDER / f"{self.name}.json"

    @property
    def receipt(self) -> Path:
        """Path of the receipt of a job that carries it out."""
        return FOLDER / f"{self.name}.receipt.json"

    @property
    def faults(self) -> Path:
        """Path of the faults of a failed job; see `Receipt.faults`."""
        return FOLDER / f"{self.name}.faults.json"

    @property
    def targets(self) -> list[Target]:
        """Targets of all items."""
        return [target for work in self.items for target in work.targets]

    @property
    def skips(self) -> bool:
        """Whether faulty items are skipped."""
        return self.dataset_settings.on_error == "skip"

    def after(self, receipts: Iterable[str]) -> Order:
        """Return this order as one of a job that waits for those of some receipts."""
        return replace(self, awaits=tuple(receipts))

    def write(self) -> None:
        """Write the order, with an mtime later than those of all target files; remove its receipt.

        A target file whose mtime lies in the future gets the present time. Otherwise the order
        would need a future mtime as well: it would be newer than its job's output, and Snakemake
        would end with an error.

        An existing order without a receipt is not written again, because a build may be carrying it
        out. Snakemake ends with an error if an input becomes newer than the output made from it.

        Raises:
            StorageError: the disk is full or cannot be written.
        """
        path, (head, items) = self.path.with_suffix(".items.json"), self._texts
        del self._texts  # frees memory: a plan may have very many items
        with contextlib.suppress(OSError):
            new = self.path.stat().st_mtime > time.time() - KEPT_SECONDS / 2
            same = self.path.read_bytes() == head and path.read_bytes() == items
            if new and same and not self.receipt.exists():
                return
        # The receipt is of an attempt that failed. Snakemake compares small inputs by content,
        # so it would not carry out an equal order again.
        self.receipt.unlink(missing_ok=True)
        # The items are a file of their own, so that Snakemake need not digest them with its input.
        # They are written first: once the order exists, it is complete.
        atomic.write(path, items)
        atomic.write(self.path, head)
        moment = time.time_ns()
        before = moment - 1_000_000
        for target in self.targets:
            if (target.found_mtime or 0) > before:
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
            values["model_settings"] = values["model_settings"] or NO_MODEL
            values["awaits"] = tuple(values.get("awaits", ()))
            order = cls(**values | {"items": _ITEMS.validate_json(items)})
            order.name = path.stem
            return order

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
    """Orders of one kind and model that one process carries out one after the other."""

    orders: tuple[Order, ...]

    @property
    def name(self) -> str:
        """Beginning of the name of its order, or of the digest of several names."""
        names = [order.name for order in self.orders]
        return (names[0] if len(names) == 1 else digest.of_value(names))[:12]

    @property
    def reuses(self) -> bool:
        """Whether all its targets can probably be linked."""
        return all(order.reuses for order in self.orders)

    @property
    def rule(self) -> str:
        """Name of its rule, with its datasets and model."""
        # Prompts that are encoded with the texts of a dataset are left out of the name.
        datasets = dict.fromkeys(order.dataset for order in self.orders if order.dataset != PROMPTS)
        several = "_".join([*datasets][:3]) or PROMPTS
        kind, model = self.orders[0].kind, self.orders[0].model
        return f"{'reuse' if self.reuses else 'encode'}_{kind}_{several}_{model}_{self.name}"

    @property
    def log(self) -> str:
        """Path of its log."""
        first, one = self.orders[0], len({order.dataset for order in self.orders}) == 1
        return f"logs/{first.kind}/{first.dataset if one else first.model}/{self.name}.log"

    @property
    def awaits(self) -> list[str]:
        """Receipts of the jobs that come first."""
        return [*dict.fromkeys(receipt for order in self.orders for receipt in order.awaits)]

    @property
    def receipts(self) -> list[str]:
        """Paths of the receipts of its orders."""
        return [str(order.receipt) for order in self.orders]
