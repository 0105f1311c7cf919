"""Encoding by musubi-tuner's own scripts: run for missing targets, checked, stamped as ours.

The scripts know nothing of staleness, so they get a dataset of just these items and an empty cache
folder. Their files get their names like those of our encoders.

A script dies of the first item that it cannot encode. It is then run again without that one: an
item that its last words name, or else the first one left undone by a run that takes them in order.
A lack of memory is the fault of an item only if it is larger than all that fitted.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from latentmake.caches.inputs import Reading
from latentmake.caches.job import Job
from latentmake.config.rows import File
from latentmake.config.weights import Weights
from latentmake.errors import DeviceError, ModelError, is_device_fault, is_out_of_memory
from latentmake.geometry.buckets import Size
from latentmake.models.files import script_of
from latentmake.plan.orders import Order, Work
from latentmake.progress import Progress
from latentmake.training import process
from latentmake.training.external.arguments import with_paths
from latentmake.training.external.installation import Installation
from latentmake.training.external.musubi.caching_command import caching_arguments
from latentmake.training.external.musubi.installation import find
from latentmake.training.external.musubi.scratch import Awaited, Scratch
from latentmake.training.external.musubi.written import Taker

_MOST_FRUITLESS = 50  # attempts in a row that write nothing, of a script that made something
_MOST_AT_FIRST = 3  # the same of a script that has made nothing yet: it may fail whatever the item
_HUB = r"huggingface\.co|cached files|HF_HUB_OFFLINE|[Oo]ffline mode"
_HUB_HINT = (
    "it loads a tokenizer by its name on the hub: fetch that once on a machine with internet, into "
    "the folder that HF_HOME names"
)
_TRACEBACK = "Traceback (most recent call last)"
_Size = tuple[int, ...]


def make_by_scripts(job: Job, items: Sequence[Work], threads: int, progress: Progress) -> None:
    """Make the targets of some items by musubi-tuner's own scripts.

    The header of each source is checked before, without a GPU: a bad one would end the script.

    Raises:
        TrainingError: musubi-tuner is not where the configuration says.
        DeviceError: the GPU is at fault; what is finished is kept.
        ModelError: a script failed whatever the item; what it had finished is kept.
    """
    wanted: list[Reading] = []
    for reading in job.readings(items, threads, progress):
        if reading.missing:
            wanted.append(reading)
    if not wanted:
        return
    job.take_gpu()
    with Scratch(job.order) as scratch:
        _Attempts(job, scratch, threads, progress, wanted).run()


@dataclass
class _Attempts:
    """Runs of a script for the items of a job, until all are made or refused.

    Attributes:
        wanted: items that are yet to be encoded.
        suspects: items that the script died of before it wrote anything else, and its words.
        put_off: identities of the items that were put off for lack of memory.
        fitted: sizes of what was encoded.
        works: whether the script has made anything in this job, or has named an item, or all items
            are such as earlier builds skipped.
        fruitless: attempts in a row that wrote nothing.
        in_order: whether the script takes the items one by one, in the order of its dataset.
    """

    job: Job
    scratch: Scratch
    threads: int
    progress: Progress
    wanted: list[Reading]
    suspects: list[tuple[Reading, str]] = field(default_factory=list)
    put_off: set[int] = field(default_factory=set)
    fitted: set[_Size] = field(default_factory=set)
    works: bool = field(init=False)
    fruitless: int = 0
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
        self.works = {each.item.stem for each in self.wanted} <= self.job.known_faults
        self.in_order = self._workers == 1 and order.musubi_tuner.batch_size in (None, 1)

    def run(self) -> None:
        """Run the script until nothing is left that it could make.

        Raises:
            DeviceError: the GPU is at fault: it has no memory for what fitted before, or is lost.
            ModelError: the script fails whatever the item.
        """
        error = ""
        for attempt in itertools.count():
            if not self.wanted:
                break
            taker, status, output = self._run()
            left = _items(taker)
            wrote = taker.taken > 0 or any(count for _, count in taker.progress_of_left())
            if wrote or status == 0:
                self._refuse_suspects()
            self.fruitless = 0 if wrote else self.fruitless + 1
            self.works |= wrote
            if status == 0:
                self._refuse_unwritten(taker, wrote_none=attempt == 0 and not taker.taken)
                return
            self.wanted = left
            if not left:
                break
            error = f"{self.name}: {process.last_error(output, status)}"
            if is_device_fault(error):
                self._make_room(taker, error)
            else:
                self._blame(taker, output, error)
            if self.wanted:
                self.job.say(
                    f"{error}; trying again with the {len(self.wanted)} items that are left"
                )
        if self.suspects and not self.works and len(self.suspects) > 1:
            raise self._failure(error)
        self._refuse_suspects()

    def _blame(self, taker: Taker, output: str, error: str) -> None:
        """Leave out the item that the script died of; it is refused once others are made.

        Raises:
            ModelError: the script fails whatever the item.
        """
        named = _named(output, taker.left.values())
        self.works |= bool(named)
        most = _MOST_FRUITLESS if self.works else _MOST_AT_FIRST
        if not taker.began or self.fruitless >= most:
            raise self._failure(error)
        for each in named:
            self._refuse(each, error)
        if not named and (self.in_order or len(self.wanted) == 1):
            named = [_first_undone(taker).reading]
            self.suspects.append((named[0], error))
        self.in_order |= not named
        self.wanted = _without(self.wanted, named)
        if self.fruitless:  # the next ones may be bad like this one: begin elsewhere
            half = len(self.wanted) // 2
            self.wanted = self.wanted[half:] + self.wanted[:half]

    def _make_room(self, taker: Taker, error: str) -> None:
        """Put off the item that memory did not suffice for, and all that are as large.

        They are tried again behind the others, the smallest first. What then does not fit is
        refused, if only smaller ones fitted.

        Raises:
            DeviceError: it is no fault of an item.
        """
        if not taker.began or not is_out_of_memory(error):
            raise self._fault_of_device(error)
        if not self.in_order and len(self.wanted) > 1:
            self.in_order = True  # one at a time takes less
            return
        died = _first_undone(taker)
        size = _size(self.job.order, died)
        if any(_is_as_large(each, size) for each in self.fitted):
            raise self._fault_of_device(f"{error}, though one as large was encoded before")
        found = [(_size(self.job.order, x), id(x.reading)) for x in taker.left.values()]
        sizes = {each: other for other, each in sorted(found)}  # of each item's largest file
        sizes[id(died.reading)] = size
        large = [x for x in self.wanted if _is_as_large(sizes[id(x)], size)]
        self.wanted = _without(self.wanted, large)
        if id(died.reading) not in self.put_off:
            self.put_off |= {id(each) for each in large}
            self.wanted += sorted(large, key=lambda each: math.prod(sizes[id(each)]))
        elif self.fitted or died.reading.item.stem in self.job.known_faults:
            for each in large:
                self._refuse(each, f"not enough memory to encode it, even by itself: {error}")
        else:
            raise self._fault_of_device(error)

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
                [str(self.installation.python), str(script), *arguments],
                # Its own bars know no total, and the job shows one of finished files.
                environment={**self.installation.environment(), "TQDM_DISABLE": "1"},
                log=self.log,
                cwd=self.installation.folder,
                pipe=taker.pipe,
            )
        taker.finish(status)
        self.fitted |= {_size(order, each) for each in awaited if each.path not in taker.left}
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
                f"which is {first.path.name} of {first.reading.item.name}",
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

    def _refuse_suspects(self) -> None:
        for each in self.suspects:
            self._refuse(*each)
        self.suspects.clear()

    def _failure(self, error: str) -> ModelError:
        hint = _HUB_HINT if re.search(_HUB, error) else "finished caches are kept"
        where = f"models.{self.job.order.model}"
        if self.suspects:
            some = [reading.item.name for reading, _ in self.suspects[:_MOST_AT_FIRST]]
            error += f" (at {', '.join(some)}{', ...' * (len(self.suspects) > len(some))})"
        return ModelError(error, where=where, hint=f"{hint}; {self._hint}")

    def _fault_of_device(self, error: str) -> DeviceError:
        hint = (
            "check the GPU with nvidia-smi, then run the same command; finished files are kept; "
            f"{self._hint}"
        )
        return DeviceError(error, where=f"models.{self.job.order.model}", hint=hint)

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


def _without(items: Iterable[Reading], others: Iterable[Reading]) -> list[Reading]:
    gone = {id(each) for each in others}
    return [each for each in items if id(each) not in gone]


def _size(order: Order, each: Awaited) -> _Size:
    """Return numbers that tell what memory a file takes: frames, pixels, letters, pictures beside.

    They count for comparisons alone.
    """
    item, target = each.reading.item, each.target
    beside = len(item.layers) + len(item.controls)
    if each.caption is not None:
        return len(each.caption), beside
    assert item.media is not None and target.size is not None
    media, clip = item.media, target.clip
    stored = Size(media.width, media.height)
    pixels = math.prod(order.layout.size(stored, target.size, order.dataset_settings))
    return 1 if clip is None else clip.frames, pixels, beside


def _is_as_large(size: _Size, other: _Size) -> bool:
    return all(one >= two for one, two in zip(size, other, strict=True))


def _first_undone(taker: Taker) -> Awaited:
    """Return a file of the item that a script died of which takes items in order.

    Some scripts go through all items several times, and add tensors to their files each time: the
    item is the first of which less has been written than of the one before.
    """
    (first, most), *others = taker.progress_of_left()
    for each, count in others:
        if count < most:
            return each
    return first
