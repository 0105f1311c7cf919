"""An edited caption is one line for people: marks around words, and only what is near an edit."""

from __future__ import annotations

import pytest
from latentmake.commands.diff import edited


@pytest.mark.parametrize(
    ("before", "after", "line"),
    [
        ("a red cat", "a blue cat", "a [-red-]{+blue+} cat"),
        ("a boat", "a red sailing boat", "a {+red sailing+} boat"),
        ("a red boat", "a boat", "a [-red-] boat"),
        ("a cat", "", "[-a cat-]"),
        ("", "a cat", "{+a cat+}"),
        ("a\tcat", "a cat", "a[- -]{+ +}cat"),
        ("a \x1b[31mcat", "a \x1b[31mdog", "a \\x1b[[-31mcat-]{+31mdog+}"),
        (
            "on a wooden table beside an open window a red cat sleeps in the light of the morning",
            "on a wooden table beside an open window a fat cat sleeps in the light of the morning",
            "... beside an open window a [-red-]{+fat+} cat sleeps in the light ...",
        ),
    ],
)
def test_an_edit_is_one_line(
    before: str, after: str, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    assert edited(before, after) == line
    monkeypatch.delenv("NO_COLOR")
    assert edited("a red cat", "a cat") == "a \x1b[31m[-red-]\x1b[0m cat"
