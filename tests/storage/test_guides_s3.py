"""Guides whose commands need an S3 server; see tests/worlds/guide_world.py.

`aws s3 cp` and `aws s3 sync` copy files to the server and from it.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from guide_world import HUB, Here, follow, guides_that_need
from project import Project
from s3_server import Bucket, Server
from style_guides import make_pictures, make_repository

NAME = "vision"


@pytest.mark.parametrize("name", guides_that_need("s3"))
def test_a_guide_does_what_it_says(
    name: str, tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    for key, value in server.environment().items():
        monkeypatch.setenv(key, value)
    bucket = Bucket(NAME, server).create()
    project = Project.make(tmp_path / "project", {})
    here = Here(project, HUB, environment=server.environment())
    make_pictures(tmp_path / "drawn")
    bucket.upload(tmp_path / "drawn", "ginger")
    make_repository(project / "models/sd15")

    def copy(words: list[str]) -> None:
        source, target = (word.removeprefix(f"s3://{NAME}/") for word in words[3:])
        if words[2] == "cp":
            bucket.put(target, b"a fox in the snow\n")
        elif words[4] != target:
            bucket.upload(project / source, target)
            (project / "cache").rename(tmp_path / "other")  # another machine
        else:
            listed = bucket.client.list_objects_v2(Bucket=NAME, Prefix=f"{source}/")
            for each in listed["Contents"]:
                place = project / target / each["Key"].removeprefix(f"{source}/")
                place.parent.mkdir(parents=True, exist_ok=True)
                place.write_bytes(bucket.get(each["Key"]))

    here.handlers["aws s3"] = copy
    follow(name, here)
