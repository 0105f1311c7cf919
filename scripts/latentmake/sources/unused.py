"""A line about the files of a dataset's folder that nothing uses."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from os.path import normpath
from posixpath import splitext

from latentmake.config.datasets import Dataset
from latentmake.errors import shortened
from latentmake.files.media import VIDEO_EXTENSIONS
from latentmake.sources.item import IMAGE_EXTENSIONS, Scan

_NAMED = 3  # files
# Caches that trainers, and `export_{run}`, write beside images.
_CACHES = (".npz", ".safetensors", ".img_sdvae", ".img_sdxl", ".txt_t5cache", ".txt_clipl")


def unused_note(datasets: Iterable[Dataset], scanned: Scan) -> str:
    """Return the number of unused files of a folder, with the names of some; "" if none is.

    A file of each ending is named before a second one of any, the rarest endings first.

    Args:
        datasets: all that read the folder.
        scanned: its listing.
    """
    if scanned.rows is not None:
        return ""
    used, lists = {*_CACHES}, set()
    for each in datasets:
        used |= VIDEO_EXTENSIONS if each.video else IMAGE_EXTENSIONS
        used |= {ending.lower() for ending in (each.caption_extension, each.tags_extension or "")}
        lists.add(normpath(each.metadata_file or ""))
    endings = tuple(used - {""})
    unused: dict[str, list[str]] = defaultdict(list)
    for path, size, *_ in scanned.entries:
        lower = path.lower()
        if size < 0 or lower.endswith(endings):
            continue
        if normpath(f"{scanned.root}/{path}") not in lists:
            unused[splitext(lower)[1]].append(path)
    count = sum(map(len, unused.values()))
    if not count:
        return ""
    ranked = sorted(
        (rank, len(paths), path)
        for paths in unused.values()
        for rank, path in enumerate(sorted(paths))
    )
    names = [shortened(" ".join(path.split())) for _, _, path in ranked[:_NAMED]]
    more = ", ..." if count > len(names) else ""
    be = "file is" if count == 1 else "files are"
    return f"{count} {be} not used: {', '.join(names)}{more}"
