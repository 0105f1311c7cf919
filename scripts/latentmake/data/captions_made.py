"""Captions that a captioner wrote: faults of its answers, and changes that make no caption again.

The raw answer of the network is kept; `processed` gives the caption that is encoded.
"""

from __future__ import annotations

import re

from latentmake.config.captioners import Captioner

_FEWEST_WORDS = 8  # in a loop; "very, very, very" is none
_SHORT_PHRASE = 5  # words; a longer phrase is hardly ever repeated in a caption
_LOOP_IN_A_WORD = re.compile(r"(\S{1,20}?)\1{19,}")


def processed(text: str, settings: Captioner) -> str:
    """Return the caption for a raw answer, on one line: changed words, first words, beginning."""
    text = " ".join(text.split())
    for phrase in settings.drop:
        text = re.sub(rf"{_words(phrase)}\s*[,:]?\s*", "", text, flags=re.IGNORECASE)
    for phrase, other in settings.replace.items():
        text = re.sub(_words(phrase), other.replace("\\", r"\\"), text)
    words = text.split()
    kept = " ".join(words[: settings.max_words])
    if kept != " ".join(words) or settings.drop:
        kept = kept.strip(" ,;:")
    if settings.prefix:
        kept = f"{settings.prefix} {kept}".rstrip()
    if not settings.trigger or re.match(_words(settings.trigger), kept):
        return kept
    return f"{settings.trigger}, {kept}" if kept else settings.trigger


def _words(phrase: str) -> str:
    """Return a regular expression of a phrase that is no part of a longer word."""
    before = r"(?<!\w)" if re.match(r"\w", phrase) else ""
    behind = r"(?!\w)" if re.search(r"\w$", phrase) else ""
    return before + r"\s+".join(map(re.escape, phrase.split())) + behind


def answer_fault(text: str) -> str | None:
    """Return why an answer is no caption: it is empty, or loops; None if it is a caption.

    A loop is a phrase that follows itself: at least four times, or three times if it has five words
    or more. It has at least eight words altogether.
    """
    words = re.findall(r"\w+", text.casefold())
    if not words:
        return "the answer is empty"
    if match := _LOOP_IN_A_WORD.search(text):
        return _looping(match[1])
    for period in range(1, len(words) // 3 + 1):
        needed = max((3 if period >= _SHORT_PHRASE else 4) * period, _FEWEST_WORDS)
        same = period  # words up to here that repeat those one period before
        for place in range(period, len(words)):
            same = same + 1 if words[place] == words[place - period] else period
            if same >= needed:
                return _looping(" ".join(words[place - period + 1 : place + 1]))
    return None


def _looping(phrase: str) -> str:
    shown = phrase if len(phrase) <= 40 else f"{phrase[:40]}..."
    return f"the answer repeats the same phrase: {shown}"
