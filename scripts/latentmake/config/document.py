"""Check of configuration files as text: encoding, syntax, repeated keys.

Snakemake reads them itself, but names no line of a mistake and keeps the last of two equal keys. So
this check comes first: for files named on the command line from the profile, for any file from the
Snakefile.
"""

from __future__ import annotations

import argparse
import json
import stat
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import yaml

from latentmake.errors import ConfigError

__all__ = ["check_command", "check_file", "check_files"]

_TOP = "write the sections datasets, models and runs; see config/README.md"


def check_command(arguments: Sequence[str]) -> None:
    """Check the files of `--configfile` of a Snakemake command; exit at the first mistake."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--configfile", "--configfiles", nargs="+", default=[], dest="files")
    try:
        files = parser.parse_known_args(list(arguments))[0].files
    except argparse.ArgumentError:
        return  # Snakemake says what is wrong
    check_files(files)


def check_files(files: Iterable[str | Path]) -> None:
    """Check configuration files; exit with one line at the first mistake."""
    try:
        for file in files:
            check_file(Path(file))
    except ConfigError as error:
        sys.exit(f"error: {error}")


def check_file(path: Path) -> None:
    """Check encoding, syntax and repeated keys of a configuration file.

    Raises:
        ConfigError: the first mistake, with its line.
    """
    try:
        if stat.S_ISFIFO(path.stat().st_mode):
            return  # a pipe can be read once: by Snakemake
        data = path.read_bytes()
    except FileNotFoundError:
        raise _missing(path) from None
    except OSError as error:
        what = f"cannot be read: {error.strerror}"
        raise ConfigError(what, where=path, hint="name a file that can be read") from None
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n")
        what = f"the byte 0x{data[error.start]:02x} is not UTF-8"
        raise _mistake(path, line, what, "save the file in UTF-8") from None
    try:
        values = json.loads(text, object_pairs_hook=lambda pairs: _unique(path, pairs))
    except (ValueError, RecursionError):
        _check_yaml(path, text)
    else:
        if not isinstance(values, dict):
            raise ConfigError("has no keys at its top level", where=path, hint=_TOP)


def _missing(path: Path) -> ConfigError:
    if path.suffix not in (".yaml", ".yml", ".json") and "/" not in str(path):
        hint = "if it is a target, write it before --configfile"
    elif str(path) == "config/config.yaml":
        hint = "name your configuration by --configfile FILE"
    else:
        hint = "correct the path after --configfile"
    return ConfigError(f"there is no such file in {Path.cwd()}", where=path, hint=hint)


def _mistake(path: Path, line: int, what: str, hint: str) -> ConfigError:
    return ConfigError(what, where=f"{path}, line {line + 1}", hint=hint)


def _unique(path: Path, pairs: Sequence[tuple[str, object]]) -> dict[str, object]:
    """Return the values of a JSON object without repeated keys."""
    values = dict(pairs)
    if len(values) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ConfigError(f"the key `{twice}` occurs twice", where=path, hint="write it once")
    return values


def _check_yaml(path: Path, text: str) -> None:
    hint = "check brackets, quotes and indentation there"
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            raise ConfigError("is empty", where=path, hint=_TOP)
        if not isinstance(node, yaml.MappingNode):
            what = "a list" if isinstance(node, yaml.SequenceNode) else "a text"
            line = node.start_mark.line
            raise _mistake(path, line, f"{what} is in the place of sections", _TOP)
        values = loader.construct_document(node)
        json.dumps(values, default=str, skipkeys=True)  # which finds a section that holds itself
    except yaml.reader.ReaderError as error:
        line = text[: error.position].count("\n")
        what = f"the character U+{error.character:04X} is not allowed"
        raise _mistake(path, line, what, "remove it, and save the file in UTF-8") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = 0 if mark is None else mark.line
        what = ", ".join(each for each in (error.context, error.problem) if each)
        if "'\\t'" in what:
            what, hint = "a tab stands where YAML wants spaces", "indent with spaces"
        raise _mistake(path, line, what, error.note or hint) from None
    except RecursionError:
        raise ConfigError("is nested too deeply", where=path, hint=hint) from None
    except ValueError as error:
        what = f"has a value that cannot be read: {error}"
        raise ConfigError(what, where=path, hint="write it in quotes") from None


class _Loader(yaml.SafeLoader):
    """PyYAML's, but for keys that are no words, or repeated in their section."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        lines: dict[tuple[str, str], int] = {}
        for key, _ in node.value:
            mark = key.start_mark
            if not isinstance(key, yaml.ScalarNode):
                what = "a key is a list or section"
                raise yaml.MarkedYAMLError(None, None, what, mark, "write a word")
            if key.value == "<<" or key.value.startswith("?"):
                continue  # a merge, or a template's condition
            if (key.tag, key.value) in lines:
                first = lines[key.tag, key.value] + 1
                what = f"the key `{key.value}` occurs twice, first in line {first}"
                raise yaml.MarkedYAMLError(None, None, what, mark, "write it once")
            lines[key.tag, key.value] = mark.line
        return node
