"""A name never stands for half a file, whatever ends its writer."""

from __future__ import annotations

import errno
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from latentmake.base import atomic
from latentmake.base.errors import StorageError, storage_error

CODE = """
import resource, signal, sys
from pathlib import Path
from latentmake.base import atomic
signal.signal(signal.SIGXFSZ, signal.SIG_IGN if sys.argv[1] == "refused" else signal.SIG_DFL)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))  # the kernel stops a write at this byte
if sys.argv[2] == "write":
    atomic.write("cache/a", b"new" * 100, b"new" * 1000)
else:
    with atomic.replacing(Path("cache/a")) as new:
        new.write_bytes(b"new" * 1000)
"""


@pytest.mark.parametrize("old", [None, b"old"])
@pytest.mark.parametrize("way", ["write", "replacing"])
@pytest.mark.parametrize("end", ["refused", "killed"])
def test_a_write_that_stops_halfway_leaves_what_was_there(
    end: str, way: str, old: bytes | None, tmp_path: Path
) -> None:
    place = tmp_path / "cache/a"
    place.parent.mkdir()
    if old:
        place.write_bytes(old)
    done = subprocess.run(
        [sys.executable, "-c", CODE, end, way], cwd=tmp_path, capture_output=True, check=False
    )
    assert done.returncode == (-signal.SIGXFSZ if end == "killed" else 1), done.stderr
    assert (place.read_bytes() if place.exists() else None) == old
    left = {path.name for path in place.parent.iterdir()} - {"a"}
    assert len(left) == (end == "killed") and all(".latentmake-partial" in x for x in left)


SAVING = """
import signal
from pathlib import Path
from latentmake.base import atomic
from latentmake.base.signals import signals_call
with signals_call(), atomic.replacing_folder(Path("step-000002")) as new:
    (new / "state.pt").write_bytes(b"half")
    signal.raise_signal(signal.SIGHUP)
"""


def test_a_folder_whose_writer_is_told_to_end_leaves_nothing(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SAVING], cwd=tmp_path, capture_output=True, check=False
    )
    assert b"KeyboardInterrupt" in done.stderr
    assert not [*tmp_path.iterdir()]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "sub" / "file"


def everything_in(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_the_umask_says_who_may_read(path: Path, umask: int, mode: int) -> None:
    before = os.umask(umask)
    try:
        atomic.write(path, b"whole")
        atomic.link(path, path.with_name("second"))
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == mode
    assert stat.S_IMODE(path.with_name("second").stat().st_mode) == mode


def test_replacing_a_file_leaves_its_second_name_alone(path: Path) -> None:
    atomic.write(path, b"old")
    second = path.with_name("second")
    os.link(path, second)
    atomic.write(path, b"new")
    assert (path.read_bytes(), second.read_bytes()) == (b"new", b"old")
    assert everything_in(path.parent) == [path.name, second.name]


@pytest.mark.parametrize(
    ("fault", "line"),
    [
        (errno.ENOSPC, "cache/x: no space left on the disk; free some space, then"),
        (errno.EDQUOT, "cache/x: your disk quota is used up; free some space, then"),
        (errno.EFBIG, "cache/x: the file would be larger than this system allows; raise the limit"),
        (errno.EROFS, "cache/x: the file system is read-only; mount it for writing, then"),
        (errno.EACCES, "cache/x: no permission to write; give your user the right to write"),
        (errno.EPERM, "cache/x: the system does not permit this change; remove the write"),
    ],
)
def test_a_fault_of_the_disk_says_that_finished_work_is_kept(fault: int, line: str) -> None:
    error = storage_error(OSError(fault, os.strerror(fault)), "cache/x")
    assert isinstance(error, StorageError)
    assert str(error).startswith(line)
    assert str(error).endswith("finished files are kept")
    assert storage_error(OSError(errno.EIO, "other"), "cache/x") is None


def test_a_folder_in_the_place_of_the_file_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "name").mkdir()
    with pytest.raises(StorageError, match=r"name: a folder lies where a file belongs; move it"):
        atomic.write(tmp_path / "name", b"whole")
    assert everything_in(tmp_path) == []


@pytest.mark.parametrize("place", ["file/name", "file/sub/name"])
def test_a_file_in_the_place_of_a_folder_is_named(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").write_bytes(b"x")
    with pytest.raises(StorageError, match=rf"{place}: a file lies where a folder belongs; move"):
        atomic.write(tmp_path / place, b"whole")
    assert everything_in(tmp_path) == ["file"]


def test_a_link_shares_the_file_and_replaces_what_bore_the_name(path: Path) -> None:
    atomic.write(path, b"whole")
    second = path.parent / "deeper" / "second"
    atomic.write(second, b"old")
    atomic.link(path, second)
    assert second.read_bytes() == b"whole"
    for existing in (path, second):  # names of one file, which stay
        atomic.link(existing, path)
        atomic.link(existing, second)
    assert second.samefile(path)
    assert everything_in(path.parent) == ["deeper/second", path.name]


def test_where_links_fail_a_copy_is_made(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EOPNOTSUPP, "no links here")

    source = path.with_name("source")
    atomic.write(source, b"whole")
    atomic.write(path, b"old")
    monkeypatch.setattr(os, "link", refuse)  # as on some shared file systems
    atomic.link(source, path)
    assert path.read_bytes() == b"whole" and not path.samefile(source)
    assert everything_in(path.parent) == [path.name, source.name]
