"""Two projects that share a cache folder take nothing from each other."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from item_world import inputs_of
from latentmake.errors import ConfigError
from latentmake.files.atomic import TEMPORARY_SUFFIX
from latentmake.plan.owners import OWNER, claim, other_owner, refuse_other_items
from latentmake.plan.parts import PROMPTS
from latentmake.plan.staleness import PartState, Stale


def project(folder: Path, cache: Path | None = None) -> Path:
    """Make a project that was built once, with a cache folder of its own or with a link to one."""
    (folder / ".latentmake").mkdir(parents=True)
    if cache is None:
        (folder / "cache/cats").mkdir(parents=True)
    else:
        (folder / "cache").symlink_to(cache)
    return folder


def owner(folder: Path) -> Path | None:
    os.chdir(folder)
    return other_owner("cats")


def build(folder: Path) -> None:
    os.chdir(folder)
    claim(["cats"])


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "shared/cats").mkdir(parents=True)
    return tmp_path / "shared"


def test_a_folder_of_the_project_needs_no_note(shared: Path, tmp_path: Path) -> None:
    mine = project(tmp_path / "mine")
    build(mine)
    assert owner(mine) is None and not list((mine / "cache/cats").iterdir())


def test_the_first_that_builds_in_a_folder_elsewhere_owns_it(shared: Path, tmp_path: Path) -> None:
    first, second = project(tmp_path / "1", shared), project(tmp_path / "2", shared)
    assert owner(first) is owner(second) is None  # as it was before there were notes
    build(first)
    build(second)
    assert owner(first) is None and owner(second) == first
    (shared / "cats" / OWNER).unlink()
    build(second)
    assert owner(first) == second


def test_a_folder_inside_of_another_project_is_that_projects(shared: Path, tmp_path: Path) -> None:
    home = project(tmp_path / "home")
    guest = project(tmp_path / "guest", home / "cache")
    build(guest)
    assert owner(guest) == home and owner(home) is None
    assert not (home / "cache/cats" / OWNER).exists()


def test_a_project_that_was_moved_or_copied_goes_on(shared: Path, tmp_path: Path) -> None:
    first = project(tmp_path / "1", shared)
    build(first)
    moved = first.rename(tmp_path / "moved")
    assert owner(moved) is None
    build(moved)
    assert (shared / "cats" / OWNER).read_text() == f"{moved}/cache/cats"
    (moved / "cache").unlink()
    shutil.copytree(shared, moved / "cache")  # notes are copied too
    shutil.copytree(moved, tmp_path / "copy")
    assert owner(moved) is owner(tmp_path / "copy") is None
    shutil.rmtree(moved)
    other = project(tmp_path / "2", shared)
    assert owner(other) is None
    build(other)
    assert (shared / "cats" / OWNER).read_text() == f"{other}/cache/cats"


def test_a_project_under_another_mount_is_the_same(shared: Path, tmp_path: Path) -> None:
    first, place = project(tmp_path / "1", shared), tmp_path / "mounted"
    place.mkdir()
    if subprocess.run(["mount", "--bind", first, place], capture_output=True).returncode:
        pytest.skip("a mount needs the rights of root")
    try:
        build(first)
        assert owner(place) is None
    finally:
        os.chdir(tmp_path)
        subprocess.run(["umount", place], check=True)


def part(
    *, new: int = 0, fresh: int = 0, edited: int = 0, orphans: tuple[str, ...] = ()
) -> PartState:
    source = inputs_of("a", "a.png")
    stale = [Stale(source, "new", "new", None)] * new
    stale += [Stale(source, "edited", "edited", "key@1")] * edited
    return PartState(fresh, stale, [*orphans])


def test_other_items_in_anothers_folder_are_refused(shared: Path, tmp_path: Path) -> None:
    first, second = project(tmp_path / "1", shared), project(tmp_path / "2", shared)
    build(first)
    mine = [part(fresh=1, new=1, edited=1, orphans=("cache/cats/m/64/b",))]
    refuse_other_items("cats", mine)
    os.chdir(second)
    with pytest.raises(ConfigError) as refused:
        refuse_other_items("cats", mine)
    line = str(refused.value)
    assert line.startswith(f"cache/cats: the project {first} uses this folder too, and its items")
    assert f"those of {second}: 3 cache files differ; rename the dataset in one of them" in line


def test_the_same_items_are_shared(shared: Path, tmp_path: Path) -> None:
    build(project(tmp_path / "1", shared))
    os.chdir(project(tmp_path / "2", shared))
    half = f"cache/cats/m/64/.x{TEMPORARY_SUFFIX}"
    mine = [part(fresh=3), part(new=3, orphans=(half,))]  # one more resolution
    refuse_other_items("cats", mine)
    assert mine[1].orphans == []  # the other project may be writing it


def test_prompts_of_another_project_stay(shared: Path, tmp_path: Path) -> None:
    (shared / PROMPTS).mkdir()
    first, second = project(tmp_path / "1", shared), project(tmp_path / "2", shared)
    for folder in (first, second):
        os.chdir(folder)
        claim([PROMPTS])
        mine = [part(fresh=1, new=1, orphans=("theirs",))]
        refuse_other_items(PROMPTS, mine)
        assert mine[0].orphans == (["theirs"] if folder == first else [])
