"""docs/laws.md names real tests for each law."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/laws.md").read_text()
LAWS = dict(re.findall(r"^### (.+)\n((?:(?!#).*\n?)*)", PAGE, re.MULTILINE))
NAMED = sorted(set(re.findall(r"^- `(.+)`$", PAGE, re.MULTILINE)))


def names_of(path: Path) -> set[str]:
    """Return the tests of a module: its functions, and what it assigns to such a name."""
    body = ast.parse(path.read_text()).body
    functions = {node.name for node in body if isinstance(node, ast.FunctionDef)}
    assigned = (node.targets[0] for node in body if isinstance(node, ast.Assign))
    names = functions | {target.id for target in assigned if isinstance(target, ast.Name)}
    return {name for name in names if name.startswith("test_")}


@pytest.mark.parametrize("name", NAMED)
def test_a_test_that_the_page_names_exists(name: str) -> None:
    path, _, function = name.partition("::")
    assert function in names_of(ROOT / path)


@pytest.mark.parametrize("law", LAWS)
def test_each_law_has_a_test(law: str) -> None:
    tests = re.findall(r"^- `tests/.+::test_.+`$", LAWS[law], re.MULTILINE)
    assert tests, law
    assert len(tests) == len(set(tests))


def test_the_laws_of_a_build_are_numbered() -> None:
    numbers = [int(law.partition(".")[0]) for law in LAWS if law[0].isdigit()]
    assert numbers == list(range(1, 17))
