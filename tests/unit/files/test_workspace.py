"""A project's folders can be written, and one project owns each cache folder."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from latentmake.errors import ConfigError, StorageError
from latentmake.files import workspace
from latentmake.files.workspace import OWNER, check_folder, check_run_folder, claim, other_owner

PACKAGE = Path(workspace.__file__).parents[2]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


# -- folders --------------------------------------------------------------------------------------


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
        (".snakemake", "size=16k", "free some"),
        ("temporary", "size=4k", "set TMPDIR to another folder, or free some"),
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


def test_a_folder_without_permission_is_named(folder: Path) -> None:
    code = (
        "import sys; from pathlib import Path\n"
        "from latentmake.files.workspace import check_folder\n"
        "try: check_folder(Path(), dry=sys.argv[1] == 'dry')\n"
        "except Exception as error: print(error)\n"
    )
    asked = [sys.executable, "-c", code]
    if os.geteuid() == 0:  # who may write anywhere, unless that right is given up
        asked = ["setpriv", "--bounding-set=-dac_override,-dac_read_search", *asked]
        if shutil.which("setpriv") is None:
            pytest.skip("root may write anywhere")
    for name, how in (("logs", "real"), (".snakemake", "dry")):
        (folder / name).mkdir(mode=0o500)
        environment = {**os.environ, "PYTHONPATH": str(PACKAGE)}
        done = subprocess.run(
            [*asked, how], env=environment, capture_output=True, text=True, check=True
        )
        assert done.stdout.startswith(f"{name}: no permission to write; give your user the right")


# -- shared cache folders -------------------------------------------------------------------------


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


def test_a_project_under_another_mount_is_the_same(shared: Path, folder: Path) -> None:
    first, place = make_project(folder / "1", shared), folder / "mounted"
    place.mkdir()
    if subprocess.run(["mount", "--bind", first, place], capture_output=True).returncode:
        pytest.skip("a mount needs the rights of root")
    try:
        build_in(first)
        assert owner(place) is None
    finally:
        os.chdir(folder)
        subprocess.run(["umount", place], check=True)
