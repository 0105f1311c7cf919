"""What editors and readers are told about the configuration is what the program accepts."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import jsonschema
import pytest
import yaml
from config_world import changed, smallest
from hypothesis import given, settings
from latentmake.config.root import Config, parse
from pydantic import BaseModel
from reference.schema import json_schema
from test_config import MISTAKES, configurations

FOLDER = Path(__file__).parents[3] / "config"
FILES = sorted([FOLDER / "config.yaml", *(FOLDER / "examples").glob("*.yaml")])
VALIDATOR = jsonschema.Draft202012Validator(json.loads(json_schema()))


class Reader(yaml.SafeLoader):
    """Reads 1e-4 as a number, as editors do (YAML 1.2); PyYAML calls it text."""


Reader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[0-9]+e[-+]?[0-9]+$"), list("0123456789")
)


def read(path: Path) -> dict[str, Any]:
    values = yaml.load(path.read_text(encoding="utf-8"), Loader=Reader)
    assert isinstance(values, dict)
    return values


def sections(model: type[BaseModel]) -> Iterator[type[BaseModel]]:
    """Yield every section below one, by walking the types of its fields."""
    yield model
    pending: list[Any] = [field.annotation for field in model.model_fields.values()]
    while pending:
        kind = pending.pop()
        pending.extend(get_args(kind))
        # A resolution is written as a number or a list, never as a section.
        if isinstance(kind, type) and issubclass(kind, BaseModel) and kind.__name__ != "Resolution":
            yield from sections(kind)


SECTIONS = {section.__name__: section for section in sections(Config)}


def test_the_schema_is_one() -> None:
    jsonschema.Draft202012Validator.check_schema(json.loads(json_schema()))


def test_there_are_examples() -> None:
    assert {path.stem for path in FILES} >= {"config", "sd15-lora", "sd15-full", "two-datasets"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_file_of_ours_is_accepted_by_the_program(path: Path) -> None:
    config = parse(read(path))
    assert config.runs


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_file_of_ours_is_accepted_by_the_schema(path: Path) -> None:
    assert [f"{e.json_path}: {e.message}" for e in VALIDATOR.iter_errors(read(path))] == []


@settings(max_examples=50, deadline=None)
@given(configurations())
def test_what_the_program_accepts_the_schema_accepts(values: dict[str, Any]) -> None:
    parse(values)
    rate = [run.get("trainer", {}).get("learning_rate") for run in values["runs"].values()]
    if not any(isinstance(each, str) for each in rate):  # a number in quotes, or YAML's 1e-3
        assert [f"{e.json_path}: {e.message}" for e in VALIDATOR.iter_errors(values)] == []


@pytest.mark.parametrize("section", ["datasets", "resolutions"])
def test_one_value_for_a_list_of_one_is_accepted_by_the_schema(section: str) -> None:
    value = {"datasets": "cats", "resolutions": 64}[section]
    assert VALIDATOR.is_valid(changed("runs", "first", section, value=value))


@pytest.mark.parametrize(
    "name", [name for name in MISTAKES if name.startswith(("misspelt", "key", "text", "word"))]
)
def test_what_the_program_refuses_for_its_form_the_schema_refuses(name: str) -> None:
    path, value, _ = MISTAKES[name]
    assert VALIDATOR.is_valid(smallest())
    assert not VALIDATOR.is_valid(changed(*path, value=value))


@pytest.mark.parametrize("name", SECTIONS)
def test_every_key_has_a_description(name: str) -> None:
    schema = json.loads(json_schema())
    section = schema if name == "Config" else schema["$defs"][name]
    described = {key for key, value in section["properties"].items() if value.get("description")}
    assert described == {*SECTIONS[name].model_fields}
