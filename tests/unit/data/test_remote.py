"""Datasets at URLs, without a server; tests/storage has one."""

from __future__ import annotations

from datetime import UTC, datetime
from itertools import count

import fsspec
import pytest
from config_world import changed, smallest
from fsspec.registry import known_implementations
from latentmake.base import digest
from latentmake.base.digest import SourceStat
from latentmake.base.errors import ConfigError, DatasetError, SourceError, StorageError
from latentmake.config.datasets import Dataset
from latentmake.config.root import parse
from latentmake.data import folders, listing, remote

NUMBERS = count()


@pytest.fixture
def url() -> str:
    """A folder in memory."""
    made = f"memory://bucket{next(NUMBERS)}/p"
    files = fsspec.filesystem("memory")
    for path in ("cat.png", "cat.txt", "sub/dog.png", "sub/dog.txt", ".git/x.png"):
        files.pipe_file(f"{made}/{path}", path.encode())
    files.pipe_file(f"{made}2/other.png", b"x")
    return made


def test_a_folder_at_a_url_is_listed_and_read_like_one_on_disk(url: str) -> None:
    settings = Dataset(path=f"{url}/")
    items, faults = folders.items("x", settings, listing.scan("x", settings))
    assert not faults
    assert [each.path for item in items for each in item.files] == [
        f"{url}/{path}" for path in ("cat.png", "cat.txt", "sub/dog.png", "sub/dog.txt")
    ]
    for item in items:
        assert remote.read(item.image) == (f"{item.stem}.png".encode(), item.files[0].stat)
    flat = Dataset(path=url, flat=True)
    assert [path for path, *_ in listing.scan("x", flat).entries] == ["cat.png", "cat.txt"]


def test_another_content_is_another_stat(url: str) -> None:
    before = remote.listing(url, "")
    assert remote.listing(url, "") == before
    fsspec.filesystem("memory").pipe_file(f"{url}/cat.txt", b"CAT.TXT")
    changed = {path for path, *_ in {*remote.listing(url, "")} - {*before}}
    assert changed == {"cat.txt"}


def test_a_stat_is_the_same_from_a_listing_and_from_a_header() -> None:
    listed = {"size": 5, "LastModified": datetime(2024, 5, 6, 7, 8, 9, 987_654, UTC), "ETag": "abc"}
    header = {**listed, "LastModified": datetime(2024, 5, 6, 7, 8, 9, tzinfo=UTC)}
    # As version 0.2.0 made it: what a memo knows is not fetched again.
    assert remote.stat_of(listed) == SourceStat(5, 1714979289 * 10**9, 0, 6718257250126850037)
    assert remote.stat_of({**header, "ETag": '"abc"'}) == remote.stat_of(listed)
    assert remote.stat_of({**header, "ETag": 'W/"abc"'}) == remote.stat_of(listed)
    assert remote.stat_of({**listed, "ETag": "abd"}) != remote.stat_of(listed)
    assert remote.stat_of({"size": 5, "blob_id": "a"}) != remote.stat_of(
        {"size": 5, "blob_id": "b"}
    )
    assert all(0 <= remote.stat_of({"size": 5, "etag": n}).inode < 2**63 for n in range(1, 100))


def test_digests_are_those_of_the_bytes_in_order(url: str) -> None:
    names = ["cat.png", "gone.png", "cat.txt"]
    urls = [f"{url}/{name}" for name in names]
    found = remote.contents(urls, lambda data, url: f"{digest.of_bytes(data)} of {url}")
    contents = [digest.of_bytes(name.encode()) for name in names]
    assert [*found] == [f"{contents[0]} of {urls[0]}", None, f"{contents[2]} of {urls[2]}"]


def test_what_is_missing_is_one_line(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DatasetError, match=f"{url}/none does not exist, or no file is in it"):
        remote.listing(f"{url}/none", "datasets.x.path")
    with pytest.raises(SourceError, match=f"{url}/none.png: is gone since it was listed"):
        remote.read(f"{url}/none.png")
    with pytest.raises(DatasetError, match=r"cannot be read .Protocol not known: nothing.;"):
        remote.listing("nothing://bucket/p", "datasets.x.path")
    monkeypatch.setitem(known_implementations, "no", {"class": "no.No", "err": "x"})
    with pytest.raises(DatasetError, match=r"package for no:// is missing .x.; install it: pip"):
        remote.listing("no://bucket/p", "datasets.x.path")


@pytest.mark.parametrize(
    ("error", "kinds"),
    [
        (PermissionError("not\nyours"), (DatasetError, SourceError)),
        (TimeoutError(), (DatasetError, StorageError)),
    ],
)
def test_an_error_of_a_server_is_one_line(
    url: str, monkeypatch: pytest.MonkeyPatch, error: OSError, kinds: tuple[type, type]
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    for name in ("find", "info"):
        monkeypatch.setattr(fsspec.get_filesystem_class("memory"), name, fail)
    calls = (lambda: remote.listing(url, "datasets.x.path"), lambda: remote.read(f"{url}/cat.png"))
    for call, kind in zip(calls, kinds, strict=True):
        with pytest.raises(kind, match=r"cannot be read .(not yours|TimeoutError).; ") as raised:
            call()
        assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "path", ["s3:/bucket/p", "s3://", "S3://bucket/p", "s3:///p", "s3://b//p", "hf:/x"]
)
def test_half_an_address_is_refused_by_the_configuration(path: str) -> None:
    with pytest.raises(ConfigError, match="should be a URL such as s3://bucket/folder"):
        parse(changed("datasets", "cats", "path", value=path))


def test_an_address_is_taken_by_the_configuration() -> None:
    assert parse(changed("datasets", "cats", "path", value="s3://bucket")).datasets["cats"].remote
    assert not parse(smallest()).datasets["cats"].remote
