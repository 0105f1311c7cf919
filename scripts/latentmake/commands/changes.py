"""Changes of the configuration that are not written: `--set KEY=VALUE` of `latentmake cost`."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from latentmake import backends
from latentmake.base.errors import ConfigError, refuse_unknown
from latentmake.config.root import parse
from latentmake.plan.facts import Facts
from latentmake.plan.remembered import facts_with

_NAMED = ("datasets", "models", "runs")  # sections whose keys are names of the user
_HINT = "write KEY=VALUE, such as runs.cats.resolutions=[512]"


def with_changes(facts: Facts, changes: Sequence[str]) -> Facts:
    """Return facts of the configuration with some changes, such as `runs.cats.resolutions=[512]`.

    Raises:
        ConfigError: a change names no key, or its value is wrong.
    """
    values = copy.deepcopy(dict(facts.values))
    for change in changes:
        key, equals, text = change.partition("=")
        if not equals or not key.strip("."):
            raise ConfigError("names no key and value", where=f"--set {change}", hint=_HINT)
        try:
            value = yaml.safe_load(text)
        except yaml.YAMLError:
            what = "the value is not YAML"
            raise ConfigError(what, where=f"--set {change}", hint=_HINT) from None
        _set(values, key, value, f"--set {change}")
    try:
        config = parse(values)
    except ConfigError as error:
        where = ": ".join(filter(None, ("--set", str(error.where))))
        raise ConfigError(error.what, where=where, hint=error.hint) from None
    changed = facts_with(
        config,
        facts.memo,
        program_digest=backends.program_digest,
        encoders=facts.config.publish.caches,
        read_only=True,
    )
    changed.options = facts.options
    return changed


def _set(values: dict[str, Any], key: str, value: object, where: str) -> None:
    """Set a key such as `runs.cats.resolutions`; names of the user may contain dots."""
    section, path = values, list[str]()
    while True:
        name = _first(section, key)
        if path and path[0] in _NAMED and len(path) == 1:
            refuse_unknown(path[0].removesuffix("s"), name, section, where)
        if name == key:
            section[name] = value
            return
        path.append(name)
        section = section.setdefault(name, {})
        if not isinstance(section, dict):
            what = f"`{'.'.join(path)}` is a value and has no keys"
            raise ConfigError(what, where=where, hint="set a key that has a value")
        key = key.removeprefix(f"{name}.")


def _first(section: Mapping[str, Any], key: str) -> str:
    """Return the first name of a key: the longest that a section has, or all up to a dot."""
    names = [name for name in section if f"{key}.".startswith(f"{name}.")]
    return max(names, key=len, default=key.partition(".")[0])
