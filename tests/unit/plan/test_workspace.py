"""A working folder in which Snakemake would end in a traceback is refused in one line."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from latentmake.errors import ConfigError, StorageError
from latentmake.plan import workspace

PACKAGE = Path(workspace.__file__).parents[2]
RULES = PACKAGE.parent / "rules"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_folder_that_can_be_written_is_taken_and_left_as_it_was(folder: Path) -> None:
    workspace.check(folder, dry=True)
    assert list(folder.iterdir()) == []
    (folder / "logs/text").mkdir(parents=True)
    (folder / "logs/import.log").touch()
    workspace.check(folder, dry=False)
    assert {each.name for each in (folder / "logs").iterdir()} == {"text", "import.log"}


@pytest.mark.parametrize("name", [".gitkeep", "out", "nohup"])
def test_a_file_of_the_users_own_among_the_logs_stops_nothing(folder: Path, name: str) -> None:
    (folder / "logs").mkdir()
    (folder / "logs" / name).touch()
    for dry in (True, False):
        workspace.check(folder, dry=dry)


def test_a_file_in_the_place_of_any_folder_of_logs_is_named(folder: Path) -> None:
    text = "".join(path.read_text() for path in RULES.glob("*.smk"))
    folders = set(re.findall(r'"logs/(\w+)/', text)) | {"latents", "text"}
    assert len(folders) >= 9
    (folder / "logs").mkdir()
    for name in folders:
        place = folder / "logs" / name
        place.touch()
        with pytest.raises(StorageError, match=f"^logs/{name}: a file is in the place"):
            workspace.check(folder, dry=True)
        place.unlink()


@pytest.mark.parametrize("name", ["logs", "logs/text", ".snakemake", ".latentmake"])
def test_a_file_in_the_place_of_a_folder_is_named(folder: Path, name: str) -> None:
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).touch()
    for dry in (True, False):
        with pytest.raises(StorageError, match=f"^{name}: a file is in the place of a folder; "):
            workspace.check(folder, dry=dry)


def test_braces_in_the_project_are_refused_and_elsewhere_taken(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"my {project}: .* braces .*; rename the folder"):
        workspace.check(folder / "my {project}", dry=True)
    place = folder / "work {x}"
    place.mkdir()
    os.chdir(place)
    workspace.check(folder, dry=False)


@pytest.mark.parametrize("name", ["logs", ".snakemake"])
def test_a_full_disk_is_named(folder: Path, name: str) -> None:
    place = folder / name
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=16k", "tmpfs", str(place)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a small disk needs the rights of root")
    try:
        with pytest.raises(StorageError, match=f"^{name}: no space left on the disk; free some"):
            workspace.check(folder, dry=False)
        workspace.check(folder, dry=True)
    finally:
        subprocess.run(["umount", str(place)], check=True)


@pytest.mark.parametrize("options", ["size=4k", "nr_inodes=1"])
def test_no_room_for_temporary_files_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch, options: str
) -> None:
    place = folder / "temporary"
    place.mkdir()
    monkeypatch.delenv("TMP", raising=False)
    monkeypatch.setenv("TMPDIR", str(place))
    mount = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(place)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a small disk needs the rights of root")
    try:
        line = f"^{place}: no space left on the disk; set TMPDIR to another folder, or free some"
        with pytest.raises(StorageError, match=line):
            workspace.check(folder, dry=False)
        workspace.check(folder, dry=True)
    finally:
        subprocess.run(["umount", str(place)], check=True)
    workspace.check(folder, dry=False)


def test_a_folder_whose_name_is_not_utf8_is_refused(folder: Path) -> None:
    place = folder / os.fsdecode(b"caf\xe9")
    place.mkdir()
    with pytest.raises(ConfigError, match="which is not UTF-8; rename the folder"):
        workspace.check(place, dry=True)
    os.chdir(place)
    with pytest.raises(ConfigError, match="which is not UTF-8; rename the folder"):
        workspace.check(folder, dry=True)


@pytest.mark.parametrize("name", ["runs", "runs/cats"])
def test_a_file_in_the_place_of_a_runs_folder_is_named(folder: Path, name: str) -> None:
    workspace.check_run(Path("runs/cats"))
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).touch()
    with pytest.raises(StorageError, match=f"^{name}: a file is in the place of a folder; "):
        workspace.check_run(Path("runs/cats"))


@pytest.mark.parametrize("name", ["runs", "runs/cats"])
def test_a_runs_folder_that_cannot_be_written_is_named(folder: Path, name: str) -> None:
    (folder / name).mkdir(parents=True)
    if subprocess.run(["chattr", "+i", name], capture_output=True).returncode:
        pytest.skip("a folder that nobody may write needs the rights of root")
    try:
        with pytest.raises(StorageError, match=f"^{name}: this folder cannot be written; give"):
            workspace.check_run(Path("runs/cats"))
    finally:
        subprocess.run(["chattr", "-i", name], check=True)
    workspace.check_run(Path("runs/cats"))


def test_a_folder_without_permission_is_named(folder: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from latentmake.plan import workspace\n"
        "try: workspace.check(Path(), dry=sys.argv[1] == 'dry')\n"
        "except Exception as error: print(error)\n"
    )
    command = [sys.executable, "-c", code]
    if os.geteuid() == 0:  # who may write anywhere, unless that right is given up
        command = ["setpriv", "--bounding-set=-dac_override,-dac_read_search", *command]
        if shutil.which("setpriv") is None:
            pytest.skip("root may write anywhere")
    (folder / "logs").mkdir(mode=0o500)
    for name, how in (("logs", "real"), (".snakemake", "dry")):
        (folder / name).mkdir(mode=0o500, exist_ok=True)
        environment = {**os.environ, "PYTHONPATH": str(PACKAGE)}
        done = subprocess.run(
            [*command, how], env=environment, capture_output=True, text=True, check=True
        )
        assert done.stdout.startswith(f"{name}: no permission to write; give your user the right")
