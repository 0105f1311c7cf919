"""Explanations of cache files in words, and as plain values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path

from latentmake.models.reasons import short
from latentmake.models.recipe_differences import program_of, recipe_words
from latentmake.plan.explain import Explanation, quoted


def explanation_values(each: Explanation) -> dict[str, object]:
    """Return an explanation as plain values."""
    header, checked = (part and part._asdict() for part in (each.header, each.checked))
    differences = [difference._asdict() for difference in each.differences]
    return {**vars(each), "header": header, "checked": checked, "differences": differences}


def explanation_text(found: Sequence[Explanation]) -> str:
    """Return some explanations as text."""
    return "\n".join(line for each in found for line in (*_lines(each), ""))


def _lines(each: Explanation) -> Iterator[str]:
    reason = f" ({each.reason})" if each.reason else ""
    yield f"{each.path}: {each.state}{reason}"
    rows = [
        ("differs" if found.old != found.new else "because", str(found))
        for found in each.differences
    ]
    rows += [("reusable", f"{path} has its key") for path in each.at_hand[:1]]
    rows += [("source", source) for source in each.source]
    if each.header is not None:
        caption = "" if each.caption is None else f"{quoted(each.caption)}, "
        rows.append(("made of", f"{caption}SHA-256 {each.header.source}"))
        rows.append(("recipe", recipe_words(each.recipe)))
        rows.append(("key", each.header.key))
    if each.key is not None and (each.header is None or each.header.key != each.key):
        rows.append(("key today", each.key))
    rows += [("content", line) for line in _content(each)]
    rows += [("made", line) for line in _made(each)]
    rows.append(("runs", ", ".join(each.runs) or "none"))
    before = ""
    for name, text in rows:
        yield f"  {name if name != before else '':12}{text}"
        before = name


def _content(each: Explanation) -> Iterator[str]:
    """Yield what the checksum of a file says."""
    if each.checked is None:
        return
    if each.checked.damage is not None:
        hint = f"; `latentmake verify {each.runs[0]} --repair` deletes it" if each.runs else ""
        yield f"damaged: {each.checked.damage}{hint}"
    else:
        known = each.checked.has_checksum
        yield "as it was written, by its checksum" if known else "no checksum to tell by"


def _made(each: Explanation) -> Iterator[str]:
    """Yield when and by what a file was made."""
    with suppress(OSError):
        moment = datetime.fromtimestamp(Path(each.path).stat().st_mtime).astimezone()
        by = ""
        if each.header is not None:
            by = f" by {program_of(each.recipe) or 'latentmake'}"
            if each.header.adopted:
                digests = ", ".join(map(short, each.header.adopted.split()))
                by = f" from another program's file ({digests})"
        yield f"{moment:%Y-%m-%d %H:%M:%S}{by}"
