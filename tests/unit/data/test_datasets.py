"""Files of a folder that nothing uses are counted, and some of each ending are named."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from config_world import smallest
from latentmake.config.root import parse
from latentmake.data.datasets import Datasets
from latentmake.index.memo import Memo

Captured = pytest.CaptureFixture[str]


@pytest.fixture
def note(tmp_path: Path, capsys: Captured) -> Callable[..., str]:
    def noted(*names: str, others: Iterable[dict[str, Any]] = (), **changes: Any) -> str:
        for name in names:
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).touch()
        every = {f"more{number}": each for number, each in enumerate(others)} | {"cats": changes}
        values = {name: {"path": str(tmp_path), **each} for name, each in every.items()}
        made = Datasets(parse({**smallest(), "datasets": values}), Memo(None))
        made.note_unused("cats")
        made.note_unused("cats")  # says it once
        return capsys.readouterr().err.removeprefix("note: datasets.cats: ").strip("\n")

    return noted


def test_only_files_that_are_no_image_caption_or_cache_are_counted(
    tmp_path: Path, note: Callable[..., str]
) -> None:
    used = ("a.png", "a.txt", "B.JPG", "sub/c.webp", "a_te_outputs.npz", "a.img_sdxl", ".hidden")
    assert note(*used, "list.json", metadata_file=f"{tmp_path}/list.json") == ""
    assert note("sub/notes.pdf") == "2 files are not used: list.json, sub/notes.pdf"
    assert note(flat=True) == "1 file is not used: list.json"
    assert note("B.TXT", flat=True) == "2 files are not used: B.TXT, list.json"


def test_one_file_of_each_ending_is_named_the_rarest_first(note: Callable[..., str]) -> None:
    names = [f"{number}.heic" for number in range(9)] + ["x.mp4", "y.mp4", "z.pdf", "README"]
    assert note(*names) == "13 files are not used: README, z.pdf, x.mp4, ..."


@pytest.mark.parametrize("name", ["line\nbreak.pdf", "x" * 200 + ".pdf"])
def test_the_line_stays_one_short_line(name: str, note: Callable[..., str]) -> None:
    line = note(name)
    assert "\n" not in line
    assert 0 < len(line) < 120


def test_files_that_another_dataset_of_the_folder_reads_are_used(note: Callable[..., str]) -> None:
    assert note("a.png", "a.txt", "a.tags", "b.mp4") == "2 files are not used: a.tags, b.mp4"
    others = [{"caption_extension": ".tags"}, {"target_frames": [5]}]
    assert note(others=others) == ""
