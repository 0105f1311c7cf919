"""Folders for projects: `latentmake new` and `latentmake demo`."""

from __future__ import annotations

from pathlib import Path

import pytest
import world
import yaml
from latentmake.base.errors import StorageError
from latentmake.commands.new import demo, new
from latentmake.trainers.init.init import init

ROOT = Path(__file__).resolve().parents[3]


def test_init_fills_the_configuration_of_a_new_project(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    new(Path("My cats"))
    wrote, *_, last = capsys.readouterr().out.splitlines()
    assert wrote == "wrote    My cats: pictures/my_cats/, models/, my_cats.yaml, .gitignore"
    assert last == ("next     cd 'My cats' && latentmake init pictures/my_cats --model MODEL")
    monkeypatch.chdir("My cats")
    assert yaml.safe_load(Path("my_cats.yaml").read_text()) is None
    world.draw(Path("pictures/my_cats/a.png"), 1, (80, 64))
    Path("pictures/my_cats/a.txt").write_text("a cat")
    init([Path("pictures/my_cats")], model=str(ROOT / "data/tiny-sd"))
    assert [*yaml.safe_load(Path("my_cats.yaml").read_text())["runs"]] == ["my_cats"]


def test_the_demo_is_the_sample_of_a_clone(tmp_path: Path) -> None:
    demo(tmp_path / "demo")
    names = ("config/config.yaml", *(f"data/michael_gove/{x}" for x in ("red_heart.jpg",)))
    for name in names:
        assert (tmp_path / "demo" / name).read_bytes() == (ROOT / name).read_bytes()
    assert (tmp_path / "demo/data/tiny-sd/unet/config.json").is_file()


@pytest.mark.parametrize("word", [new, demo])
def test_a_folder_with_files_is_left_as_it_is(word: object, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("mine")
    with pytest.raises(StorageError, match="is not empty"):
        word(tmp_path)  # type: ignore[operator]
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]
