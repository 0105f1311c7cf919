"""The fenced blocks of a guide, and the comparison of an output with what a command printed."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

_FENCE = re.compile(r"^```(\w*)(?: +(.*))?$")
_TITLE = re.compile(r'title="([^"]+)"')
_STATUS = re.compile(r"\s+# exit (\d)$")
_COLOUR = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Block(NamedTuple):
    """A fenced block: its language, the file that it writes, its line in the page, its text."""

    language: str
    title: str | None
    line: int
    text: str


class Command(NamedTuple):
    """A command of a session, its line in the page, its exit status, and the lines it prints."""

    line: int
    text: str
    status: int
    output: list[str]


def blocks_of(page: Path, shrink: Mapping[str, str]) -> list[Block]:
    """Return the blocks of a page.

    Args:
        page: its file.
        shrink: text -> text that a test puts in its place, in all blocks.
    """
    found, start = [], None
    language, title, lines = "", None, []  # type: str, str | None, list[str]
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        fence = _FENCE.match(line)
        if start is None and fence:
            language, start, lines = fence[1], number, []
            named = _TITLE.search(fence[2] or "")
            title = named[1] if named else None
        elif start is not None and line == "```":
            text = "\n".join(lines) + "\n"
            for old, new in shrink.items():
                text = text.replace(old, new)
            found.append(Block(language, title, start, text))
            start = None
        elif start is not None:
            lines.append(line)
    assert start is None, f"{page}:{start}: this block has no end"
    return found


def commands_of(block: Block) -> Iterator[Command]:
    """Yield the commands of a session, each with its output."""
    line, text, status, output = 0, "", 0, []  # type: int, str, int, list[str]
    for number, each in enumerate(block.text.splitlines(), block.line + 1):
        if each.startswith("$ "):
            if text:
                yield Command(line, text, status, output)
            ending = _STATUS.search(each)
            status = int(ending[1]) if ending else 0
            line, text, output = number, _STATUS.sub("", each[2:]), []
        elif each.startswith("> ") and text and not output:
            text += f"\n{each[2:]}"
        else:
            assert text, f"line {number}: a session begins with `$ `"
            output.append(each)
    yield Command(line, text, status, output)


def shell_lines(block: Block) -> Iterator[tuple[int, str]]:
    """Yield the commands of a bash block with their lines, and no comments."""
    line, text = 0, ""
    for number, each in enumerate(block.text.splitlines(), block.line + 1):
        line = line if text else number
        text += each.removesuffix("\\")
        if not each.endswith("\\"):
            if text.strip() and not text.lstrip().startswith("#"):
                yield line, text.strip()
            text = ""


def difference(expected: Sequence[str], printed: str) -> str | None:
    """Return what a page shows and a command did not print; None where all lines are there.

    Each line must be one that was printed, in this order; others may lie between them.
    """
    lines = [_plain(line) for line in _COLOUR.sub("", printed).replace("\r", "\n").splitlines()]
    place = 0
    for each in map(_plain, expected):
        if each in ("...", ""):
            continue
        pattern = re.compile(".*".join(map(re.escape, each.split("..."))))
        found = (n for n in range(place, len(lines)) if pattern.fullmatch(lines[n]))
        if (here := next(found, None)) is None:
            near = difflib.get_close_matches(each, lines, 3, 0.5)
            earlier = any(map(pattern.fullmatch, lines))
            said = "it was printed before the lines above it" if earlier else "it was not printed"
            nearest = "".join(f"\n  near it:  {line}" for line in near)
            return f"  the page: {each}\n  {said}{nearest}\nall of the output:\n{printed}"
        place = here + 1
    return None


def _plain(line: str) -> str:
    """Return a line whose spaces and rules are as long as any others."""
    return re.sub(r"-{3,}|─{3,}", "---", " ".join(line.split()))
