"""Captions, tags and variants: each text is encoded once, and an edit touches its item alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from project import Project
from safetensors import safe_open

TEXT = "cache/shapes/micro"


def captions_of(project: Project, stem: str, variants: int) -> list[str]:
    parts = ["text", *(f"text.{number}" for number in range(1, variants))]
    found = []
    for part in parts:
        with safe_open(project / f"{TEXT}/{part}/{stem}.text.safetensors", framework="np") as file:
            found.append(file.metadata()["caption"])
    return found


def with_captions(**settings: Any) -> Callable[[dict[str, Any]], None]:
    def change(values: dict[str, Any]) -> None:
        values["datasets"]["shapes"]["captions"] = settings

    return change


def test_an_edit_of_one_caption_encodes_its_variants_alone(built: Project) -> None:
    for stem in ("ant", "bee"):
        (built / f"data/shapes/{stem}.txt").write_text("one, two, three, four, five\n")
    built.configure(with_captions(variants=4, shuffle_caption=True, keep_tokens=1))
    built.run("caches_tiny")
    before = built.snapshot()
    texts = captions_of(built, "ant", 4)
    assert len(set(texts)) == 4
    assert all(
        sorted(text.split(", ")) == sorted(["one", "two", "three", "four", "five"])
        for text in texts
    )
    assert all(text.startswith("one, ") for text in texts)
    assert captions_of(built, "bee", 4) != texts
    (built / "data/shapes/ant.txt").write_text("one, two, three, four, six\n")
    done = built.run("caches_tiny")
    assert done.encoded("text").encoded == 4
    assert done.encoded("latents").encoded == 0
    changes = built.changed(before)
    assert {name.rpartition("/")[2] for name in changes.content} == {"ant.text.safetensors"}
    assert not (changes.added or changes.removed or changes.rewritten)
    assert built.run("caches_tiny").idle
