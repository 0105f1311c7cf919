"""Captions from one file for many images: each form of it, and what is wrong with one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from latentmake.errors import DatasetError
from latentmake.index.memo import Entry, Memo
from latentmake.sources.metadata import entries_of, name_of

TEXT = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]))


def entries(path: Path, root: str = "images", memo: Memo | None = None) -> dict[str, Entry]:
    listed = entries_of("cats", str(path), root, memo or Memo(None))
    found = listed.find(listed.names())
    assert len(found) == listed.count
    return found


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("m.json", '{"a.png": {"caption": "an ä", "tags": "x, y"}, "s/b": {"tags": "z"}}'),
        ("m.json", '[{"image_path": "a.png", "caption": "an ä", "tags": ["x", "y"]},'
         ' {"file_name": "s/b", "text": null, "tags": "z"}]'),
        ("m.jsonl", '{"image_path": "./a.png", "caption": "an ä", "tags": "x, y"}\n\n'
         '{"image_path": "s\\\\b", "tags": "z", "image_size": [3, 4]}\n'),
        ("m.jsonl", '{"file": "a.png", "text": "an ä", "tags": "x, y"}\n'
         '{"media_path": "s/b", "tags": "z"}\n'),
        ("m.csv", 'file_name,text,tags\r\na.png,an ä,"x, y"\r\ns/b,,z\r\n'),
        ("m.csv", '\ufefffile_name,caption,tags\na.png,"an ä","x, y"\ns/b,"",z\n'),
    ],
)  # fmt: skip
def test_every_form_gives_the_same_entries(tmp_path: Path, name: str, content: str) -> None:
    path = tmp_path / name
    path.write_text(content, encoding="utf-8", newline="")
    found = entries(path)
    assert found["a.png"] == ("a.png", "an ä", "x, y")
    assert (found["s/b"].caption or None, found["s/b"].tags) == (None, "z")
    assert len(found) == 2


@given(st.dictionaries(st.uuids().map(str), st.tuples(TEXT, TEXT), min_size=1, max_size=5))
def test_any_caption_comes_back(
    tmp_path_factory: pytest.TempPathFactory, pairs: dict[str, tuple[str, str]]
) -> None:
    folder = tmp_path_factory.mktemp("any")
    rows = {name: {"caption": caption, "tags": tags} for name, (caption, tags) in pairs.items()}
    (folder / "m.json").write_text(json.dumps(rows, ensure_ascii=False), encoding="utf-8")
    lines = [json.dumps({"file_name": name, **row}) for name, row in rows.items()]
    (folder / "m.jsonl").write_text("\n".join(lines), encoding="utf-8")
    for kind in ("json", "jsonl"):
        found = entries(folder / f"m.{kind}")
        assert {name: each[1:] for name, each in found.items()} == pairs


@pytest.mark.parametrize(
    ("key", "name"),
    [
        ("a.png", "a.png"),
        ("./s//a", "s/a"),
        ("s\\a.png", "s/a.png"),
        ("/data/cats/s/a.png", "s/a.png"),
        ("/data/cats2/a.png", "/data/cats2/a.png"),
        ("../a.png", "../a.png"),
    ],
)
def test_a_key_names_an_image_below_the_datasets_folder(key: str, name: str) -> None:
    assert name_of(key, ["/data/cats"]) == name


FAULTS = [
    ("m.json", '{"a": {"caption": "x"}, "b": {"capt', "ends in the middle, after 1 entries"),
    ("m.json", '{"a": {"caption": "x"},,', "is not JSON"),
    ("m.json", "", "is no JSON object or list"),
    ("m.json", '"text"', "is no JSON object or list"),
    ("m.json", '{"a": "x"}', "has no object with a caption at a"),
    ("m.json", '{"a": {"caption": 3}}', "a caption that is no text at a"),
    ("m.json", '{"a": {"tags": "x\\u0000"}}', "a caption that holds NUL characters"),
    ("m.json", '[{"caption": "x"}]', "names no image in entry 1"),
    ("m.jsonl", '{"image_path": "a", "caption": "x"}\n{"image_pa', "in the middle of line 2"),
    ("m.jsonl", '{"image_path": "a",}\n', "is not JSON"),
    ("m.jsonl", "[1]\n", "has no object with a caption at entry 1"),
    ("m.csv", "name,words\na,b\n", "has the columns name, words"),
    ("m.csv", "file_name,text\na,b,c\n", "has too many columns in line 2"),
    ("m.csv", "", "has the columns none"),
    ("m.xml", "<a/>", "is none of .json, .jsonl, .csv"),
]


@pytest.mark.parametrize(("name", "content", "what"), FAULTS)
def test_a_damaged_file_gets_one_line_and_leaves_nothing_behind(
    tmp_path: Path, name: str, content: str, what: str
) -> None:
    path, memo = tmp_path / name, Memo(tmp_path / "memo.sqlite")
    path.write_text(content, encoding="utf-8")
    with pytest.raises(DatasetError) as caught:
        entries(path, memo=memo)
    line = str(caught.value)
    assert what in line
    assert str(path) in line
    assert "datasets.cats.metadata_file" in line
    assert "\n" not in line
    path.with_suffix(".jsonl").write_text('{"image_path": "a", "caption": "x"}\n')
    assert entries(path.with_suffix(".jsonl"), memo=memo) == {"a": ("a", "x", None)}


@pytest.mark.parametrize("name", ["m.json", "m.jsonl", "m.csv"])
def test_another_encoding_is_named(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    text = {
        "m.json": '{"a": {"caption": "\xe4"}}',
        "m.jsonl": '{"image_path": "a", "caption": "\xe4"}\n',
        "m.csv": "file_name,text\na,\xe4\n",
    }[name]
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(DatasetError, match=r"UTF-8"):
        entries(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match=r"m\.json cannot be read .*correct the path"):
        entries(tmp_path / "m.json")


def test_a_file_that_changed_is_read_anew(tmp_path: Path) -> None:
    path, place = tmp_path / "m.json", tmp_path / "memo.sqlite"
    path.write_text('{"a": {"caption": "old"}, "b": {"caption": "gone"}}')
    with Memo(place) as memo:
        entries(path, memo=memo)
    path.write_text('{"a": {"caption": "new"}}')
    with Memo(place) as memo:
        assert entries(path, memo=memo) == {"a": ("a", "new", None)}


def test_known_entries_need_no_reading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, place = tmp_path / "m.json", tmp_path / "memo.sqlite"
    path.write_text('{"a": {"caption": "x"}}')
    with Memo(place) as memo:
        entries(path, memo=memo)
    opened: list[Path] = []
    real = Path.open
    monkeypatch.setattr(
        Path, "open", lambda self, *a, **k: (opened.append(self), real(self, *a, **k))[1]
    )
    with Memo(place) as memo:
        assert entries(path, memo=memo) == {"a": ("a", "x", None)}
    assert path not in opened


def test_a_memo_that_cannot_be_written_does_not_stand_in_the_way(tmp_path: Path) -> None:
    path, place = tmp_path / "m.json", tmp_path / "memo.sqlite"
    path.write_text('{"a": {"caption": "x"}}')
    Memo(place).save()
    with Memo(place) as other, Memo(place) as memo:
        other._database.execute("BEGIN IMMEDIATE")
        assert entries(path, memo=memo) == {"a": ("a", "x", None)}
        other._database.execute("ROLLBACK")
