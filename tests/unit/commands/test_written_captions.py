"""What a person wrote is never written over, whatever builds, accepts, undos and kills follow.

`LATENTMAKE_SEQUENCES=500` runs as many sequences; each is drawn by its number.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from captioned_world import CaptionedWorld
from latentmake.base.errors import UserError
from latentmake.commands.accepted_captions import accept, undo

SEQUENCES = int(os.environ.get("LATENTMAKE_SEQUENCES", "20"))
STEMS = ("a", "b", "c")


class Person:
    """Somebody who works on a project, and knows each file that they wrote.

    Attributes:
        files: path -> bytes of each caption file that the person wrote or edited.
    """

    def __init__(self, number: int) -> None:
        self.draw = random.Random(number)
        self.world = CaptionedWorld(*STEMS)
        self.files: dict[Path, bytes] = {}

    def path(self) -> Path:
        return Path("data", f"{self.draw.choice(STEMS)}.txt")

    def write(self) -> None:
        path = self.path()
        text = self.draw.choice(("my words", "a 10", " two  spaces \r\n", "Ö" * 3)).encode()
        path.write_bytes(text)
        self.files[path] = text

    def delete(self) -> None:
        path = self.path()
        path.unlink(missing_ok=True)
        self.files.pop(path, None)

    def accept(self) -> None:
        stems = self.draw.choice((["all"], [self.draw.choice(STEMS)]))
        accept(self.world.facts(), "cats", stems, as_json=True)

    def undo(self) -> None:
        undo(self.world.facts(), "cats", [], as_json=True)

    def build(self) -> None:
        self.world.build(most=self.draw.choice((None, None, 0, 1, 2)))

    def change(self) -> None:
        self.world.values["captioners"]["flo"]["prompt"] = self.draw.choice(("a", "the", "one"))

    def act(self) -> None:
        acts: tuple[Callable[[], None], ...]
        acts = (self.write, self.delete, self.accept, self.undo, self.build, self.change)
        self.draw.choice(acts)()


@pytest.mark.parametrize("number", range(SEQUENCES))
@pytest.mark.usefixtures("own_folder")
def test_no_byte_of_a_persons_file_is_changed_or_lost(number: int) -> None:
    person = Person(number)
    for _ in range(12):
        with_files = dict(person.files)
        try:
            person.act()
        except UserError:  # such as a caption that is not made yet
            assert person.files == with_files
        assert {path: path.read_bytes() for path in person.files} == person.files
    person.world.build()
    written = {path.stem for path in Path("data").glob("*.txt")}
    items, _ = person.world.facts().items("cats", "tiny")
    assert {item.stem for item in items if item.caption} == written
    assert {item.stem for item in items if not item.made} == written
    assert {path: path.read_bytes() for path in person.files} == person.files
