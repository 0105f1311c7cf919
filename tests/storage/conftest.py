"""A server for all tests of this folder, a bucket and a project for each."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import pytest

pytest.importorskip("s3fs")
pytest.importorskip("moto.server")

from s3_server import Bucket, Server

_NUMBERS = count()


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    started = Server.start(tmp_path_factory.mktemp("s3"))
    yield started
    started.stop()


@pytest.fixture
def bucket(server: Server, monkeypatch: pytest.MonkeyPatch) -> Bucket:
    """An empty bucket, with the environment that leads to it."""
    for name, value in server.environment().items():
        monkeypatch.setenv(name, value)
    made = Bucket(f"bucket-{next(_NUMBERS)}", server).create()
    made.requests()
    return made
