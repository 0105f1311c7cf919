"""Check of configuration files as text: encoding, syntax, repeated keys.

Snakemake reads them itself, but names no line of a mistake, keeps the last of two equal keys, and
runs Python code of a file that asks for it. So this check comes first: for files named on the
command line from the profile, for any file from the Snakefile.
"""

from __future__ import annotations

import argparse
import json
import stat
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import yaml

from latentmake.errors import ConfigError, shortened

_VALUES, _DEPTH = 100_000, 100  # of a file, with whatever its aliases stand for
_BYTES = 4_000_000
_LONGEST_NUMBER = 1000  # characters: PyYAML takes hours for a million of them
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
    """Check encoding, syntax, size and repeated keys of a configuration file; refuse templates.

    Raises:
        ConfigError: the first mistake, with its line.
    """
    try:
        mode, size = path.stat().st_mode, path.stat().st_size
        if stat.S_ISFIFO(mode) and path.is_relative_to("/dev/fd"):
            return  # a pipe can be read once: by Snakemake, which takes nothing but JSON from it
        if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
            hint = "name a file that can be read"
            raise ConfigError("is no regular file", where=path, hint=hint)
        if stat.S_ISREG(mode) and size > _BYTES:
            what = f"has {size} bytes, more than the {_BYTES} of any configuration"
            raise ConfigError(
                what, where=path, hint="write prompts and lists into files of their own"
            )
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
        if _depth(values) > _DEPTH:
            raise RecursionError
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
        twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
        what = f"the key `{shortened(twice)}` occurs twice"
        raise ConfigError(what, where=path, hint="write it once")
    return values


def _depth(value: object) -> int:
    """Return the depth of a value of a JSON file."""
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 1 + max(map(_depth, parts), default=0)


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
        _measure(node, {})
        if not isinstance(loader.construct_document(node), dict):
            raise _mistake(path, node.start_mark.line, "the sections are no mapping", _TOP)
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
    except (ValueError, OverflowError):  # of \UFFFFFFFF
        what = "a character stands there that does not exist"
        raise _mistake(path, loader.line, what, hint) from None


def _measure(node: yaml.Node, known: dict[int, tuple[int, int] | None]) -> tuple[int, int]:
    """Return the number of values that a node stands for, and its depth.

    Args:
        node: a scalar, list or section.
        known: results by the nodes' ids; None for those that hold this one.

    Raises:
        MarkedYAMLError: it holds itself, too many values, or too deep ones.
    """
    if id(node) not in known:
        known[id(node)] = None
        parts = node.value if isinstance(node, yaml.CollectionNode) else []
        if isinstance(node, yaml.MappingNode):
            parts = [each for pair in parts for each in pair]
        inner = [_measure(each, known) for each in parts]
        values = 1 + sum(number for number, _ in inner)
        depth = 1 + max((depth for _, depth in inner), default=0)
        if values > _VALUES:
            what = f"with its aliases, this stands for more than {_VALUES} values"
            raise yaml.MarkedYAMLError(None, None, what, node.start_mark, "write fewer")
        if depth > _DEPTH:
            raise yaml.MarkedYAMLError(None, None, "this is nested too deeply", node.start_mark)
        known[id(node)] = values, depth
    found = known[id(node)]
    if found is None:
        what = "a section or list holds itself"
        raise yaml.MarkedYAMLError(None, None, what, node.start_mark, "write its values there")
    return found


class _Loader(yaml.SafeLoader):
    """PyYAML's, but for keys that are no words or repeated, templates, and values of wrong type."""

    values = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        self.values += 1
        if self.values > _VALUES:
            what, mark = f"there are more than {_VALUES} values", self.peek_event().start_mark  # type: ignore[no-untyped-call]
            raise yaml.MarkedYAMLError(None, None, what, mark, "write fewer")
        return super().compose_node(parent, index)

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
            mark = node.start_mark
            raise yaml.MarkedYAMLError(None, None, what, mark, "write it in quotes") from None

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        lines: dict[tuple[str, str], int] = {}
        for key, _ in node.value:
            mark = key.start_mark
            if not isinstance(key, yaml.ScalarNode):
                what = "a key is a list or section"
                raise yaml.MarkedYAMLError(None, None, what, mark, "write a word")
            if key.value == "<<":
                continue
            if key.value == "__use_yte__":
                what = "`__use_yte__` would run Python code of this file"
                raise yaml.MarkedYAMLError(None, None, what, mark, "write values, and no template")
            if (key.tag, key.value) in lines:
                first = lines[key.tag, key.value] + 1
                what = f"the key `{shortened(key.value)}` occurs twice, first in line {first}"
                raise yaml.MarkedYAMLError(None, None, what, mark, "write it once")
            lines[key.tag, key.value] = mark.line
        return node
