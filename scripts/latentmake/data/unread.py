"""Files in a dataset's folder that belong to no item, such as masks.

One line counts them by their endings, so that the user sees every picture that is left out.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from posixpath import abspath, basename, splitext

from latentmake.config.datasets import Dataset
from latentmake.formats.endings import IMAGE_EXTENSIONS, PREVIEWS, UNREAD, VIDEO_EXTENSIONS

_CAPTIONS = frozenset({".txt", ".text", ".caption", ".captions", ".cap", ".tags"})
_LISTS = frozenset({".json", ".jsonl", ".csv", ".tsv", ".parquet"})
_MOST_SHOWN = 3  # most endings or names that the line has for one kind
_LONGEST_NAME = 40  # characters; longer names are shown by their endings
# Names that OneTrainer gives to masks and to condition images.
_LABEL = re.compile(r"-(?:mask|cond)label\.[^./]+$", re.IGNORECASE)
_FOLDER = re.compile(r"(?:^|(?<=/))masks?/", re.IGNORECASE)


def masks(paths: Collection[str], endings: Iterable[str]) -> set[str]:
    """Return the images that other trainers would read as masks of other images.

    `a-masklabel.png` is always a mask. `masks/a.png` is the mask of `a.png`, unless it has a
    caption of its own.

    Args:
        paths: files of a folder.
        endings: endings of caption files.
    """
    named = [path for path in paths if "mask" in path.lower() or "-condlabel" in path.lower()]
    masked = {path for path in named if _LABEL.search(path) and _is_picture(path)}
    if likely := [path for path in named if in_masks(path) and _is_picture(path)]:
        names, captions = {*map(_stem, filter(_is_picture, paths))}, {*paths}
        for path in likely:
            own = any(f"{_stem(path)}{ending}" in captions for ending in endings)
            if _FOLDER.sub("", _stem(path)) in names and not own:
                masked.add(path)
    return masked


def left_out(settings: Dataset, paths: Collection[str]) -> set[str]:
    """Return the files that are ignored by design: masks, videos beside images or vice versa."""
    other = tuple(IMAGE_EXTENSIONS if settings.video else VIDEO_EXTENSIONS)
    return masks(paths, _endings([settings])) | {
        path for path in paths if path.lower().endswith(other)
    }


def _endings(sections: Iterable[Dataset]) -> tuple[str, ...]:
    pairs = ((section.caption_extension, section.tags_extension) for section in sections)
    return tuple(ending for pair in pairs for ending in pair if ending)


def in_masks(path: str) -> bool:
    """Whether a file lies in a folder of masks, so that other files decide whether it is one."""
    return _FOLDER.search(path) is not None


def unread(settings: Dataset, others: Sequence[Dataset], paths: Collection[str]) -> str:
    """Return a sentence about the files of a folder that are not read; "" if there are none.

    Args:
        settings: section of the dataset in the configuration.
        others: sections of further datasets with the same folder.
        paths: files of the folder, as paths below it.
    """
    sections, root = (settings, *others), abspath(settings.path)
    endings = _endings(sections)
    listed = {abspath(section.metadata_file) for section in sections if section.metadata_file}
    kinds = {section.video for section in sections}
    hidden = masks(paths, endings)
    own = VIDEO_EXTENSIONS if settings.video else IMAGE_EXTENSIONS
    usual = (*own, *endings)  # one `endswith` skips most files fast
    if not (unusual := [path for path in paths if path in hidden or not path.endswith(usual)]):
        return ""
    existing = {*paths}
    stems = {_stem(path) for path in paths if splitext(path)[1].lower() in own}
    counts: dict[str, Counter[str]] = {}
    for path in sorted(unusual):
        stem, ending = splitext(path)
        kind, label = ending.lower(), ending
        # With a caption, it is reported as a faulty item, unless the folder has no items at all.
        has_caption = any(f"{stem}{ending}" in existing for ending in endings)
        faulty = bool(stems) and stem not in stems and has_caption
        if path in hidden:
            label = path[path.rindex("-") :] if _LABEL.search(path) else f"*{ending} in masks/"
            hint = "masks, which are not used"
        elif path.endswith((*PREVIEWS, *endings)):
            continue
        elif kind in VIDEO_EXTENSIONS or kind in IMAGE_EXTENSIONS:
            if (kind in VIDEO_EXTENSIONS) in kinds:
                continue
            hint = "images" if settings.video else "videos"
        elif kind in UNREAD and not faulty:
            hint = UNREAD[kind]
        elif kind in _CAPTIONS and stem in stems:
            hint = "captions: see caption_extension"
        elif kind in _LISTS and f"{root}/{path}" not in listed:
            is_own = stem in stems or _stem(stem) in stems
            label = ending if is_own or len(basename(path)) > _LONGEST_NAME else basename(path)
            hint = "captions: see metadata_file"
        else:
            continue
        counts.setdefault(hint, Counter())[label] += 1
    total = sum(count.total() for count in counts.values())
    parts = ", ".join(f"{_labels(count)} ({hint})" for hint, count in counts.items())
    if total == 1:
        return f"1 file is not read: {parts}"
    return f"{total} files are not read: {parts}" if total else ""


def _labels(counts: Counter[str]) -> str:
    """Return the most frequent endings with their counts, and names of files."""
    most = counts.most_common(_MOST_SHOWN)
    shown = (label if label[0] not in ".-*" else f"{number} {label}" for label, number in most)
    rest = counts.total() - sum(number for _, number in most)
    return ", ".join(shown) + (f" and {rest} more" if rest else "")


def _stem(path: str) -> str:
    return splitext(path)[0]


def _is_picture(path: str) -> bool:
    return splitext(path)[1].lower() in IMAGE_EXTENSIONS
