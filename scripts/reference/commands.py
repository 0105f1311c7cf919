"""Page about the commands of `latentmake`, made from their help."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import typer
from latentmake.cli import app

from reference.tables import table

__all__ = ["page"]

_SHARED = ("configfile", "configfiles", "directory", "as_json")
_HEAD = ("argument or option", "meaning")
_TEXT = """# Commands of latentmake

`latentmake build` makes files, the other commands answer questions and keep house.
[Usage](../usage.md) explains them with examples. `latentmake --help` lists the commands,
`latentmake COMMAND --help` shows the options of one.

{table}

## Shared options

{shared}

`-c` and `--directory` may also stand before the command. The exit status is 0 if all is well, 1
if a job of `build` failed or if `check` or `verify` finds something wrong, and 2 after a mistake in
the command or the configuration. `latentmake --install-completion` sets up the completion of your
shell.
"""


def page() -> str:
    """Return the Markdown of the page."""
    group: Any = typer.main.get_command(app)
    commands = dict(sorted(group.commands.items()))
    rows = [[f"[`{name}`](#{name})", _paragraphs(command)[0]] for name, command in commands.items()]
    shared = {
        parameter.name: list(_row(parameter))
        for command in commands.values()
        for parameter in command.params
        if parameter.name in _SHARED
    }
    tables = {"table": table(("command", "purpose"), rows), "shared": table(_HEAD, shared.values())}
    parts = [_TEXT.format(**tables)]
    parts += [_command(name, command) for name, command in commands.items()]
    return "\n".join(parts)


def _paragraphs(command: Any) -> list[str]:
    return [" ".join(part.split()) for part in (command.help or "").split("\n\n")]


def _command(name: str, command: Any) -> str:
    shown = [option for option in command.params if not getattr(option, "hidden", False)]
    arguments = [option for option in shown if option.param_type_name == "argument"]
    usage = " ".join(["latentmake", name, *map(_argument, arguments)])
    rows = [list(_row(option)) for option in shown if option.name not in _SHARED]
    shared = [f"`{option.opts[-1]}`" for option in shown if option.name in _SHARED]
    blocks = [f"## `{name}`", f"```text\n{usage}\n```", *_paragraphs(command)]
    if rows:
        blocks.append(table(_HEAD, rows))
    if shared:
        blocks.append(f"[Shared options](#shared-options): {', '.join(shared)}.")
    return "\n\n".join(blocks) + "\n"


def _argument(parameter: Any) -> str:
    word = parameter.metavar or parameter.name.upper()
    word += "..." if parameter.nargs != 1 and not word.endswith("...") else ""
    return word if parameter.required else f"[{word}]"


def _row(parameter: Any) -> Iterator[str]:
    if parameter.param_type_name == "argument":
        yield f"`{_argument(parameter)}`"
    else:
        flags = ", ".join(f"`{flag}`" for flag in parameter.opts)
        yield flags if parameter.is_flag else f"{flags} `{parameter.metavar or 'TEXT'}`"
    yield re.sub(r"\s+", " ", parameter.help or "").replace("|", "\\|")
