"""Caption pipeline: from an item's caption and tags to the texts that are encoded.

The steps and their order are those of sd-scripts (`process_caption` in its library/train_util.py),
which repeats them in every step of a training. Here each item gets some variants once, drawn from a
seed, the item's name and the variant's number alone: the same on any machine, whatever other items
there are.
"""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Callable, Sequence
from math import ceil, floor

from latentmake.config.datasets import Captions
from latentmake.errors import SourceError

_WILDCARD = re.compile(r"\{([^{}]*)\}")
_ATTEMPTS = 16  # draws of a variant that shall differ from those before it
_MOST_BYTES = 1_000_000  # of a text; a tokenizer takes hundreds of bytes for each
_PRIVATE = range(0xE000, 0xF900)  # Unicode's private use area, where the stand-ins of braces lie


_Draw = Callable[[], float]
"""Returns random numbers from 0 to 1, of one draw of a variant."""


def _drawing(*parts: object) -> _Draw:
    # Python promises that `random()` gives the same numbers in every version, of others not.
    named = "\n".join(map(str, parts)).encode("utf-8", "surrogatepass")
    return random.Random(hashlib.sha256(named).digest()).random  # noqa: S311 -- no secret


def _choice(draw: _Draw, several: Sequence[str]) -> str:
    return several[int(draw() * len(several))]


def decode_text(data: bytes, path: str) -> str:
    """Return the text of a file: UTF-8, without byte order mark, line ends as `newlines` has them.

    Raises:
        SourceError: it is not UTF-8, or no text of a caption (see `text_fault`).
    """
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise SourceError(
            f"is not UTF-8 (byte {error.start + 1})", where=path, hint="save it as UTF-8"
        ) from None
    if fault := text_fault(text):
        raise SourceError(fault, where=path, hint="write the caption there, as UTF-8")
    return newlines(text)


def text_fault(text: str) -> str | None:
    """Return why a text cannot be a caption; None where it can."""
    if "\0" in text:
        return "holds NUL characters (is it UTF-16?)"
    if len(text.encode("utf-8", "surrogatepass")) > _MOST_BYTES:
        return f"is longer than {_MOST_BYTES} bytes"
    return None


def newlines(text: str) -> str:
    """Return a text with the line ends that Python's text mode gives, and so the trainers read."""
    return text.replace("\r\n", "\n").replace("\r", "\n")


def clean(text: str) -> str:
    """Return a text without empty lines and the space around each line."""
    lines = (line.strip() for line in newlines(text).split("\n"))
    return "\n".join(line for line in lines if line)


def warming(variants: int) -> int:
    """Return the number of an item's variants for the warm-up of tokens: the first half."""
    return ceil(variants / 2)


def variants(
    stem: str, caption: str, tags: str, settings: Captions, *, first_line: bool = False
) -> list[str]:
    """Return the variants of an item's text; they differ as far as there are different ones.

    The empty caption of a dropout comes as often as its rate says. The item's stem seeds the draws;
    caption and tags may be empty, and are cleaned where wildcards take one of their lines. Without
    wildcards all lines count, or with `first_line` the first, as in sd-scripts.

    Raises:
        SourceError: braces do not fit, or a wildcard holds nothing; it names no place.
    """
    if settings.enable_wildcard:
        _check_braces(caption)
        _check_braces(tags)
    found: list[str] = []
    for number in range(settings.variants):
        rate = settings.caption_dropout_rate
        text, dropped = "", rate > 0 and _drawing(settings.seed, stem, number)() < rate
        for attempt in range(0 if dropped else _ATTEMPTS):
            draw = _drawing(settings.seed, stem, number, attempt)
            text = _variant(caption, tags, settings, number, draw, first_line=first_line)
            if text not in found or not settings.random:
                break
        found.append(text)
    return found


def _check_braces(text: str) -> None:
    """Refuse a text whose braces are no wildcards."""
    hint = "write {{ and }} for braces that are no wildcard, or correct it"
    for line in text.split("\n"):
        line = line.replace("{{", "x").replace("}}", "x")
        if any(not inside.replace("|", "").strip() for inside in _WILDCARD.findall(line)):
            raise SourceError("has a wildcard that holds nothing", hint=hint)
        if {"{", "}"} & {*_WILDCARD.sub("", line)}:
            what = "has a { or a } without the other, or a wildcard within a wildcard"
            raise SourceError(what, hint=hint)


def _variant(
    caption: str, tags: str, settings: Captions, number: int, draw: _Draw, *, first_line: bool
) -> str:
    text = _combined(caption, tags, settings, draw)
    if settings.caption_prefix:
        text = f"{settings.caption_prefix} {text}"
    if settings.caption_suffix:
        text = f"{text} {settings.caption_suffix}"
    if settings.enable_wildcard:
        text = _without_wildcards(text, draw)
    elif first_line:
        text = text.split("\n")[0]
    if (
        settings.shuffle_caption
        or settings.token_warmup_step > 0
        or settings.caption_tag_dropout_rate > 0
    ):
        text = _with_tags_drawn(text, settings, number, draw)
    if settings.secondary_separator:
        text = text.replace(settings.secondary_separator, settings.caption_separator)
    for word, other in settings.replacements.items():
        if word == "":
            text = other if isinstance(other, str) else _choice(draw, other)
        elif isinstance(other, str):
            text = text.replace(word, other)
    return text.strip()


def _combined(caption: str, tags: str, settings: Captions, draw: _Draw) -> str:
    """Return caption and tags as one text, which may have several lines."""
    if not caption or not tags:
        return caption or tags
    separator, how = settings.caption_separator, settings.caption_and_tags
    tags = tags.replace("\n", separator)
    lines = caption.split("\n") if settings.enable_wildcard else [caption]
    if how == "pick":
        return _choice(draw, [caption, tags])
    if how == "lines":
        return f"{caption}\n{tags}"
    if how == "wildcard":  # settled at once: a wildcard of theirs would be one within another
        return _choice(draw, [_choice(draw, lines), tags])
    pairs = ((tags, line) if how == "tags_first" else (line, tags) for line in lines)
    return "\n".join(separator.join(pair) for pair in pairs)


def _without_wildcards(text: str, draw: _Draw) -> str:
    text = _choice(draw, text.split("\n"))
    free = (chr(code) for code in _PRIVATE if chr(code) not in text)
    opening, closing = next(free), next(free)  # stand for literal braces
    text = text.replace("{{", opening).replace("}}", closing)
    text = _WILDCARD.sub(lambda match: _choice(draw, match[1].split("|")), text)
    return text.replace(opening, "{").replace(closing, "}")


def _split(text: str, separator: str) -> list[str]:
    return [part for each in text.split(separator) if (part := each.strip())]


def _with_tags_drawn(text: str, settings: Captions, number: int, draw: _Draw) -> str:
    separator, divider = settings.caption_separator, settings.keep_tokens_separator
    tail: list[str] = []
    if divider and divider in text:
        first, _, rest = text.partition(divider)
        middle, _, last = rest.partition(divider)
        head, tags, tail = (_split(part, separator) for part in (first, middle, last))
    else:
        tags = [each.strip() for each in text.strip().split(separator)]
        head, tags = tags[: settings.keep_tokens], tags[settings.keep_tokens :]
    warm = warming(settings.variants)
    if settings.token_warmup_step > 0 and number < warm:
        least = settings.token_warmup_min
        tags = tags[: floor(number * ((len(tags) - least) / warm)) + least]
    if settings.shuffle_caption:
        for end in range(len(tags) - 1, 0, -1):  # by Fisher and Yates
            other = int(draw() * (end + 1))
            tags[end], tags[other] = tags[other], tags[end]
    if settings.caption_tag_dropout_rate > 0:
        tags = [each for each in tags if draw() >= settings.caption_tag_dropout_rate]
    return ", ".join([*head, *tags, *tail])
