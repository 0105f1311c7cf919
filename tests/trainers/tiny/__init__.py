"""Tiny stand-ins for what the trainers' scripts load, from the shapes and settings in models.yaml.

They run in the trainers' Python, and import nothing of the trainers before a function is called.
A target is an object `MODULE:NAME.NAME`, whose names are attributes or keys; `*` stands for all.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import yaml

from tiny import hub, mends

_ALL: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("models.yaml").read_text())
WEIGHTS: dict[str, Any] = _ALL["weights"]
TRANSFORMERS: list[str] = _ALL["transformers"]


def prepare(script: str) -> None:
    """Shrink what a script makes."""
    shrink(_ALL["scripts"].get(Path(script).name, ()))


def write_hub(home: Path) -> None:
    """Write the repositories into Hugging Face's cache of a home folder."""
    for name, tokenizers in _ALL["repositories"].items():
        place = home / "hub" / f"models--{name.replace('/', '--')}"
        snapshot = place / "snapshots" / ("0" * 40)
        snapshot.mkdir(parents=True)
        (place / "refs").mkdir()
        (place / "refs/main").write_text("0" * 40)
        for folder, kind in tokenizers.items():
            write_tokenizer(snapshot / folder, kind)


def write_tokenizer(folder: Path, kind: str) -> None:
    """Write a tokenizer, with the files beside it."""
    hub.write_tokenizer(folder, **_ALL["tokenizers"][kind])


def write(name: str, folder: Path) -> None:
    """Write small random weights of a model into a folder."""
    shrink(WEIGHTS[name].get("small", ()))
    for file, values in WEIGHTS[name]["files"].items():
        match values:
            case {"call": function}:
                getattr(mends, function)(folder / file)
            case {"tokenizer": kind}:
                write_tokenizer(folder / file, kind)
            case _:
                network = _network(folder / file, **values)
                others = values.get("rename", ()), values.get("metadata", {})
                hub.write_random(network, folder / file, *others)


def _network(
    file: Path,
    load: str = "",
    make: str = "",
    given: Any = None,
    options: Any = None,
    needs: Iterable[str] = (),
    **_: Any,
) -> Any:
    """Make a network, or the one that a trainer's loader makes before it reads a file.

    Args:
        file: its file, `=file` in arguments.
        load: target of the loader.
        make: target of the network's class, or of a function that returns one.
        given: arguments; `=TARGET` is an object, `=TARGET()` what it returns, and a mapping a
            namespace.
        options: named arguments.
        needs: tensors that the loader asks for by their names.
    """

    def value(argument: Any) -> Any:
        match argument:
            case "=file":
                return str(file)
            case str() if argument.startswith("="):
                found = _target(argument[1:].removesuffix("()"))
                return found() if argument.endswith("()") else found
            case {}:
                return SimpleNamespace(**{key: value(each) for key, each in argument.items()})
        return argument

    if given is None:
        given = ["=file"] if load else []
    arguments = [value(each) for each in given]
    named = {key: value(each) for key, each in (options or {}).items()}
    called = functools.partial(_target(make or load), *arguments, **named)
    return called() if make else hub.network_of(called, file, needs)


# -- small settings -------------------------------------------------------------------------------


def shrink(names: list[str]) -> None:
    """Replace settings in the trainers' code by small ones; the names are those of `small`.

    A setting that is a function of `mends` is called. Else each target gets the values: a dict or
    an object takes them, a class or function is called with them from then on. Of a nested
    setting, the values of `everywhere` replace those of its keys at any depth.
    """
    for name in names:
        if isinstance(patches := _ALL["small"][name], str):
            getattr(mends, patches)()
            continue
        for place, small in patches.items():
            for owner, key, value in _targets(place):
                _shrink(owner, key, value, small)


def _shrink(owner: Any, key: str, value: Any, small: dict[str, Any]) -> None:
    if isinstance(value, dict):
        value.update(_merged(value, small))
    elif not callable(value):
        for name, new in small.items():
            object.__setattr__(value, name, new)
    else:

        def made(*given: Any, **named: Any) -> Any:
            if given and isinstance(given[0], Mapping):
                return value(_merged(given[0], small), *given[1:], **named)
            return value(*given, **_merged(named, small))

        setattr(owner, key, made)


def _merged(given: Mapping[str, Any], small: Mapping[str, Any]) -> dict[str, Any]:
    own = {key: value for key, value in small.items() if key != "everywhere"}
    for key, value in own.items():
        if isinstance(value, Mapping):
            own[key] = {**given[key], **value}
    return {**_replaced(given, small.get("everywhere", {})), **own}


def _replaced(given: Mapping[str, Any], small: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: _replaced(value, small) if isinstance(value, Mapping) else small.get(key, value)
        for key, value in given.items()
    }


def _targets(place: str) -> Iterator[tuple[Any, str, Any]]:
    """Yield the owner, the name and the object of each target."""
    module, _, path = place.partition(":")
    within = module.startswith(("library.", "transformers"))
    found: list[tuple[Any, str, Any]]
    found = [(None, "", importlib.import_module(module if within else f"musubi_tuner.{module}"))]
    for name in path.split(".") if path else ():
        found = [
            (owner, key, owner[key] if isinstance(owner, dict) else getattr(owner, key))
            for *_, owner in found
            for key in (owner if name == "*" else [name])
        ]
    yield from found


def _target(place: str) -> Any:
    ((*_, found),) = _targets(place)
    return found
