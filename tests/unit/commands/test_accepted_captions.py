"""`latentmake captions RUN --accept`: made captions become files of a person, which stay."""

from __future__ import annotations

import contextlib
import io
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import made_caption_world
import pytest
from latentmake.base import atomic
from latentmake.base.errors import ConfigError
from latentmake.commands.captions import captions
from made_caption_world import DATA, config, facts_of, write_made

MADE = {"ant": "a red circle, made", "bee": "a blue square, made", "cat": "a circle, made"}


@pytest.fixture(autouse=True)
def _world(tmp_path: Path, micro: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made_caption_world.lay(micro, monkeypatch, tmp_path)
    write_made(facts_of(config()), MADE)


def ask(*stems: str, undo: bool = False, values: Mapping[str, Any] | None = None) -> list[str]:
    """Accept captions, or take that back; return the lines of the command."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        accept = None if undo else [stems[0]]
        captions(facts_of(values or config()), "tiny", [*stems[not undo :]], accept, undo)
    return said.getvalue().splitlines()


def files() -> dict[str, str]:
    return {path.stem: path.read_text() for path in DATA.glob("*.txt")}


def test_all_made_captions_are_copied_and_no_written_one_is_touched() -> None:
    before = files()
    assert ask("all") == [
        *(f"data/shapes/{stem}.txt" for stem in ("ant", "bee", "cat")),
        "kept: dog: its caption is not made yet, or is not up to date; build it first",
        "3 captions accepted",
    ]
    assert files() == before | {stem: f"{text}\n" for stem, text in MADE.items()}
    assert not [*DATA.glob(".*")]


def test_only_named_captions_are_copied_and_one_that_cannot_be_is_an_error() -> None:
    assert ask("ant", "bee") == [
        "data/shapes/ant.txt",
        "data/shapes/bee.txt",
        "2 captions accepted",
    ]
    with pytest.raises(ConfigError, match=r"ant: has a caption already.* dog: its caption is not"):
        ask("ant", "cat", "dog")
    assert "cat" in files()
    assert ask("cat", undo=True) == ["data/shapes/cat.txt", "1 caption removed"]


def test_an_accepted_caption_gives_the_text_that_the_made_one_gave() -> None:
    def texts(values: dict[str, Any]) -> dict[str, list[str]]:
        items = facts_of(values).items("shapes", "micro")[0]
        return {item.stem: item.texts or [] for item in items if item.stem in MADE}

    for extra in (
        {},
        {"captions": {"caption_prefix": "sks", "shuffle_caption": True, "variants": 3}},
        {"captions": {"caption_and_tags": "tags_first", "caption_separator": ";"}},
    ):
        values = config("florence", "tagger", **extra)
        values["captioners"]["tagger"]["trigger"] = "tag"
        for name in ("florence", "tagger"):
            write_made(facts_of(values), {stem: f"{name}, {stem}" for stem in MADE}, name)
        before = texts(values)
        assert all(before.values())
        ask("ant", "bee", "cat", values=values)
        made = {stem: (DATA / f"{stem}.txt").read_text().strip() for stem in MADE}
        after = texts(values)
        assert {stem: own or [made[stem]] for stem, own in after.items()} == before, extra
        ask(undo=True, values=values)


def test_a_made_caption_that_is_out_of_date_is_not_copied() -> None:
    (DATA / "ant.png").write_bytes((DATA / "bee.png").read_bytes())
    with pytest.raises(ConfigError, match="is not up to date"):
        ask("ant")
    assert "ant" not in files()


def test_undo_removes_what_nobody_edited() -> None:
    before = files()
    ask("all")
    (DATA / "ant.txt").write_text("mine now\n")
    (DATA / "bee.txt").unlink()
    assert ask(undo=True) == [
        "data/shapes/cat.txt",
        "kept: ant: data/shapes/ant.txt was edited since, so it stays",
        "kept: bee: data/shapes/bee.txt is gone already",
        "1 caption removed",
    ]
    assert files() == before | {"ant": "mine now\n"}
    assert ask("cat", "eel", undo=True) == [
        "kept: cat: was not accepted",
        "kept: eel: was not accepted",
        "0 captions removed",
    ]


def test_undo_of_one_leaves_the_others() -> None:
    ask("all")
    assert ask("ant", undo=True) == ["data/shapes/ant.txt", "1 caption removed"]
    assert {"bee", "cat"} <= files().keys()
    assert ask(undo=True)[-1] == "2 captions removed"


def test_a_file_that_appears_meanwhile_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    link = os.link

    def late(source: Path, path: Path) -> None:
        (DATA / "ant.txt").write_text("a person was faster\n")
        link(source, path)

    monkeypatch.setattr(os, "link", late)
    with pytest.raises(ConfigError, match=r"ant: data/shapes/ant\.txt exists"):
        ask("ant")
    assert files()["ant"] == "a person was faster\n"
    assert not [*DATA.glob(".*")]


def test_a_disk_without_links_gets_new_files_only(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    atomic.create(DATA / "new.txt", b"a")
    with pytest.raises(FileExistsError):
        atomic.create(DATA / "new.txt", b"b")
    assert files()["new"] == "a"
    assert not [*DATA.glob(".*")]


def test_a_list_says_in_a_line_why_nothing_is_accepted() -> None:
    lines = [json.dumps({"image_path": f"{stem}.png"}) for stem in MADE]
    (DATA / "list.jsonl").write_text("\n".join(lines))
    values = config()
    values["datasets"]["shapes"]["path"] = "data/shapes/list.jsonl"
    with pytest.raises(ConfigError, match=r"shapes: has its captions in .*list.jsonl; edit that"):
        ask("all", values=values)


def test_a_wrong_name_is_one_line_with_a_guess() -> None:
    with pytest.raises(ConfigError, match="antt: there is no such item; did you mean `ant`"):
        ask("antt")
    values = config()
    del values["datasets"]["shapes"]["captioner"]
    with pytest.raises(ConfigError, match="no captioner writes its captions"):
        ask("all", values=values)


def test_one_of_the_three_options_is_given() -> None:
    with pytest.raises(ConfigError, match="takes one of"):
        captions(facts_of(config()), "tiny", None, ["ant"], True)
    with pytest.raises(ConfigError, match="takes one of"):
        captions(facts_of(config()), "tiny", ["ant"], None, False)
