"""Check configuration files as text, with one line and a hint for the first mistake.

Snakemake reads these files too. But it names no line of a mistake, keeps the last of two equal
keys, and runs Python code that a file contains. So this check comes first. The profile runs it for
files on the command line, the Snakefile for every file. It must refuse everything that would end
in a traceback in Snakemake, and must not fail itself: Snakemake would report an error of the
profile.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import yaml

from latentmake.base.errors import ConfigError, shortened
from latentmake.base.regular import read_regular

_TOP = "write the sections datasets, models and runs; see config/README.md"
_FILE = "name your configuration by --configfile FILE"
_HINT = (
    "check brackets, quotes and indentation there; a text with `: `, or one that begins with a "
    "sign such as `*`, `@`, `{` or `|`, needs quotes"
)
_MOST_BYTES, _MOST_VALUES, _DEEPEST = 4_000_000, 100_000, 50  # with aliases expanded
_NAMES = ("str", "int", "float", "bool", "null", "seq", "map")
_TYPES = {f"tag:yaml.org,2002:{name}" for name in _NAMES}
_KEYS = {f"tag:yaml.org,2002:{name}" for name in ("str", "merge", "value")}
_OCTAL = re.compile(r"[-+]?0o?[0-7_]+")


def check_command(arguments: Sequence[str]) -> None:
    """Check the files of `--configfile` of a Snakemake command; exit at the first mistake."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--configfile", "--configfiles", nargs="+", default=[], dest="files")
    try:
        files = parser.parse_known_args(list(arguments))[0].files
    except argparse.ArgumentError:
        return  # Snakemake reports the error
    check_files(files)


def check_files(files: Iterable[str | Path]) -> None:
    """Check configuration files; exit with one line at the first mistake."""
    try:
        for file in files:
            check_file(Path(file))
    except ConfigError as error:
        sys.exit(f"error: {error}")


def check_file(path: Path) -> yaml.MappingNode:
    """Check encoding, size, syntax and keys of a configuration file, and refuse templates.

    Returns:
        The file as a tree whose nodes have lines; merges (`<<`) are carried out.

    Raises:
        ConfigError: the first mistake, with its line.
    """
    try:
        data = read_regular(path, _MOST_BYTES)
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
    node = _from_yaml(path, text)
    if not isinstance(node, yaml.MappingNode):
        what = "is empty" if node is None or not node.value else "has no sections"
        raise ConfigError(what, where=path, hint=_TOP)
    return node


def _mistake(path: Path, line: int, what: str, hint: str) -> ConfigError:
    return ConfigError(what, where=f"{path}, line {line + 1}", hint=hint)


def _from_yaml(path: Path, text: str) -> yaml.Node | None:
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is not None:
            loader.construct_document(node)
        return node
    except yaml.reader.ReaderError as error:
        what = f"the character U+{error.character:04X} is not allowed"
        line = text[: error.position].count("\n")
        raise _mistake(path, line, what, "remove it, and save the file in UTF-8") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        what, hint = ", ".join(filter(None, (error.context, error.problem))), error.note or _HINT
        if "'\\t'" in what:
            what, hint = "a tab stands where YAML wants spaces", "indent with spaces"
        elif "escape" in what:
            hint = "write / in place of \\, or use single quotes"
        raise _mistake(path, 0 if mark is None else mark.line, what, hint) from None
    except (ValueError, OverflowError):  # an escape such as "\UFFFFFFFF"
        raise _mistake(path, loader.line, "a character there does not exist", _HINT) from None


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader, which also refuses templates, repeated keys and unusual types."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._level = 0
        # Id of a node -> number of values in it, with aliases expanded, and levels below it.
        self._sizes: dict[int, tuple[int, int]] = {}

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Compose a value; refuse circles, and more values or levels than any configuration has.

        A small file with nested aliases can stand for billions of values.
        """
        event = self.peek_event()  # type: ignore[no-untyped-call]
        self._level += 1
        if self._level > _DEEPEST:
            raise _refused(event, "this is nested too deeply", _HINT)
        node = super().compose_node(parent, index)
        self._level -= 1
        if id(node) not in self._sizes:
            if isinstance(event, yaml.AliasEvent):
                what = f"`*{shortened(str(event.anchor))}` stands inside of what it repeats"
                raise _refused(event, what, "write its values there")
            pairs = node.value if isinstance(node, yaml.CollectionNode) else []
            parts = chain(*pairs) if isinstance(node, yaml.MappingNode) else pairs
            inner = [self._sizes[id(part)] for part in parts] or [(0, 0)]
            values, levels = zip(*inner, strict=True)
            self._sizes[id(node)] = 1 + sum(values), 1 + max(levels)
        number, levels_below = self._sizes[id(node)]
        if number > _MOST_VALUES or self._level + levels_below > _DEEPEST:
            most = f"{_MOST_VALUES} values, or {_DEEPEST} levels"
            raise _refused(event, f"with its aliases, this is more than {most}", "write less")
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """Construct a value; refuse tags, and words that YAML reads as a type that no key takes."""
        if node.tag not in _TYPES:
            kind = node.tag.replace("tag:yaml.org,2002:", "!!")
            what = f"{_shown(node)} has the YAML type {shortened(kind)}, which no key takes"
            raise _refused(node, what, "write it in quotes, without a tag")
        kind, text = node.tag[18:], node.value if isinstance(node, yaml.ScalarNode) else ""
        what = "is a number to base 60" if kind in ("int", "float") and ":" in text else ""
        quoted = isinstance(node, yaml.ScalarNode) and node.style
        # PyYAML reads `010` as 8, and `0o17` as text; by YAML 1.2 they are 10 and 15.
        if _OCTAL.fullmatch(text) and (kind == "int" or ("o" in text and not quoted)):
            what = "is an octal number"
        if what:
            hint = "write a decimal number, or put it in quotes"
            raise _refused(node, f"{_shown(node)} {what} in YAML", hint)
        try:
            return super().construct_object(node, deep)
        except yaml.YAMLError:
            raise
        except Exception:  # PyYAML lets through whatever its conversions raise
            what = f"{_shown(node)} cannot be read as !!{kind}"
            raise _refused(node, what, "correct it, or write it in quotes") from None

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        lines: dict[str, int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise _refused(key, "a key is a list or section", "write a word")
            if key.value == "__use_yte__":
                what = "`__use_yte__` would run Python code of this file"
                raise _refused(key, what, "write values, and no template")
            if key.tag not in _KEYS:
                what = f"the key `{shortened(key.value)}` is no text in YAML"
                raise _refused(key, what, f'put it in quotes: "{shortened(key.value)}"')
            if key.value != "<<" and key.value in lines:
                first = f"first in line {lines[key.value] + 1}"
                what = f"the key `{shortened(key.value)}` occurs twice, {first}"
                raise _refused(key, what, "write it once")
            lines[key.value] = key.start_mark.line
        return node


def _shown(node: yaml.Node) -> str:
    text = node.value if isinstance(node, yaml.ScalarNode) else ""
    return f"`{shortened(text)}`" if text else "a value"


def _refused(place: yaml.Node | yaml.Event, what: str, hint: str) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(None, None, what, place.start_mark, hint)  # type: ignore[arg-type]
