"""Make items from the listing of a folder: pair images with captions, and report faults."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator
from operator import itemgetter
from pathlib import Path
from posixpath import splitext
from unicodedata import normalize

from latentmake.base.digest import SourceStat
from latentmake.base.errors import DatasetError, SourceError
from latentmake.config.datasets import Dataset
from latentmake.data.item import (
    CAPTION,
    IMAGE,
    LAYER,
    NO_FILE,
    TAGS,
    Entry,
    Fault,
    File,
    Item,
    Scan,
    missing_file,
    unusable_name,
)
from latentmake.data.unread import left_out, unread
from latentmake.formats.endings import IMAGE_EXTENSIONS, PREVIEWS, VIDEO_EXTENSIONS, unread_fault
from latentmake.geometry.clips import Span

_VIDEOS = tuple(VIDEO_EXTENSIONS)
_REPEATS = re.compile(r"0*([1-9]\d{0,5})_(.*\S)")
_LONGEST_NAME = 100  # characters of a dataset's name


def slug(name: str) -> str:
    """Return a name in the form that the configuration uses: `Michael Gove` -> `michael_gove`."""
    plain = normalize("NFKD", name.replace("ß", "ss")).encode("ascii", "ignore")
    words = re.sub(r"[^a-z0-9]+", "_", plain.decode().lower()).strip("_")
    return words[:_LONGEST_NAME].strip("_") or "dataset"


def kohya(folder: Path) -> tuple[int, str] | None:
    """Return repeats and words of a folder named like `10_sks man`, as kohya's are, else None.

    Source: `extract_dreambooth_params` of sd-scripts' library/config_util.py.
    """
    match = _REPEATS.fullmatch(folder.name)
    return (int(match[1]), match[2]) if match else None


def items(name: str, dataset: Dataset, scanned: Scan) -> tuple[list[Item], list[Fault]]:
    """Pair the images of a listing with their captions.

    Args:
        name: name of the dataset.
        dataset: its section of the configuration.
        scanned: listing of its folder.

    Returns:
        The items, sorted, and the faults of other files.

    Raises:
        DatasetError: the folder holds no image.
    """
    root, kind = scanned.root, "video" if dataset.video else "image"
    extensions = VIDEO_EXTENSIONS if dataset.video else IMAGE_EXTENSIONS
    images: dict[str, list[File]] = {}
    texts: dict[str, dict[str, File]] = {CAPTION: {}, TAGS: {}}
    faulty: dict[str, tuple[str, tuple[str, str]]] = {}  # stem -> path and fault
    faults: set[Fault] = set()
    # Longest ending first, because one may end in another: `.tags.txt` in `.txt`.
    pairs = ((dataset.caption_extension, CAPTION), (dataset.tags_extension, TAGS))
    endings = [(ending, role) for ending, role in pairs if ending]
    endings.sort(key=lambda pair: -len(pair[0]))
    paths = [path for path, *_ in scanned.entries]
    ignored = left_out(dataset, paths)
    for entry in sorted(scanned.entries, key=itemgetter(0)):
        below, *values = entry
        path, stat = f"{root}/{below}", SourceStat(*values)
        stem, dot, extension = below.rpartition(".")
        extension = f"{dot}{extension.lower()}"
        is_image = dot and extension in extensions and not below.endswith(PREVIEWS)
        ending, role = next(filter(lambda pair: below.endswith(pair[0]), endings), ("", ""))
        if below in ignored and stat != NO_FILE:
            ignored.add(stem)
        elif not is_image and not ending:
            faults.update(broken_links(root, [entry], flat=dataset.flat))
            if (problem := unread_fault(extension)) is not None:
                faulty[stem] = path, problem
        elif fault := unusable_name(below):
            shown = repr(below)[1:-1]
            faults.add(Fault(f"{root}/{shown}", shown, fault, "rename it"))
        elif ending:
            texts[role][below.removesuffix(ending)] = File(role, path, stat)
        else:
            images.setdefault(stem, []).append(File(IMAGE, path, stat))
    if not images and not faults:
        hint = f"put {kind}s there ({', '.join(sorted(extensions))})"
        if not dataset.video and any(path.lower().endswith(_VIDEOS) for path in paths):
            hint = "it holds videos: set target_frames, for a model that takes them"
        elif line := unread(dataset, (), paths):
            hint = line
        what = f"the dataset folder {root} holds no {kind}"
        raise DatasetError(what, where=f"datasets.{name}.path", hint=hint)
    made: list[Item] = []
    layers = _layers(images, texts[CAPTION]) if dataset.multiple_target else {}
    span = Span(stride=dataset.sample_stride) if dataset.sample_stride > 1 else None
    for stem, candidates in images.items():
        own = [file for by_stem in texts.values() if (file := by_stem.pop(stem, None))]
        try:
            if len(candidates) > 1:
                others = ", ".join(file.path[len(root) + 1 :] for file in candidates[1:])
                what = f"has the same name as {others}, so their caches would overwrite each other"
                raise SourceError(what, hint="rename or remove one of them")
            layer_files = in_order(stem, layers[stem], "layer") if stem in layers else ()
            made.append(Item(stem, (candidates[0], *own, *layer_files), span=span))
        except SourceError as error:
            faults.add(Fault(candidates[0].path, stem, error.what, error.hint))
    hint = f"add the {kind} it describes, or remove it"
    # macOS writes `ä` as `a` and `¨` (NFD), other systems as one character (NFC).
    composed = {
        normalize("NFC", stem): files[0].path
        for stem, files in images.items()
        if not stem.isascii()
    }
    for role, noun in ((CAPTION, "caption"), (TAGS, "file of tags")):
        problem = f"is a {noun} without {'a video' if dataset.video else 'an image'}", hint
        for stem, file in texts[role].items():
            if stem in faulty or stem not in ignored:
                path, (what, how) = faulty.get(stem, (file.path, problem))
                if stem not in faulty and (image := composed.get(normalize("NFC", stem))):
                    what = f"looks named like {image}, but in other Unicode characters (NFC, NFD)"
                    how = "rename both: type their names again"
                faults.add(Fault(path, stem, what, how))
    return sorted(made), sorted(faults)


def broken_links(root: str, entries: Iterable[Entry], *, flat: bool) -> Iterator[Fault]:
    """Yield a fault for each broken link, because it may stand for a folder of items.

    Args:
        root: folder of the listing.
        entries: files of the listing.
        flat: whether sub-folders are ignored; a broken link is then no fault.
    """
    for below, size, *_ in () if flat else entries:
        path = f"{root}/{below}"
        if size == NO_FILE.size and Path(path).is_symlink():
            shown = repr(below)[1:-1] if unusable_name(f"{below}.") else below
            hint = "mount its drive, or correct or remove the link"
            yield Fault(f"{root}/{shown}", f"{shown}/", missing_file(path), hint)


# -- files named after an item, with a suffix: controls and layers --------------------------------


def owner(path: str, stems: Collection[str], ends: str) -> str | None:
    """Return the longest stem that a path begins with, followed by a character of `ends`.

    `cat_2.png` belongs to `cat_2`; it belongs to `cat` only if there is no item `cat_2`.
    """
    folder = path.rfind("/") + 1
    positions = (at for at in range(len(path) - 1, folder, -1) if path[at] in ends)
    return next((path[:at] for at in positions if path[:at] in stems), None)


def in_order(stem: str, files: Iterable[File], what: str) -> list[File]:
    """Sort files that are named after an item by the numbers at the ends of their names.

    A file with exactly the item's name comes first.

    Args:
        stem: stem of the item.
        files: its controls or layers.
        what: `control` or `layer`, for messages.

    Raises:
        SourceError: a name does not end in a number, or two names have the same number. The error
            has no `where`.
    """
    numbered: dict[int, File] = {}
    name = stem.rpartition("/")[2]
    for file in sorted(files):
        own = splitext(file.path.rpartition("/")[2])[0]
        digits = own.rpartition("_")[2]
        if own != name and not (digits.isascii() and digits.isdecimal()):
            fault = f"has a {what} {file.path}, whose name does not end in a number"
            raise SourceError(fault, hint=f"name it {name}_0 or likewise, or move it away")
        first = numbered.setdefault(-1 if own == name else int(digits), file)
        if first is not file:
            fault = f"has two {what}s of the same number, {first.path} and {file.path}"
            raise SourceError(fault, hint="rename or remove one of them")
    return [numbered[number] for number in sorted(numbered)]


def _layers(images: dict[str, list[File]], captions: Collection[str]) -> dict[str, list[File]]:
    """Remove the layers from a dataset's images, and return them by the stems of their items.

    A layer is an image without a caption, named after an image with a caption: `cat_1.png`.
    """
    described = images.keys() & captions
    layers: dict[str, list[File]] = {}
    for stem in [*images]:
        if stem not in described and (item := owner(stem, described, "_")) is not None:
            files = (file._replace(role=LAYER) for file in images.pop(stem))
            layers.setdefault(item, []).extend(files)
    return layers
