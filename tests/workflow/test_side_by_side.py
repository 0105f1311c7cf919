"""Models that share an encoder: what one of them has cached, the other does not encode again."""

from __future__ import annotations

import shutil
from typing import Any

from project import Project


def add_second_text(values: dict[str, Any]) -> None:
    micro = values["models"]["micro"]
    other = [{"path": micro["text"][0], "max_length": 20}]
    values["models"]["other"] = {**micro, "text": other}
    values["runs"]["second"] = {**values["runs"]["tiny"], "model": "other"}


def test_latents_of_one_vae_are_encoded_once_for_two_texts(built: Project) -> None:
    built.configure(add_second_text)
    before = built.snapshot()
    result = built.run("caches_second")
    assert result.encoded("latents").encoded == 0
    assert result.encoded("latents").linked == 12  # six pictures at two resolutions
    assert result.encoded("text").encoded == 5  # six captions, two of them equal
    mine = built / "cache/shapes/other/16/ant.latents.safetensors"
    theirs = built / "cache/shapes/micro/16/ant.latents.safetensors"
    assert mine.read_bytes() == theirs.read_bytes()
    changes = built.changed(before)
    assert not changes.removed | changes.content | changes.rewritten
    assert built.run("caches_tiny", "caches_second").idle


def test_each_kind_of_cache_is_removed_and_rebuilt_alone(built: Project) -> None:
    built.configure(add_second_text)
    built.run("caches_second")
    shutil.rmtree(built / "cache/shapes/other/text")
    result = built.run("text_second")
    assert result.encoded("text").encoded == 5
    assert not result.encoded("latents").encoded
    shutil.rmtree(built / "cache/shapes/micro/32")
    result = built.run("latents_tiny")
    assert result.encoded("latents").encoded == 0  # the other model has them
    assert result.encoded("latents").linked == 6
    assert not result.encoded("text").encoded
    assert built.run("caches_tiny", "caches_second").idle


def test_an_edited_picture_is_encoded_once_for_both(built: Project) -> None:
    built.configure(add_second_text)
    built.run("caches_second")
    source = built / "data/shapes/ant.png"
    source.write_bytes((built / "data/shapes/bee.png").read_bytes() + b"\0")
    assert built.run("caches_second").encoded("latents").encoded == 2
    assert built.run("caches_tiny").encoded("latents").encoded == 0
