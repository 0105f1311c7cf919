"""Each message that docs/troubleshooting.md quotes is one that the package or Snakemake prints."""

from __future__ import annotations

import argparse
import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import snakemake

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/troubleshooting.md").read_text()
QUOTED = re.findall(r"^### `([^`]+)`$", PAGE, re.MULTILINE)
VALUE = "\0"


def templates(node: ast.AST) -> Iterator[str]:
    """Yield the strings of a module; `VALUE` stands for each value in them."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant):
            continue  # a docstring
        if isinstance(child, ast.JoinedStr):
            parts = (
                each.value if isinstance(each, ast.Constant) else VALUE for each in child.values
            )
            yield "".join(map(str, parts))
        elif isinstance(child, ast.Constant) and isinstance(child.value, str):
            yield child.value
        yield from templates(child)


@cache
def printed() -> str:
    """All strings of the package, and of the programs that it is called by."""
    folders = (ROOT / "scripts/latentmake", Path(snakemake.__file__).parent)
    files = [Path(argparse.__file__), *(path for each in folders for path in each.rglob("*.py"))]
    modules = (ast.parse(path.read_text(encoding="utf-8")) for path in files)
    return "\n".join(text.replace("\n", " ") for each in modules for text in templates(each))


def test_the_page_quotes_many_messages() -> None:
    assert len(QUOTED) >= 40 and len(QUOTED) == len({*QUOTED})


@pytest.mark.parametrize("message", QUOTED)
def test_a_quoted_message_is_printed_somewhere(message: str) -> None:
    parts = [re.escape(part) for part in message.split("...")]
    assert re.search(".*".join(parts), printed()), message
