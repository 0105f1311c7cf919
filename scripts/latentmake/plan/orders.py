"""Orders: targets to make together, and the jobs that carry them out.

An order is named by the digest of its content, found targets included, so that Snakemake never
takes a new order for one that it has seen. The planning process writes it; jobs read it.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Sequence
from dataclasses import InitVar, dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel, TypeAdapter
from pydantic_core import to_json

from latentmake import digest
from latentmake.config.datasets import Dataset
from latentmake.config.machines import ExternalProgram, MusubiTuner
from latentmake.config.models import Model
from latentmake.data.item import Item
from latentmake.files import atomic
from latentmake.layouts.layout import Layout, layout_of
from latentmake.plan.target import Target

FOLDER = Path(".latentmake/orders")
RUNS = Path(".latentmake/runs")
KEPT_SECONDS = 7 * 24 * 3600
"""How long orders and receipts are kept."""

_SECTIONS: dict[str, type[BaseModel]] = {
    "dataset_settings": Dataset,
    "model_settings": Model,
    "musubi_tuner": MusubiTuner,
    "sd_scripts": ExternalProgram,
}


class Work(NamedTuple):
    """Inputs of some targets of an item, and these targets."""

    item: Item
    targets: tuple[Target, ...]
    content: str | None = None  # digest of the inputs when the order was written, if it was known


_ITEMS: TypeAdapter[tuple[Work, ...]] = TypeAdapter(tuple[Work, ...])


@dataclass
class Order:
    """Order of one batch.

    Attributes:
        dataset_settings: the dataset's section of the configuration; the defaults for prompts.
        musubi_tuner: the installation whose scripts encode, if our encoders do not.
        reuses: whether all targets seem to be at hand, so that nothing has to be encoded.
        work: kind and model: jobs with the same are about equally fast.
    """

    kind: str  # `latents` or `text`
    dataset: str
    model: str
    dataset_settings: Dataset
    model_settings: Model
    recipe: dict[str, Any]  # of the targets; empty where the model is not here
    items: tuple[Work, ...]
    musubi_tuner: MusubiTuner | None = None
    sd_scripts: ExternalProgram | None = None  # the same of sd-scripts
    file: InitVar[Path | None] = None  # the one that it was read from
    name: str = field(init=False, compare=False)  # digest of its content
    path: Path = field(init=False, compare=False)
    receipt: Path = field(init=False, compare=False)
    paths: list[str] = field(init=False, compare=False)  # of all targets
    reuses: bool = field(init=False, compare=False)
    is_external: bool = field(init=False, compare=False)  # whether another program encodes
    work: str = field(init=False, compare=False)
    _texts: tuple[bytes, bytes] = field(init=False, compare=False, repr=False)

    def __post_init__(self, file: Path | None) -> None:
        """Find out what follows from the fields."""
        targets = [target for item in self.items for target in item.targets]
        self.paths = [target.path for target in targets]
        self.reuses = all(target.at_hand for target in targets)
        self.is_external = self.musubi_tuner is not None or self.sd_scripts is not None
        self.work = f"{self.kind} {self.model}"
        if file is None:  # its content is a head with the digest of its items, and these
            values = {each.name: getattr(self, each.name) for each in fields(self) if each.init}
            for name in _SECTIONS:
                values[name] = values[name] and values[name].model_dump()
            items = _ITEMS.dump_json(self.items)
            head = digest.canonical(values | {"items": digest.of_bytes(items)}).encode()
            self._texts = head, items
        self.name = file.stem if file else digest.of_bytes(head)[:20]
        self.path = FOLDER / f"{self.name}.json"
        self.receipt = FOLDER / f"{self.name}.receipt.json"

    @property
    def layout(self) -> Layout:
        """Layout of its targets."""
        return layout_of(self.model_settings.layout_name)

    @property
    def cuts_clips(self) -> bool:
        """Whether its targets are clips of videos."""
        return self.kind == "latents" and self.dataset_settings.video

    @property
    def skips(self) -> bool:
        """Whether faulty items are skipped."""
        return self.dataset_settings.on_error == "skip"

    @property
    def log(self) -> str:
        """Path of the log of a job that carries out nothing else."""
        return f"logs/{self.kind}/{self.dataset}/{self.name[:12]}.log"

    def write(self) -> None:
        """Write it, with an mtime later than that of anything found and of its receipt.

        An order that lies there without a receipt is left as it is: a build may be carrying it out,
        which Snakemake ends with an error where an input is newer than what was made of it.

        Raises:
            StorageError: the disk is full or cannot be written.
        """
        path, (head, items) = self.path.with_suffix(".items.json"), self._texts
        self._texts = head, b""  # the texts of a plan's orders would be much memory
        with contextlib.suppress(OSError):
            new = self.path.stat().st_mtime > time.time() - KEPT_SECONDS / 2
            whole = self.path.read_bytes() == head and path.exists()
            if new and whole and not self.receipt.exists():
                return
        # The items lie beside the order: Snakemake digests its input, and need not digest those.
        atomic.write(path, items or _ITEMS.dump_json(self.items))
        atomic.write(self.path, head)
        found = (target.found for item in self.items for target in item.targets)
        newest = max((int(each.split("@")[1]) for each in found if each), default=0)
        moment = max(time.time_ns(), newest + 1_000_000)
        os.utime(self.path, ns=(moment, moment))

    @classmethod
    def read(cls, path: Path) -> Order:
        """Read an order; an OSError or ValueError tells that there is none."""
        values = json.loads(path.read_bytes())
        for name, section in _SECTIONS.items():
            if values.get(name):
                values[name] = section.model_validate(values[name])
        items = _ITEMS.validate_json(path.with_suffix(".items.json").read_bytes())
        return cls(**values | {"items": items, "file": path})


def run_order(run: str, kind: str, planned: int) -> Path:
    """Return the path of a run's order of a kind (`manifest`, ...), of a plan of some time (ns)."""
    return RUNS / f"{run}.{planned}.{kind}.json"


def write_order(run: str, kind: str, order: object) -> str:
    """Write a run's order of a kind, planned now; return its path."""
    path = run_order(run, kind, time.time_ns())
    atomic.write(path, to_json(order))
    return str(path)


class EncodingJob(NamedTuple):
    """Orders of one kind and model that one process carries out one after the other.

    `rule` is the name of its rule, `reuses` whether all its targets seem to be at hand.
    """

    rule: str
    log: str
    orders: tuple[Order, ...]
    receipts: list[str]
    reuses: bool


def job_of(orders: Sequence[Order]) -> EncodingJob:
    """Return the job of some orders; it is named by their dataset, or by their model."""
    kind, names = orders[0].kind, [order.name for order in orders]
    one = {order.dataset for order in orders} == {orders[0].dataset}
    subject = orders[0].dataset if one else orders[0].model
    name = (names[0] if len(names) == 1 else digest.of_value(names))[:12]
    reuses = all(order.reuses for order in orders)
    rule = f"{'reuse' if reuses else 'encode'}_{kind}_{subject}_{name}"
    receipts = [str(order.receipt) for order in orders]
    return EncodingJob(rule, f"logs/{kind}/{subject}/{name}.log", tuple(orders), receipts, reuses)
