"""Encoding by musubi-tuner's own scripts: run for missing targets, checked, stamped as ours.

The scripts know nothing of staleness, so they get a dataset of just these items and an empty cache
folder. Their files get their names like those of our encoders.

A script dies of the first item that it cannot encode. It is then run again without that one: an
item that its last words name, or else the first one left undone by a run that takes them in order.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from latentmake.caches.job import Job
from latentmake.caches.reading import Reading
from latentmake.config import Weights
from latentmake.config.scripts import File
from latentmake.errors import ModelError
from latentmake.models.scripted import script_of
from latentmake.plan.orders import WorkItem
from latentmake.progress import Progress
from latentmake.training import process
from latentmake.training.external.arguments import with_paths
from latentmake.training.external.installation import Installation
from latentmake.training.external.musubi.caching_command import caching_arguments
from latentmake.training.external.musubi.installation import find
from latentmake.training.external.musubi.scratch import Awaited, Scratch
from latentmake.training.external.musubi.written import Taker

__all__ = ["make_by_scripts"]

_MOST_ATTEMPTS = 12
_HUB = r"huggingface\.co|cached files|HF_HUB_OFFLINE|[Oo]ffline mode"
_HUB_HINT = (
    "it loads a tokenizer by its name on the hub: fetch that once on a machine with internet, into "
    "the folder that HF_HOME names"
)
_TRACEBACK = "Traceback (most recent call last)"


def make_by_scripts(job: Job, items: Sequence[WorkItem], threads: int, progress: Progress) -> None:
    """Make the targets of some items by musubi-tuner's own scripts.

    Each source is decoded here before: one bad picture would end the script for all others.

    Raises:
        TrainingError: musubi-tuner is not where the configuration says.
        ModelError: a script failed whatever the item; what it had finished is kept.
    """
    wanted: list[Reading] = []
    for reading in job.readings(items, threads, progress):
        if reading.missing:
            if job.order.kind == "latents":
                reading.samples.clear()  # pixels, which the scripts decode themselves
            wanted.append(reading)
    if not wanted:
        return
    with Scratch(job.order) as scratch:
        _Attempts(job, scratch, threads, progress, wanted).run()
    job.refuse_equal()


@dataclass
class _Attempts:
    """Runs of a script for the items of a job, until all are made or refused.

    Attributes:
        wanted: items that are yet to be encoded.
        suspect: item without which the script is tried next, and how it failed with it.
        in_order: whether the script takes the items one by one, in the order of its dataset.
    """

    job: Job
    scratch: Scratch
    threads: int
    progress: Progress
    wanted: list[Reading]
    suspect: tuple[Reading, str] | None = None
    in_order: bool = field(init=False)
    log: Path = field(init=False)
    name: str = field(init=False)
    installation: Installation = field(init=False)

    def __post_init__(self) -> None:
        order = self.job.order
        scripts = order.model_settings.spec.scripts
        assert order.musubi_tuner is not None and scripts is not None
        self.log = Path(order.log).absolute()
        self.name = script_of(order.model_settings, order.kind).name
        self.installation = find(order.musubi_tuner, scripts)
        self.in_order = self._workers == 1 and order.musubi_tuner.batch_size in (None, 1)

    def run(self) -> None:
        """Run the script until nothing is left that it could make.

        Raises:
            ModelError: it fails whatever the item, or too often.
        """
        for attempt in range(_MOST_ATTEMPTS):
            taker, status, output = self._run()
            left = _items(taker)
            if self.suspect is not None and (status == 0 or taker.taken):
                self._refuse(*self.suspect)
                self.suspect = None
            if status == 0:
                self._refuse_unwritten(taker, wrote_none=attempt == 0 and not taker.taken)
                return
            if not left:
                return
            error = f"{self.name}: {process.last_error(output, status)}"
            if self.suspect is not None or not taker.began or attempt + 1 == _MOST_ATTEMPTS:
                hint = _HUB_HINT if re.search(_HUB, error) else "finished caches are kept"
                where = f"models.{self.job.order.model}"
                raise ModelError(error, where=where, hint=f"{hint}; {self._hint}")
            blamed = _named(output, taker.left.values()) or (left if len(left) == 1 else [])
            for each in blamed:
                self._refuse(each, error)
            if not blamed and self.in_order:
                blamed = [_first_undone(taker)]
                self.suspect = (blamed[0], error)
            self.in_order |= not blamed
            self.wanted = [each for each in left if all(each is not other for other in blamed)]
            if not self.wanted:
                return
            self.job.say(f"{error}; trying again with the {len(self.wanted)} items that are left")

    def _run(self) -> tuple[Taker, int, str]:
        """Run the script once; take what it makes."""
        order = self.job.order
        settings = order.musubi_tuner
        assert settings is not None
        batch = None if self.in_order else settings.batch_size
        workers = 1 if self.in_order else self._workers
        done = self.job.places.keys() | self.job.refused.keys()
        for reading in self.wanted:
            reading.missing = {x: key for x, key in reading.missing.items() if key not in done}
        toml, awaited = self.scratch.write(self.wanted, batch or 1)
        arguments = with_paths(  # the script runs in another folder
            caching_arguments(
                order.model_settings,
                order.kind,
                dataset_config=str(toml),
                place=_local,
                batch_size=batch,
                num_workers=workers,
                skip_existing=False,
            )
        )
        script = self.installation.script(self.name)
        with Taker(self.job, awaited, self.log, self.progress) as taker:
            status, output = process.run(
                process.ending_with_parent(
                    [str(self.installation.python), str(script), *arguments]
                ),
                # Its own bars know no total, and the job shows one of finished files.
                environment={**self.installation.environment(), "TQDM_DISABLE": "1"},
                log=self.log,
                cwd=self.installation.folder,
                pipe=taker.pipe,
            )
        taker.finish(status)
        return taker, status, output

    @property
    def _workers(self) -> int:
        settings = self.job.order.musubi_tuner
        return (settings.num_workers if settings else None) or self.threads

    def _refuse_unwritten(self, taker: Taker, *, wrote_none: bool) -> None:
        """Refuse the items of which a script that ended well has written no file."""
        first = next(iter(taker.left.values()), None)
        if first is None:
            return
        if wrote_none and len(self.wanted) > 1:
            raise ModelError(
                f"{self.name} ended well and wrote none of {len(taker.left)} caches, the first of "
                f"which is {first.path.name} of {first.reading.item.place}",
                hint=self._hint,
            )
        for reading in _items(taker):
            name = next(x.path.name for x in taker.left.values() if x.reading is reading)
            self._refuse(reading, f"{self.name} ended well and wrote no {name} of it")

    def _refuse(self, reading: Reading, what: str) -> None:
        """Refuse an item of which something is missing; the next build tries it again."""
        missing = [key for key in reading.missing.values() if key not in self.job.places]
        self.job.refused |= dict.fromkeys(missing, ("", what, self._hint))
        self.job.refuse(reading.item, missing[0], "", what, self._hint)

    @property
    def _hint(self) -> str:
        return f"all output: {self.log}"


def _local(file: File, weights: Weights) -> str:
    """Return the place of a file or folder of weights for a script's command line.

    Raises:
        ModelError: it is not on this machine, or a folder where the script reads a file.
    """
    place = Path(weights.path or "")
    fault = "" if weights.path and place.exists() else "weights on this machine"
    if file.form == "file" and not fault and place.is_dir():
        fault = "the one original file of a network, not a folder"
    if fault:
        raise ModelError(
            f"musubi-tuner's scripts read {fault}",
            where=f"models.*.{file.key.partition('.')[0]}",
            hint="name that file",
        )
    return str(place.absolute())


def _items(taker: Taker) -> list[Reading]:
    """Return the items of the files that are left, none twice."""
    return list({id(each.reading): each.reading for each in taker.left.values()}.values())


def _named(output: str, awaited: Iterable[Awaited]) -> list[Reading]:
    """Return the items that the last words of a script name, none twice."""
    _, found, words = output.rpartition(_TRACEBACK)
    if not found:
        return []
    named = {}
    for each in awaited:
        body, dot, ending = each.source.rpartition(".")
        clip = rf"{re.escape(body)}(_\d{{5,}}-\d{{3,}})?{re.escape(dot + ending)}"
        if re.search(rf"(?<![\w./-]){clip}(?![\w.-])", words):
            named[id(each.reading)] = each.reading
    return list(named.values())


def _first_undone(taker: Taker) -> Reading:
    """Return the item that a script died of which takes items in order.

    Some scripts go through all items several times, and add tensors to their files each time: the
    item is the first of which less has been written than of the one before.
    """
    (first, most), *others = taker.progress_of_left()
    for each, count in others:
        if count < most:
            return each.reading
    return first.reading
