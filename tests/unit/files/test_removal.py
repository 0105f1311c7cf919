"""Files are removed as they were listed, or not at all; nothing is removed through a link."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from latentmake.files.removal import ListedFile, files_below, freed, remove, remove_empty


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("top/deep").mkdir(parents=True)
    Path("top/deep/a").write_text("a")


def listed() -> list[ListedFile]:
    return [file for _, file in files_below("top") if file is not None]


def test_what_changed_since_is_left() -> None:
    (file,) = listed()
    Path("top/deep/a").write_text("b!")
    assert not remove(file)
    Path("top/deep/a").unlink()
    assert not remove(file)
    Path("top/deep/a").mkdir()
    assert not remove(file)


def test_a_folder_that_became_a_link_is_left() -> None:
    (file,) = listed()
    Path("top/deep").rename("elsewhere")
    Path("top/deep").symlink_to(Path("elsewhere").resolve())
    assert not remove(file) and Path("elsewhere/a").exists()
    assert [*files_below("top")] == [("top/deep", None)]
    assert [*files_below("top/deep")] == [("top/deep", None)]


def test_names_of_one_file_free_its_bytes_once_and_together() -> None:
    os.link("top/deep/a", "top/b")
    os.link("top/deep/a", "c")
    assert freed(listed()) == 0
    Path("c").unlink()
    assert freed(listed()) == 1
    files = listed()
    assert all(map(remove, files))
    remove_empty(file.path for file in files)
    assert Path("top").is_dir() and not Path("top/deep").exists()
