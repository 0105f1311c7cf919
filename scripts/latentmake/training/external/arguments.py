"""Further arguments that a user gives an external trainer: which are ours, which are paths.

The trainer runs in a folder of its own, so that a path relative to the project means nothing to it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from latentmake.training.external.order import ExternalOrder

__all__ = ["depends_on_length", "located", "missing_files", "with_paths"]

# Learning-rate schedules that know no end: they go on rightly whatever number of steps is left.
_ENDLESS = frozenset({"constant", "constant_with_warmup", "inverse_sqrt", "adafactor"})
_Order = TypeVar("_Order", bound=ExternalOrder)

# Endings of files that trainers read.
_READ = (
    *(".safetensors", ".sft", ".ckpt", ".pt", ".pth", ".bin"),
    *(".toml", ".json", ".yaml", ".yml", ".txt"),
)


def with_paths(arguments: Sequence[str], named: Callable[[str], str] = str) -> list[str]:
    """Return arguments with each path in them made absolute, and named as another system does.

    A value is a path if it has a slash, an ending or a `~` and exists, seen from the working
    directory; in `--flag=value` and `key=value` the part behind counts. All others stay as they
    are.

    Args:
        arguments: the user's own, as the configuration has them.
        named: gets an absolute path, returns its name on the machine that reads it.
    """
    found = []
    for each in arguments:
        before, value = _split(each)
        place = _place(value)
        found.append(f"{before}{named(place)}" if place else each)
    return found


def located(order: _Order, named: Callable[[str], str] = str) -> _Order:
    """Return the order of a training with the paths in its further arguments resolved.

    Args:
        order: the run.
        named: see `with_paths`.
    """
    further = with_paths(order.trainer.arguments, named)
    trainer = order.trainer.model_copy(update={"arguments": further})
    return order.model_copy(update={"trainer": trainer})


def depends_on_length(arguments: Sequence[str], schedule: str = "constant") -> bool:
    """Tell whether the learning rate depends on how many steps a trainer is told to take.

    Told only what is left after a resume, such a schedule would be another one.

    Args:
        arguments: the user's own.
        schedule: the one that is set besides.
    """
    values = [*arguments, ""]
    given = dict(_split(x) if "=" in x else (x + "=", values[i + 1])
                 for i, x in enumerate(arguments) if x.startswith("--"))  # fmt: skip
    if given.get("--lr_scheduler_type="):
        return False  # its own numbers are part of the state
    if "." in given.get("--lr_warmup_steps=", "") or "." in given.get("--lr_decay_steps=", ""):
        return True  # shares of all steps
    return given.get("--lr_scheduler=", schedule).partition(":")[0] not in _ENDLESS


def missing_files(arguments: Sequence[str], folder: Path) -> Iterator[str]:
    """Yield values that look like files to be read and are nowhere.

    Args:
        arguments: the user's own, as the configuration has them.
        folder: in which the trainer runs.
    """
    for each in arguments:
        value = _split(each)[1]
        named = value.endswith(_READ) and "://" not in value and " " not in value
        if named and _place(value) is None and not (folder / value).exists():
            yield value


def _split(argument: str) -> tuple[str, str]:
    """Return what stands up to an equals sign, and the value behind it."""
    key, equals, value = argument.partition("=")
    return (f"{key}=", value) if equals and not Path(argument).exists() else ("", argument)


def _place(value: str) -> str | None:
    """Return the absolute path that a value means; None if it is none."""
    path = os.path.expanduser(value)  # noqa: PTH111 -- Path would drop "./"
    looks = path != value or os.sep in value or bool(Path(value).suffix)
    if value.startswith("-") or not looks:
        return None
    try:
        there = Path(path).exists()
    except (OSError, ValueError):
        return None
    return os.path.abspath(path) if there else None  # noqa: PTH100 -- links stay
