"""Check of configuration files as text: encoding, syntax, repeated keys.

Snakemake reads them itself, but names no line of a mistake, keeps the last of two equal keys, and
runs Python code of a file that asks for it. So this check comes first: for files named on the
command line from the profile, for any file from the Snakefile.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import yaml

from latentmake.errors import ConfigError, shortened

_TOP = "write the sections datasets, models and runs; see config/README.md"
_LONGEST_NUMBER = 1000  # characters: PyYAML takes hours for a million of them
_FILE = "name your configuration by --configfile FILE"
_HINT = "check brackets, quotes and indentation there"


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
    """Check encoding, syntax and repeated keys of a configuration file; refuse templates.

    Raises:
        ConfigError: the first mistake, with its line.
    """
    if path.is_relative_to("/dev/fd"):
        return  # a pipe can be read once: by Snakemake, which takes nothing but JSON from it
    try:
        data = path.read_bytes()
    except OSError as error:
        what, hint = f"cannot be read: {error.strerror}", _FILE
        if isinstance(error, FileNotFoundError):
            what = f"there is no such file in {Path.cwd()}"
            if path.suffix == "" and path.parent == Path():
                hint = "if it is a target, write it before --configfile"
        raise ConfigError(what, where=path, hint=hint) from None
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        what = f"the byte 0x{data[error.start]:02x} is not UTF-8"
        raise _mistake(path, data[: error.start].count(b"\n"), what, "save it in UTF-8") from None
    try:
        values = json.loads(text, object_pairs_hook=lambda pairs: _unique(path, pairs))
    except (ValueError, RecursionError):
        values = _from_yaml(path, text)
    if not isinstance(values, dict):
        what = "is empty" if values is None else "has no sections"
        raise ConfigError(what, where=path, hint=_TOP)


def _mistake(path: Path, line: int, what: str, hint: str) -> ConfigError:
    return ConfigError(what, where=f"{path}, line {line + 1}", hint=hint)


def _unique(path: Path, pairs: Sequence[tuple[str, object]]) -> dict[str, object]:
    """Return the values of a JSON object without repeated keys."""
    if len(found := dict(pairs)) < len(pairs):
        (twice, _), *_ = Counter(key for key, _ in pairs).most_common(1)
        what = f"the key `{shortened(twice)}` occurs twice"
        raise ConfigError(what, where=path, hint="write it once")
    return found


def _from_yaml(path: Path, text: str) -> object:
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        # At once, not piece by piece: so a section that holds itself is a mistake.
        return None if node is None else loader.construct_object(node, deep=True)
    except yaml.reader.ReaderError as error:
        what = f"the character U+{error.character:04X} is not allowed"
        line = text[: error.position].count("\n")
        raise _mistake(path, line, what, "remove it, and save the file in UTF-8") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        what, hint = ", ".join(filter(None, (error.context, error.problem))), error.note or _HINT
        if "'\\t'" in what:
            what, hint = "a tab stands where YAML wants spaces", "indent with spaces"
        raise _mistake(path, 0 if mark is None else mark.line, what, hint) from None
    except RecursionError:
        raise ConfigError("is nested too deeply", where=path, hint=_HINT) from None
    except (ValueError, OverflowError):  # of \UFFFFFFFF
        raise _mistake(path, loader.line, "a character there does not exist", _HINT) from None


class _Loader(yaml.SafeLoader):
    """PyYAML's, but for keys that are no words or repeated, templates, and values of wrong type."""

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            if node.tag.endswith((":int", ":float")) and len(node.value) > _LONGEST_NUMBER:
                raise ValueError(f"it has {len(node.value)} characters")
            return super().construct_object(node, deep)
        except (yaml.YAMLError, RecursionError):
            raise
        except Exception as error:  # PyYAML lets through whatever its conversions raise
            kind = node.tag.replace("tag:yaml.org,2002:", "!!")
            what = f"`{node.value:.40}` cannot be read as {kind} ({error})"
            raise _refused(node, what, "write it in quotes") from None

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        lines: dict[str, int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise _refused(key, "a key is a list or section", "write a word")
            if key.value == "__use_yte__":
                what = "`__use_yte__` would run Python code of this file"
                raise _refused(key, what, "write values, and no template")
            if key.value != "<<" and key.value in lines:
                first = f"first in line {lines[key.value] + 1}"
                what = f"the key `{shortened(key.value)}` occurs twice, {first}"
                raise _refused(key, what, "write it once")
            lines[key.value] = key.start_mark.line
        return node


def _refused(node: yaml.Node, what: str, hint: str) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(None, None, what, node.start_mark, hint)
