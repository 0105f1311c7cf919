"""The text of `train_{run}.sh`, `.bat` and `.ps1`, which start another trainer.

A script is put together from lists of arguments, each quoted as its shell wants it; there is no
template whose tokens could stay unfilled.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from latentmake.errors import ConfigError

__all__ = ["Commands", "Step", "batch_script", "powershell_script", "shell_script"]

_TRAINING = "training"


class Step(NamedTuple):
    """What a script does before the training.

    Attributes:
        what: in words.
        script: the program's.
        arguments: of that; None where there is nothing to do.
        without: why there is nothing to do.
    """

    what: str
    script: str
    arguments: Sequence[str] | None
    without: str = ""


@dataclass(frozen=True)
class Commands:
    """What a script does, in the paths of the system that runs it.

    Attributes:
        run: the run's name.
        does: what it does, as a sentence.
        program: the trainer's name.
        folder: its folder.
        package: folder below that in which its scripts lie in some versions; "" for none.
        venvs: virtual environments, the first that is there is activated; relative to `folder`.
        steps: what is done before the training.
        accelerate: arguments of `accelerate launch`, before the script.
        script: the one that trains.
        training: its arguments.
    """

    run: str
    does: str
    program: str
    folder: str
    package: str
    venvs: Sequence[str]
    steps: Sequence[Step]
    accelerate: Sequence[str]
    script: str
    training: Sequence[str]

    @property
    def no_venv(self) -> str:
        """What is said where no environment is found."""
        return (
            f"warning: no virtual environment of {self.program}; going on with the python on PATH"
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
    name = f"train_{commands.run}"

    def step(what: str, head: str, arguments: Sequence[str]) -> list[str]:
        continued = [head, *_grouped(arguments, shlex.quote), f"|| fail '{what} failed'"]
        return ["", " \\\n  ".join(continued)]

    lines = [
        "#!/usr/bin/env bash",
        f"# {commands.does}",
        "# Publishing the run again writes this file anew.",
        "set -euo pipefail",
        "",
        "fail() {",
        f"  printf '{name}: %s\\n' \"$1\" >&2",
        "  exit 1",
        "}",
        "",
        f"cd -- {shlex.quote(commands.folder)} || "
        f"fail 'the folder of {commands.program} is not there'",
        "",
        "venv=",
        f"for candidate in {shlex.join(commands.venvs)}; do",
        "  if [[ -z $venv && -f $candidate/bin/activate ]]; then venv=$candidate; fi",
        "done",
        "if [[ -n $venv ]]; then",
        "  set +u  # activate may read variables that are not set",
        '  source "$venv/bin/activate" || fail "$venv/bin/activate failed"',
        "  set -u",
        "else",
        f'  echo "{name}: {commands.no_venv}" >&2',
        "fi",
        "python=$(command -v python || command -v python3) || fail 'there is no python on PATH'",
        "",
        "scripts=.",
        *(
            [f"if [[ ! -f {commands.script} ]]; then scripts={commands.package}; fi"]
            if commands.package
            else []
        ),
        f'[[ -f $scripts/{commands.script} ]] || fail "$PWD holds no {commands.script}"',
    ]
    for what, script, arguments, without in commands.steps:
        if arguments is None:
            lines += ["", f"# {without}"]
        else:
            lines += step(what, f'"$python" "$scripts/{script}"', arguments)
    launch = ["accelerate", "launch", *commands.accelerate]
    head = f'{shlex.join(launch)} "$scripts/{commands.script}"'
    lines += step(_TRAINING, head, commands.training)
    return "\n".join(lines) + "\n"


def batch_script(commands: Commands) -> str:
    """Return the script for cmd.exe, with CRLF at the end of each line.

    Programs are started by `call`, for `python` may itself be a batch file (pyenv-win), which would
    otherwise not come back. `call` reads its line twice: a percent sign takes four, and a caret,
    which it would double, comes out of a variable.

    Raises:
        ConfigError: an argument has signs that no batch file can pass on.
    """
    name = f"train_{commands.run}"
    variables: dict[str, str] = {}

    def quote(value: str) -> str:
        if re.fullmatch(r"[A-Za-z0-9_.:/\\+-]*[A-Za-z0-9_.:/+-]", value):
            return value
        value = _for_program(value)
        if "^" in value:
            variable = variables.setdefault(value, f"VALUE_{len(variables) + 1}")
            return f'"%%{variable}%%"'
        return f'"{value.replace("%", "%%%%")}"'

    def step(what: str, head: str, arguments: Sequence[str]) -> list[str]:
        continued = [head, *_grouped(arguments, quote)]
        return ["", f'set "STEP={what}"', " ^\n  ".join(continued), *check]

    folder = commands.folder.rstrip("\\") + "\\"
    # A program that crashes gives a negative number.
    check = ["if errorlevel 1 goto failed", "if not errorlevel 0 goto failed"]
    lines = [
        f'set "STEP=entering the folder of {commands.program}"',
        f"if not exist {_for_cmd(folder)} goto failed",
        f"pushd {_for_cmd(commands.folder)}",
        "",
    ]
    for number, venv in enumerate(commands.venvs):
        activate = f"{venv}\\Scripts\\activate.bat"
        opening = "if" if number == 0 else ") else if"
        lines += [f"{opening} exist {_for_cmd(activate)} (", f"    call {quote(activate)}"]
    lines += [
        ") else (",
        f"    echo {name}: {commands.no_venv} 1>&2",
        ")",
        "",
        'set "SCRIPTS=."',
        *(
            [f'if not exist "{commands.script}" set "SCRIPTS={_backslashed(commands.package)}"']
            if commands.package
            else []
        ),
        f'set "STEP=finding {commands.script}"',
        f'if not exist "%SCRIPTS%\\{commands.script}" goto failed',
    ]
    for what, script, arguments, without in commands.steps:
        if arguments is None:
            lines += ["", f"rem {without}"]
        else:
            lines += step(what, f'call python "%SCRIPTS%\\{script}"', arguments)
    launch = " ".join(["call accelerate launch", *map(quote, commands.accelerate)])
    lines += step(_TRAINING, f'{launch} "%SCRIPTS%\\{commands.script}"', commands.training)
    lines += [
        "",
        "popd",
        "exit /b 0",
        "",
        ":failed",
        f"echo {name}: %STEP% failed 1>&2",
        "popd",
        "exit /b 1",
    ]
    head = [
        "@echo off",
        f"rem {commands.does}",
        "rem Publishing the run again writes this file anew.",
        "setlocal EnableExtensions DisableDelayedExpansion",
        "chcp 65001 >nul",
        *(f'set "{variable}={_doubled(value)}"' for value, variable in variables.items()),
        "",
    ]
    return "\n".join([*head, *lines, ""]).replace("\n", "\r\n")


# What PowerShell takes for a quotation mark of a literal string, typographic ones included.
_SINGLE = re.compile("['\u2018\u2019\u201a\u201b]")


def powershell_script(commands: Commands) -> str:
    """Return the script for PowerShell 5.1 and later: UTF-8 with a mark, CRLF at line ends.

    Every argument is a literal string. How a quotation mark inside of one reaches a program differs
    between versions; all are told to pass arguments as the oldest does, and the mark is escaped for
    that.

    Raises:
        ConfigError: an argument has signs that PowerShell 5.1 cannot pass on.
    """
    name = f"train_{commands.run}"

    def step(what: str, head: Sequence[str], arguments: Sequence[str]) -> list[str]:
        program, *words = head
        return [
            "",
            "$arguments = @(",
            *(f"    {word}" for word in words),
            *(f"    {line}" for line in _listed(arguments)),
            ")",
            f"& {program} @arguments",
            f"if ($LASTEXITCODE -ne 0) {{ Stop-Training {_literal(f'{what} failed')} }}",
        ]

    lines = [
        f"# {commands.does}",
        "# Publishing the run again writes this file anew.",
        "$PSNativeCommandArgumentPassing = 'Legacy'",
        "$PSNativeCommandUseErrorActionPreference = $false",
        "",
        "function Stop-Training($what) {",
        f'    [Console]::Error.WriteLine("{name}: $what")',
        "    Pop-Location",
        "    exit 1",
        "}",
        "",
        f"$folder = {_literal(commands.folder)}",
        "if (-not (Test-Path -LiteralPath $folder -PathType Container)) {",
        f"    Stop-Training {_literal(f'the folder of {commands.program} is not there')}",
        "}",
        "Push-Location -LiteralPath $folder",
        "",
        "$activate = $null",
        f"foreach ($venv in {', '.join(map(_literal, commands.venvs))}) {{",
        '    $found = "$venv/Scripts/Activate.ps1"',
        "    if (-not $activate -and (Test-Path -LiteralPath $found)) {",
        "        $activate = (Resolve-Path -LiteralPath $found).ProviderPath",
        "    }",
        "}",
        "if ($activate) {",
        "    . $activate",
        "} else {",
        f"    [Console]::Error.WriteLine({_literal(f'{name}: {commands.no_venv}')})",
        "}",
        "foreach ($program in 'python', 'accelerate') {",
        "    if (-not (Get-Command $program -ErrorAction SilentlyContinue)) {",
        '        Stop-Training "there is no $program on PATH"',
        "    }",
        "}",
        "",
        "$scripts = '.'",
        *(
            [
                f"if (-not (Test-Path -LiteralPath {_literal(commands.script)})) "
                f"{{ $scripts = {_literal(commands.package)} }}"
            ]
            if commands.package
            else []
        ),
        f'if (-not (Test-Path -LiteralPath "$scripts/{commands.script}")) {{',
        f"    Stop-Training {_literal(f'there is no {commands.script} in its folder')}",
        "}",
    ]
    for what, script, arguments, without in commands.steps:
        if arguments is None:
            lines += ["", f"# {without}"]
        else:
            lines += step(what, ["python", f'"$scripts/{script}"'], arguments)
    launch = ["accelerate", "'launch'", *_listed(commands.accelerate)]
    lines += step(_TRAINING, [*launch, f'"$scripts/{commands.script}"'], commands.training)
    lines += ["", "Pop-Location", ""]
    return "\ufeff" + "\n".join(lines).replace("\n", "\r\n")


def _listed(arguments: Sequence[str]) -> list[str]:
    """Return the lines of a PowerShell array, one for each flag with its values."""
    lines: list[str] = []
    for argument in arguments:
        if argument.startswith("--") or not lines:
            lines.append(_passed(argument))
        else:
            lines[-1] += f", {_passed(argument)}"
    return lines


def _literal(text: str) -> str:
    """Return a literal string of PowerShell."""
    return "'" + _SINGLE.sub(lambda mark: mark[0] * 2, text) + "'"


def _passed(value: str) -> str:
    """Quote an argument for a program started by PowerShell 5.1.

    It puts an argument with a space between quotation marks and escapes nothing inside of it.
    """
    spaced = any(letter.isspace() for letter in value)
    if re.search(r"[\r\n]", value) or (spaced and value.endswith("\\")):
        raise ConfigError(
            f"{value!r} cannot stand in a .ps1",
            where="trainer.arguments",
            mend="leave out line breaks, and a backslash at the end of what has spaces",
        )
    return _literal(re.sub(r'(\\*)"', r'\1\1\\"', value) or '""')


def _backslashed(path: str) -> str:
    return path.replace("/", "\\")


def _doubled(value: str) -> str:
    return value.replace("%", "%%")


def _for_cmd(path: str) -> str:
    """Quote a path for a command of cmd.exe itself."""
    return f'"{_doubled(path)}"'


def _for_program(value: str) -> str:
    """Return what stands between quotation marks, as C programs take their arguments apart."""
    special = re.search(r"[&|<>^%\r\n]" if '"' in value else r"[\r\n]", value)
    if special is not None:
        raise ConfigError(
            f"{value!r} cannot stand in a .bat",
            where="trainer.arguments",
            mend="leave out line breaks, and signs such as & or % beside quotation marks",
        )
    value = re.sub(r'(\\*)"', r'\1\1\\"', value)
    return re.sub(r"(\\+)$", r"\1\1", value)
