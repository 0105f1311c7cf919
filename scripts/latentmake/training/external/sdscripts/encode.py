"""Encoding by sd-scripts' own strategies: run for missing targets, checked, stamped as ours.

Its tools cache for few architectures, so that a driver of ours (`driver.py`) calls its strategies
in its environment. What it finishes gets its name while it goes on, like the files of our encoders.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import threading
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import torch

from latentmake.caches.inputs import stored_size
from latentmake.caches.job import Job
from latentmake.config.models import Model
from latentmake.config.rows import Call, Encoder, Network
from latentmake.data.item import Item
from latentmake.errors import (
    DeviceError,
    ModelError,
    SourceError,
    is_device_fault,
    is_out_of_memory,
)
from latentmake.files import atomic
from latentmake.geometry.buckets import Placement
from latentmake.layouts.sdscripts import array_name
from latentmake.models.recipe import encoder_of, options_of
from latentmake.plan.orders import Order, Work
from latentmake.plan.target import Target
from latentmake.progress import Progress
from latentmake.training import process
from latentmake.training.external.sdscripts.installation import find

_FOLDER = Path(".latentmake/sdscripts")
_DRIVER = Path(__file__).with_name("driver.py")
_RESULTS = "results.jsonl"
_SECONDS = 1.0  # between two looks at what is finished


class _Wanted(NamedTuple):
    """A target to be encoded.

    Attributes:
        source: digest of what it is made from.
        caption: None for an image.
    """

    item: Item
    target: Target
    key: str
    source: str
    caption: str | None


def make_by_strategies(job: Job, items: Sequence[Work], threads: int, progress: Progress) -> None:
    """Make the targets of some items by sd-scripts' own strategies.

    The header of each source is checked before, without a GPU, and bad ones are named as with our
    encoders.

    Raises:
        TrainingError: sd-scripts is not where the configuration says.
        DeviceError: the GPU is at fault; what is finished is kept.
        ModelError: the driver failed; what it had finished is kept.
    """
    wanted: list[_Wanted] = []
    for reading in job.readings(items, threads, progress):
        texts = {sample.key: str(sample.content) for sample in reading.samples}
        for target, key in reading.missing.items():
            caption = texts.get(key) if job.order.kind == "text" else None
            wanted.append(_Wanted(reading.item, target, key, reading.content, caption))
    if not wanted:
        return
    job.take_gpu()
    folder = (_FOLDER / job.order.name).absolute()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        with _Taker(job, wanted, folder, progress) as taker:
            failure = _run(job.order, wanted, folder, threads, job.known_faults)
        if failure is None:
            failure = taker.judge()
        if failure is None and taker.left:
            failure = _failure(job.order, f"it ended well and told nothing of {len(taker.left)}")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if failure is not None:
        raise failure


class _Taker:
    """Takes finished files into the cache while the driver goes on, in a thread.

    Attributes:
        left: key -> targets that the driver has told nothing of.
        short: targets that memory did not suffice for, with the library's words.
        fitted: the largest of the others, as `_amount` has it; None where there is none.
    """

    def __init__(
        self, job: Job, wanted: Sequence[_Wanted], folder: Path, progress: Progress
    ) -> None:
        self._job = job
        self.left = {each.key: each for each in wanted}
        self.short: list[tuple[_Wanted, str]] = []
        self.fitted: int | None = None
        self._folder = folder
        self._progress = progress
        self._read = 0
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._go_on, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._thread.join()
        self._take_new()

    def _go_on(self) -> None:
        with contextlib.suppress(Exception):  # which comes again in `__exit__`
            while not self._ends.wait(_SECONDS):
                self._take_new()

    def _take_new(self) -> None:
        """Take what the driver has told of since the last time, by whole lines."""
        try:
            data = (self._folder / _RESULTS).read_bytes()
        except OSError:
            return  # it has not begun
        whole = data.rfind(b"\n") + 1
        for line in data[self._read : whole].splitlines(keepends=True):
            result = json.loads(line)
            wanted, fault = self.left[result["key"]], result.get("error")
            if fault is not None and is_out_of_memory(fault):
                self.short.append((wanted, fault))
            else:
                _take(self._job, wanted, self._folder, fault)
                if fault is None:
                    self.fitted = max(self.fitted or 0, _amount(self._job.order, wanted))
            del self.left[result["key"]]
            self._read += len(line)
            self._progress.update()

    def judge(self) -> DeviceError | None:
        """Refuse the targets larger than all that fitted; others are the fault of the device.

        Where nothing fitted, those are refused that an earlier build skipped.
        """
        for wanted, fault in self.short:
            is_fault_of_device = wanted.item.stem not in self._job.known_faults
            if self.fitted is not None:
                is_fault_of_device = _amount(self._job.order, wanted) <= self.fitted
            if is_fault_of_device:
                return _device_failure(self._job.order, fault)
            _take(self._job, wanted, self._folder, fault)
        return None


def _file(folder: Path, key: str) -> Path:
    return folder / f"{key}.npz"


# -- the driver's job -----------------------------------------------------------------------------


def _run(
    order: Order, wanted: Sequence[_Wanted], folder: Path, threads: int, known: set[str]
) -> ModelError | DeviceError | None:
    """Run the driver for some targets, the smallest first; return its failure.

    `known` are stems of items that earlier builds skipped.
    """
    model = order.model_settings
    assert order.sd_scripts is not None and model.spec.strategies is not None
    program = find(model.spec.strategies.scripts[0], order.sd_scripts)
    values = {
        "folder": str(program.folder),
        "kind": order.kind,
        "results": str(folder / _RESULTS),
        "known": {each.item.stem for each in wanted} <= known,
        **_encoder(model, encoder_of(model, order.kind), order.kind),
        "flip_aug": order.dataset_settings.flip_aug,
        "alpha_mask": order.dataset_settings.alpha_mask,
        "items": [
            item
            for _, item in sorted(
                ((_amount(order, each), _item(order, each, folder)) for each in wanted),
                key=lambda pair: (pair[0], pair[1].get("bucket", ()), pair[1]["key"]),
            )
        ],
    }
    place = folder / "job.json"
    atomic.write(place, json.dumps(values).encode())
    log = Path(order.log).absolute()
    status, output = process.run(
        [str(program.python), str(_DRIVER), str(place)],
        environment={"OMP_NUM_THREADS": str(threads), **program.environment()},
        log=log,
        cwd=program.folder,
    )
    if status == 0:
        return None
    error = process.last_error(output, status)
    return (_device_failure if is_device_fault(error) else _failure)(order, error)


def _device_failure(order: Order, what: str) -> DeviceError:
    return DeviceError(
        f"sd-scripts' encoder of {order.kind} failed: {what}",
        where=f"models.{order.model}",
        hint="check the GPU with nvidia-smi, then run the same command; finished files are kept; "
        f"all output: {Path(order.log).absolute()}",
    )


def _failure(order: Order, what: str) -> ModelError:
    return ModelError(
        f"sd-scripts' encoder of {order.kind} failed: {what}",
        where=f"models.{order.model}",
        hint=f"finished caches are kept; all output: {Path(order.log).absolute()}",
    )


def _encoder(model: Model, encoder: Encoder, kind: str) -> dict[str, Any]:
    """Return the entries of a job that say how to encode."""
    dtype = model.caption_dtype if kind == "text" else model.vae_dtype or model.dtype
    options = {
        encoder.options[flag].argument: _absolute(value, encoder.options[flag].kind)
        for flag, value in options_of(model, kind).items()
    }
    networks = [
        _network(model, network, dtype, {} if encoder.tokenizer else options)
        for network in encoder.networks
    ]
    found: dict[str, Any] = {"strategy": encoder.strategy, "networks": networks}
    if encoder.tokenizer is not None:
        paths = {argument: _path(model, key) for argument, key in encoder.paths.items()}
        found["tokenizer"] = _call(encoder.tokenizer, {**paths, **options})
        found["encoding"] = encoder.encoding
        autocast = encoder.autocast and dtype != "float32"
        found["autocast"] = dtype if autocast else None
    return found


def _network(
    model: Model, network: Network, dtype: str, options: Mapping[str, Any]
) -> dict[str, Any]:
    return {
        **_call(network.load, {network.path: _path(model, network.key), **options}),
        "dtype": network.dtype or dtype,
        "takes_dtype": network.takes_dtype,
        "place": network.place,
    }


def _call(call: Call, further: Mapping[str, Any]) -> dict[str, Any]:
    return {"call": call.name, "arguments": {**call.arguments, **further}}


def _path(model: Model, key: str) -> str:
    weights = model.weights(key)
    assert weights is not None and weights.path is not None  # the configuration was checked
    return str(Path(weights.path).absolute())


def _absolute(value: Any, kind: str) -> Any:
    return str(Path(value).absolute()) if kind == "path" else value


def _item(order: Order, wanted: _Wanted, folder: Path) -> dict[str, Any]:
    seed = (int(wanted.key[:15], 16) + order.model_settings.posterior_seed) % 2**63
    found: dict[str, Any] = {
        "key": wanted.key,
        "file": str(_file(folder, wanted.key)),
        "seed": seed,
    }
    if wanted.caption is not None:
        return found | {"caption": wanted.caption}
    size = stored_size(wanted.item)
    fitted = _fitted(order, wanted)
    return found | {
        "image": str(Path(wanted.item.source or "").absolute()),
        "size": list(size),
        "bucket": list(fitted.target),
        "resized": list(fitted.resized),
    }


def _amount(order: Order, wanted: _Wanted) -> int:
    """Return the pixels or letters of a target, which tell what memory it takes."""
    if wanted.caption is not None:
        return len(wanted.caption)
    bucket = _fitted(order, wanted).target
    return bucket.width * bucket.height


def _fitted(order: Order, wanted: _Wanted) -> Placement:
    size, path = stored_size(wanted.item), wanted.item.source or ""
    return order.layout.place(size, wanted.target.size or size, order.dataset_settings, path)


# -- its results ----------------------------------------------------------------------------------


def _take(job: Job, wanted: _Wanted, folder: Path, fault: str | None) -> None:
    """Check the file of a target, and store it under its name with our key.

    `fault` is why there is none.
    """
    item, path = wanted.item, _file(folder, wanted.key)
    arrays: dict[str, Any] = {}
    if fault is None:
        try:
            with np.load(path, allow_pickle=False) as file:
                arrays = {name: torch.from_numpy(file[name]) for name in file.files}
        except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
            fault = f"its file cannot be read ({error})"
        else:
            fault = _wrong_names(job.order, wanted, arrays)
    if fault is not None:
        refused = SourceError(
            f"sd-scripts could not encode it: {fault}",
            where=item.name,
            hint=f"all output: {Path(job.order.log).absolute()}",
        )
        job.fail(item, "", str(refused))  # without a digest: the next build tries it again
        return
    nonzero = None
    if wanted.caption is not None:
        # Masks of a short caption may be zeros; of an empty one, so may its embedding.
        nonzero = encoder_of(job.order.model_settings, "text").arrays[: bool(wanted.caption)]
    job.store(item, wanted.key, wanted.source, arrays, {}, nonzero=nonzero)
    path.unlink()


def _wrong_names(order: Order, wanted: _Wanted, arrays: Mapping[str, Any]) -> str | None:
    """Return what is wrong with the names of a file's arrays."""
    model = order.model_settings
    expected = set(encoder_of(model, order.kind).arrays)
    if order.kind == "latents":
        assert model.architecture is not None and model.spec.strategies is not None
        further = {
            "latents_flipped": order.dataset_settings.flip_aug,
            "alpha_mask": order.dataset_settings.alpha_mask,
        }
        expected |= {name for name, asked in further.items() if asked}
        bucket, side = _fitted(order, wanted).target, model.spec.strategies.pixels
        height, width = bucket.height // side, bucket.width // side
        expected = {array_name(name, model.architecture, height, width) for name in expected}
    if set(arrays) == expected:
        return None
    return f"its file holds {', '.join(sorted(arrays))}, not {', '.join(sorted(expected))}"
