"""Folders on S3 are listed and read like folders on disk."""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import order_world
import pytest
import s3fs
import wan
from item_world import work_of
from latentmake.base.digest import SourceStat
from latentmake.base.errors import ConfigError, DatasetError, SourceError, StorageError
from latentmake.config.datasets import Dataset
from latentmake.config.root import parse
from latentmake.data import folders, listing, remote
from latentmake.encode.reading import Loaded
from latentmake.plan.orders import Order
from order_world import carry_out
from s3_server import Bucket


@pytest.fixture(autouse=True)
def new_client() -> Iterator[None]:
    """The client of a process keeps the environment that it began with."""
    s3fs.S3FileSystem.clear_instance_cache()
    yield
    s3fs.S3FileSystem.clear_instance_cache()


def listed(path: str) -> dict[str, SourceStat]:
    return {each[0]: SourceStat(*each[1:]) for each in remote.listing(path, "datasets.x.path")}


def test_a_listing_and_a_fetched_object_tell_the_same_stat(bucket: Bucket) -> None:
    bucket.put("pictures/a.png", b"first")
    bucket.put("pictures/deep/er/ü {x} & 100%.txt", b"second")
    large = io.BytesIO(b"x" * 9_000_000)  # goes up in parts, and its ETag is no MD5
    bucket.client.upload_fileobj(large, bucket.name, "pictures/parts.bin")
    found = listed(f"s3://{bucket.name}/pictures")
    assert set(found) == {"a.png", "deep/er/ü {x} & 100%.txt", "parts.bin"}
    for path, stat in found.items():
        data, fetched = remote.read(f"s3://{bucket.name}/pictures/{path}")
        assert fetched == stat
        assert len(data) == stat.size


def test_a_listing_of_more_than_a_page_is_whole_and_below_its_folder_alone(bucket: Bucket) -> None:
    client = bucket.client
    for number in range(1005):
        client.put_object(Bucket=bucket.name, Key=f"many/{number:04}.txt", Body=b"x")
    client.put_object(Bucket=bucket.name, Key="many2/other.txt", Body=b"x")
    bucket.requests()
    assert len(listed(f"s3://{bucket.name}/many")) == 1005
    assert bucket.requests() == [("GET", "")] * 2
    assert len(listed(f"s3://{bucket.name}")) == 1006


def test_a_wrong_address_is_one_line(bucket: Bucket) -> None:
    with pytest.raises(DatasetError, match=r"s3://no-such-bucket/p.* bucket does not exist"):
        listed("s3://no-such-bucket/p")
    with pytest.raises(DatasetError, match="/labs does not exist, or no file is in it"):
        listed(f"s3://{bucket.name}/labs")


def test_hidden_objects_and_marks_of_folders_are_passed_over(bucket: Bucket) -> None:
    for key in ("p/", "p/.git/a.txt", "p/.b.txt", "p/sub/", "p/sub/c.txt", "p/sub/../d.txt"):
        bucket.put(key, b"x")
    assert set(listed(f"s3://{bucket.name}/p")) == {"sub/c.txt"}


def test_names_that_no_disk_can_have_are_faults(bucket: Bucket) -> None:
    for stem in ("a//b", "n" * 300 + "/c", "fine"):
        for ending in ("png", "txt"):
            bucket.put(f"p/{stem}.{ending}", b"x")
    settings = Dataset(path=f"s3://{bucket.name}/p/")
    scanned = listing.scan("x", settings)
    assert scanned.root == f"s3://{bucket.name}/p"
    items, faults = folders.items("x", settings, scanned)
    assert [item.image for item in items] == [f"s3://{bucket.name}/p/fine.png"]
    assert len(faults) == 4
    assert all("no disk can have; rename it" in fault.line for fault in faults)


@pytest.mark.parametrize(
    ("environment", "what"),
    [
        ({"AWS_ENDPOINT_URL_S3": "http://127.0.0.1:9", "AWS_MAX_ATTEMPTS": "1"}, "127.0.0.1:9"),
        ({"AWS_ENDPOINT_URL_S3": "nowhere"}, "nowhere"),
        ({"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": ""}, "Unable to locate credentials"),
    ],
)
@pytest.mark.usefixtures("bucket")
def test_a_server_that_gives_nothing_is_one_line_and_no_fault_of_an_item(
    environment: dict[str, str], what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(DatasetError) as of_folder:
        listed("s3://bucket/p")
    with pytest.raises(StorageError) as of_object:
        remote.read("s3://bucket/p/a.png")
    for error in (of_folder, of_object):
        assert "cannot be read" in str(error.value) and what in str(error.value)
        assert "\n" not in str(error.value)


def on_s3(bucket: Bucket, *stems: str, **settings: Any) -> Order:
    """Return an order for the texts of some captions in a bucket."""
    order = order_world.order("text", dict.fromkeys(stems, ""), **settings)
    items = [
        work_of(item.stem, f"s3://{bucket.name}/p/{item.stem}.txt", None, targets)
        for item, targets, _ in order.items
    ]
    return replace(order, items=tuple(items))


def test_an_object_that_went_since_the_plan_is_named_and_stops_no_other(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for stem in ("a", "c"):
        bucket.put(f"p/{stem}.txt", f"caption {stem}".encode())
    order = on_s3(bucket, "a", "b", "c")
    encoder = order_world.Encoder()
    with pytest.raises(SourceError, match=r"1 of 3 items .*/p/b\.txt: is gone since it was listed"):
        carry_out(order, say=order_world.silent, encoder=Loaded(encoder, 1))
    bucket.put("p/b.txt", b"caption b")
    done = carry_out(order, say=order_world.silent, encoder=Loaded(encoder, 1))
    assert (done.counts["encoded"], done.counts["kept"]) == (1, 2)
    folder = f"s3://{bucket.name}/p"
    stats = {path: SourceStat(*values[:4]) for path, values in done.sources.items()}
    assert stats == {f"{folder}/{path}": stat for path, stat in listed(folder).items()}


def test_a_server_that_goes_away_sets_nothing_aside(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    order = on_s3(bucket, "a", "b", on_error="skip")
    with pytest.raises(StorageError, match=r"cannot be read .*127\.0\.0\.1:9"):
        carry_out(order, say=order_world.silent, encoder=Loaded(order_world.Encoder(), 1))
    assert not order.receipt.exists()


def test_a_wan_model_refuses_a_dataset_on_s3() -> None:
    values = wan.config()
    (name,) = values["datasets"]
    values["datasets"][name]["path"] = "s3://bucket/p"
    with pytest.raises(ConfigError, match=f"the dataset {name} lies at a URL;"):
        parse(values)
