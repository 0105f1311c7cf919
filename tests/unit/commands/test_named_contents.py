"""`latentmake uses` finds the contents of paths in datasets, lists, other files and rosters."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import world
from latentmake.base import digest
from latentmake.base.errors import SourceError, StorageError
from latentmake.commands import uses
from latentmake.config.root import parse
from latentmake.data.memo import Memo
from latentmake.plan.facts import Facts
from latentmake.runs.edited import all_contents
from latentmake.runs.history import RosterItem, begin
from latentmake.runs.order import Record

pytestmark = pytest.mark.usefixtures("own_folder")

Permitted = Callable[[str, int], AbstractContextManager[None]]

PICTURES = {"data/cats/a.png": "x", "data/cats/old/b.png": "y", "pics/c.png": "z"}


def facts() -> Facts:
    datasets = {"cats": {"path": "data/cats"}, "listed": {"path": "lists/l.jsonl"}}
    run = {"datasets": [*datasets], "model": "m", "resolutions": 64}
    model = {"vae": "vae", "text": "text", "unet": "unet"}
    values = {"datasets": datasets, "models": {"m": model}, "runs": {"cats": run}}
    return Facts(parse(values), Memo(None), encoders=False)


def contents_of(paths: Sequence[str]) -> tuple[set[str], set[str]]:
    today = facts()
    return uses.contents_of(today, [*all_contents(today)], paths)


@pytest.fixture
def sources() -> dict[str, str]:
    """Files of two datasets; digests of the pictures by their paths."""
    for number, (place, text) in enumerate(PICTURES.items()):
        path = Path(place)
        path.parent.mkdir(parents=True, exist_ok=True)
        world.draw(path, number)
        path.with_suffix(".txt").write_text(text)
    Path("lists").mkdir()
    row = {"file_name": str(Path("pics/c.png").absolute()), "caption": "z"}
    Path("lists/l.jsonl").write_text(json.dumps(row) + "\n")
    return {path: digest.of_file(Path(path)) for path in PICTURES}


def remember(sources: dict[str, str]) -> None:
    """Write a training that saw all pictures."""
    listed = str(Path("pics/c").absolute()).lstrip("/")
    names = [("cats", "a"), ("cats", "old/b"), ("listed", listed)]
    items = [
        RosterItem(dataset=dataset, stem=stem, source=source, texts=[text])
        for (dataset, stem), source, text in zip(
            names, sources.values(), PICTURES.values(), strict=True
        )
    ]
    roster = "".join(f"{item.model_dump_json()}\n" for item in items).encode()
    begin("cats", roster, Record(parts={}, seconds=1))


def test_contents_are_those_of_items_while_they_exist_and_of_rosters_afterwards(
    sources: dict[str, str],
) -> None:
    remember(sources)
    a, b, c = sources.values()
    wanted = {
        ("data/cats/a.png",): ({a}, set()),
        ("data/cats/a.png", "data/cats/a.txt"): ({a}, {"x"}),
        ("data/cats/old",): ({b}, set()),
        ("data/cats", "pics/c.png"): ({a, b, c}, set()),
    }
    for paths, contents in wanted.items():
        assert contents_of(paths) == contents
    shutil.rmtree("data/cats")
    shutil.rmtree("pics")
    for paths, contents in wanted.items():
        assert contents_of(paths) == contents
    with pytest.raises(SourceError, match=r"d\.png: is in no dataset"):
        contents_of(["data/cats/a.png", "data/cats/d.png"])


def test_the_row_of_a_list_is_named_beside_its_picture(sources: dict[str, str]) -> None:
    picture = "files", str(Path("pics/c.png").absolute())
    row = "rows", "line 1 of lists/l.jsonl"

    def found(*wanted: str) -> list[tuple[str, str]]:
        def contains(source: str, texts: Sequence[str]) -> bool:
            return source in wanted or bool({*wanted} & {*texts})

        today = facts()
        return [*uses.files_of_items(today, all_contents(today), contains)]

    assert found(sources["pics/c.png"]) == [picture, row]
    assert found("z") == [row]
    assert found("x") == [("files", "data/cats/a.txt")]


@pytest.mark.parametrize("place", ["runs", "runs/cats", "runs/cats/history"])
def test_a_folder_of_trainings_that_cannot_be_read_is_named(
    sources: dict[str, str], permitted: Permitted, place: str
) -> None:
    remember(sources)
    with (
        permitted(place, 0),
        pytest.raises(StorageError, match=rf"^{place}: cannot be read"),
    ):
        [*uses.trainings_with(lambda *_: True)]


def test_a_folder_of_files_that_cannot_be_read_is_named(permitted: Permitted) -> None:
    today = facts()
    Path("pics/secret").mkdir(parents=True)
    with permitted("pics/secret", 0):
        with pytest.raises(StorageError, match=r"^pics/secret: cannot be read"):
            [*uses.files_with(today, [Path("pics")], lambda *_: True)]
        with pytest.raises(StorageError, match=r"pics/secret: cannot be read"):
            uses.contents_of(today, [], ["pics"])
