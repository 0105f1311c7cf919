"""Files of a dataset's folder that no item is made of: masks, and what is told of all of them.

They are counted by their endings in one line, so that no picture is left out unseen.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from posixpath import abspath, basename, splitext

from latentmake.config.datasets import Dataset
from latentmake.data.item import IMAGE_EXTENSIONS, PREVIEWS
from latentmake.files.media import RENAMED, UNREAD_IMAGES, UNREAD_VIDEOS, VIDEO_EXTENSIONS

_CAPTIONS = frozenset({".txt", ".text", ".caption", ".captions", ".cap", ".tags"})
_LISTS = frozenset({".json", ".jsonl", ".csv", ".tsv", ".parquet"})
_SHOWN = 3  # endings or names of one kind
_LONGEST = 40  # characters of a name that is shown
# Masks, and the pictures of conditions, of OneTrainer.
_LABEL = re.compile(r"-(?:mask|cond)label\.[^./]+$", re.IGNORECASE)
_FOLDER = re.compile(r"(?:^|(?<=/))masks?/", re.IGNORECASE)


def masks(paths: Collection[str], endings: Iterable[str]) -> set[str]:
    """Return the pictures of a listing that are masks of others, as other trainers name them.

    `a-masklabel.png` is one wherever it lies; `masks/a.png` is one of `a.png`, unless it has a
    caption of its own. `endings` are those of captions.
    """
    named = [path for path in paths if "mask" in path.lower() or "-condlabel" in path.lower()]
    found = {path for path in named if _LABEL.search(path) and _is_picture(path)}
    if likely := [path for path in named if in_masks(path) and _is_picture(path)]:
        names, captions = {*map(_stem, filter(_is_picture, paths))}, {*paths}
        for path in likely:
            own = any(f"{_stem(path)}{each}" in captions for each in endings)
            if _FOLDER.sub("", _stem(path)) in names and not own:
                found.add(path)
    return found


def left_out(settings: Dataset, paths: Collection[str]) -> set[str]:
    """Return the files that are no items by design: masks, and videos beside images or likewise."""
    other = tuple(IMAGE_EXTENSIONS if settings.video else VIDEO_EXTENSIONS)
    return masks(paths, _endings([settings])) | {x for x in paths if x.lower().endswith(other)}


def _endings(several: Iterable[Dataset]) -> tuple[str, ...]:
    return tuple(x for y in several for x in (y.caption_extension, y.tags_extension) if x)


def in_masks(path: str) -> bool:
    """Whether a file lies in a folder of masks, so that other files decide whether it is one."""
    return _FOLDER.search(path) is not None


def unread(settings: Dataset, others: Sequence[Dataset], paths: Collection[str]) -> str:
    """Return a sentence on the files of a folder that are left out; "" where there is none.

    Args:
        settings: of the dataset.
        others: further datasets of the same folder.
        paths: of its files, below the folder.
    """
    several, root = (settings, *others), abspath(settings.path)
    endings = _endings(several)
    listed = {abspath(each.metadata_file) for each in several if each.metadata_file}
    kinds = {each.video for each in several}
    hidden = masks(paths, endings)
    own = VIDEO_EXTENSIONS if settings.video else IMAGE_EXTENSIONS
    usual = (*own, *endings)  # of most files, which are passed over fast
    if not (odd := [x for x in paths if x in hidden or not x.endswith(usual)]):
        return ""
    there = {*paths}
    stems = {_stem(path) for path in paths if _ending(path).lower() in own}
    found: dict[str, Counter[str]] = {}
    for path in sorted(odd):
        stem, ending = _stem(path), _ending(path)
        kind, label = ending.lower(), ending
        # Its caption makes it a faulty item, unless there is no other.
        alone = bool(stems) and stem not in stems
        faulty = alone and any(f"{stem}{each}" in there for each in endings)
        if path in hidden:
            label = path[path.rindex("-") :] if _LABEL.search(path) else f"*{ending} in masks/"
            hint = "masks, which are not used"
        elif path.endswith((*PREVIEWS, *endings)):
            continue
        elif kind in VIDEO_EXTENSIONS or kind in IMAGE_EXTENSIONS:
            if (kind in VIDEO_EXTENSIONS) in kinds:
                continue
            hint = "images" if settings.video else "videos"
        elif kind in RENAMED and not faulty:
            hint = f"rename to {RENAMED[kind]}"
        elif kind in UNREAD_IMAGES and not faulty:
            hint = "convert to PNG or JPEG"
        elif kind in UNREAD_VIDEOS and not faulty:
            hint = "convert to MP4"
        elif kind in _CAPTIONS and stem in stems:
            hint = "captions: see caption_extension"
        elif kind in _LISTS and f"{root}/{path}" not in listed:
            is_own = stem in stems or _stem(stem) in stems
            label = ending if is_own or len(basename(path)) > _LONGEST else basename(path)
            hint = "captions: see metadata_file"
        else:
            continue
        found.setdefault(hint, Counter())[label] += 1
    total = sum(each.total() for each in found.values())
    told = ", ".join(f"{_labels(each)} ({hint})" for hint, each in found.items())
    if total == 1:
        return f"1 file is not read: {told}"
    return f"{total} files are not read: {told}" if total else ""


def _labels(counts: Counter[str]) -> str:
    """Return the most frequent endings with their numbers, and names of files."""
    most = counts.most_common(_SHOWN)
    shown = (label if label[0] not in ".-*" else f"{number} {label}" for label, number in most)
    rest = counts.total() - sum(number for _, number in most)
    return ", ".join(shown) + (f" and {rest} more" if rest else "")


def _stem(path: str) -> str:
    return splitext(path)[0]


def _ending(path: str) -> str:
    return splitext(path)[1]


def _is_picture(path: str) -> bool:
    return _ending(path).lower() in IMAGE_EXTENSIONS
