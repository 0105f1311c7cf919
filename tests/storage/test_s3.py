"""Sources on an S3 server: built once, then nothing to do, and no object is fetched again."""

from __future__ import annotations

import shutil
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import world
from PIL import Image
from project import NOTHING, Counts, Project
from s3_server import Bucket

ALL = Counts(encoded=17, linked=1)  # 6 pictures at 2 resolutions, 6 captions of which 2 are equal


def s3_config(bucket: Bucket) -> dict[str, Any]:
    values = world.config()
    values["datasets"]["shapes"]["path"] = f"s3://{bucket.name}/lab/shapes"
    return values


def picture(number: int) -> bytes:
    """Return the bytes of a PNG; every number gives another."""
    data = BytesIO()
    Image.effect_noise((40, 36), 20 + number).convert("RGB").save(data, "PNG")
    return data.getvalue()


def fetched(bucket: Bucket) -> list[str]:
    """Return the keys of the objects that were fetched since this was called last."""
    return sorted(key for method, key in bucket.requests() if method == "GET" and key)


@pytest.fixture
def remote(bucket: Bucket, micro: Path, tmp_path: Path) -> Project:
    """A project whose sources lie in a bucket, nothing built."""
    world.make_dataset(tmp_path / "drawn")
    bucket.upload(tmp_path / "drawn", "lab/shapes")
    bucket.put("lab/shapes-old/zoo.png", picture(1))
    bucket.requests()
    return Project.make(tmp_path / "project", s3_config(bucket), micro)


@pytest.fixture
def built(template: Project, bucket: Bucket, tmp_path: Path) -> Project:
    """Its copy, after its sources have moved into a bucket, which encodes nothing."""
    project = template.copy(tmp_path / "project")
    bucket.upload(project / "data/shapes", "lab/shapes")
    shutil.rmtree(project / "data")
    project.config = s3_config(bucket)
    assert project.run("caches_tiny").encoded() == Counts()
    bucket.requests()
    return project


def contents(project: Project) -> dict[str, str]:
    return {name: content for name, (content, _) in project.snapshot().items()}


def test_built_once_then_nothing_to_do_by_one_listing(
    remote: Project, bucket: Bucket, template: Project
) -> None:
    result = remote.run("caches_tiny")
    assert result.encoded() == ALL
    asked = bucket.requests()
    assert asked[0] == ("GET", "")
    names = [f"lab/shapes/{stem}.{end}" for stem in world.CAPTIONS for end in ("png", "txt")]
    assert sorted(asked[1:]) == sorted(("GET", name) for name in names)
    sources = [row["source"] for row in remote.manifest()]
    assert sources == [f"s3://{bucket.name}/lab/shapes/{stem}.png" for stem in world.CAPTIONS]
    assert not list(remote.folder.rglob("*.png"))
    assert not list(remote.folder.rglob("s3:*"))
    # The caches are those of the same files on disk.
    assert contents(remote) == contents(template)
    assert remote.lock()["digest"] == template.lock()["digest"]

    before = remote.snapshot()
    assert remote.run("caches_tiny").idle
    assert bucket.requests() == [("GET", "")]
    assert remote.changed(before) == NOTHING


def test_a_listing_that_comes_back_short_costs_no_cache(built: Project, bucket: Bucket) -> None:
    before = contents(built)
    built.configure(lambda values: values.update(store={"keep": 0}))
    stems = ("ant", "cat", "dog", "eel")
    keys = [f"lab/shapes/{stem}.{end}" for stem in stems for end in ("png", "txt")]
    away = {key: bucket.get(key) for key in keys}
    for key in keys:
        bucket.remove(key)
    built.run("caches_tiny").one_line("warning: shapes: 12 cache files have no item any more")
    assert [row["stem"] for row in built.manifest()] == ["bee", "fox"]
    for key, data in away.items():
        bucket.put(key, data)
    assert built.run("caches_tiny").encoded() == Counts(linked=12)
    assert contents(built) == before


def test_a_listing_that_comes_back_at_a_renamed_prefix_costs_no_cache(
    built: Project, bucket: Bucket
) -> None:
    # Captions of the same length, which the plan tells apart by their names.
    for number, stem in enumerate(world.CAPTIONS):
        bucket.put(f"lab/shapes/{stem}.txt", f"number {number}".encode())
    built.configure(lambda values: values.update(store={"keep": 0}))
    built.run("caches_tiny")
    names = [f"{stem}.{end}" for stem in world.CAPTIONS for end in ("png", "txt")]
    away = {f"lab/other/{name}": bucket.get(f"lab/shapes/{name}") for name in names}
    for name in names:
        bucket.remove(f"lab/shapes/{name}")
    for key, data in [*away.items()][:4]:
        bucket.put(key, data)
    path = f"s3://{bucket.name}/lab/other"
    built.configure(lambda values: values["datasets"]["shapes"].update(path=path))
    assert built.run("caches_tiny").encoded().encoded == 0
    for key, data in away.items():
        bucket.put(key, data)
    assert built.run("caches_tiny").encoded() == Counts(linked=12)


def test_without_the_memo_each_object_is_fetched_once_and_nothing_is_encoded(
    built: Project, bucket: Bucket
) -> None:
    shutil.rmtree(built / ".latentmake")
    assert built.run("caches_tiny").idle
    asked = bucket.requests()
    assert asked[0] == ("GET", "")
    assert len(set(asked)) == len(asked) == 13
    assert built.run("caches_tiny").idle
    assert bucket.requests() == [("GET", "")]


def test_the_same_bytes_put_again_are_fetched_once_and_rebuild_nothing(
    built: Project, bucket: Bucket
) -> None:
    key = "lab/shapes/cat.png"
    data = bucket.get(key)
    moment = bucket.client.head_object(Bucket=bucket.name, Key=key)["LastModified"]
    bucket.remove(key)
    while True:  # until its time is another in whole seconds
        bucket.put(key, data)
        head = bucket.client.head_object(Bucket=bucket.name, Key=key)
        if int(head["LastModified"].timestamp()) != int(moment.timestamp()):
            break
    bucket.requests()
    assert built.run("caches_tiny").idle
    assert bucket.requests() == [("GET", ""), ("GET", key)]
    assert built.run("caches_tiny").idle
    assert bucket.requests() == [("GET", "")]


def test_an_edited_caption_and_a_new_picture_are_fetched_once_and_nothing_else_is(
    built: Project, bucket: Bucket
) -> None:
    before = built.snapshot()
    bucket.put("lab/shapes/fox.txt", b"a blue square with a shadow\n")
    table = built.run("-n", "caches_tiny").table()
    assert (table["shapes", "text"]["edited"], table["shapes", "text"]["fresh"]) == (1, 5)
    assert fetched(bucket) == ["lab/shapes/fox.txt"]
    result = built.run("caches_tiny")
    assert result.encoded() == Counts(encoded=1)
    assert fetched(bucket) == ["lab/shapes/fox.txt"]  # by the job, for the planner knew it
    assert built.changed(before) == NOTHING._replace(content=built.texts("fox"))
    assert built.run("caches_tiny").idle
    assert fetched(bucket) == []
    bucket.put("lab/shapes/gnu.png", picture(9))
    bucket.put("lab/shapes/gnu.txt", b"a grey field\n")
    bucket.requests()
    assert built.run("caches_tiny").encoded() == Counts(encoded=3)
    assert fetched(bucket) == ["lab/shapes/gnu.png", "lab/shapes/gnu.txt"]


def test_what_is_set_aside_is_looked_at_again_when_it_changes_and_not_before(
    remote: Project, bucket: Bucket
) -> None:
    remote.configure(lambda values: values["datasets"]["shapes"].update(on_error="skip"))
    good = bucket.get("lab/shapes/cat.png")
    bucket.put("lab/shapes/cat.png", b"no picture")
    remote.run("caches_tiny")
    bucket.requests()
    assert remote.run("caches_tiny").idle
    assert bucket.requests() == [("GET", "")]
    bucket.put("lab/shapes/cat.png", good)
    assert remote.run("caches_tiny").encoded() == Counts(encoded=2)


def test_a_single_cache_file_can_be_asked_for(remote: Project, bucket: Bucket) -> None:
    name = "cache/shapes/micro/16/cat.latents.safetensors"
    remote.run(name)
    assert remote.cache_files() == [name]
    assert fetched(bucket) == ["lab/shapes/cat.png"]
