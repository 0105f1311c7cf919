"""Text of `train_{run}.sh` and `train_{run}.bat`, which start an external trainer.

Arguments are quoted here as each shell wants them; the templates hold the rest.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from latentmake.errors import ConfigError


class Step(NamedTuple):
    """One call of a Python script.

    Attributes:
        what: in words.
        arguments: None where its weights lie in a folder, which the script cannot read.
    """

    what: str
    script: str
    arguments: Sequence[str] | None


@dataclass(frozen=True)
class Commands:
    """Content of a script, in the paths of the system that runs it.

    Attributes:
        run: the run's name.
        does: a sentence for its first line.
        program: the trainer's name.
        folder: its folder.
        package: folder below that in which its scripts lie in some versions; "" for none.
        venvs: virtual environments, the first that exists is activated; relative to `folder`.
        accelerate: arguments of `accelerate launch`, before the script.
        steps: the calls; the last one trains.
    """

    run: str
    does: str
    program: str
    folder: str
    package: str
    venvs: Sequence[str]
    accelerate: Sequence[str]
    steps: Sequence[Step]


def _render(commands: Commands, ending: str, quote: Callable[[str], str], **values: Any) -> str:
    """Fill the template of an ending; each flag has a line with its values."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined  # not while planning

    templates = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=StrictUndefined,
        autoescape=False,  # noqa: S701 -- no HTML: each shell has its own quoting
    )
    lines = [_grouped(step.arguments or (), quote) for step in commands.steps]
    return templates.get_template(f"train.{ending}.j2").render(
        {**vars(commands), "script": commands.steps[-1].script, "lines": lines, **values}
    )


def _grouped(arguments: Sequence[str], quote: Callable[[str], str]) -> list[str]:
    """Return one line for each flag with its values."""
    lines: list[str] = []
    for argument in arguments:
        if argument.startswith("--") or not lines:
            lines.append(quote(argument))
        else:
            lines[-1] += f" {quote(argument)}"
    return lines


def shell_script(commands: Commands) -> str:
    """Return the script for bash."""
    return _render(
        commands,
        "sh",
        shlex.quote,
        folder=shlex.quote(commands.folder),
        venvs=[*map(shlex.quote, commands.venvs)],
        launch=shlex.join(["accelerate", "launch", *commands.accelerate]),
    )


def batch_script(commands: Commands) -> str:
    """Return the script for cmd.exe, with CRLF at the end of each line.

    Programs are started by `call`, for `python` may itself be a batch file (pyenv-win), which would
    otherwise not come back. `call` reads its line twice: a percent sign takes four, and a caret,
    which it would double, comes out of a variable.

    Raises:
        ConfigError: an argument has signs that no batch file can pass on.
    """
    variables: dict[str, str] = {}

    def quote(value: str) -> str:
        if re.fullmatch(r"[A-Za-z0-9_.:/\\+-]*[A-Za-z0-9_.:/+-]", value):
            return value
        value = _for_program(value)
        if "^" in value:
            name = variables.setdefault(_doubled(value), f"VALUE_{len(variables) + 1}")
            return f'"%%{name}%%"'
        return f'"{_doubled(_doubled(value))}"'

    inside = commands.folder.rstrip("\\") + "\\"
    scripts = [f"{venv}\\Scripts\\activate.bat" for venv in commands.venvs]
    text = _render(
        commands,
        "bat",
        quote,
        folder=f'"{_doubled(commands.folder)}"',
        folder_inside=f'"{_doubled(inside)}"',
        venvs=[{"file": f'"{_doubled(each)}"', "called": quote(each)} for each in scripts],
        package=commands.package.replace("/", "\\"),
        launch=" ".join(["accelerate launch", *map(quote, commands.accelerate)]),
        variables=variables,
    )
    return text.replace("\n", "\r\n")


def _doubled(value: str) -> str:
    return value.replace("%", "%%")


def _for_program(value: str) -> str:
    """Return the text between quotation marks that C programs read as a value."""
    special = re.search(r"[&|<>^%\r\n]" if '"' in value else r"[\r\n]", value)
    if special is not None:
        raise ConfigError(
            f"{value!r} cannot stand in a .bat",
            where="trainer.arguments",
            hint="leave out line breaks, and signs such as & or % beside quotation marks",
        )
    value = re.sub(r'(\\*)"', r'\1\1\\"', value)
    return re.sub(r"(\\+)$", r"\1\1", value)
