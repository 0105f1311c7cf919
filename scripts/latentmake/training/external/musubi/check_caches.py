"""Checks of a run's caches for musubi-tuner: names, headers, captions, stray files.

It globs its cache folders and trains on whatever fits the pattern; an item without its text cache
is dropped with a warning, one of another shape ends the training at its batch. Tensors are not
read. What an architecture's files hold is told by its row, see `config.rows`.
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path

from latentmake.config.fields import resolution_name
from latentmake.data.texts import read_caption
from latentmake.errors import SourceError
from latentmake.files.safetensors import DTYPES, Tensor, read_head
from latentmake.geometry.buckets import Size
from latentmake.layouts.musubi import latents_size
from latentmake.training.external.musubi.deploy import linked_before, names_of
from latentmake.training.external.musubi.order import ManifestRow, MusubiOrder

_LATENTS_NAME = (
    r"(?P<stem>.+?)(?:_(?P<start>\d{5,})-(?P<frames>\d{3,})(?:-(?P<section>\d{4,}))?)?"
    r"_(?P<w>\d{4,})x(?P<h>\d{4,})"
)
_KEY = re.compile(
    r"(?P<what>latents(?:_[a-z]\w*?)?)_(?:(?P<f>\d+)x)?(?P<h>\d+)x(?P<w>\d+)_(?P<dtype>\w+)"
)
_DTYPES = {dtype.name: name for name, dtype in DTYPES.items()}
_FIRST, _CONTROL = "latents_image", "latents_control"
_HISTORY = "latents_clean"  # of FramePack: named for the frames of `latents`, not for its own


class _FaultError(Exception):
    """Fault of one cache file."""


def item_faults(rows: Sequence[ManifestRow]) -> Iterator[str]:
    """Yield a line for each image, caption and control file of the manifest that is not there."""
    for row in rows:
        for path in (row.source, row.caption, *row.control_files, *row.layers):
            if path is not None and not Path(path).is_file():
                yield f"{path} is missing"


def cache_faults(order: MusubiOrder, rows: Sequence[ManifestRow]) -> Iterator[str]:
    """Yield a line for each cache file that is missing, damaged or unexpected."""
    parts = {Path(order.cache_folder("", size)).name: size for size in order.resolutions}
    files = _Files(order)
    for row in rows:
        yield from (
            f"{row.stem} ({row.dataset}) has no {kind} for {part}"
            for part in parts
            for kind, known in (("latents", row.latents), ("text", row.text))
            if not known.get(part)
        )
        captions = _captions(row)
        checked: set[tuple[int, int]] = set()
        for part, size in parts.items():
            folder = order.cache_folder(row.dataset, size)
            texts = {
                text: (number, caption)
                for number, (text, caption) in enumerate(
                    zip(row.texts_at(part), captions, strict=False)
                )
            }
            for place in (*row.latents.get(part, ()), *texts):
                path = Path(place)
                try:
                    number, caption = texts.get(place, (0, None))
                    part_of_it = f"text.{number}@{part}"
                    further = order.layout.folder(row.dataset, order.model_name, part_of_it)
                    base = order.layout.base(row.stem)
                    _check_place(path, further if number else folder, base)
                    if place in texts:
                        files.check_text(path, caption, checked)
                    else:
                        files.check_latents(row, path, size)
                except _FaultError as fault:
                    yield f"{place} {fault}"


def _captions(row: ManifestRow) -> Sequence[str | None]:
    """Return the texts, one as it stands in its file now; None where that cannot be told."""
    if row.texts is not None:
        return row.texts
    if row.caption is None:
        return [""]
    try:
        return [read_caption(row.caption)]
    except SourceError:
        return [None]  # said elsewhere, or not to be compared


def _check_place(path: Path, folder: str, stem: str) -> None:
    if os.path.normpath(path.parent) != os.path.normpath(folder):
        raise _FaultError(f"does not lie in {folder}")
    if not path.name.startswith(f"{stem}_"):
        raise _FaultError(f"is not named as {stem} is")


class _Files:
    """Checks the cache files of one order."""

    def __init__(self, order: MusubiOrder) -> None:
        self._order = order
        self._scripts = order.scripts
        self._title = order.scripts.title

    @cached_property
    def _name(self) -> re.Pattern[str]:
        return re.compile(_LATENTS_NAME + re.escape(self._order.layout.latents_ending))

    def _read(self, path: Path) -> tuple[Mapping[str, Tensor], Mapping[str, str]]:
        """Return the tensors by name, and the metadata."""
        try:
            head = read_head(path)
            tensors = head.tensors
        except FileNotFoundError:
            raise _FaultError("is missing") from None
        except OSError as error:
            raise _FaultError(f"cannot be read ({error.strerror})") from None
        except ValueError as error:
            raise _FaultError(str(error)) from None
        if head.metadata.get("architecture") != self._scripts.header:
            raise _FaultError(f"is not a cache of {self._title} (architecture in its header)")
        return tensors, head.metadata

    def check_latents(self, row: ManifestRow, path: Path, resolution: tuple[int, int]) -> None:
        """Check a file of latents: name, header, tensors and their shapes."""
        name = self._name.fullmatch(path.name)
        if name is None:
            raise _FaultError(f"is not named as latents of {self._title} are")
        tensors, metadata = self._read(path)
        width, height = int(name["w"]), int(name["h"])
        if (metadata.get("width"), metadata.get("height")) != (str(width), str(height)):
            raise _FaultError("has another width or height in its header than in its name")
        sizes: dict[str, str] = {}
        for key, tensor in tensors.items():
            match = _KEY.fullmatch(key)
            if match is None:
                continue
            self._check_shape(match, tensor)
            what = match["what"]
            if what in sizes:
                raise _FaultError(f"holds several tensors {what}")
            sizes[what] = "x".join(match[side] or "1" for side in "fhw")
        self._check_kinds(row, tensors, sizes)
        found, expected = sizes["latents"], self._expected(row, name, resolution)
        if found != expected:
            raise _FaultError(f"holds latents of {found}, where the trainer expects {expected}")

    def _check_shape(self, match: re.Match[str], tensor: Tensor) -> None:
        """Compare a tensor to its name, which says its frames, height, width and dtype."""
        what, key = match["what"], match[0]
        sides = [int(match["h"]), int(match["w"])]
        shape = tensor.shape
        if what.startswith(_HISTORY):
            shape = shape[-2:]
        elif match["f"] is not None:
            sides.insert(0, int(match["f"]))
        channels = self._scripts.channels.get(what.rstrip("_0123456789"))
        if not _fits(shape, sides, channels):
            known = [*([] if channels is None else [channels]), *sides]
            raise _FaultError(f"holds {key} with the shape {list(tensor.shape)}, not {known}")
        if _DTYPES.get(match["dtype"]) != tensor.dtype:
            raise _FaultError(f"holds {key} as {tensor.dtype}")

    def _check_kinds(
        self, row: ManifestRow, tensors: Mapping[str, Tensor], sizes: Mapping[str, str]
    ) -> None:
        """Check that all tensors are there which the task and the item's controls demand."""
        scripts, model = self._scripts, self._order.model
        if "latents" not in sizes:
            raise _FaultError("holds no latents")
        demanded = model.version.tensors
        missing = [each for each in demanded if not any(key.startswith(each) for key in tensors)]
        if missing:
            names = " and no ".join(each.strip("_") for each in sorted(missing, reverse=True))
            raise _FaultError(f"holds no {names}, which {model.task or model.title} needs")
        if scripts.counts_controls:
            controls = [what for what in sizes if what.startswith(_CONTROL)]
            wanted = len(row.control_files)
            if wanted and not controls:
                raise _FaultError(f"holds no {_CONTROL}")
            if len(controls) != wanted:
                raise _FaultError(f"holds latents of {len(controls)} controls, not of {wanted}")
        for what in (_FIRST, _CONTROL) if scripts.equal_shapes else ():
            if sizes.get(what, sizes["latents"]) != sizes["latents"]:
                raise _FaultError("holds latents of different shapes")

    def _expected(self, row: ManifestRow, name: re.Match[str], resolution: tuple[int, int]) -> str:
        """Return the latents' frames, height and width that the trainer computes from a name."""
        scripts, dataset = self._scripts, self._order.datasets[row.dataset]
        size = Size(int(name["w"]), int(name["h"]))
        frames = 1 + len(row.layers)
        if name["section"] is not None:
            frames = dataset.fp_latent_window_size
        elif name["frames"] is not None:
            frames = (int(name["frames"]) - 1) // scripts.frames + 1
        if name["frames"] is None:  # the name of a clip has the size of its bucket
            size = self._order.layout.size(size, Size(*resolution), dataset)
        width, height = latents_size(self._order.model, size)
        return f"{frames}x{height}x{width}"

    def check_text(self, path: Path, caption: str | None, checked: set[tuple[int, int]]) -> None:
        """Check a file of embeddings: header, tensors, and the caption in its header."""
        try:
            stat = path.stat()
        except OSError:
            raise _FaultError("is missing") from None
        # One file under several names, a folder each, is read once.
        if (stat.st_dev, stat.st_ino) in checked:
            return
        tensors, metadata = self._read(path)
        for number, beginning in enumerate(self._scripts.tensors):
            found = [tensor for key, tensor in tensors.items() if key.startswith(beginning)]
            name = beginning.strip("_")
            # HunyuanVideo 1.5 has tokens of quoted words besides, of which there may be none.
            if not found or any(not x.shape or (not number and 0 in x.shape) for x in found):
                raise _FaultError(f"holds no embedding ({name}) of one token or more")
            if len(found) > 1 and beginning.startswith("varlen_"):
                raise _FaultError(f"holds several embeddings ({name})")
        if "caption1" not in metadata:
            raise _FaultError("does not say its caption (caption1)")
        if caption is not None and metadata["caption1"] != caption:
            raise _FaultError("was made from another caption")
        checked.add((stat.st_dev, stat.st_ino))


def _fits(shape: Sequence[int], sides: Sequence[int], channels: int | None) -> bool:
    """Whether a tensor has some sides in a row, and besides them no more than its channels.

    Some architectures leave out a single frame, and some have the channels last.
    """
    tails = [list(sides)]
    if len(sides) == 3 and sides[0] == 1:
        tails.append(list(sides[1:]))
    for tail in tails:
        for start in range(len(shape) - len(tail) + 1):
            if list(shape[start : start + len(tail)]) != tail:
                continue
            others = [*shape[:start], *shape[start + len(tail) :]]
            rest = [each for each in others if each != 1]
            if len(rest) <= 1 if channels is None else rest == [channels]:
                return True
    return False


def stray_files(order: MusubiOrder, rows: Sequence[ManifestRow]) -> Iterator[str]:
    """Yield latents in the run's cache folders that its manifest does not name.

    The trainer would train on them all the same. Embeddings alone do no harm: an item is known by
    its latents.
    """
    named = {
        f"{order.training_folder(row.dataset, size)}/{name}"
        for row in rows
        for size in order.resolutions
        for name, _ in names_of(row, resolution_name(*size), order.model.layout_name)
    }
    named |= linked_before(order)  # and removed before the training, where they are not wanted
    for dataset in order.datasets:
        for size in order.resolutions:
            folder = order.training_folder(dataset, size)
            try:
                with os.scandir(folder) as entries:
                    names = sorted(entry.name for entry in entries)
            except OSError:
                continue  # said elsewhere
            for name in names:
                if name.endswith(order.layout.latents_ending) and f"{folder}/{name}" not in named:
                    yield f"{folder}/{name}"


def folder_faults(order: MusubiOrder) -> Iterator[str]:
    """Yield a line for each cache folder that is missing, shared, or among the images."""
    images = {name: os.path.realpath(each.folder) for name, each in order.datasets.items()}
    seen: dict[str, str] = {}
    for dataset in order.datasets:
        for size in order.resolutions:
            folder = order.cache_folder(dataset, size)
            if not Path(folder).is_dir():
                yield f"{folder} is missing"
                continue
            path = os.path.abspath(order.training_folder(dataset, size))  # noqa: PTH100
            if path != glob.escape(path):
                yield f"{path} has one of [ ] * ? in it, with which musubi-tuner finds nothing"
                continue
            real = os.path.realpath(folder)
            if real in seen:
                yield f"{folder} is the same folder as {seen[real]}"
            seen[real] = folder
            for name, place in images.items():
                if real == place or real.startswith(place + os.sep):
                    yield f"{folder} lies among the images of {name}"
