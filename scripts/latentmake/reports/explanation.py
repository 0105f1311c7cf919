"""Explanations of cache files in words, and as plain values."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from latentmake.files.cachefile import Checked, Header
from latentmake.plan.reasons import Difference, short
from latentmake.reports.recipe_changes import program_of, recipe_words


@dataclass
class Explanation:
    """Explanation of one cache file, or of one that is to be made.

    Attributes:
        state: `fresh`, `stale`, `orphaned`, `unknown`, or `unreadable`.
        reason: one of `state.REASONS` of a stale one, or a sentence.
        differences: parts of its key that differ from those of today.
        source: files that it is made of; the text, where there is no file.
        header: digests in it; None where it cannot be read.
        recipe: in its header.
        key: that it needs today, if known.
        at_hand: files that have this key.
        caption: in its header, where it is there.
        checked: what was found of its bytes; None where its header cannot be read.
        runs: that use it.
    """

    path: str
    state: str
    reason: str = ""
    differences: list[Difference] = field(default_factory=list)
    source: list[str] = field(default_factory=list)
    header: Header | None = None
    recipe: dict[str, object] = field(default_factory=dict)
    key: str | None = None
    at_hand: list[str] = field(default_factory=list)
    caption: str | None = None
    checked: Checked | None = None
    runs: list[str] = field(default_factory=list)


def explanation_values(each: Explanation) -> dict[str, object]:
    """Return an explanation as plain values."""
    header = each.header and each.header._asdict()
    said = ("damage", "has_checksum", "is_foreign")
    checked = each.checked and {name: getattr(each.checked, name) for name in said}
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


def quoted(text: str) -> str:
    """Return a text in quotes, in one line."""
    return json.dumps(text, ensure_ascii=False)
