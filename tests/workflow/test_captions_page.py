"""`latentmake captions`: every text that will be encoded, its tokens and what is cut, on a page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import world
from browser import Browser
from project import Project

LONG = "x" * 80  # 80 tokens: the micro model's tokenizer knows letters alone
NASTY = "</script><img src=x onerror='window.hurt=1'>"
PAGE = "reports/captions_tiny.html"


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory, micro: Path) -> Project:
    """A project with a caption that is too long, a faulty one, and three variants of each."""

    values = world.config()
    values["datasets"]["shapes"]["captions"] = {"variants": 3, "shuffle_caption": True}
    project = Project.make(tmp_path_factory.mktemp("captions") / "project", values, micro)
    world.make_dataset(project / "data/shapes")
    (project / "data/shapes/ant.txt").write_text(f"kept, {LONG}")
    (project / "data/shapes/bee.txt").write_text(f"a, {NASTY}, b")
    (project / "data/shapes/cat.txt").write_bytes(b"caf\xe9")
    said = project.ask("captions", "tiny").output.splitlines()
    assert said[0] == "text_encoder: 3 of 15 texts are cut, the longest has 85 tokens"
    assert said[1].startswith("faulty: data/shapes/cat.txt: is not UTF-8")
    assert said[2:] == [PAGE]
    assert not (project / "cache").exists()
    return project


def rows(project: Project) -> list[dict[str, Any]]:
    text = (project / "reports/captions_tiny.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def test_a_line_says_of_each_text_what_every_encoder_sees(shown: Project) -> None:
    found = rows(shown)
    assert [(row["stem"], row["variant"]) for row in found] == [
        (stem, variant) for stem in ("ant", "bee", "dog", "eel", "fox") for variant in range(3)
    ]
    for row in found[:3]:
        seen = row["encoders"]["text_encoder"]
        assert (seen["tokens"], seen["kept"]) == (85, 75)
        assert row["text"].endswith(seen["cut"])
        assert len(seen["cut"].replace(" ", "")) == 10
        assert seen["words"] in ([LONG], [LONG, "kept"])
    assert found[-1]["encoders"]["text_encoder"] == {
        "tokens": len("abluesquare"), "kept": len("abluesquare"), "cut": "", "words": []
    }  # fmt: skip


def test_the_lines_can_be_printed_and_follow_the_captions(shown: Project, tmp_path: Path) -> None:
    project = shown.copy(tmp_path / "project")
    project.ask("captions", "tiny", "--json").one_line("faulty: data/shapes/cat.txt: is not UTF-8")
    (project / "data/shapes/cat.txt").write_text("mended")
    said = project.ask("captions", "tiny", "--json").output.splitlines()
    assert [*map(json.loads, said)] == rows(project)
    assert len(rows(project)) == 18


def test_the_page_shows_every_text_and_strikes_out_what_is_cut(
    shown: Project, browser: Browser
) -> None:
    browser.open(shown / PAGE)
    assert browser.text("h1") == "Captions of tiny"
    assert browser.text(".encoder p.warn") == "3 of 15 texts are cut."
    assert browser.text("#faults li").startswith("data/shapes/cat.txt: is not UTF-8")
    wanted = rows(shown)
    texts, struck = (  # a card shows the first lines
        [element.get_property("textContent") for element in browser.all(selector)]
        for selector in (".text", "li del")
    )
    assert texts == [row["text"] for row in wanted]
    assert struck == [row["encoders"]["text_encoder"]["cut"] for row in wanted[:3]]
    assert len(browser.all(".item img")) == 5
    assert browser.run("return window.hurt") is None
    assert browser.complaints() == []


def test_words_and_cut_texts_can_be_looked_for(shown: Project, browser: Browser) -> None:
    def stems() -> list[str]:
        return [element.text.split()[0] for element in browser.all("h3")]

    browser.open(shown / PAGE)
    browser.click("cut")
    assert stems() == ["ant"]
    browser.click("cut")
    browser.driver.find_element("id", "words").send_keys("SQUARE")
    assert stems() == ["dog", "fox"]
