"""Items of a dataset: pair the images of a folder with their captions, and name what is wrong.

Two steps, so that a folder in which nothing changed costs its listing alone: `scan` stats every
file and digests what it saw; `items` makes items of a scan.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path, PurePosixPath
from stat import S_ISREG

from latentmake import digest
from latentmake.config.datasets import Dataset
from latentmake.errors import DatasetError, SourceError
from latentmake.files.paths import is_remote, normalized
from latentmake.index.memo import SourceStat
from latentmake.sources.item import (
    CAPTION,
    IMAGE,
    IMAGE_EXTENSIONS,
    LAYER,
    TAGS,
    Fault,
    File,
    Item,
    Scan,
)

_NOWHERE, _SPECIAL, _FOLDER = -1, -2, -3  # in the place of a size
_ODD = {
    _NOWHERE: ("is a link that leads nowhere", "repair or remove the link"),
    _SPECIAL: ("is a pipe, a socket or a device and no file", "remove it, or put a file there"),
    _FOLDER: ("is a folder without any file, though it has a file's name", "rename or remove it"),
}

# Previews of latents, which ai-training's scripts write beside images (--writepreview).
_PREVIEWS = (".img_sdvae.webp", ".img_sdxl.webp")


_Entry = tuple[str, SourceStat]
"""Path and stat."""


def scan(name: str, dataset: Dataset, key: str = "path") -> Scan:
    """List the folder that a dataset's `path` or `control_directory` names.

    Sub-folders are listed unless the dataset is `flat`; hidden files and folders are skipped.

    Raises:
        DatasetError: it is missing, no folder, or cannot be read.
    """
    root, where = normalized(getattr(dataset, key)), f"datasets.{name}.{key}"
    if is_remote(root):
        from latentmake.sources import s3

        entries = s3.listing(root, where)
        if dataset.flat:
            entries = [entry for entry in entries if "/" not in entry[0]]
    elif Path(root).is_dir():
        try:
            entries = _entries(root, flat=dataset.flat)
        except OSError as error:
            what = f"{error.filename} cannot be read ({error.strerror})"
            hint = "give your user permission to read it"
            raise DatasetError(what, where=where, hint=hint) from None
    else:
        what = "is not a folder" if Path(root).exists() else "does not exist"
        what = f"the dataset folder {root} {what}"
        raise DatasetError(what, where=where, hint="correct the path or create it")
    return Scan(root, entries, digest.of_entries(entries))


def _entries(root: str, *, flat: bool) -> list[tuple[str, int, int, int, int]]:
    entries: list[tuple[str, int, int, int, int]] = []
    start = Path(root).stat()
    seen = {(start.st_dev, start.st_ino)}
    pending = [("", root)]
    links: list[tuple[str, str]] = []  # after all folders, so that these keep their own names
    while pending or links:
        if pending:
            prefix, folder = pending.pop()
        else:
            prefix, folder = links.pop()
            there = Path(folder).stat()
            if (there.st_dev, there.st_ino) in seen:  # links may lead in circles
                continue
            seen.add((there.st_dev, there.st_ino))
        # Plain tuples and little else: this loop is what doing nothing costs.
        with os.scandir(folder) as found:
            for entry in found:
                file = entry.name
                if file[0] == ".":
                    continue
                path = prefix + file
                try:
                    stat = entry.stat()
                except OSError as error:
                    if error.errno not in (errno.ENOENT, errno.ELOOP):
                        raise
                    entries.append((path, _NOWHERE, 0, 0, 0))
                    continue
                if S_ISREG(stat.st_mode):
                    changed = stat.st_ctime_ns
                    entries.append((path, stat.st_size, stat.st_mtime_ns, changed, stat.st_ino))
                elif not entry.is_dir():  # reading a pipe would never end
                    entries.append((path, _SPECIAL, 0, 0, 0))
                else:
                    if "." in file:
                        entries.append((path, _FOLDER, 0, 0, 0))
                    if flat:
                        continue
                    if entry.is_symlink():
                        links.append((f"{path}/", entry.path))
                        links.sort(reverse=True)
                    elif (stat.st_dev, stat.st_ino) not in seen:
                        seen.add((stat.st_dev, stat.st_ino))
                        pending.append((f"{path}/", entry.path))
    return entries


def items(name: str, dataset: Dataset, scanned: Scan) -> tuple[list[Item], list[Fault]]:
    """Pair the images of a scan with their captions: items by stem, and faults of other files.

    Raises:
        DatasetError: there is no image at all.
    """
    from latentmake.files.media import UNREAD_FORMATS, VIDEO_EXTENSIONS, unread_format
    from latentmake.geometry.clips import Span
    from latentmake.sources.names import unusable_name
    from latentmake.sources.numbered import in_order

    root = scanned.root
    extensions = VIDEO_EXTENSIONS if dataset.video else IMAGE_EXTENSIONS
    kind = "video" if dataset.video else "image"
    span = Span(stride=dataset.sample_stride) if dataset.sample_stride > 1 else None
    images: dict[str, list[_Entry]] = {}
    texts: dict[str, dict[str, _Entry]] = {
        ending: {} for ending in (dataset.caption_extension, dataset.tags_extension) if ending
    }
    # One ending may end in another: `.tags.txt` in `.txt`.
    endings = sorted(texts, key=len, reverse=True)
    layers: dict[str, list[_Entry]] = {}
    other_case: dict[tuple[str, str], str] = {}
    unread: dict[str, tuple[str, str]] = {}  # path and format by stem
    faults: list[Fault] = []
    full = _folders_with_files(scanned, (*extensions, *map(str.lower, endings)))
    for below, *values in sorted(scanned.entries):
        if below in full:
            continue
        path, stat = f"{root}/{below}", SourceStat(*values)
        stem, dot, extension = below.rpartition(".")
        is_image = f".{extension.lower()}" in extensions and not below.endswith(_PREVIEWS)
        ending = next(filter(below.endswith, endings), None)
        if not dot or not (is_image or ending):
            if kind == "image" and (other := UNREAD_FORMATS.get(f".{extension.lower()}")):
                unread[stem] = path, other
            for each in endings:
                if stat.size >= 0 and below.lower().endswith(each.lower()):
                    other_case[each, below[: -len(each)]] = path
        elif fault := unusable_name(below):
            shown = below.encode("utf-8", "backslashreplace").decode()
            shown = shown.replace("\n", "\\n").replace("\r", "\\r")
            faults.append(Fault(f"{root}/{shown}", shown, fault, "rename it"))
        elif ending:
            texts[ending][below[: -len(ending)]] = path, stat
        else:
            images.setdefault(stem, []).append((path, stat))
    if not images and not faults:
        raise DatasetError(
            f"the dataset folder {root} holds no {kind}",
            where=f"datasets.{name}.path",
            hint=_no_images(kind, extensions, scanned),
        )
    if dataset.multiple_target:
        layers = _layers(images, texts[dataset.caption_extension], root)
    found: list[Item] = []
    for stem, candidates in images.items():
        files = [each for each in candidates if each[1].size != _FOLDER] or candidates
        own = {of: entry for of, each in texts.items() if (entry := each.pop(stem, None))}
        try:
            further = in_order(stem.rpartition("/")[2], layers.get(stem, ()), "layer")
        except SourceError as error:
            faults.append(Fault(files[0][0], stem, error.what, error.hint))
            continue
        if wrong := _fault(dataset, root, stem, files, own, other_case, further):
            faults.append(wrong)
        else:
            roles = {dataset.caption_extension: CAPTION, dataset.tags_extension: TAGS}
            beside = [File(roles[of], *own[of]) for of in texts if of in own]
            behind = [File(LAYER, *each) for each in further]
            item = Item(stem, (File(IMAGE, *files[0]), *beside, *behind), span=span)
            if item.caption is None and dataset.class_tokens is not None:
                item = item._replace(texts=[dataset.class_tokens])
            found.append(item)
    for stem, (path, other) in unread.items():
        left_over = [each.pop(stem, None) for each in texts.values()]
        if any(left_over):
            faults.append(Fault(path, stem, *unread_format(other)))
    article = "an" if kind == "image" else "a"
    for ending, left in texts.items():
        one = "a caption" if ending == dataset.caption_extension else "a file of tags"
        hint = f"add the {kind} it describes, or remove it"
        for stem, (path, stat) in left.items():
            if stat.size != _FOLDER:
                faults.append(Fault(path, stem, f"is {one} without {article} {kind}", hint))
    return sorted(found), sorted(faults)


def _layers(
    images: dict[str, list[_Entry]],
    captions: Collection[str],
    root: str,
) -> dict[str, list[_Entry]]:
    """Take the layers out of the images of a dataset, and return them by their items.

    They are those without a caption whose names continue that of an image with a caption.
    """
    from latentmake.sources.numbered import Names

    own = (files[0][0] for stem, files in images.items() if stem in captions)
    names = Names(path.removeprefix(f"{root}/") for path in own)
    layers: dict[str, list[_Entry]] = {}
    for stem in [stem for stem in images if stem not in captions]:
        if (owner := names.owner(stem, "_")) is not None:
            layers.setdefault(owner, []).extend(images.pop(stem))
    return layers


def _fault(
    dataset: Dataset,
    root: str,
    stem: str,
    files: Sequence[_Entry],
    texts: Mapping[str, _Entry],
    other_case: Mapping[tuple[str, str], str],
    layers: Sequence[_Entry],
) -> Fault | None:
    """Return what is wrong with an item, by its images, its layers, and its texts by their endings.

    `other_case` names files whose endings differ from those in upper and lower case alone.
    """
    where = files[0][0]
    if len(files) > 1:
        others = ", ".join(path[len(root) + 1 :] for path, _ in files[1:])
        what = f"has the same name as {others}, so their cache files would overwrite each other"
        return Fault(where, stem, what, "rename or remove one of them")
    for path, stat in (files[0], *texts.values(), *layers):
        if stat.size < 0:
            return Fault(path, stem, *_ODD[stat.size])
    for key in ("caption_extension", "tags_extension"):
        ending = getattr(dataset, key)
        if ending not in texts and (other := other_case.get((ending, stem))):
            what = f"differs from {key} `{ending}` in upper and lower case, so it is not read"
            hint = f"rename it to {stem}{ending}, or set {key}: {other[-len(ending) :]}"
            return Fault(other, stem, what, hint)
    ending = dataset.caption_extension
    demanded = dataset.missing_caption == "error" and dataset.class_tokens is None
    if ending not in texts and demanded and not dataset.composed:
        hint = f"write {root}/{stem}{ending}, or set `class_tokens` to a caption for all of them"
        return Fault(where, stem, "has no caption file", hint)
    return None


def _folders_with_files(scanned: Scan, endings: tuple[str, ...]) -> set[str]:
    """Return the folders named like files of some endings in which files lie, however deep."""
    named = {
        path
        for path, size, *_ in scanned.entries
        if size == _FOLDER and path.lower().endswith(endings)
    }
    return {
        str(folder)
        for path, size, *_ in (scanned.entries if named else ())
        if size != _FOLDER
        for folder in PurePosixPath(path).parents
        if str(folder) in named
    }


def _no_images(kind: str, extensions: frozenset[str], scanned: Scan) -> str:
    from latentmake.files.media import UNREAD_FORMATS, VIDEO_EXTENSIONS

    endings = {f".{path.rpartition('.')[2].lower()}" for path, *_ in scanned.entries}
    if kind == "image" and endings & VIDEO_EXTENSIONS:
        return "it holds videos: set target_frames, for a model that takes them"
    if kind == "image" and (found := endings & UNREAD_FORMATS.keys()):
        return f"convert its {UNREAD_FORMATS[min(found)]} images to PNG or JPEG"
    return f"put {kind}s there ({', '.join(sorted(extensions))})"
