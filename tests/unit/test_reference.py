"""The generated files are those that the program would write today: reference, schema, index."""

from __future__ import annotations

import re
from contextlib import suppress
from typing import Annotated

import pytest
import yaml
from latentmake.config.mistakes import sections
from latentmake.config.root import Config
from pydantic import TypeAdapter, ValidationError
from reference import ROOT, files
from reference.pages import PAGES, Page, text

FILES = files()
SECTIONS = {section.model for section in sections(Config)}


@pytest.mark.parametrize("name", FILES)
def test_a_file_is_what_the_program_says_today(name: str) -> None:
    written = (ROOT / name).read_text(encoding="utf-8")
    assert written == FILES[name], "run: PYTHONPATH=scripts python -m reference"


def test_no_other_page_lies_in_the_folder() -> None:
    pages = {f"docs/reference/{path.name}" for path in (ROOT / "docs/reference").iterdir()}
    assert pages == {name for name in FILES if name.startswith("docs/reference/")}


def test_every_section_has_its_keys_on_a_page() -> None:
    shown = {page.section for page in PAGES} | {part.section for x in PAGES for part in x.parts}
    elsewhere = {"Config", "Location"}  # the first page; the keys of `Weights`, but `config`
    assert {each.__name__ for each in SECTIONS - shown} == elsewhere


def test_an_anchor_stands_once_on_a_page() -> None:
    for name, content in FILES.items():
        titles = re.findall(r"^#+ (.+)$", re.sub(r"```.*?```", "", content, flags=re.DOTALL), re.M)
        anchors = [re.sub(r"[^\w\- ]", "", each.lower()).replace(" ", "-") for each in titles]
        assert len(anchors) == len(set(anchors)), name


def accepted(key: str, value: object) -> bool:
    for section in SECTIONS:
        field = section.model_fields.get(key)
        with suppress(ValidationError):
            if field and TypeAdapter(Annotated[field.annotation, field]).validate_python(value):
                return True
    return False


def check_examples(content: str) -> None:
    blocks = re.findall(r"```yaml\n(.*?)```", content, re.DOTALL)
    for values in map(yaml.safe_load, blocks):
        assert all(accepted(key, value) for key, value in values.items()), values


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_examples_on_a_page_are_accepted(page: Page) -> None:
    check_examples(text(page))


def test_parts_of_a_configuration_in_the_guide_are_accepted() -> None:
    guide = (ROOT / "config/README.md").read_text(encoding="utf-8")
    check_examples(guide)
    assert len(guide.splitlines()) <= 150


def test_each_example_says_what_it_is() -> None:
    for path in (ROOT / "config/examples").glob("*.yaml"):
        assert path.read_text(encoding="utf-8").startswith("# "), path
