"""What the sections of the configuration are made of: closed sections, numbers, resolutions."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    StringConstraints,
    WithJsonSchema,
)

__all__ = [
    "Closed",
    "Dtype",
    "Ending",
    "Name",
    "Number",
    "Place",
    "Resolution",
    "ResolutionField",
    "listed",
    "place",
    "resolution_name",
]

Dtype = Literal["float32", "bfloat16", "float16"]
Ending = Annotated[str, StringConstraints(pattern=r"^\.[^/\\]+$")]
Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")]


def _no_truth(value: object) -> object:
    """Refuse `rank: yes`, which would otherwise be 1."""
    if isinstance(value, bool):
        raise ValueError("should be a number")
    return value


Number = Annotated[int, BeforeValidator(_no_truth)]


def _whole_address(path: str) -> str:
    """Refuse what begins like an address on S3 and is none; it would be looked for on this disk."""
    if path.lower().startswith("s3:") and not re.match(r"s3://[A-Za-z0-9][^/]+(/(?!/)|$)", path):
        raise ValueError("should be s3://bucket/folder")
    return path


Place = Annotated[str, AfterValidator(_whole_address)]


class Closed(BaseModel):
    """A section that refuses keys it does not know."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    def first_set(self, *keys: str) -> str | None:
        """Return the first of some keys whose value is not its default; None where all are."""
        fields = type(self).model_fields
        return next((key for key in keys if getattr(self, key) != fields[key].default), None)


class Resolution(BaseModel):
    """A target size in pixels; for `fit: bucket`, its area is what the buckets keep."""

    model_config = ConfigDict(frozen=True)
    width: Annotated[int, Field(gt=0)]
    height: Annotated[int, Field(gt=0)]

    @property
    def name(self) -> str:
        """Its folder below the cache: `64` for a square, else `512x768` (width x height)."""
        return resolution_name(self.width, self.height)


def resolution_name(width: int, height: int) -> str:
    """Return the name of a resolution: `64` for a square, else `512x768`."""
    return str(width) if width == height else f"{width}x{height}"


def _resolution(value: object) -> object:
    if isinstance(value, bool):
        raise ValueError("should be a side in pixels, or [width, height]")
    if isinstance(value, int):
        return {"width": value, "height": value}
    if isinstance(value, str) and (match := re.fullmatch(r"(\d+)(?:x(\d+))?", value)):
        return {"width": int(match[1]), "height": int(match[2] or match[1])}
    if isinstance(value, list | tuple) and len(value) == 2:
        return {"width": value[0], "height": value[1]}
    if isinstance(value, Resolution | dict):
        return value
    raise ValueError("should be a side in pixels, or [width, height]")


def listed(value: object) -> object:
    """One value may stand for a list of one."""
    return value if isinstance(value, list | tuple) else [value]


ResolutionField = Annotated[
    Resolution,
    BeforeValidator(_resolution),
    PlainSerializer(lambda resolution: [resolution.width, resolution.height]),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "integer", "exclusiveMinimum": 0},
                {
                    "type": "array",
                    "items": {"type": "integer", "exclusiveMinimum": 0},
                    "minItems": 2,
                    "maxItems": 2,
                },
                {"type": "string", "pattern": r"^\d+(x\d+)?$"},
            ]
        }
    ),
]


def place(value: object) -> object:
    """A path alone may stand for the place of some weights."""
    return {"path": value} if isinstance(value, str) else value
