"""JSON schema of the configuration, and the docstrings of its keys.

Docstrings of keys are Markdown, which the reference shows. The schema contains them without links.
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
"""Name of a limit in pydantic -> its name in JSON schema. Pydantic does not translate limits of
fields that have a validator."""


def json_schema() -> str:
    """Return the JSON schema of the configuration: the content of `config/schema.json`."""
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
    """Return key -> docstring for a section; inherited keys come first."""
    return dict(_docstrings(model))


def _plain(text: str) -> str:
    """Return Markdown without links."""
    return re.sub(r"\[([^]]+)\]\([^)]+\)", r"\1", text)


def _docstrings(model: type[BaseModel]) -> Iterator[tuple[str, str]]:
    """Yield each key and the string that follows it in the source code."""
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
    """Return the declaration of what a key rebuilds.

    Args:
        section: section of the key.
        key: name of the key.
        inherited: declaration of the field that holds the section. It is used if neither the key
            nor the section has one.

    Raises:
        TypeError: There is no declaration.
    """
    field = section.model_fields[key]
    declaration = field.json_schema_extra
    if not isinstance(declaration, Shapes):
        declaration = getattr(section, "shapes", None) or inherited
    if declaration is None:
        raise TypeError(f"{section.__name__}.{key} has no declaration")
    return declaration
