"""A folder, a pipe, a device or an endless file in the place of a file is named at once."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from latentmake.base import digest
from latentmake.base.errors import UserError
from latentmake.base.regular import open_regular, read_regular, read_text
from latentmake.base.state_file import read_order, read_state
from latentmake.config.document import check_file
from latentmake.config.weights import Weights
from latentmake.data.contents import read_text as read_caption
from latentmake.data.lists import metadata_of, read_rows
from latentmake.formats import npz, safetensors
from latentmake.formats.media import probe_image, probe_video
from latentmake.models.files import weights_files
from latentmake.models.headers import tensors_of
from latentmake.trainers.exchange.datasets_toml import imported

_SECONDS = 5  # after which a reader that waits is ended; no result depends on it

READERS: dict[str, Callable[[Path], Any]] = {
    "own.yaml": check_file,
    "list.jsonl": lambda path: [*read_rows(str(path), "datasets.cats.path")],
    "list.csv": lambda path: [*read_rows(str(path), "datasets.cats.path")],
    "list.parquet": lambda path: [*read_rows(str(path), "datasets.cats.path")],
    "metadata.json": lambda path: metadata_of("cats", str(path), "."),
    "caption.txt": lambda path: read_caption(str(path)),
    "dataset.toml": lambda path: imported(path, "cats", None, None),
    "image.png": lambda path: probe_image(str(path)),
    "video.mp4": lambda path: probe_video(str(path)),
    "network": lambda path: weights_files(Weights(path=str(path))),
    "network.pt": tensors_of,
    "network.safetensors": tensors_of,
    "lora.safetensors": safetensors.read_head,
    "pointer.safetensors": safetensors.is_pointer,
    "cache.npz": npz.read_metadata,
    "content": digest.of_file,
    "order.json": lambda path: read_order(path, bytes),
}


@pytest.fixture
def unwaiting() -> Iterator[None]:
    def late(*_: object) -> None:
        pytest.fail("it waits for ever")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(_SECONDS)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.usefixtures("unwaiting")
@pytest.mark.parametrize("name", READERS)
def test_no_reader_waits_for_a_pipe(name: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / name)
    with pytest.raises((UserError, OSError, ValueError), match=r"no regular file|neither a file"):
        READERS[name](tmp_path / name)


@pytest.mark.usefixtures("unwaiting")
def test_a_file_of_state_that_is_a_pipe_counts_as_damaged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    os.mkfifo(tmp_path / "state.json")
    assert read_state(tmp_path / "state.json", bytes) is None
    assert "is damaged (cannot be read: it is no regular file)" in capsys.readouterr().err


def test_only_a_regular_file_of_bounded_size_is_read(working: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("socket")
        for path in ("/dev/zero", "socket"):
            with pytest.raises(OSError, match="it is no regular file"):
                open_regular(path)
    for path in ("a\0b", "\ud800"):
        with pytest.raises(OSError, match="no file can have this name"):
            open_regular(path)
    for path, error in ((".", IsADirectoryError), ("gone", FileNotFoundError)):
        with pytest.raises(error):
            open_regular(path)
    Path("long").write_bytes(b"12345")
    assert read_regular("long", 5) == b"12345"
    with pytest.raises(OSError, match="its 5 bytes are more than 4, the most that are read"):
        read_regular("long", 4)


def test_a_text_is_utf_8(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_bytes("\ufeffKätzchen".encode())
    assert read_text(path) == "Kätzchen"
    path.write_bytes("ab".encode("utf-16"))
    with pytest.raises(OSError, match=r"it is not UTF-8 \(byte 1\)"):
        read_text(path)
