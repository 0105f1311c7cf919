"""Options of a command, given by `--config NAME=VALUE` and in no configuration file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from pydantic import BaseModel, ConfigDict, ValidationError

from latentmake.errors import ConfigError

__all__ = ["CommandLine", "Options", "command_line"]


class Options(BaseModel):
    """Options of a command.

    Attributes:
        repair: whether verify_{run} deletes damaged files.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    repair: bool = False


class CommandLine(NamedTuple):
    """Options of a command, and its configuration without them."""

    options: Options
    values: dict[str, object]


def command_line(words: Iterable[object], values: Mapping[str, object]) -> CommandLine:
    """Take the options out of a configuration, in which Snakemake has put them.

    In a file they stay unknown keys: a configuration must not delete what nobody was shown.

    Args:
        words: `NAME=VALUE` of `--config`, as written.
        values: the configuration.

    Raises:
        ConfigError: an option has a value that it cannot have.
    """
    pairs = (str(word).partition("=") for word in words)
    given = {name: text for name, _, text in pairs if name in Options.model_fields}
    left = {name: value for name, value in values.items() if name not in given}
    try:
        return CommandLine(Options.model_validate(given), left)
    except ValidationError as error:
        name = str(error.errors()[0]["loc"][0])
        what = f"`{given[name]}` is neither true nor false"
        raise ConfigError(what, where=name, hint=f"--config {name}=true") from None
