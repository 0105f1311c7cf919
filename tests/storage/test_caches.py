"""Finished caches on S3: stored once, fetched elsewhere, and nothing is encoded again."""

from __future__ import annotations

import io
import re
import shutil
import tarfile
from pathlib import Path
from typing import Any

import pytest
import world
from project import NOTHING, Counts, Project
from s3_server import Bucket

PARTS = ["shapes/micro/16", "shapes/micro/32", "shapes/micro/text"]


@pytest.fixture
def built(template: Project, bucket: Bucket, tmp_path: Path) -> Project:
    """A project, all built, that has a place on S3."""
    project = template.copy(tmp_path / "project")
    project.configure(
        lambda values: values.update(storage={"caches": f"s3://{bucket.name}/caches"})
    )
    return project


def elsewhere(project: Project, folder: Path) -> Project:
    """Return a copy as on another machine: configuration, sources and models, nothing built."""
    copy = project.copy(folder)
    for name in ("cache", "runs", ".latentmake", ".snakemake", "logs"):
        shutil.rmtree(copy / name)
    return copy


def contents(project: Project) -> dict[str, str]:
    return {name: content for name, (content, _) in project.snapshot().items()}


def stored(bucket: Bucket) -> list[str]:
    return [key.removeprefix("caches/") for key in bucket.keys("caches/")]


def put(bucket: Bucket) -> list[str]:
    return [key for method, key in bucket.requests() if method in ("PUT", "POST")]


def test_stored_once_fetched_elsewhere_and_nothing_is_encoded(
    built: Project, bucket: Bucket, tmp_path: Path
) -> None:
    before = built.snapshot()
    built.run("store_tiny")
    record, *archives = stored(bucket)  # in the order of names
    assert record.startswith("runs/tiny/")
    assert [re.sub(r"\.[0-9a-f]{20}\.tar$", "", name) for name in archives] == PARTS
    assert len(set(put(bucket))) == 4

    assert built.run("store_tiny").idle
    assert put(bucket) == []
    assert built.changed(before) == NOTHING

    other = elsewhere(built, tmp_path / "other")
    result = other.run("fetch_tiny")
    result.one_line("fetched 18 cache files from 3 archives")
    assert contents(other) == contents(built)
    assert other.run("caches_tiny").encoded() == Counts()
    assert other.lock()["digest"] == built.lock()["digest"]
    bucket.requests()
    other.run("fetch_tiny").one_line("fetched 0 cache files from 0 archives")
    assert [key for method, key in bucket.requests() if method == "GET" and ".tar" in key] == []
    # The same content, packed by another machine, is what is there already.
    assert other.run("store_tiny").idle
    assert put(bucket) == []


def test_one_edit_sends_one_archive_and_fetches_one(
    built: Project, bucket: Bucket, tmp_path: Path
) -> None:
    built.run("store_tiny")
    other = elsewhere(built, tmp_path / "other")
    other.run("fetch_tiny")
    other.run("caches_tiny")
    (built / "data/shapes/ant.txt").write_text("a red circle, slightly larger\n")
    put(bucket)
    built.run("caches_tiny")
    built.run("store_tiny")
    sent = put(bucket)
    assert len(sent) == 2 and sum("/micro/text." in key for key in sent) == 1

    before = other.snapshot()
    shutil.copy(built / "data/shapes/ant.txt", other / "data/shapes/ant.txt")
    other.run("fetch_tiny").one_line("fetched 1 cache files from 1 archives")
    assert other.changed(before) == NOTHING._replace(content=other.texts("ant"))
    assert other.run("caches_tiny").encoded() == Counts()


def test_what_was_undone_is_what_is_fetched(built: Project, bucket: Bucket, tmp_path: Path) -> None:
    caption = built / "data/shapes/ant.txt"
    old = caption.read_bytes()
    for text in (old, b"something else\n", old):
        caption.write_bytes(text)
        built.run("caches_tiny")
        built.run("store_tiny")
    assert len(stored(bucket)) == 4 + 3
    other = elsewhere(built, tmp_path / "other")
    other.run("fetch_tiny").one_line("fetched 18 cache files from 3 archives")
    assert contents(other) == contents(built)


def test_an_archive_that_was_tampered_with_leads_nowhere_and_gives_nothing_unwhole(
    built: Project, bucket: Bucket, tmp_path: Path
) -> None:
    built.run("store_tiny")
    (key,) = [key for key in stored(bucket) if "/text." in key]
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as tar:
        for name in ("../outside", str(tmp_path / "outside"), *sorted(built.texts("ant", "bee"))):
            entry = tarfile.TarInfo(name)
            entry.size = 4
            tar.addfile(entry, io.BytesIO(b"evil"))
        link = tarfile.TarInfo(next(iter(built.texts("cat"))))
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(link)
    bucket.put(f"caches/{key}", data.getvalue())
    other = elsewhere(built, tmp_path / "other")
    result = other.run("fetch_tiny")
    assert "it will be encoded" in result.output
    assert set(other.cache_files()) == set(built.cache_files()) - built.texts(*world.CAPTIONS)
    assert not (tmp_path / "outside").exists()
    assert other.run("caches_tiny").encoded() == Counts(encoded=5, linked=1)


def test_stale_caches_are_not_stored(built: Project, bucket: Bucket) -> None:
    (built / "data/shapes/ant.txt").write_text("a red circle, slightly larger\n")
    result = built.run("store_tiny", check=False)
    assert result.returncode
    result.one_line("error: run tiny: has caches that are not up to date", "caches_tiny")
    assert stored(bucket) == []


def lose_bucket(values: dict[str, Any]) -> None:
    values["storage"]["caches"] = "s3://no-such-bucket/caches"


def test_a_wrong_bucket_and_an_empty_one_are_one_line(built: Project, bucket: Bucket) -> None:
    result = built.run("fetch_tiny", check=False)
    assert result.returncode
    result.one_line("error: storage.caches: nothing of the run tiny is stored", "store_tiny")
    built.configure(lose_bucket)
    for target in ("fetch_tiny", "store_tiny"):
        result = built.run(target, check=False)
        assert result.returncode
        result.one_line("error: storage.caches: there is no bucket no-such-bucket")
        assert "Traceback" not in result.output


def test_a_build_that_stores_nothing_asks_the_server_nothing(
    built: Project, bucket: Bucket
) -> None:
    bucket.requests()
    assert built.run("caches_tiny").idle
    assert bucket.requests() == []


def test_a_run_without_storage_knows_no_such_rule(template: Project, tmp_path: Path) -> None:
    project = template.copy(tmp_path / "project")
    result = project.run("store_tiny", check=False)
    assert result.returncode
    result.one_line("error: storage.caches: this key is missing")
    assert "plugin" not in project.run("--list-rules").output
