"""Pages and docstrings of the configuration avoid openings and words that make readers stumble.

Only prose is read: no code blocks, inline code or targets of links. A question may begin with any
word.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from markdown_it import MarkdownIt
from markdown_it.token import Token
from reference.schema import json_schema

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    page
    for pattern in ("docs/**/*.md", "*.md", "config/**/*.md", "data/README.md", "tests/bench/*.md")
    for page in ROOT.glob(pattern)
)
OPENINGS = re.compile(r"(?:What|That|Of|Those|One whose|Whose|Which|Nothing is)\s", re.IGNORECASE)
"""Openings of a sentence, list item, table cell or paragraph that has no subject."""
WORDS = re.compile(
    r"\b(?:alone|at hand|mend(?:s|ed|ing)?|kin|twins?|aside|(?:are|is) told|the very"
    r"|whole(?=[.,;:)]|$| (?:of|and|or|is|are|was|has|in|as)\b))\b",
    re.IGNORECASE,
)
MARKDOWN = MarkdownIt().enable("table")


def passages(text: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the prose of each paragraph, heading, list item and table cell."""
    line = 0
    for token in MARKDOWN.parse(text):
        if token.map:
            line = token.map[0] + 1
        if token.type == "inline":
            yield line, "".join(map(shown, token.children or ()))


def shown(token: Token) -> str:
    """A part of a passage as prose: `CODE` stands for inline code, which may be a subject."""
    breaks = {"softbreak": "\n", "hardbreak": "\n", "code_inline": "CODE"}
    return breaks.get(token.type, token.content if token.type in {"text", "image"} else "")


def faults(text: str) -> Iterator[tuple[int, str, str]]:
    """Yield the line, the fault and the sentence of each forbidden opening and word."""
    for line, passage in passages(text):
        begin = 0
        for sentence in re.split(r"(?<=[.?!])\s+", passage):
            begin = passage.index(sentence, begin)
            place = line + passage.count("\n", 0, begin)
            opening = OPENINGS.match(sentence)
            if opening and not sentence.endswith("?"):
                yield place, opening[0].strip(), " ".join(sentence.split())
            for word in WORDS.finditer(sentence):
                at = place + sentence.count("\n", 0, word.start())
                yield at, " ".join(word[0].split()), " ".join(sentence.split())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_pages_avoid_the_forbidden_openings_and_words(page: Path) -> None:
    name = page.relative_to(ROOT)
    found = [f"{name}:{line}: {fault}: {text}" for line, fault, text in faults(page.read_text())]
    assert not found, "\n" + "\n".join(found)


def described(schema: dict[str, Any], place: str = "") -> Iterator[tuple[str, str]]:
    """Yield the place, such as `Samples.every`, and the text of each description of a schema."""
    if text := schema.get("description"):
        yield place, text
    for name, definition in schema.get("$defs", {}).items():
        yield from described(definition, name)
    for name, definition in schema.get("properties", {}).items():
        yield from described(definition, f"{place}.{name}".removeprefix("."))


def test_docstrings_of_the_schema_avoid_the_forbidden_openings_and_words() -> None:
    schema = json_schema()
    lines = [text for text in schema.splitlines() if '"description": ' in text]
    number = {line: schema.splitlines().index(line) + 1 for line in lines}
    found = []
    for place, text in described(json.loads(schema)):
        quoted = f'"description": {json.dumps(text, ensure_ascii=False)}'
        at = next(number[line] for line in lines if quoted in line)
        found += [f"config/schema.json:{at}: {place}: {fault}: {s}" for _, fault, s in faults(text)]
    assert not found, "\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Edit a caption.\nWhat changed is\nencoded.\n", [(2, "What", "What changed is encoded.")]),
        ("- that of a folder\n", [(1, "that", "that of a folder")]),
        ("| a | b |\n|---|---|\n| x | which it is |\n", [(3, "which", "which it is")]),
        ("**Of a link** the link goes.\n", [(1, "Of", "Of a link the link goes.")]),
        ("The caption\nalone counts.\n", [(2, "alone", "The caption alone counts.")]),
        ("the file as a whole.\n", [(1, "whole", "the file as a whole.")]),
        ("## Which trainer?\n\nWhat is stale? A whole network of a kind.\n", []),
        ("`alone` or [a page](alone.md#at-hand).\n\n```\nWhat it is\n```\n\n    Of code\n", []),
    ],
)
def test_faults_are_found_in_prose_only(text: str, expected: list[tuple[int, str, str]]) -> None:
    assert list(faults(text)) == expected
