"""The texts of a dataset's items, from files, from a metadata file, or from both."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from latentmake.config.datasets import Dataset
from latentmake.data import folders, listing
from latentmake.data.memo import Memo
from latentmake.data.texts import rows_of_items, with_texts

FILES = {
    "a.png": b"", "a.caption": b"a cat\r\nsecond\n", "a.txt": b"x, y\n",
    "sub/b.png": b"", "sub/b.txt": b"z",
    "c.png": b"", "c.caption": b"\xef\xbb\xbfa dog",
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, data in FILES.items():
        path = tmp_path / "images" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return tmp_path / "images"


def made(
    folder: Path, metadata: Any = None, memo: Memo | None = None, **settings: Any
) -> tuple[dict[str, list[str] | None], list[str]]:
    """Return the texts of a folder's items by their stems, and the lines of all faults."""
    values = {"path": str(folder), "caption_extension": ".caption", "tags_extension": ".txt"}
    if metadata is not None:
        file = folder.parent / "meta.json"
        file.write_text(json.dumps(metadata), encoding="utf-8")
        values["metadata_file"] = str(file)
    asked = Dataset.model_validate({**values, **settings})
    scan = listing.scan("d", asked)
    items, faults = folders.items("d", asked, scan)
    rows, others = rows_of_items("d", asked, scan, items)
    found, more, _ = with_texts(asked, rows, items, memo or Memo(None), like_sdscripts=False)
    texts = {item.stem: item.texts for item in found}
    return texts, [fault.line for fault in (*faults, *others, *more)]


def test_caption_and_tags_lie_in_files_of_their_own(folder: Path) -> None:
    found, faults = made(folder)
    assert found == {"a": ["a cat\nsecond,x, y"], "sub/b": ["z"], "c": ["a dog"]}
    assert faults == []


def test_class_tokens_stand_for_a_missing_caption_and_texts_around_may_name_the_folder(
    folder: Path,
) -> None:
    (folder / "10_sks man").mkdir()
    (folder / "10_sks man/d.png").touch()
    found, faults = made(
        folder,
        tags_extension=None,
        caption_extension=".txt",
        class_tokens="someone in {folder}",
        captions={"caption_prefix": "{folder}:", "caption_suffix": "({folder})"}
        | {"enable_wildcard": True},
    )
    assert found == {
        "10_sks man/d": ["sks man: someone in sks man (sks man)"],
        "a": ["images: x, y (images)"],
        "c": ["images: someone in images (images)"],
        "sub/b": ["sub: z (sub)"],
    }
    assert not faults
    found, _ = made(folder, tags_extension=None, caption_extension=".no", class_tokens="{folder}")
    assert found["10_sks man/d"] == ["sks man"] and found["sub/b"] == ["sub"]


def test_a_tags_extension_may_end_as_that_of_captions_does(folder: Path) -> None:
    (folder / "c.tags.caption").write_text("fluffy")
    found, faults = made(folder, tags_extension=".tags.caption")
    assert found["c"] == ["a dog,fluffy"]
    assert len(faults) == 1  # b has tags of another ending


def test_metadata_stands_in_for_files(folder: Path) -> None:
    for path in folder.rglob("*.*"):
        if path.suffix != ".png":
            path.unlink()
    b = f"{folder}/sub/b.png"
    rows = {"a.png": {"caption": "one", "tags": "t"}, b: {"caption": "two"}, "c": {"tags": "three"}}
    found, faults = made(folder, rows)
    assert found == {"a": ["one,t"], "sub/b": ["two"], "c": ["three"]}
    assert faults == []


@pytest.mark.parametrize("path", ["images", "../{}/images", "{folder}"])
def test_names_in_metadata_may_begin_in_the_working_directory(
    folder: Path, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder.parent)
    (folder / "images").mkdir()
    (folder / "images/c.png").touch()
    place = path.format(folder.parent.name, folder=folder)
    rows = {
        "images/a.png": {"caption": "one"},
        "./images\\sub/b": {"caption": "two"},
        "images/c.png": {"caption": "of that file below the folder"},
        "images/lost.png": {"caption": "four"},
    }
    plain = {"caption_extension": ".no", "tags_extension": None, "class_tokens": "x"}
    found, faults = made(folder, rows, path=place, **plain)
    below = ["of that file below the folder"]
    assert found == {"a": ["one"], "sub/b": ["two"], "images/c": below, "c": ["x"]}
    (line,) = faults
    assert "images/lost.png names no image of the dataset; a key is the image's path below" in line


@pytest.mark.parametrize(
    ("how", "text"),
    [({"metadata_captions": "override"}, "new"), ({"metadata_captions": "join"}, "a dog,new")],
)
def test_files_and_metadata_come_together_as_asked(
    folder: Path, how: dict[str, str], text: str
) -> None:
    rows = {"c.png": {"caption": "new"}}
    found, faults = made(folder, rows, **how)
    assert found == {"a": ["a cat\nsecond,x, y"], "sub/b": ["z"], "c": [text]}
    assert faults == []


def test_tags_that_are_a_list_are_joined_by_the_separator(folder: Path) -> None:
    rows = {"sub/b": {"tags": ["x, y", "z"]}, "c": {"caption": "a dog"}}
    changes = {"tags_extension": None, "captions": {"caption_separator": ";"}}
    assert made(folder, rows, **changes)[0]["sub/b"] == ["x, y; z"]


def test_a_bad_entry_of_metadata_stops_no_other(folder: Path) -> None:
    found, (line,) = made(folder, {"c.png": {"caption": 3}, "a.png": {"tags": "x, y"}})
    assert found == {"a": ["a cat\nsecond,x, y"], "sub/b": ["z"], "c": ["a dog"]}
    assert line.startswith(f"{folder.parent}/meta.json, line 1: has a caption that is no text")


def test_a_file_and_metadata_that_differ_are_a_fault(folder: Path) -> None:
    found, faults = made(folder, {"c.png": {"caption": "new"}, "a": {"caption": "a cat\nsecond"}})
    assert set(found) == {"a", "sub/b"}
    (line,) = faults
    assert line.startswith(f"{folder}/c.caption: differs from the entry in")
    assert "override or join" in line


def test_entries_that_name_no_image_are_counted_in_one_line(folder: Path) -> None:
    rows = {f"lost{number}.png": {"caption": "x"} for number in range(1000)}
    found, (line,) = made(folder, {**rows, "a.png": {"tags": "x, y"}})
    assert len(found) == 3
    assert "lost0.png and 999 more name no image of the dataset" in line
    assert "\n" not in line


@pytest.mark.parametrize(
    ("name", "data", "what"),
    [
        ("c.caption", b"caf\xe9", "is not UTF-8 (byte 4)"),
        ("c.caption", b" \n", "is an empty caption"),
        ("c.caption", b"{a", "has a { or a } without the other"),
        ("c.caption", b"{|}", "has a wildcard that holds nothing"),
        ("c.caption", None, "has no caption"),
        ("z.txt", b"tags", "is a file of tags without an image"),
    ],
)
def test_a_bad_caption_is_named_and_stops_no_other(
    folder: Path, name: str, data: bytes | None, what: str
) -> None:
    if data is None:
        (folder / name).unlink()
    else:
        (folder / name).write_bytes(data)
    found, (line,) = made(folder, captions={"enable_wildcard": True})
    assert what in line
    assert {"a", "sub/b"} <= set(found)


def test_missing_and_empty_captions_may_be_allowed(folder: Path) -> None:
    (folder / "c.caption").write_text("")
    (folder / "sub/b.txt").unlink()
    found, faults = made(folder, missing_caption="empty", empty_caption="allow")
    assert (found["c"], found["sub/b"], faults) == ([""], [""], [])


def test_no_caption_file_is_read_twice(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memo = Memo(folder.parent / "memo.sqlite")
    first = made(folder, memo=memo)
    memo.save()
    opened: list[str] = []

    def read(path: str) -> bytes:
        opened.append(path)
        return Path(path).read_bytes()

    monkeypatch.setattr("latentmake.data.contents.read_regular", read)
    (folder / "c.caption").write_text("another dog")
    again = made(folder, memo=Memo(folder.parent / "memo.sqlite"))
    assert again[0] == {**first[0], "c": ["another dog"]}
    assert opened == [str(folder / "c.caption")]
