"""Cutting clips into .npz files, only those whose content would change.

A file holds `frames`, uint8 [F, H, W, 3], uncompressed. A video is decoded once for all of its
clips. Key and origin are in the archive's comment.
"""

from __future__ import annotations

import contextlib
import json
import time
import zipfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from latentmake import digest
from latentmake.caches.pixels import scaling
from latentmake.caches.pixels.scaling import Film
from latentmake.data.probe import indices_of, prompt_of
from latentmake.errors import SourceError, unreadable
from latentmake.exchange.clip_files.order import LIST, ClipFile, ClipsOrder, npz_bytes
from latentmake.files import atomic, npz
from latentmake.files.cachefile import KEY
from latentmake.files.readers import Readers
from latentmake.files.workspace import shortages
from latentmake.geometry.clips import WAN_FPS, SourceFps, Span
from latentmake.index.memo import source_stat
from latentmake.plan.receipts import Receipt
from latentmake.plan.state import Difference, short, value_differences
from latentmake.progress import Progress

ARRAY = "frames"
_VERSION = 1  # raised when the same frames would be scaled or stored otherwise
_EPOCH = (1980, 1, 1, 0, 0, 0)

Say = Callable[[str], None]


def cut(order: ClipsOrder, *, say: Say, threads: int = 1) -> Counter[str]:
    """Bring the clips of a run and their `train.jsonl` up to date.

    Returns:
        Number of files `written`, `kept` and `removed`, and of `faulty` sources.

    Raises:
        StorageError: the disk has no room for what is missing, or cannot be written.
        SourceError: videos or captions are faulty, and their dataset does not skip them; all are
            named, all others are done, and `train.jsonl` is left as it was.
    """
    folder = Path(order.folder)
    for error in shortages([order.need]):
        raise error
    folder.mkdir(parents=True, exist_ok=True)
    _remove_unfinished(folder)
    counts: Counter[str] = Counter()
    sources: dict[str, list[Any]] = {}
    rows: dict[str, dict[str, Any]] = {}
    faults = {name: list(lines) for name, lines in order.faults.items() if lines}
    began = time.time()
    groups: dict[tuple[str, str], list[ClipFile]] = {}
    for file in order.files:
        groups.setdefault((file.dataset, file.item.image), []).append(file)
    with (
        Readers() as readers,
        ThreadPoolExecutor(threads) as pool,
        Progress(total=len(order.files), desc=f"clips of {order.run}", unit="clip") as progress,
    ):
        jobs = {pool.submit(_cut_source, order, files, readers): files for files in groups.values()}
        try:
            for job in as_completed(jobs):
                files = jobs[job]
                progress.update(len(files))
                try:
                    source, written, made = job.result()
                except SourceError as error:
                    say(f"faulty: {error}")
                    faults.setdefault(files[0].dataset, []).append(str(error))
                    continue
                sources[files[0].item.image] = source
                counts["written"] += written
                counts["kept"] += len(files) - written
                rows |= made
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            readers.close()
            raise
    Receipt(sources, {}, [], dict(counts), time.time() - began, began).write(Path(order.receipt))
    counts["faulty"] = sum(map(len, faults.values()))
    lines = [each for name, found in faults.items() if name not in order.skip for each in found]
    if not lines:
        listed = [rows[file.name] for file in order.files if file.name in rows]
        counts["removed"] = _finish(folder, listed)
    done = ", ".join(f"{counts[each]} {each}" for each in ("written", "kept", "removed"))
    state = "" if counts["written"] or counts["removed"] or lines else "nothing to do: "
    say(f"{folder}: {state}{done}, {counts['faulty']} sources faulty")
    if lines:
        raise SourceError(
            f"{len(lines)} faulty: {' | '.join(lines)}",
            where=f"clips_{order.run}",
            hint="the others are done and kept; fix these, or set on_error: skip",
        )
    return counts


def _remove_unfinished(folder: Path) -> None:
    for path in folder.glob(f".*{atomic.TEMPORARY_SUFFIX}"):
        with contextlib.suppress(FileNotFoundError):
            path.unlink()


def _cut_source(
    order: ClipsOrder, files: Sequence[ClipFile], readers: Readers
) -> tuple[list[Any], int, dict[str, dict[str, Any]]]:
    """Write the stale files of one video.

    Returns:
        Stat and digest of the video; number of files written; name -> row of the list.

    Raises:
        SourceError: the video or a caption is faulty.
    """
    first = files[0].item
    fps, rate = order.source_fps[files[0].dataset], order.rate
    rows = {file.name: _row(file, fps, rate) for file in files}
    content = _digest_of(files[0])
    keys = {file.name: _key(file, content[-1], fps, rate) for file in files}
    folder = Path(order.folder)
    stale = [
        file
        for file in files
        if _differences(folder / f"{file.name}.npz", keys[file.name], _origin(file, fps, rate))
    ]
    cuts = []
    for file in stale:
        indices = indices_of(file.item, file.clip, fps, rate)
        cuts.append((scaling.Cut(indices, 0, len(indices), [(file.size, file.size)]), file))
    cuts.sort(key=lambda pair: pair[0].reach)
    assert first.media is not None
    film = Film(first.image, first.media.rotation, order.max_pixels[files[0].dataset])
    clips = readers.each(film.path, scaling.cut, film, [each for each, _ in cuts])
    for _, file in cuts:
        comment = {KEY: keys[file.name], **_origin(file, fps, rate)}
        (clip,) = next(clips).values()
        _write(folder / f"{file.name}.npz", clip, comment)
    return content, len(stale), rows


def _digest_of(file: ClipFile) -> list[Any]:
    """Return stat and digest of a clip's video; it is read unless the plan knows it."""
    path = Path(file.item.image)
    try:
        stat = source_stat(path.stat())
        known = file.content if stat == file.item.files[0].stat else None
        return [*stat, known or digest.of_file(path)]
    except OSError as error:
        raise unreadable(error, path) from None


def _key(file: ClipFile, content: str, fps: SourceFps, rate: float) -> str:
    """Return the digest of all that decides about a file's frames."""
    media, span = file.item.media, file.item.span or Span()
    assert media is not None
    made = [_VERSION, content, fps, span, file.clip, file.size, media.timing, media.rotation]
    return digest.of_value(made if fps is None or rate == WAN_FPS else [*made, rate])


def file_differences(order: ClipsOrder, file: ClipFile) -> list[Difference]:
    """Return why a clip's file is not what an order asks for.

    Raises:
        SourceError: the video cannot be read.
    """
    fps, rate = order.source_fps[file.dataset], order.rate
    key = _key(file, _digest_of(file)[-1], fps, rate)
    return _differences(Path(order.folder) / f"{file.name}.npz", key, _origin(file, fps, rate))


def _differences(path: Path, key: str, origin: Mapping[str, object]) -> list[Difference]:
    try:
        found = npz.read_metadata(path)
        if found[KEY] == key:
            return []
    except FileNotFoundError:
        return [Difference("it has not been cut yet")]
    except (OSError, ValueError, LookupError):
        return [Difference("it is damaged, or no file of latentmake")]
    known = value_differences({name: found.get(name) for name in origin}, origin)
    return known or [Difference("key of video, size and frame rate", short(found[KEY]), short(key))]


def _write(path: Path, clip: NDArray[np.uint8], comment: Mapping[str, object]) -> None:
    """Write an npz file, which gets its name at the end."""
    entry = zipfile.ZipInfo(f"{ARRAY}.npy", _EPOCH)
    entry.create_system, entry.external_attr = 3, 0o644 << 16
    entry.file_size = npz_bytes(clip.shape)  # tells zipfile whether it needs fields for large files
    with (
        atomic.replacing(path) as temporary,
        zipfile.ZipFile(temporary, "w", zipfile.ZIP_STORED) as archive,
    ):
        archive.comment = json.dumps(dict(comment), separators=(",", ":")).encode()
        with archive.open(entry, "w") as array:
            head = {"descr": "|u1", "fortran_order": False, "shape": clip.shape}
            npy.write_array_header_1_0(array, head)
            array.write(clip.data)


def _row(file: ClipFile, fps: SourceFps, rate: float) -> dict[str, Any]:
    """Return a clip's row of the list: its file, prompt, further columns, and where it is from."""
    own = {"video": f"{file.name}.npz", "prompt": prompt_of(file.item)}
    return {**own, **(file.item.row or {}), **own, **_origin(file, fps, rate)}


def _origin(file: ClipFile, fps: SourceFps, rate: float) -> dict[str, Any]:
    """Return which frames of which video a file holds."""
    return {
        "source_video": file.item.image,
        "source_first_frame": indices_of(file.item, file.clip, fps, rate)[0],
        "source_stride": (file.item.span or Span()).stride,
    }


def _finish(folder: Path, rows: Sequence[Mapping[str, Any]]) -> int:
    """Write the list, then remove the files of clips that are gone; return their number."""
    lines = "".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows).encode()
    place = folder / LIST
    if not place.is_file() or place.read_bytes() != lines:
        atomic.write(place, lines)
    wanted = {str(row["video"]) for row in rows}
    gone = [path for path in folder.glob("*.npz") if path.name not in wanted and _is_ours(path)]
    for path in gone:
        path.unlink()
    return len(gone)


def _is_ours(path: Path) -> bool:
    try:
        return KEY in npz.read_metadata(path)
    except (OSError, ValueError):
        return False
