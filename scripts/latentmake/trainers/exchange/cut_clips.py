"""Cutting of outdated clips into .npz files; see `clip_files`.

A video is decoded once for all of its clips.
"""

from __future__ import annotations

import json
import time
import zipfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from latentmake.base import atomic
from latentmake.base.errors import SourceError, joined
from latentmake.base.progress import Progress
from latentmake.encode.pixels import scaling
from latentmake.encode.pixels.scaling import Film
from latentmake.formats import npz
from latentmake.formats.cachefile import KEY
from latentmake.formats.readers import Readers
from latentmake.plan.receipts import Receipt
from latentmake.trainers.exchange.clip_files import LIST, ClipFile, ClipsOrder, lines_of

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


def cut(order: ClipsOrder, *, say: Callable[[str], None], threads: int = 1) -> Counter[str]:
    """Bring the clips of a run and their `train.jsonl` up to date.

    Returns:
        Number of files `written`, `kept` and `removed`, and of `faulty` sources.

    Raises:
        StorageError: the disk is full or cannot be written.
        SourceError: videos or captions are faulty, and their dataset does not skip faulty sources.
            The message names all of them; the other videos are cut, and `train.jsonl` is kept.
    """
    folder = Path(order.folder)
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.glob(f".*{atomic.TEMPORARY_SUFFIX}"):  # leftovers of a killed job
        path.unlink(missing_ok=True)
    counts: Counter[str] = Counter()
    sources: dict[str, list[Any]] = {}
    rows: dict[str, dict[str, Any]] = {}
    faults = {name: list(lines) for name, lines in order.faults.items() if lines}
    began = time.time()
    groups: dict[tuple[str, str], list[ClipFile]] = {}
    for file in order.files:
        groups.setdefault((file.dataset, file.item.image), []).append(file)
    pool = ThreadPoolExecutor(threads)
    with ExitStack() as stack:
        stack.callback(pool.shutdown, cancel_futures=True)
        readers = stack.enter_context(Readers())
        progress = Progress(total=len(order.files), desc=f"clips of {order.run}", unit="clip")
        stack.enter_context(progress)
        done = pool.map(partial(_cut_source, order, readers), groups.values())
        for (dataset, video), result in zip(groups, done, strict=True):
            files = groups[dataset, video]
            progress.update(len(files))
            if isinstance(result, SourceError):
                say(f"faulty: {result}")
                faults.setdefault(dataset, []).append(str(result))
                continue
            sources[video], written, made = result
            counts.update(written=written, kept=len(files) - written)
            rows |= made
    Receipt(sources, {}, [], dict(counts), time.time() - began).write(Path(order.receipt))
    counts["faulty"] = sum(map(len, faults.values()))
    fatal = [name for name in faults if order.datasets[name].on_error != "skip"]
    lines = [line for name in fatal for line in faults[name]]
    if not lines:
        counts["removed"] = _finish(order, rows)
    summary = ", ".join(f"{counts[state]} {state}" for state in ("written", "kept", "removed"))
    prefix = "" if counts["written"] or counts["removed"] or lines else "nothing to do: "
    say(f"{folder}: {prefix}{summary}, {counts['faulty']} sources faulty")
    if lines:
        what = f"{len(lines)} faulty: {joined(lines, say)}"
        hint = "the others are done and kept; fix these, or set on_error: skip"
        raise SourceError(what, where=f"clips_{order.run}", hint=hint)
    return counts


def _cut_source(
    order: ClipsOrder, readers: Readers, files: Sequence[ClipFile]
) -> tuple[list[Any], int, dict[str, dict[str, Any]]] | SourceError:
    """Write the stale files of one video.

    Returns:
        (stat and digest of the video, number of files written, name -> row of the list), or the
        error if the video or a caption is faulty.
    """
    try:
        rows = {file.name: order.row(file) for file in files}
        source = files[0].source()
        stale = [file for file in files if order.differences(file, source[-1])]
        cuts = []
        for file in stale:
            indices = order.indices(file)
            cuts.append((scaling.Cut(indices, 0, len(indices), [(file.size, file.size)]), file))
        cuts.sort(key=lambda pair: pair[0].reach)  # the order that `scaling.cut` needs
        item, settings = files[0].item, order.datasets[files[0].dataset]
        assert item.media is not None
        film = Film(item.image, item.media.rotation, settings.max_image_pixels)
        clips = readers.iterate(film.path, scaling.cut, film, [clip_cut for clip_cut, _ in cuts])
        for _, file in cuts:
            comment = {KEY: order.key(file, source[-1]), **order.origin(file)}
            (clip,) = next(clips).values()
            _write(order.path(file), clip, comment)
    except SourceError as error:
        return error
    return source, len(stale), rows


def _write(path: Path, clip: NDArray[np.uint8], comment: Mapping[str, object]) -> None:
    """Write an npz file under a temporary name, and rename it at the end."""
    import numpy as np

    with atomic.replacing(path) as temporary:
        with temporary.open("wb") as file:
            np.savez(file, frames=clip)
        with zipfile.ZipFile(temporary, "a") as archive:
            archive.comment = json.dumps(dict(comment), separators=(",", ":")).encode()


def _finish(order: ClipsOrder, rows: Mapping[str, Mapping[str, Any]]) -> int:
    """Write the list, then remove files of clips that are not in it; return their number.

    The list comes first, so that it never names a removed file.
    """
    folder, listed = Path(order.folder), [file.name for file in order.files if file.name in rows]
    if not order.is_listed(lines := lines_of(rows[name] for name in listed)):
        atomic.write(folder / LIST, lines)
    gone = [path for path in folder.glob("*.npz") if path.stem not in rows and _is_ours(path)]
    for path in gone:
        path.unlink()
    return len(gone)


def _is_ours(path: Path) -> bool:
    try:
        return KEY in npz.read_metadata(path)
    except (OSError, ValueError):
        return False
