"""What editors and readers are told about the configuration is what the program accepts."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from config_world import changed
from latentmake.config.mistakes import sections
from latentmake.config.root import Config, parse
from reference.schema import json_schema
from test_mistakes import FORM, configuration, rows
from test_mistakes import changed as with_changes

FOLDER = Path(__file__).parents[3] / "config"
FILES = sorted([FOLDER / "config.yaml", *(FOLDER / "examples").glob("*.yaml")])
SCHEMA = json.loads(json_schema())
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)


class Reader(yaml.SafeLoader):
    """Reads 1e-4 as a number, as editors do (YAML 1.2); PyYAML calls it text."""


Reader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[0-9]+e[-+]?[0-9]+$"), list("0123456789")
)


def read(path: Path) -> dict[str, Any]:
    values = yaml.load(path.read_text(encoding="utf-8"), Loader=Reader)
    assert isinstance(values, dict)
    return values


def faults(values: dict[str, Any]) -> list[str]:
    return [f"{error.json_path}: {error.message}" for error in VALIDATOR.iter_errors(values)]


def test_every_key_of_the_schema_has_a_description() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    for each in sections(Config):
        name = each.model.__name__
        section = SCHEMA if name == "Config" else SCHEMA["$defs"][name]
        described = {key for key, value in section["properties"].items() if "description" in value}
        assert described == {*each.model.model_fields}, name


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_file_of_ours_is_accepted_by_the_schema_and_survives_being_written(path: Path) -> None:
    config = parse(read(path))
    assert config.runs and faults(read(path)) == []
    written = config.model_dump(mode="json", exclude_unset=True)
    assert parse(yaml.safe_load(yaml.safe_dump(written))) == config


@pytest.mark.parametrize(("key", "value"), [("datasets", "cats"), ("resolutions", 64)])
def test_one_value_for_a_list_of_one_is_accepted_by_the_schema(key: str, value: Any) -> None:
    assert faults(changed("runs", "first", key, value=value)) == []


@pytest.mark.parametrize(("kind", "changes"), [row[:2] for row in rows(FORM)])
def test_what_the_program_refuses_for_its_form_the_schema_refuses(
    kind: str, changes: dict[str, Any]
) -> None:
    assert not faults(configuration(kind)) and faults(with_changes(kind, **changes))
