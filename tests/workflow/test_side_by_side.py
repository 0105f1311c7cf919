"""Models that share an encoder: what one of them has cached, the other does not encode again."""

from __future__ import annotations

import shutil
from typing import Any

from project import NOTHING, Counts, Project


def add_second_text(values: dict[str, Any]) -> None:
    micro = values["models"]["micro"]
    other = [{"path": micro["text"][0], "max_length": 20}]
    values["models"]["other"] = {**micro, "text": other}
    values["runs"]["second"] = {**values["runs"]["tiny"], "model": "other"}


def test_what_one_of_two_models_has_the_other_does_not_encode(built: Project) -> None:
    built.configure(add_second_text)
    before = built.snapshot()
    result = built.run("caches_second")
    assert result.encoded("latents") == Counts(linked=12)  # six pictures at two resolutions
    assert result.encoded("text").encoded == 5  # six captions, two of them equal
    mine = built / "cache/shapes/other/16/ant.latents.safetensors"
    theirs = built / "cache/shapes/micro/16/ant.latents.safetensors"
    assert mine.read_bytes() == theirs.read_bytes()
    assert built.changed(before)._replace(added=set()) == NOTHING
    # Each kind is removed and rebuilt by itself.
    shutil.rmtree(built / "cache/shapes/other/text")
    result = built.run("text_second")
    assert (result.encoded("text").encoded, result.encoded("latents").encoded) == (5, 0)
    shutil.rmtree(built / "cache/shapes/micro/32")
    result = built.run("latents_tiny")
    assert (result.encoded("latents"), result.encoded("text")) == (Counts(linked=6), Counts())
    # An edited picture is encoded once for both.
    source = built / "data/shapes/ant.png"
    source.write_bytes((built / "data/shapes/bee.png").read_bytes() + b"\0")
    assert built.run("caches_second").encoded("latents").encoded == 2
    assert built.run("caches_tiny").encoded("latents").encoded == 0
