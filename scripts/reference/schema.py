"""The JSON schema of the configuration, and the docstrings of keys.

Docstrings of keys are Markdown, as the reference shows it; the schema has them without links.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
import textwrap
from collections.abc import Iterator
from itertools import pairwise

from latentmake.config.fields import Shapes
from latentmake.config.mistakes import sections
from latentmake.config.root import Config
from pydantic import BaseModel

_LIMITS = {
    "ge": "minimum", "gt": "exclusiveMinimum", "le": "maximum", "lt": "exclusiveMaximum"
}  # fmt: skip
"""Limits as pydantic leaves them behind a validator -> as JSON schema names them."""


def json_schema() -> str:
    """Return the JSON schema of the configuration, as `config/schema.json` holds it."""
    schema = Config.model_json_schema()
    for model in {section.model for section in sections(Config)}:
        section = schema if model is Config else schema["$defs"][model.__name__]
        section["description"] = _plain(inspect.cleandoc(model.__doc__ or "").partition("\n")[0])
        for key, text in descriptions(model).items():
            described = {**section["properties"][key], "description": _plain(text)}
            section["properties"][key] = dict(sorted(described.items()))
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema["title"] = "latentmake configuration"
    text = json.dumps(schema, indent=2, ensure_ascii=False) + "\n"
    return re.sub(r'"(ge|gt|le|lt)": ', lambda limit: f'"{_LIMITS[limit[1]]}": ', text)


def descriptions(model: type[BaseModel]) -> dict[str, str]:
    """Return the keys of a section, inherited ones first, with the strings that follow them."""
    return dict(_docstrings(model))


def _plain(text: str) -> str:
    """Return Markdown without links."""
    return re.sub(r"\[([^]]+)\]\([^)]+\)", r"\1", text)


def _docstrings(model: type[BaseModel]) -> Iterator[tuple[str, str]]:
    for part in reversed(model.__mro__[: model.__mro__.index(BaseModel)]):
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(part))).body
        assert isinstance(tree, ast.ClassDef)
        for node, following in pairwise(tree.body):
            match node, following:
                case (
                    ast.AnnAssign(target=ast.Name(id=key)),
                    ast.Expr(value=ast.Constant(value=str(text))),
                ) if key in model.model_fields:
                    yield key, " ".join(text.split())


def declared(section: type[BaseModel], key: str, inherited: Shapes | None = None) -> Shapes:
    """Return a key's declaration; `inherited` is that of the field that holds the section."""
    field = section.model_fields[key]
    found = field.json_schema_extra
    if not isinstance(found, Shapes):
        found = getattr(section, "shapes", None) or inherited
    if found is None:
        raise TypeError(f"{section.__name__}.{key} has no declaration")
    return found
