"""A folder of links is kept like a list of files: the same command twice touches nothing."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest
from latentmake.base import atomic
from latentmake.base.errors import SourceError
from latentmake.base.sync import RECORD, Changes, sync


@pytest.fixture
def sources(tmp_path: Path) -> dict[str, Path | bytes]:
    found: dict[str, Path | bytes] = {}
    for name in ("a.png", "sub/deep/b.png"):
        path = tmp_path / "data" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
        found[name] = path
    return {**found, "metadata.json": b"{}"}


def names(folder: Path) -> list[str]:
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != RECORD)
    return sorted(str(path.relative_to(folder)) for path in files)


def written(folder: Path, files: dict[str, Path | bytes]) -> set[str]:
    """Sync a folder; return the names that got a new file."""

    def inodes() -> dict[str, tuple[int, int]]:
        stats = {name: (folder / name).stat() for name in names(folder)}
        return {name: (stat.st_ino, stat.st_mtime_ns) for name, stat in stats.items()}

    before = inodes() if folder.is_dir() else {}
    sync(folder, files)
    return {name for name, inode in inodes().items() if before.get(name) != inode}


def test_content_alone_decides_what_is_copied(
    tmp_path: Path, sources: dict[str, Path | bytes]
) -> None:
    folder, source = tmp_path / "copied", sources["a.png"]
    assert isinstance(source, Path)
    files = {**sources, "low/a.png": source}
    assert written(folder, files) == set(files)
    assert (folder / "a.png").samefile(folder / "low/a.png")
    assert not (folder / "a.png").samefile(source)
    # The same content in a new file with another time.
    source.unlink()
    source.write_text("a.png")
    os.utime(source, ns=(1, 1))
    assert written(folder, files) == set()
    # Other content with the same size and time.
    source.write_text("a.pnG")
    os.utime(source, ns=(1, 1))
    assert written(folder, files) == {"a.png", "low/a.png"}
    assert (folder / "a.png").read_text() == (folder / "low/a.png").read_text() == "a.pnG"
    # Damage to the copies, one of them through both of its names.
    (folder / "a.png").write_text("x")
    (folder / "metadata.json").write_text("[]")
    (folder / "sub/deep/b.png").unlink()
    assert written(folder, files) == set(files)
    assert (folder / "low/a.png").read_text() == "a.pnG"
    assert (folder / "metadata.json").read_bytes() == b"{}"


@pytest.mark.parametrize("damage", [None, b"", b"[]", b'{"files": {"a": 1}}'])
def test_without_its_record_files_are_compared_and_not_copied(
    tmp_path: Path, sources: dict[str, Path | bytes], damage: bytes | None
) -> None:
    folder = tmp_path / "copied"
    sync(folder, sources)
    (folder / RECORD).unlink()
    if damage is not None:
        (folder / RECORD).write_bytes(damage)
    assert written(folder, sources) == set()
    assert json.loads((folder / RECORD).read_bytes())["files"].keys() == sources.keys()


def test_a_sync_that_fails_keeps_what_is_done_and_knows_its_files(
    tmp_path: Path, sources: dict[str, Path | bytes]
) -> None:
    folder, late = tmp_path / "copied", tmp_path / "late.png"
    files = {**sources, "late.png": late}
    with pytest.raises(SourceError, match=r"late\.png: cannot be read"):
        sync(folder, files)
    assert names(folder) == sorted(sources)
    late.write_text("late")
    assert written(folder, files) == {"late.png"}
    sync(folder, {})
    assert not names(folder)


def test_what_a_killed_sync_left_half_written_is_removed(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    for place in (folder, folder / "sub"):
        place.mkdir()
        (place / f".0123456789abcdef.1.1{atomic.TEMPORARY_SUFFIX}").write_bytes(b"half a file")
        (place / ".mine").write_bytes(b"mine")
    sync(folder, {"sub/a.txt": b"a"})
    assert names(folder) == [".mine", "sub/.mine", "sub/a.txt"]


def test_files_are_linked_and_the_second_time_nothing_is_touched(
    tmp_path: Path, sources: dict[str, Path | bytes]
) -> None:
    folder = tmp_path / "deployed"
    assert sync(folder, sources, link=True) == Changes(1, 2, 0, 0)
    for name, source in sources.items():
        if isinstance(source, Path):
            assert (folder / name).samefile(source)
    before = {path: path.stat() for path in folder.rglob("*") if path.is_file()}
    assert sync(folder, sources, link=True) == Changes(0, 0, 3, 0)
    assert {path: path.stat().st_mtime_ns for path in before} == {
        path: stat.st_mtime_ns for path, stat in before.items()
    }
    source = sources["a.png"]
    assert isinstance(source, Path)
    (tmp_path / "new").write_text("a.pnG")
    (tmp_path / "new").replace(source)
    assert sync(folder, sources, link=True) == Changes(0, 1, 2, 0)
    assert (folder / "a.png").read_text() == "a.pnG"


def test_what_is_no_longer_wanted_goes_with_its_empty_folders_and_nothing_else(
    tmp_path: Path, sources: dict[str, Path | bytes]
) -> None:
    folder = tmp_path / "deployed"
    sync(folder, sources, link=True)
    (folder / "mine.txt").write_text("somebody's")
    del sources["sub/deep/b.png"]
    assert sync(folder, sources, link=True).removed == 1
    assert names(folder) == ["a.png", "metadata.json", "mine.txt"]
    assert not (folder / "sub").exists()
    assert (tmp_path / "data/sub/deep/b.png").is_file()


def test_where_links_fail_copies_are_made_once(
    tmp_path: Path, sources: dict[str, Path | bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EXDEV, "another file system")

    monkeypatch.setattr(os, "link", refuse)
    assert sync(tmp_path / "deployed", sources, link=True) == Changes(3, 0, 0, 0)
    assert sync(tmp_path / "deployed", sources, link=True) == Changes(0, 0, 3, 0)


def test_what_is_replaced_or_removed_is_told_before(tmp_path: Path) -> None:
    folder, told = tmp_path / "kept", dict[str, str]()

    def replacing(name: str) -> None:
        path = folder / name
        told[name] = path.read_text() if path.exists() else ""

    def bring(files: dict[str, Path | bytes]) -> dict[str, str]:
        told.clear()
        sync(folder, files, replacing=replacing)
        return dict(told)

    source = tmp_path / "source"
    source.write_text("one")
    assert bring({"a": source, "b": b"x", "c": b"y"}) == {"a": "", "b": "", "c": ""}
    os.utime(source, ns=(1, 1))
    assert bring({"a": source, "b": b"x", "c": b"y"}) == {}
    source.write_text("two")
    assert bring({"a": source, "b": b"z"}) == {"a": "one", "b": "x", "c": "y"}
