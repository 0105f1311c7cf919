"""Make the texts of items from caption files, tags, and rows of a list or a metadata file.

A file is read only if its text is changed before it is encoded. It is read once, because the memo
keeps its text.

The steps and their order are those of sd-scripts (`process_caption` in its library/train_util.py).
sd-scripts repeats them in every training step; here, each item gets a fixed number of variants. The
random choices of a variant depend only on the seed, the item's name and the variant's number, so
they are the same on every machine and do not depend on other items.
"""

from __future__ import annotations

import hashlib
import os
import random
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from posixpath import splitext

from latentmake.base.errors import SourceError
from latentmake.base.progress import Progress
from latentmake.config.datasets import Captions, Dataset
from latentmake.data.captions_made import processed
from latentmake.data.contents import EMPTY, Contents, caption_of, newlines
from latentmake.data.item import (
    CAPTION,
    MADE,
    NAMED,
    NO_FILE,
    TAGS,
    Fault,
    File,
    Item,
    Row,
    Scan,
    fault_of,
    missing_file,
)
from latentmake.data.memo import Memo

_WILDCARD = re.compile(r"\{([^{}]*)\}")
_ATTEMPTS = 16  # attempts to draw a variant that differs from the earlier ones
MARKER = "|||"  # the `keep_tokens_separator` that most captions for sd-scripts use
_MOST_NAMES = 3  # most files that a line names
_PRIVATE = range(0xE000, 0xF900)  # Unicode's private use area: stand-ins for literal braces


_Draw = Callable[[], float]
"""Generator of the random numbers, from 0 to 1, for one attempt to draw a variant."""


def _generator(*parts: object) -> _Draw:
    # Only for `random()` does Python promise the same numbers in every version; `choice` and
    # `shuffle` may change.
    named = "\n".join(map(str, parts)).encode("utf-8", "surrogatepass")
    return random.Random(hashlib.sha256(named).digest()).random  # noqa: S311 -- no secret


def _choice(draw: _Draw, several: Sequence[str]) -> str:
    return several[int(draw() * len(several))]


def clean(text: str) -> str:
    """Return a text without empty lines and the space around each line."""
    lines = (line.strip() for line in newlines(text).split("\n"))
    return "\n".join(line for line in lines if line)


def variants(
    stem: str, caption: str, tags: str, settings: Captions, *, like_sdscripts: bool = False
) -> list[str]:
    """Return the variants of an item's text.

    Variants differ if there are enough different texts, except for empty captions, which occur as
    often as the dropout rate says.

    Args:
        stem: stem of the item, which seeds the random choices.
        caption: caption, or ""; clean lines if `enable_wildcard` takes one of them.
        tags: tags, or ""; clean lines likewise.
        settings: the dataset's `captions`.
        like_sdscripts: whether texts are the same as in sd-scripts. Without wildcards, only the
            first line counts. Prefix and suffix are added to the complete caption before wildcards
            take one line of it. Tags are joined by `, ` even if another separator was set.
            `keep_tokens_separator` stays in texts that are not shuffled.

    Raises:
        SourceError: braces do not match, or a wildcard is empty. The error has no `where`.
    """
    if not settings.random:  # the result does not depend on the random numbers
        return [_variant(caption, tags, settings, random.random, like_sdscripts)]
    if settings.enable_wildcard:
        _check_braces(caption)
        _check_braces(tags)
    texts: list[str] = []
    for number in range(settings.variants):
        rate = settings.caption_dropout_rate
        text, dropped = "", rate > 0 and _generator(settings.seed, stem, number)() < rate
        for attempt in range(0 if dropped else _ATTEMPTS):
            draw = _generator(settings.seed, stem, number, attempt)
            text = _variant(caption, tags, settings, draw, like_sdscripts)
            if text not in texts:
                break
        texts.append(text)
    return texts


def _check_braces(text: str) -> None:
    hint = "write {{ and }} for braces that are no wildcard, or correct it"
    for line in text.split("\n"):
        line = line.replace("{{", "x").replace("}}", "x")
        if any(not inside.replace("|", "").strip() for inside in _WILDCARD.findall(line)):
            raise SourceError("has a wildcard that holds nothing", hint=hint)
        if {"{", "}"} & {*_WILDCARD.sub("", line)}:
            what = "has a { or a } without the other, or a wildcard within a wildcard"
            raise SourceError(what, hint=hint)


def _variant(caption: str, tags: str, settings: Captions, draw: _Draw, like_sdscripts: bool) -> str:
    text, divider = _combined(caption, tags, settings, draw), settings.keep_tokens_separator
    lines = text.split("\n") if settings.enable_wildcard and not like_sdscripts else [text]
    if settings.caption_prefix:
        lines = [f"{settings.caption_prefix} {line}" for line in lines]
    if settings.caption_suffix:
        lines = [f"{line} {settings.caption_suffix}" for line in lines]
    text = "\n".join(lines)
    if settings.enable_wildcard:
        text = _without_wildcards(text, draw)
    elif like_sdscripts:
        text = text.split("\n")[0]
    is_divided = not like_sdscripts and divider is not None and divider in text
    if settings.shuffle_caption or settings.caption_tag_dropout_rate > 0 or is_divided:
        text = _with_tags_drawn(text, settings, draw, like_sdscripts)
    if settings.secondary_separator:
        text = text.replace(settings.secondary_separator, settings.caption_separator)
    for word, other in settings.replacements.items():
        if word == "":
            text = other if isinstance(other, str) else _choice(draw, other)
        elif isinstance(other, str):
            text = text.replace(word, other)
    return text.strip()


def _combined(caption: str, tags: str, settings: Captions, draw: _Draw) -> str:
    """Combine caption and tags into one text, which may have several lines."""
    if not caption or not tags:
        return caption or tags
    separator, how = settings.caption_separator, settings.caption_and_tags
    tags = tags.replace("\n", separator)
    lines = caption.split("\n") if settings.enable_wildcard else [caption]
    if how == "pick":
        return _choice(draw, [caption, tags])
    pairs = ((tags, line) if how == "tags_first" else (line, tags) for line in lines)
    return "\n".join(separator.join(pair) for pair in pairs)


def _without_wildcards(text: str, draw: _Draw) -> str:
    text = _choice(draw, text.split("\n"))
    free = (chr(code) for code in _PRIVATE if chr(code) not in text)
    opening, closing = next(free), next(free)  # stand for literal braces
    text = text.replace("{{", opening).replace("}}", closing)
    text = _WILDCARD.sub(lambda match: _choice(draw, match[1].split("|")), text)
    return text.replace(opening, "{").replace(closing, "}")


def _with_tags_drawn(text: str, settings: Captions, draw: _Draw, like_sdscripts: bool) -> str:
    separator, divider = settings.caption_separator, settings.keep_tokens_separator
    tail: list[str] = []
    if divider and divider in text:
        first, _, rest = text.partition(divider)
        middle, _, last = rest.partition(divider)
        last = last if like_sdscripts else last.replace(divider, separator)
        head, tags, tail = (
            [tag.strip() for tag in part.split(separator) if tag.strip()]
            for part in (first, middle, last)
        )
    else:
        tags = [tag.strip() for tag in text.strip().split(separator)]
        head, tags = tags[: settings.keep_tokens], tags[settings.keep_tokens :]
    if settings.shuffle_caption:
        for end in range(len(tags) - 1, 0, -1):  # Fisher-Yates shuffle
            other = int(draw() * (end + 1))
            tags[end], tags[other] = tags[other], tags[end]
    if settings.caption_tag_dropout_rate > 0:
        tags = [tag for tag in tags if draw() >= settings.caption_tag_dropout_rate]
    return (", " if like_sdscripts else settings.joint).join([*head, *tags, *tail])


# -- warnings -------------------------------------------------------------------------------------


def doubts(settings: Captions, like_sdscripts: bool) -> Iterator[str]:
    """Yield a line for each setting by which texts may lose parts that the user wants."""
    drawn = settings.shuffle_caption or settings.caption_tag_dropout_rate > 0
    divider = settings.keep_tokens_separator
    if drawn and settings.caption_prefix and not settings.keep_tokens and not divider:
        yield "`caption_prefix` is shuffled or dropped like a tag; set `keep_tokens: 1` to keep it"
    if not like_sdscripts:
        return
    if drawn and settings.caption_separator.strip() != ",":
        separator = settings.caption_separator
        yield f"sd-scripts joins tags by `, ` after a shuffle, though `{separator}` separated them"
    if divider and not drawn:
        yield f"sd-scripts leaves `{divider}` in texts that are not shuffled; remove it there"
    for key, place in ("caption_prefix", "before the first"), ("caption_suffix", "behind the last"):
        if settings.enable_wildcard and getattr(settings, key):
            what = f"sd-scripts puts `{key}` only {place} line of a caption"
            yield f"{what}, and `enable_wildcard` takes any line; write it into each line"


def marked(names: Collection[str]) -> Iterator[str]:
    """Yield a warning about texts in which `MARKER` is encoded; `names` are their items."""
    if names:
        many = "1 caption holds" if len(names) == 1 else f"{len(names)} captions hold"
        shown = ", ".join(sorted(names)[:_MOST_NAMES])
        if len(names) > _MOST_NAMES:
            shown += " ..."
        what = f"warning: {many} `{MARKER}`, which is encoded as it stands: {shown}"
        yield f"{what}; remove it, or set `keep_tokens_separator` of the dataset's `captions`"


# -- texts of items -------------------------------------------------------------------------------

_NO_CHANGES = Captions()
_FOLDER = "{folder}"  # in class_tokens, prefix and suffix: the name of the image's folder
_EMPTY_FIRST_LINE = (
    "has an empty first line, and sd-scripts reads only that",
    "remove the empty line, or set empty_caption: allow",
)


def without_caption(items: Iterable[Item], rows: Collection[str]) -> list[Item]:
    """Return the items that have no caption of a person's; `rows` has the stems of listed ones."""
    return [
        item
        for item in items
        if item.stem not in rows and not any(file.role in (CAPTION, TAGS) for file in item.files)
    ]


def with_texts(
    settings: Dataset,
    rows: Mapping[str, Row],
    items: list[Item],
    memo: Memo,
    *,
    like_sdscripts: bool,
) -> tuple[list[Item], list[Fault], list[str]]:
    """Return the items of a dataset with their texts, the faults of the others, and notes.

    An item that awaits a made caption is returned as it is.

    Args:
        settings: the dataset's section of the configuration.
        rows: stem -> row of the list or metadata file.
        items: items without texts.
        memo: index that keeps texts of files.
        like_sdscripts: whether texts are the same as in sd-scripts, see `variants`.
    """
    faults = list[Fault]()
    reads = settings.composed or like_sdscripts or settings.captioner
    text_roles = (CAPTION, TAGS, MADE)
    text_files = (file for item in items for file in item.files if file.role in text_roles)
    contents = Contents(text_files if reads else (), memo, settings)
    complete: list[Item] = []
    for item in Progress(items, desc="captions", unit="item") if reads else items:
        row = rows.get(item.stem)
        files = [file for file in item.files if file.role in text_roles]
        awaits = bool(settings.captioner) and any(
            file.role == MADE and file.stat == NO_FILE for file in files
        )
        try:
            for role, path, stat in item.files:
                if stat == NO_FILE and role != MADE:
                    place = path if item.place is None else f"{item.place}: {path}"
                    raise SourceError(missing_file(path), where=place, hint="repair or remove it")
            if not (files or row or settings.class_tokens) and settings.missing_caption == "error":
                raise SourceError("has no caption file", hint=_hint(settings, item))
            texts = None
            if not awaits:
                texts = _texts(settings, contents, item, row, like_sdscripts=like_sdscripts)
        except SourceError as error:
            error.where = error.where or (files[0].path if files else "")
            faults.append(fault_of(item, error))
        else:
            complete.append(item if texts is None else item._replace(texts=texts))
    if settings.captions is not None and settings.captions.enable_wildcard:
        return complete, faults, []
    several = {stem: row.captions for stem, row in rows.items() if row.captions > 1}
    lists = {item.where: several[item.stem] for item in complete if item.stem in several}
    if not lists:
        return complete, faults, []
    where, number = next(iter(lists.items()))
    more = f", and {len(lists) - 1} more" if len(lists) > 1 else ""
    use = "of which the first is encoded" if like_sdscripts else "which are encoded as one text"
    hint = f"set `captions: {{enable_wildcard: true, variants: {number}}}` to draw among them"
    note = f"{where} has a list of {number} captions, {use}{more}; {hint}"
    return complete, faults, [note]


def _made_texts(contents: Contents, item: Item, settings: Dataset) -> tuple[str, str]:
    """Return the text of an item's first captioner, and those of the others; both may be "".

    Raises:
        SourceError: a made caption is missing or damaged.
    """
    texts = [
        processed(contents.read(file), settings.captioners[name])
        for file, name in zip(item.made, item.captioners, strict=True)
    ]
    return (texts or [""])[0], "\n".join(filter(None, texts[1:]))


def made_text(contents: Contents, item: Item, settings: Dataset) -> str:
    """Return an item's made captions as one text, as a person would write it.

    Raises:
        SourceError: a made caption is missing or damaged.
    """
    captions, made = settings.captions or _NO_CHANGES, _made_texts(contents, item, settings)
    return _combined(*made, captions, _generator(captions.seed, item.stem, 0, 0)).strip()


def texts_with(
    settings: Dataset, item: Item, caption: str, *, like_sdscripts: bool = False
) -> list[str]:
    """Return the texts that would be encoded if an item's caption file had this content.

    Raises:
        SourceError: the caption is empty, or its wildcards are wrong.
    """
    file = File(CAPTION, "the caption", NO_FILE)
    own = item._replace(files=(file, *(file for file in item.files if file.role == TAGS)))
    contents = Contents((), Memo(None), settings)
    contents.learn(file, caption)
    texts = _texts(settings, contents, own, None, like_sdscripts=like_sdscripts)
    return [caption_of(caption, file.path, settings)] if texts is None else texts


def settled(item: Item, part: str, settings: Dataset, *, like_sdscripts: bool) -> Item:
    """Return inputs that await a made caption with their text; others as they are.

    A job calls this once the captioner's job is done. The result is the one that the plan gets when
    the caption exists.

    Args:
        item: the item, or inputs of a text.
        part: name of the part, such as `text.1`, for inputs; "" for all texts of an item.
        settings: the dataset's section of the configuration.
        like_sdscripts: whether texts are the same as in sd-scripts, see `variants`.

    Raises:
        SourceError: the caption is missing, damaged or empty.
    """
    if not item.awaits_caption:
        return item
    contents = Contents((), Memo(None), settings)
    texts = _texts(settings, contents, item, None, like_sdscripts=like_sdscripts) or []
    if not part:
        return item._replace(texts=texts)
    number = int(part.partition("@")[0].partition(".")[2] or 0)
    files = tuple(file for file in item.files if file.role not in (MADE, NAMED))
    return item._replace(files=files, texts=[texts[number]], place=item.where)


def rows_of_items(
    name: str, settings: Dataset, scan: Scan, items: Iterable[Item]
) -> tuple[Mapping[str, Row], list[Fault]]:
    """Return stem -> row of a list or a metadata file, and the faults of a metadata file.

    Rows without an item share one fault.

    A row that names a file that is ignored by design, such as a video beside images, is no fault.
    """
    if settings.metadata_file is None:
        return scan.rows, []
    from latentmake.data.lists import metadata_of
    from latentmake.data.unread import left_out

    file, joint = settings.metadata_file, (settings.captions or _NO_CHANGES).joint
    listed, faults = metadata_of(name, file, scan.root, joint)
    start, here = len(scan.root) + 1, os.path.relpath(scan.root)
    pairs = [(item.stem, below) for item in items for below in (item.stem, item.image[start:])]
    names = {below for _, below in pairs}
    used = {
        stem: key
        for stem, below in pairs
        for key in (f"{here}/{below}", below)  # the last of these keys that is listed counts
        if key in listed and (key == below or key not in names)
    }
    rows = {stem: listed[key] for stem, key in used.items()}
    unmatched = listed.keys() - used.values()
    if unmatched:
        ignored = left_out(settings, [path for path, *_ in scan.entries])
        unmatched -= ignored | {splitext(path)[0] for path in ignored}
    if not unmatched:
        return rows, faults
    # One fault for all of them, because there may be a million.
    more, first = len(unmatched) - 1, min(unmatched)
    who = f"{first} and {more} more name" if more else f"{first} names"
    hint = "a key is the image's path below the dataset's folder, or from here: correct it or "
    hint += "take it out"
    what, place = f"{who} no image of the dataset", listed[first].place
    return rows, [*faults, Fault(place, f"({file})", what, hint)]


def _hint(settings: Dataset, item: Item) -> str:
    endings = filter(None, (settings.caption_extension, settings.tags_extension))
    ways = " or ".join(f"{splitext(item.image)[0]}{ending}" for ending in endings)
    ways += f", or an entry in {settings.metadata_file}" if settings.metadata_file else ""
    ways += ", or a `prompt` in its row" if item.place is not None else ""
    return f"write {ways}, or set `class_tokens` to a caption for all of them, or a `captioner`"


def _with_folder(text: str, item: Item) -> str:
    """Replace `{folder}` by the name of the item's folder, without repeats."""
    if _FOLDER not in text:
        return text
    folder = Path(item.image).absolute().parent.name
    return text.replace(_FOLDER, re.sub(r"^\d+_(?=.)", "", folder))  # kohya's `10_sks man`


def _texts(
    settings: Dataset,
    contents: Contents,
    item: Item,
    row: Row | None,
    *,
    like_sdscripts: bool,
) -> list[str] | None:
    """Return the variants of an item's text, or None if the text is the content of its file.

    Source of `like_sdscripts`: `read_caption` of sd-scripts' library/train_util.py, for captions
    without wildcards.

    Raises:
        SourceError: the text is empty, or caption file and row have different captions.
    """
    class_caption = _with_folder(settings.class_tokens, item) if settings.class_tokens else ""
    by_captioner = settings.captioner and item.made
    plain = not (settings.composed or row or by_captioner)
    if plain and not (class_caption or like_sdscripts):
        return None
    files = item.file(CAPTION), item.file(TAGS)
    if plain and not (like_sdscripts and (files[0] or "\n" in class_caption.strip())):
        return [class_caption] if class_caption and not files[0] else None
    captions = _with_folders(settings.captions or _NO_CHANGES, item)
    made = _made_texts(contents, item, settings)
    raw = [contents.read(file) if file else text for file, text in zip(files, made, strict=True)]
    if not (any(files) or row or by_captioner):
        raw[0] = class_caption
    entries = (row.caption, row.tags if settings.composed else None) if row else (None, None)
    texts = list[str]()
    for file, content, entry in zip(files, raw, entries, strict=True):
        if captions.enable_wildcard:  # one line is taken, so lines must be clean
            own, listed = clean(content), clean(entry or "")
        else:
            own = (content.partition("\n")[0] if like_sdscripts else content).strip()
            listed = newlines(entry or "").strip()
        if own and listed and clean(content) != clean(listed):
            if row and file and settings.metadata_captions is None:
                what = f"differs from the entry in {row.place}"
                hint = "set `metadata_captions` to override or join, or remove one of the two"
                raise SourceError(what, where=file.path, hint=hint)
            if settings.metadata_captions == "join":
                listed = _joined(own, listed, captions)
        texts.append(listed or own)
    caption, tags = texts
    has_own = any(files) or row or by_captioner
    if not (caption or tags) and has_own and settings.empty_caption == "error":
        what, hint = _EMPTY_FIRST_LINE if "".join(raw).strip() else EMPTY
        if by_captioner:
            hint = "correct `drop` and `replace` of its captioner, or set empty_caption: allow"
            raise SourceError(EMPTY[0], where=by_captioner[0].path, hint=hint)
        raise SourceError(what if any(files) else "has an empty caption", hint=hint)
    result = variants(item.stem, caption, tags, captions, like_sdscripts=like_sdscripts)
    return None if plain and files[0] and result == [raw[0].strip()] else result


def _with_folders(captions: Captions, item: Item) -> Captions:
    """Replace `{folder}` in prefix and suffix; see `_with_folder`."""
    affixes = {
        key: _with_folder(text, item)
        for key in ("caption_prefix", "caption_suffix")
        if _FOLDER in (text := getattr(captions, key) or "")
    }
    return captions.model_copy(update=affixes) if affixes else captions


def _joined(own: str, listed: str, captions: Captions) -> str:
    """Join the text of a file and that of its row; with wildcards, each line of the file's."""
    separator, lines = captions.caption_separator, [own]
    if captions.enable_wildcard:
        listed, lines = listed.replace("\n", separator), own.split("\n")
    return "\n".join(f"{line}{separator}{listed}" for line in lines)
