"""Pages, docstrings and comments avoid openings and words that make readers stumble.

Only prose is read: no code blocks, inline code or targets of links. A question may begin with any
word. Some words are no names, either: they do not say what a variable holds.
"""

from __future__ import annotations

import ast
import io
import json
import re
import tokenize
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
NAMES = {
    *("each", "found", "known", "asked", "hand", "aside", "mend", "kin", "twin", "whole"),
    *("x", "spooled", "wishes", "is_"),
}
"""Names that do not say what they hold."""
IN_FILES = {
    "plan/manifest.py: aside",
    "plan/orders.py: found",
    "trainers/loop/generation.py: asked",
    "runs/results.py: asked",
    "runs/rows.py: aside",
}
"""Fields with such a name that stand in files of users."""
CODE = [path for path in sorted(ROOT.glob("scripts/**/*.py")) if "egg-info" not in path.parts]
DIRECTIVE = re.compile(r"#:?\s*(?:noqa|type:|fmt:|pragma|mypy:|!)")
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


def texts(source: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of each docstring, and of each block of comments, of a module."""
    for node in ast.walk(ast.parse(source)):
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else ():
            match statement:
                case ast.Expr(value=ast.Constant(value=str(text))):
                    yield statement.lineno, text
    block, last = [], 0
    for token in [*tokenize.generate_tokens(io.StringIO(source).readline), None]:
        if token and (token.type != tokenize.COMMENT or DIRECTIVE.match(token.string)):
            continue
        goes_on = token and token.start[0] == last + 1 and not token.line[: token.start[1]].strip()
        if block and not goes_on:
            yield last - len(block) + 1, "\n".join(block)
            block = []
        if token:
            block.append(token.string.lstrip("#: ").rstrip())
            last = token.start[0]


def prose(text: str) -> Iterator[tuple[int, str]]:
    """Yield the line in a docstring or comment, and the text, of each sentence and entry."""
    begin = 0
    for paragraph in re.split(r"\n[ \t]*\n|\n(?=[ \t]*[-*] )|\n(?=[ \t]+\w+: )", text):
        begin = text.index(paragraph, begin)
        words = re.sub(r"``?[^`]+``?", "CODE", paragraph)
        words = re.sub(r"^\s*(?:[-*] |\w+: )", "", words)
        for sentence in re.split(r"(?<=[.?!:;])\s+(?=[A-Z`])|(?<=[.?!])\s+", words):
            yield text.count("\n", 0, begin), " ".join(sentence.split())


def names(source: str) -> Iterator[tuple[int, str]]:
    """Yield the line of each variable, parameter, attribute and function, and its name."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case (
                ast.Name(id=name, ctx=ast.Store())
                | ast.Attribute(attr=name, ctx=ast.Store())
                | ast.arg(arg=name)
                | ast.alias(asname=str(name))
                | ast.ExceptHandler(name=str(name))
                | ast.FunctionDef(name=name)
                | ast.ClassDef(name=name)
            ):
                yield node.lineno, name


@pytest.mark.parametrize("module", CODE, ids=lambda path: str(path.relative_to(ROOT)))
def test_code_avoids_the_forbidden_openings_words_and_names(module: Path) -> None:
    source, place = module.read_text(), module.relative_to(ROOT)
    faulty = []
    for line, text in texts(source):
        for offset, sentence in prose(text):
            opening = OPENINGS.match(sentence)
            if opening and not sentence.endswith("?"):
                faulty.append(f"{place}:{line + offset}: {opening[0]}: {sentence}")
            faulty += [
                f"{place}:{line + offset}: {word[0]}: {sentence}"
                for word in WORDS.finditer(sentence)
            ]
    for line, name in names(source):
        short = f"{place.relative_to(*place.parts[:2]) if len(place.parts) > 2 else place}: {name}"
        if {name, name.strip("_")} & NAMES and short not in IN_FILES:
            faulty.append(f"{place}:{line}: the name {name}")
    assert not faulty, "\n" + "\n".join(faulty)


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
