"""Captions from one file for many images: each form of it, and what is wrong with one."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from hypothesis import strategies as st
from latentmake.base.errors import DatasetError
from latentmake.data.lists import metadata_of, name_of

TEXT = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]))


def entries(path: Path) -> dict[str, tuple[str | None, str | None]]:
    """Return name -> caption and tags."""
    found, faults = metadata_of("cats", str(path), "images")
    assert faults == []
    return {name: (row.caption, row.tags) for name, row in found.items()}


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
        ("m.csv", '\ufefffile_name,caption,tags\na.png,"an ä","x, y"\ns/b,"",z\n,,\n'),
        ("m.csv", 'file_name;text;tags\na.png;an ä;x, y\ns/b;;z\n'),
        ("m.tsv", 'file_name\ttext\ttags\na.png\tan ä\tx, y\ns/b\t\tz\n'),
    ],
)  # fmt: skip
def test_every_form_gives_the_same_entries(tmp_path: Path, name: str, content: str) -> None:
    path = tmp_path / name
    path.write_text(content, encoding="utf-8", newline="")
    found = entries(path)
    assert found["a.png"] == ("an ä", "x, y")
    assert found["s/b"] == (None, "z")
    assert len(found) == 2


def test_a_parquet_table_has_the_same_columns(tmp_path: Path) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    columns = {"file_name": ["a.png", "s/b"], "text": ["an ä", None], "tags": [["x", "y"], ["z"]]}
    parquet.write_table(arrow.table(columns), tmp_path / "m.parquet")
    assert entries(tmp_path / "m.parquet") == {"a.png": ("an ä", "x, y"), "s/b": (None, "z")}
    data = (tmp_path / "m.parquet").read_bytes()
    length = int.from_bytes(data[-8:-4], "little")  # of the footer, which is damaged in its middle
    for damaged in (data[:-9], data[: -8 - length] + b"\xff" * length + data[-8:]):
        (tmp_path / "bad.parquet").write_bytes(damaged)
        with pytest.raises(DatasetError, match=r"bad\.parquet is no Parquet file, or damaged \("):
            entries(tmp_path / "bad.parquet")


def test_a_parquet_table_needs_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "m.parquet").touch()
    with pytest.raises(DatasetError, match="needs the Python package pyarrow; install it: pip"):
        entries(tmp_path / "m.parquet")


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
    ("m.json", '{"a": {"caption": "x"}, "b": {"capt', "m.json ends in the middle"),
    ("m.json", '{"a": {"caption": "x"},\n,', "is not JSON (Expecting property name"),
    ("m.json", '{"a": {"caption": "x"},\n,', "line 2 column 1 ("),
    ("m.json", "", "ends in the middle"),
    ("m.json", '"text"', "is no JSON object or list"),
    ("m.json", '[{"file": "a", "caption": "x"}] x', "is not JSON (Extra data: line 1 column 33"),
    ("m.csv", "name,words\na,b\n", "and text or tags, but ['name', 'words']"),
    ("m.csv", 'file_name,"text\na,b\n', "has a header that has a quote without its pair"),
    ("m.csv", "", "text or tags, but []"),
    ("m.xml", "<a/>", "is none of .json, .jsonl, .csv, .tsv, .parquet"),
]


@pytest.mark.parametrize(("name", "content", "what"), FAULTS)
def test_a_damaged_file_gets_one_line(tmp_path: Path, name: str, content: str, what: str) -> None:
    path = tmp_path / name
    path.write_text(content, encoding="utf-8")
    with pytest.raises(DatasetError) as caught:
        entries(path)
    line = str(caught.value)
    assert all(word in line for word in (what, str(path), "datasets.cats.metadata_file"))
    assert "\n" not in line


ROWS = [
    ("m.json", '{"c": {"text": "[\\n"},\n\n"b": "x",\n"c.png": {"text": "x"}}', 3, "is no object"),
    ("m.json", '{"a": {"text":\n3},"c": {"text": ""}}', 1, "is no text, but 3: put it in quotes"),
    ("m.json", '\n[{"text": "x"},\n{"file": "c"}]', 2, "names no file"),
    ("m.json", '[{"file": "c"},\n{"file": true}]', 2, "names no file, but True: put it in quotes"),
    ("m.json", '{"a": {"tags": "x\\u0000"}, "c": {}}', 1, "a caption that holds NUL characters"),
    ("m.json", '{"a": {"text": "x \\ud800"}, "c": {}}', 1, "a caption that holds half a character"),
    ("m.jsonl", '{"file": "c", "text": "x"}\n{"image_pa', 2, "ends in the middle"),
    ("m.jsonl", '\n{"file": "a",}\n{"file": "c"}', 2, "is not JSON (column 1"),
    ("m.jsonl", '{"file": "c"}\n[1]\n', 2, "is no object"),
    ("m.jsonl", '{"file": "c"}\n{"file": "a", "text": "\xe4"}\n', 2, "is not UTF-8"),
    ("m.csv", 'file,text\nc,"x\n\ny"\na,b,c\n', 5, "has 3 columns, and the header has 2: put a"),
    ("m.csv", 'file,text\r\na,"b" c\r\nc,"x"\r\n', 2, "has a quote without its pair (',' expected"),
    ("m.csv", 'file,text\n\na,"b\nc,x\n', 3, "has a quote without its pair (unexpected end"),
    ("m.csv", "file,text\na,\xe4\nc,x\n", 2, "is not UTF-8: save it as UTF-8"),
]


@pytest.mark.parametrize(("name", "content", "line", "what"), ROWS)
def test_a_bad_row_is_named_by_its_line_and_stops_no_other(
    tmp_path: Path, name: str, content: str, line: int, what: str
) -> None:
    path = tmp_path / name
    path.write_bytes(content.encode("latin-1"))
    found, faults = metadata_of("cats", str(path), "images")
    assert {*found} <= {"c", "c.png"} and found
    assert [fault.path for fault in faults] == [f"{path}, line {line}"]
    assert what in faults[0].line
