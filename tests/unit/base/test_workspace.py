"""A project's folders can be written, and one project owns each cache folder.

What has no room on its disk is refused before it is written; a folder has a name on each system.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from latentmake.base import workspace
from latentmake.base.errors import ConfigError, StorageError
from latentmake.base.machine import Need, free, human, shortages, usable_cores
from latentmake.base.paths import absolute, translate
from latentmake.base.workspace import OWNER, check_folder, check_run_folder, claim, other_owner


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_folder_that_can_be_written_is_taken_and_left_as_it_was(folder: Path) -> None:
    check_folder(folder, dry=True)
    assert list(folder.iterdir()) == []
    (folder / "logs/text").mkdir(parents=True)
    names = {"text", "import.log", ".gitkeep", "nohup"}  # files of the user's own, too
    for name in names - {"text"}:
        (folder / "logs" / name).touch()
    check_folder(folder, dry=False)
    assert {each.name for each in (folder / "logs").iterdir()} == names


@pytest.mark.parametrize("name", ["logs", ".snakemake", ".latentmake"])
def test_a_file_in_the_place_of_a_folder_is_named(folder: Path, name: str) -> None:
    (folder / name).touch()
    with pytest.raises(StorageError, match=f"^{name}: a file lies where a folder belongs"):
        check_folder(folder, dry=False)


def test_braces_in_the_project_are_refused_and_elsewhere_taken(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"my {project}: .* braces .*; rename the folder"):
        check_folder(folder / "my {project}", dry=True)
    place = folder / "work {x}"
    place.mkdir()
    os.chdir(place)
    check_folder(folder, dry=False)


@pytest.mark.parametrize(
    ("name", "options", "hint"),
    [
        ("logs", "size=16k", "free some"),
        ("temporary", "nr_inodes=1", "set TMPDIR to another folder, or free some"),
    ],
)
def test_a_full_disk_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, options: str, hint: str
) -> None:
    place = folder / name
    place.mkdir()
    monkeypatch.delenv("TMP", raising=False)
    monkeypatch.setenv("TMPDIR", str(folder / "temporary"))
    mount = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(place)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a small disk needs the rights of root")
    try:
        with pytest.raises(StorageError, match=f"{name}: no space left on the disk; {hint}"):
            check_folder(folder, dry=False)
        check_folder(folder, dry=True)
    finally:
        subprocess.run(["umount", str(place)], check=True)
    check_folder(folder, dry=False)


@pytest.mark.parametrize("name", ["runs", "runs/cats"])
def test_a_runs_folder_that_is_none_or_cannot_be_written_is_named(folder: Path, name: str) -> None:
    run = Path("runs/cats")
    check_run_folder(run)
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).touch()
    with pytest.raises(StorageError, match=f"^{name}: a file is in the place of a folder; "):
        check_run_folder(run)
    (folder / name).unlink()
    (folder / name).mkdir()
    if subprocess.run(["chattr", "+i", name], capture_output=True).returncode:
        pytest.skip("a folder that nobody may write needs the rights of root")
    try:
        with pytest.raises(StorageError, match=f"^{name}: this folder cannot be written; give"):
            check_run_folder(run)
    finally:
        subprocess.run(["chattr", "-i", name], check=True)
    check_run_folder(run)


def make_project(place: Path, cache: Path | None = None) -> Path:
    """Make a project that was built once, with a cache folder of its own or with a link to one."""
    (place / ".latentmake").mkdir(parents=True)
    if cache is None:
        (place / "cache/cats").mkdir(parents=True)
    else:
        (place / "cache").symlink_to(cache)
    return place


def owner(place: Path) -> Path | None:
    os.chdir(place)
    return other_owner("cats")


def build_in(place: Path) -> None:
    os.chdir(place)
    claim(["cats"])


@pytest.fixture
def shared(folder: Path) -> Path:
    (folder / "shared/cats").mkdir(parents=True)
    return folder / "shared"


def test_the_first_that_builds_in_a_folder_elsewhere_owns_it(shared: Path, folder: Path) -> None:
    first, second = make_project(folder / "1", shared), make_project(folder / "2", shared)
    assert owner(first) is owner(second) is None  # as it was before there were notes
    build_in(first)
    build_in(second)
    assert owner(first) is None and owner(second) == first
    (shared / "cats" / OWNER).unlink()
    build_in(second)
    assert owner(first) == second


def test_a_folder_inside_of_another_project_is_that_projects(folder: Path) -> None:
    home = make_project(folder / "home")
    guest = make_project(folder / "guest", home / "cache")
    for each in (guest, home):
        build_in(each)
    assert owner(guest) == home and owner(home) is None
    assert not (home / "cache/cats" / OWNER).exists()  # it needs none


def test_a_project_that_was_moved_or_copied_goes_on(shared: Path, folder: Path) -> None:
    first = make_project(folder / "1", shared)
    build_in(first)
    moved = first.rename(folder / "moved")
    assert owner(moved) is None
    build_in(moved)
    assert (shared / "cats" / OWNER).read_text() == f"{moved}/cache/cats"
    (moved / "cache").unlink()
    shutil.copytree(shared, moved / "cache")  # notes are copied too
    shutil.copytree(moved, folder / "copy")
    assert owner(moved) is owner(folder / "copy") is None
    shutil.rmtree(moved)
    other = make_project(folder / "2", shared)
    assert owner(other) is None
    build_in(other)
    assert (shared / "cats" / OWNER).read_text() == f"{other}/cache/cats"


def test_what_has_no_room_is_one_line_a_disk(tmp_path: Path) -> None:
    there = free(tmp_path / "not" / "made" / "yet")
    half = Need("latents of wan", str(tmp_path / "cache"), there * 6 // 10)
    assert not list(shortages([half, Need("nothing", "cache", 0)]))
    both = [half, half._replace(what="clips", folder=str(tmp_path / "clips"))]
    (error,) = shortages(both)
    line = str(error)
    assert line.startswith(f"{tmp_path}/cache: {human(half.size)} of latents of wan, ")
    assert "of clips must be written, but only" in line and "; free some space" in line
    assert not (tmp_path / "not").exists()


def test_bytes_for_people() -> None:
    sizes = (999, 250_000, 4_190_000, 503_000_000, 4.137e11, 1.2e12)
    named = ["1.0 kB", "0.2 MB", "4.2 MB", "0.5 GB", "413.7 GB", "1.2 TB"]
    assert [*map(human, sizes)] == named


def test_cores_are_those_that_the_process_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {1, 5, 6}, raising=False)
    assert usable_cores() == 3
    monkeypatch.delattr(os, "sched_getaffinity")  # macOS tells no affinity
    assert usable_cores() == os.cpu_count()
    asking = Path(workspace.__file__).parents[1].rglob("*.py")
    assert [x.name for x in asking if "sched_getaffinity" in x.read_text()] == ["machine.py"]


MAPS = [
    {"linux": "/data", "windows": "E:\\Daten", "wsl": "/mnt/e/Daten"},
    {"linux": "/data/models", "windows": "\\\\nas\\models"},
    {"wsl": "/home/u", "windows": "\\\\wsl.localhost\\Ubuntu\\home\\u\\"},
    {"linux": "/srv/drive", "wsl": "/mnt/f"},
]


@pytest.mark.parametrize(
    ("path", "linux", "windows", "wsl"),
    [
        ("/data/a b.png", "/data/a b.png", "E:/Daten/a b.png", "/mnt/e/Daten/a b.png"),
        ("/data", "/data", "E:/Daten", "/mnt/e/Daten"),
        ("/database", "/database", None, "/database"),  # whole components
        ("/Data/x", "/Data/x", None, "/Data/x"),  # case counts
        ("/data/models/v", "/data/models/v", "//nas/models/v", "/mnt/e/Daten/models/v"),  # longest
        ("/mnt/e/Daten/x", "/data/x", "E:/Daten/x", "/mnt/e/Daten/x"),
        ("/mnt/e/other", "/mnt/e/other", "E:/other", "/mnt/e/other"),
        ("/mnt/f/x", "/srv/drive/x", "F:/x", "/mnt/f/x"),
        ("/mnt/d", "/mnt/d", "D:/", "/mnt/d"),
        ("/mnt/disk/x", "/mnt/disk/x", None, "/mnt/disk/x"),
        ("/home/u/x", "/home/u/x", "//wsl.localhost/Ubuntu/home/u/x", "/home/u/x"),
        ("e:\\daten\\X", "/data/X", "E:/Daten/X", "/mnt/e/Daten/X"),  # case does not count
        ("D:\\x\\y", "/mnt/d/x/y", "D:/x/y", "/mnt/d/x/y"),
        ("D:/", "/mnt/d", "D:/", "/mnt/d"),
        ("D:", "/mnt/d", "D:/", "/mnt/d"),
        ("\\\\NAS\\Models\\v", "/data/models/v", "//nas/models/v", None),
        ("//other/share", None, "//other/share", None),
        ("/data/./a//b/../c/", "/data/a/c", "E:/Daten/a/c", "/mnt/e/Daten/a/c"),
        ("/", "/", None, "/"),
    ],
)
def test_names_of_each_system(
    path: str, linux: str | None, windows: str | None, wsl: str | None
) -> None:
    assert translate(path, "linux", MAPS) == linux
    assert translate(path, "windows", MAPS) == windows
    assert translate(path, "wsl", MAPS) == wsl


def test_a_root_can_be_mapped_and_of_two_maps_of_one_length_the_first_wins() -> None:
    maps = [{"linux": "/", "windows": "//wsl.localhost/Ubuntu/"}]
    assert translate("/home/u", "windows", maps) == "//wsl.localhost/Ubuntu/home/u"
    assert translate("/mnt/d/u", "windows", maps) == "D:/u"
    assert translate("//WSL.localhost/ubuntu/home/u", "linux", maps) == "/home/u"
    maps = [{"linux": "/mnt/d", "windows": "Z:"}, {"linux": "/mnt/d", "windows": "Y:"}]
    assert translate("/mnt/d/x", "windows", maps) == "Z:/x"


def test_absolute_leaves_windows_alone(folder: Path) -> None:
    assert absolute("a/../b") == f"{folder}/b"
    assert absolute("D:\\x") == "D:\\x"
