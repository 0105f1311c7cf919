"""Building blocks of sections: closed sections, numbers, paths, resolutions, and `Shapes`.

A key declares once which results it shapes: results that change with its value. The
declaration is the `Shapes` of its field, the `shapes` of its section, or the declaration of the
field that holds its section. Recipes, digests, the documentation and tests read the declarations.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import (
    Annotated,
    Any,
    ClassVar,
    Literal,
    NamedTuple,
    Self,
    TypeVar,
    get_args,
    get_origin,
)

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    PlainSerializer,
    StringConstraints,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WithJsonSchema,
    WrapValidator,
    model_validator,
)
from pydantic.config import JsonDict
from pydantic_core import core_schema

Dtype = Literal["float32", "bfloat16", "float16"]
_ENDING = r"^\.[^/\\]{1,99}$"
NAME = r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,199}$"
MODULE = r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*$"
NETWORK_ARG = r"^[A-Za-z_]\w*=.+$"
PLAIN_NETWORK_ARG = r"^[A-Za-z_]\w*=[^=]+$"
COLOUR = r"^(#[0-9a-fA-F]{6}|white|black|gray)$"
UNET_PART = (
    r"^(unet|cross_attention|cross_attention_qk|cross_attention_out|attention|norms|conv_in"
    r"|conv_out|time_embedding|mid_block|(down_blocks|up_blocks)(\.[0-9])?)$"
)
PATTERNS = {
    _ENDING: "an ending that begins with a dot, such as .txt",
    NAME: "letters (A-Z, a-z), digits, `.`, `_` and `-`, beginning with a letter or digit, 200 at "
    "most",
    MODULE: "the name of a Python module, such as networks.loha",
    NETWORK_ARG: "NAME=VALUE, such as conv_dim=4",
    PLAIN_NETWORK_ARG: "NAME=VALUE, such as factor=4, with no other =",
    COLOUR: "white, black, gray, or six digits such as '#8090ff' in quotes",
    UNET_PART: "unet, cross_attention, cross_attention_qk, cross_attention_out, attention, norms, "
    "conv_in, conv_out, time_embedding, mid_block, down_blocks, up_blocks, or up_blocks.1",
}
"""Regular expression of a value -> its description in messages."""

Ending = Annotated[str, StringConstraints(pattern=_ENDING)]
Name = Annotated[str, StringConstraints(pattern=NAME)]

MAX_SIDE = 8192
"""Longest side of a resolution in pixels; larger values are typing errors."""


def _refuse_bool(value: object) -> object:
    """Refuse `rank: yes`, which would otherwise be 1."""
    if isinstance(value, bool):
        raise ValueError("should be a number")
    return value


_Numeric = TypeVar("_Numeric", int, float)
_MAX_INTEGER, _MAX_FLOAT = 2**63 - 1, 3.4e38  # limits of a generator's seed and of float32


def _refuse_huge(value: _Numeric) -> _Numeric:
    if abs(value) > (_MAX_INTEGER if isinstance(value, int) else _MAX_FLOAT):
        raise ValueError("is too large a number; use a smaller one")
    return value


Number = Annotated[int, BeforeValidator(_refuse_bool), AfterValidator(_refuse_huge)]
Real = Annotated[float, BeforeValidator(_refuse_bool), AfterValidator(_refuse_huge)]

# Upper bounds refuse typing errors: no network has wider layers, no device holds such a batch, and
# a thousand steps a second would take eleven days.
Rank = Annotated[Number, Field(ge=1, le=65_536)]
BatchSize = Annotated[Number, Field(ge=1, le=65_536)]
Steps = Annotated[Number, Field(ge=1, le=1_000_000_000)]
LearningRate = Annotated[Real, Field(gt=0, le=1000)]


def worded(rule: str) -> WrapValidator:
    """Return a validator with one message for a union; pydantic's has a line for each member."""

    def check(value: object, inner: ValidatorFunctionWrapHandler) -> Any:
        try:
            return inner(value)
        except ValidationError:
            raise ValueError(rule) from None

    return WrapValidator(check)


def expanded(path: str) -> str:
    """Expand `~`, `$NAME` and `${NAME}` in a path; `$$` stands for a dollar sign.

    Raises:
        ValueError: a variable is not set, or the path is a damaged URL.
    """

    def value_of(match: re.Match[str]) -> str:
        name = match[1].strip("{}")
        if name == "$":
            return "$"
        if name not in os.environ:
            what = f"has a variable that is not set: {name}; set it, or write $$ for a dollar sign"
            raise ValueError(what)
        return os.environ[name]

    path = str(_VARIABLE.sub(value_of, os.path.expanduser(path)))  # noqa: PTH111 -- URLs stay
    if ("://" in path or _SCHEME.match(path)) and not _URL.match(path):
        raise ValueError("should be a URL such as s3://bucket/folder")  # it is no local path either
    return path


def literal(path: str | Path) -> str:
    """Return the text for a configuration that `expanded` turns into this path."""
    text = str(path).replace("$", "$$")
    return f"./{text}" if text.startswith("~") or _SCHEME.match(text) else text


_VARIABLE = re.compile(r"\$(\$|[A-Za-z_]\w*|\{[A-Za-z_]\w*\})")
_SCHEME = re.compile(r"(?i)(s3|gs|hf):")
_URL = re.compile(r"[a-z][a-z0-9+.-]+://[A-Za-z0-9][^/]+(/(?!/)|$)")
DiskPath = Annotated[str, AfterValidator(expanded)]


class Closed(BaseModel):
    """A section that refuses unknown keys, and keys without an effect.

    The docstrings of keys are their descriptions in the schema.

    Args:
        shapes: declaration of the keys without a declaration of their own.

    Attributes:
        declarations: key -> declaration, for keys that hold no section.
        limits: pairs of a key and a condition without which it has no effect.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
    declarations: ClassVar[dict[str, Shapes]]
    limits: ClassVar[list[tuple[str, Applies]]]
    shapes: ClassVar[Shapes | None] = None

    def __init_subclass__(cls, shapes: Shapes | None = None, **config: Any) -> None:
        cls.shapes = shapes or cls.shapes
        super().__init_subclass__(**config)

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        extras = {key: field.json_schema_extra for key, field in cls.model_fields.items()}
        declared = {key: extra for key, extra in extras.items() if isinstance(extra, Shapes)}
        cls.limits = [(key, limit) for key, extra in declared.items() for limit in extra.applies]
        if cls.shapes:
            declared = {**dict.fromkeys(extras, cls.shapes), **declared}
        plain = (key for key in declared if not any(held_by(cls.model_fields[key].annotation)))
        cls.declarations = {key: declared[key] for key in plain}

    @model_validator(mode="after")
    def _applies(self) -> Self:
        if fault := self.refused():
            key, reason = fault
            raise ValueError(f"`{key}` {reason}")
        return self

    def refused(self, model: object = None) -> tuple[str, str] | None:
        """Return the first key that is set without an effect, and the reason.

        Args:
            model: model of a run. If it is given, keys are checked against the model, else against
                the other keys of the section.
        """
        for key, limit in self.limits:
            applies, values = (limit.when, self) if model is None else (limit.row, model)
            if applies and self.first_set(key) and not applies(values):
                return key, limit.reason
        return None

    def first_set(self, *keys: str) -> str | None:
        """Return the first of these keys whose value is not its default; None if there is none."""
        fields = type(self).model_fields
        return next((key for key in keys if getattr(self, key) != fields[key].default), None)


class Resolution(BaseModel):
    """Target size in pixels; with `fit: bucket`, its area is the target area of the buckets."""

    model_config = ConfigDict(frozen=True)
    width: Annotated[Number, Field(gt=0, le=MAX_SIDE)]
    height: Annotated[Number, Field(gt=0, le=MAX_SIDE)]

    @property
    def name(self) -> str:
        """Name of its cache folder: `64` for a square, else `512x768` (width x height)."""
        return resolution_name(self.width, self.height)


def resolution_name(width: int, height: int) -> str:
    """Return the name of a resolution: `64` for a square, else `512x768`."""
    return str(width) if width == height else f"{width}x{height}"


def _resolution(value: object) -> object:
    if isinstance(value, int) and not isinstance(value, bool):
        return {"width": value, "height": value}
    if isinstance(value, str) and (match := re.fullmatch(r"([0-9]+)(?:x([0-9]+))?", value)):
        return {"width": int(match[1]), "height": int(match[2] or match[1])}
    if isinstance(value, list | tuple) and len(value) == 2:
        return {"width": value[0], "height": value[1]}
    if isinstance(value, Resolution | dict):
        return value
    raise ValueError("should be a side in pixels, or [width, height]")


class OneOrMore:
    """Annotation of a list that may be written as one value."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> Any:
        several = handler(source)
        either = core_schema.union_schema([several["items_schema"], several])
        return core_schema.no_info_before_validator_function(
            lambda value: value if isinstance(value, list | tuple | None) else [value],
            several,
            json_schema_input_schema=either,
        )


_Item = TypeVar("_Item")
Listed = Annotated[list[_Item], OneOrMore()]


_SIDE = {"type": "integer", "exclusiveMinimum": 0, "maximum": MAX_SIDE}
_SIZES = [
    _SIDE,
    {"type": "array", "items": _SIDE, "minItems": 2, "maxItems": 2},
    {"type": "string", "pattern": "^[0-9]+(x[0-9]+)?$"},
]
ResolutionField = Annotated[
    Resolution,
    BeforeValidator(_resolution),
    PlainSerializer(lambda resolution: [resolution.width, resolution.height]),
    WithJsonSchema({"anyOf": _SIZES}),
]


def place(value: object) -> object:
    """Turn a path into a section with the key `path`."""
    return {"path": value} if isinstance(value, str) else value


class Applies(NamedTuple):
    """Condition without which a key has no effect.

    Attributes:
        reason: predicate for the message if the condition is not met.
        when: condition on the section of the key.
        row: condition on the model of a run.
    """

    reason: str
    when: Callable[[Any], object] | None = None
    row: Callable[[Any], object] | None = None


Kind = Literal[
    "latents",
    "text",
    "captions",
    "manifest",
    "weights",
    "pictures",
    "clips",
    "publication",
    "machine",
]


class Shapes:
    """Declaration of a key: the `json_schema_extra` of its field, or the `shapes` of its section.

    Attributes:
        kinds: results whose bytes depend on the key; `machine` means no result.
        layouts: layouts in which the key has an effect; () means all layouts.
        indirect: whether only the consequences of the key count, not its value. Examples are sizes
            and frames, which are part of each target's key, and the content of files.
        when: another key of the section, and its values for which this key counts.
        applies: conditions without which the key is refused.
    """

    def __init__(
        self,
        *kinds: Kind,
        layouts: tuple[str, ...] = (),
        indirect: bool = False,
        when: tuple[str, tuple[object, ...]] | None = None,
        applies: Iterable[Applies] = (),
    ) -> None:
        self.kinds = kinds
        self.layouts = layouts
        self.indirect = indirect
        self.when = when
        self.applies = applies

    def __call__(self, schema: JsonDict) -> None:
        """Write the declaration into the JSON schema, for editors and readers."""
        schema["shapes"] = list(self.kinds)


def shaped(default: Any, shapes: Shapes, **rules: Any) -> Any:
    """Return the field of a key with its default, its declaration, and rules of pydantic."""
    return Field(default, json_schema_extra=shapes, **rules)


LATENTS = Shapes("latents")
GEOMETRY = Shapes("latents", indirect=True)
TEXT = Shapes("text")
MADE = Shapes("captions")
MANIFEST = Shapes("manifest")
WEIGHTS = Shapes("weights")
PICTURES = Shapes("pictures")
CLIPS = Shapes("clips")
PUBLICATION = Shapes("publication")
MACHINE = Shapes("machine")


def held_by(annotation: Any) -> Iterator[tuple[tuple[str, ...], type[Closed]]]:
    """Yield the sections that a field's type may hold, with their locations below the field.

    In a location, `*` stands for a name or for the index of a list.
    """
    origin, arguments = get_origin(annotation), get_args(annotation)
    if isinstance(annotation, type) and issubclass(annotation, Closed):
        yield (), annotation
    elif origin in (list, dict):
        yield from ((("*", *below), model) for below, model in held_by(arguments[-1]))
    elif origin is Annotated:
        yield from held_by(arguments[0])
    elif origin is not Literal:
        for argument in arguments:
            several = sum(member is not type(None) for member in arguments) > 1
            for below, model in held_by(argument):
                # pydantic puts the tag of such a union's member into the location.
                tag = get_args(model.model_fields["kind"].annotation) if several else ()
                yield (*tag, *below), model


def shaping(
    section: Closed, kind: Kind, layout: str | None = None, *, defaults: bool = True
) -> dict[str, object]:
    """Return key -> JSON value of the keys of a section that directly shape a result.

    Keys of sections below it are not included.

    Args:
        section: section of the configuration.
        kind: kind of the result.
        layout: layout of the caches; None for keys of all layouts.
        defaults: whether to include keys with default values. Leave them out of digests, so that
            a release which adds a key does not change them.
    """
    result = {}
    values = section.model_dump(mode="json", exclude_defaults=not defaults)
    for key, shapes in section.declarations.items():
        if key not in values or kind not in shapes.kinds or shapes.indirect:
            continue
        if shapes.when and getattr(section, shapes.when[0]) not in shapes.when[1]:
            continue
        if layout is None or not shapes.layouts or layout in shapes.layouts:
            result[key] = values[key]
    return result
