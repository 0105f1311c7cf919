"""The listing of a cache folder tells any change, and nothing odd in the folder stops it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from latentmake.base.errors import CacheError
from latentmake.data.memo import Folder, packed, unpacked

FILES = ["cache/64/a", "cache/64/sub/b", "cache/text/a"]


@pytest.fixture(autouse=True)
def _caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in FILES:
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(name)


def listed() -> list[str]:
    return sorted(Folder("cache").listing())


def test_a_fingerprint_tells_any_change_and_no_change() -> None:
    prints = [Folder("cache").fingerprint]
    assert Folder("cache").fingerprint == prints[0]
    Path("new").write_text(FILES[0])
    Path("new").replace(FILES[0])
    prints.append(Folder("cache").fingerprint)
    Path(FILES[1]).unlink()
    prints.append(Folder("cache").fingerprint)
    Path("cache").rename("elsewhere")
    prints.append(Folder("cache").fingerprint)
    assert len(set(prints)) == 4 and Folder("cache").listing() == {}


def test_a_file_that_vanishes_while_it_is_listed_hides_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fleeting = Path("cache/64/.half")
    fleeting.write_bytes(b"half")
    scandir = os.scandir

    @contextlib.contextmanager
    def scanned(folder: str) -> Iterator[list[os.DirEntry[str]]]:
        with scandir(folder) as found:
            entries = list(found)
        fleeting.unlink(missing_ok=True)  # as the job does that wrote it
        yield entries

    monkeypatch.setattr(os, "scandir", scanned)
    assert listed() == FILES


@pytest.mark.parametrize("to", [".", "..", "../../..", "loop", "gone", "/"])
def test_a_link_in_a_circle_or_to_nowhere_is_listed_like_a_file(to: str) -> None:
    Path("cache/64/loop").symlink_to(to)
    assert [name for name in listed() if name != "cache/64/loop"] == FILES


def test_a_folder_behind_a_link_is_listed_once() -> None:
    Path("cache/64").rename("elsewhere")
    Path("cache/64").symlink_to(Path("elsewhere").absolute())
    Path("elsewhere/back").symlink_to(Path("cache").absolute())
    assert [name for name in listed() if "back" not in name] == FILES
    assert Folder("cache").has_links


def test_a_folder_whose_name_is_not_utf8_hides_no_other() -> None:
    folder = b"cache/64/caf\xe9"
    os.mkdir(folder)
    Path(os.fsdecode(folder), "x").touch()
    assert {*FILES} < {*listed()} and Folder("cache").fingerprint


def test_a_folder_that_cannot_be_read_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(folder: str) -> None:
        raise PermissionError(13, "Permission denied", folder)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(CacheError, match=r"^cache: cannot be read \(Permission denied\); check"):
        Folder("cache")


def test_packed_entries_come_back_in_their_order() -> None:
    entries = [(f"{number}.png", number) for number in range(3000)]
    blocks = [*packed(entries)]
    assert len(blocks) == 3
    assert [entry for block in blocks for entry in unpacked(block)] == entries
