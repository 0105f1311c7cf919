"""Files of a folder that nothing uses are counted, and some of each ending are named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from latentmake.config.datasets import Dataset
from latentmake.sources.folders import scan
from latentmake.sources.unused import unused_note


def note(root: Path, *names: str, **changes: Any) -> str:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()
    asked = Dataset(path=str(root), **changes)
    return unused_note([asked], scan("cats", asked))


def test_only_files_that_are_no_image_caption_or_cache_are_counted(tmp_path: Path) -> None:
    used = ("a.png", "a.txt", "B.JPG", "B.TXT", "sub/c.webp", "a_te_outputs.npz", "a.img_sdxl")
    assert (
        note(tmp_path, *used, ".hidden", "list.json", metadata_file=f"{tmp_path}/list.json") == ""
    )
    assert note(tmp_path, "sub/notes.pdf", "list.json") == (
        "2 files are not used: list.json, sub/notes.pdf"
    )
    assert note(tmp_path, flat=True) == "1 file is not used: list.json"


def test_each_ending_is_named_and_the_rarest_first(tmp_path: Path) -> None:
    names = [f"{number}.heic" for number in range(9)] + ["x.mp4", "y.mp4", "z.pdf", "README"]
    assert note(tmp_path, *names) == "13 files are not used: README, z.pdf, x.mp4, ..."
    for name in names[1:-1]:
        (tmp_path / name).unlink()
    assert note(tmp_path, "1.heic") == "3 files are not used: README, 0.heic, 1.heic"


@pytest.mark.parametrize("name", ["line\nbreak.pdf", "x" * 200 + ".pdf"])
def test_the_line_stays_one_short_line(tmp_path: Path, name: str) -> None:
    line = note(tmp_path, name)
    assert "\n" not in line
    assert len(line) < 120


def test_files_that_another_dataset_of_the_folder_reads_are_used(tmp_path: Path) -> None:
    for name in ("a.png", "a.txt", "a.tags", "b.mp4"):
        (tmp_path / name).touch()
    images = Dataset(path=str(tmp_path))
    listed = scan("cats", images)
    assert unused_note([images], listed) == "2 files are not used: a.tags, b.mp4"
    others = [
        Dataset(path=str(tmp_path), caption_extension=".tags"),
        Dataset(path=str(tmp_path), target_frames=[5]),
    ]
    assert unused_note([images, *others], listed) == ""
